"""Recurrent layers against torch's own with the same matrices, their constants against Jacobians."""

import copy
import math

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import trysquare as ts
from tests.jacobians import exact, jacobian, points, randomise, train
from trysquare.nn.layers.recurrent import Recurrence

SHAPES = [(1, False), (2, False), (1, True), (2, True)]


def twin(rnn, kind):
    """Torch's own layer with the matrices of ours."""
    sizes = rnn.input_size, rnn.hidden_size, rnn.num_layers, kind
    plain = nn.RNN(*sizes, batch_first=rnn.batch_first, bidirectional=rnn.bidirectional, dtype=torch.float64)
    suffixes = [f"l{k}{way}" for k in range(rnn.num_layers) for way in ["", "_reverse"][: 1 + rnn.bidirectional]]
    state = {}
    for suffix, cell in zip(suffixes, rnn.layers, strict=True):
        nn.init.normal_(cell.read.bias)
        state |= {f"weight_ih_{suffix}": cell.read.weight, f"weight_hh_{suffix}": cell.turn.weight}
        state |= {f"bias_ih_{suffix}": cell.read.bias, f"bias_hh_{suffix}": torch.zeros(rnn.hidden_size)}
    plain.load_state_dict(state)
    return plain


@pytest.mark.parametrize(("layers", "both"), SHAPES)
@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("kind", ["tanh", "relu"])
def test_outputs_are_those_of_torchs_layer(layers, both, batch_first, kind):
    rnn = ts.OrthoRNN(3, 6, layers, kind, batch_first=batch_first, bidirectional=both, dtype=torch.float64)
    plain, x = twin(rnn, kind), torch.randn(5, 4, 3, dtype=torch.float64)
    starts = torch.randn(layers * (1 + both), 5 if batch_first else 4, 6, dtype=torch.float64)
    for given in [(x,), (x, starts), (x[0],), (x[0], starts[:, 0])]:
        for found, expected in zip(rnn(*given), plain(*given), strict=True):
            torch.testing.assert_close(found, expected)
    for found, expected in zip(ts.to_torch(rnn)(x, starts), plain(x, starts), strict=True):
        torch.testing.assert_close(found, expected)
    assert type(ts.to_torch(rnn)) is nn.RNN


@pytest.mark.parametrize(("layers", "both"), SHAPES)
@pytest.mark.parametrize("in_order", [False, True])
def test_packed_sequences_are_those_of_torchs_layer(layers, both, in_order):
    rnn = ts.OrthoRNN(3, 6, layers, "tanh", batch_first=True, bidirectional=both, dtype=torch.float64)
    plain, x = twin(rnn, "tanh"), torch.randn(4, 5, 3, dtype=torch.float64)
    lengths = [5, 4, 4, 1] if in_order else [2, 5, 1, 3]
    packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=in_order)
    starts = torch.randn(layers * (1 + both), 4, 6, dtype=torch.float64)
    for given in [(packed,), (packed, starts)]:
        (found, found_last), (expected, expected_last) = rnn(*given), plain(*given)
        torch.testing.assert_close(found_last, expected_last)
        for one, other in zip(pad_packed_sequence(found), pad_packed_sequence(expected), strict=True):
            torch.testing.assert_close(one, other)


@pytest.mark.parametrize("kind", ["tanh", "relu"])
def test_the_cell_is_torchs(kind):
    cell = ts.OrthoRNNCell(3, 6, nonlinearity=kind, dtype=torch.float64)
    plain = nn.RNNCell(3, 6, nonlinearity=kind, dtype=torch.float64)
    nn.init.normal_(cell.read.bias)
    state = {"weight_ih": cell.read.weight, "weight_hh": cell.turn.weight, "bias_ih": cell.read.bias}
    plain.load_state_dict(state | {"bias_hh": torch.zeros(6)})
    x, state = torch.randn(4, 3, dtype=torch.float64), torch.randn(4, 6, dtype=torch.float64)
    for given in [(x,), (x, state), (x[0],), (x[0], state[0])]:
        torch.testing.assert_close(cell(*given), plain(*given))
    found = ts.lipschitz_bound(cell.eval(), [(3,), (6,)])
    assert found == pytest.approx(math.sqrt(2), abs=1e-5)


def test_matrices_are_built_once_a_sequence(monkeypatch):
    rnn, built = ts.OrthoRNN(3, 6, 2, bidirectional=True), []
    for part in rnn.modules():
        if isinstance(part, ts.parametrizations.Parametrization):
            build = part.build
            monkeypatch.setattr(
                part, "build", lambda *free, build=build, part=part: (built.append(part), build(*free))[1]
            )
    rnn(torch.randn(50, 2, 3))[0].sum().backward()
    assert len(built) == len(set(built)) == 2 * 4  # four cells with two matrices each
    assert all(p.grad is not None for p in rnn.parameters())
    built.clear()
    with ts.built(rnn):
        for _ in range(3):
            rnn(torch.randn(5, 2, 3))[0].sum().backward()
    assert len(built) == len(set(built))  # some by the batch, together


@pytest.mark.parametrize("orthogonalizer", ts.linalg.ORTHOGONALIZERS)
@pytest.mark.parametrize("size", [6, 7])
def test_recurrent_matrices_start_as_rotations_in_planes(orthogonalizer, size):
    for init, low, high in (("henaff", -math.pi, math.pi), ("cayley", 0, math.pi / 2), ("identity", 0, 0)):
        cell = ts.OrthoRNNCell(3, size, init=init, orthogonalizer=orthogonalizer, dtype=torch.float64)
        for _ in range(2):
            weight = cell.turn.weight.detach()
            torch.testing.assert_close(weight @ weight.T, torch.eye(size, dtype=torch.float64))
            blocks = [weight[k : k + 2, k : k + 2] for k in range(0, size, 2)]
            torch.testing.assert_close(torch.block_diag(*blocks), weight, rtol=0, atol=1e-12)
            for block in blocks[: size // 2]:
                assert torch.linalg.det(block) == pytest.approx(1)
                assert low - 1e-9 <= torch.atan2(block[1, 0], block[0, 0]) <= high + 1e-9
            if init != "identity":
                assert len({round(float(block[0, 0]), 6) for block in blocks}) == len(blocks)
            cell.reset_parameters()
            assert (init == "identity") == torch.equal(cell.turn.weight, weight)
    weight = ts.OrthoRNNCell(3, size, init="random", orthogonalizer=orthogonalizer).turn.weight
    assert weight[:2, 2:].abs().max() > 0.01


@pytest.mark.parametrize("activation", ["abs", "maxmin", ts.Householder(6, order=2), ts.GroupSort(3)])
def test_gradients_keep_their_norm_through_a_hundred_steps(activation):
    rnn = randomise(ts.OrthoRNN(3, 6, nonlinearity=activation)).double()
    start = torch.randn(1, 1, 6, dtype=torch.float64, requires_grad=True)
    _, last = rnn(torch.randn(100, 1, 3, dtype=torch.float64), start)
    direction = torch.randn_like(last)
    assert torch.autograd.grad(last, start, direction)[0].norm() == pytest.approx(float(direction.norm()), rel=1e-9)


class States(nn.Module):
    """All states, as a model with one output."""

    def __init__(self, rnn):
        super().__init__()
        self.rnn = rnn

    def forward(self, x):
        return self.rnn(x)[0]


class End(States):
    def forward(self, x):
        return self.rnn(x)[0][:, -1]


ACTIVATIONS = ["tanh", "relu", "abs", "maxmin", ts.NActivation(4), ts.Householder(4), ts.FullSort(), nn.Hardtanh()]


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=str)
@pytest.mark.parametrize(("layers", "both"), SHAPES)
def test_the_bound_is_above_every_jacobian(activation, layers, both):
    rnn = train(End(ts.OrthoRNN(3, 4, layers, activation, batch_first=True, bidirectional=both)), (5, 3)).rnn
    for kind in (ts.LastState, States, End):
        model = kind(rnn).eval()
        bound = ts.lipschitz_bound(model, (5, 3))
        plain = exact(model)
        seen = max(torch.linalg.matrix_norm(jacobian(plain, x), 2) for x in points((5, 3)))
        assert 0 < seen <= bound * (1 + 1e-5)  # the weights in float64 are not those rounded to float32
        if kind is ts.LastState and activation != "tanh":
            assert seen > 0.1 * bound / (layers * (1 + both))


def steady(layers=1, reads=4):
    """Recurrent layers that add up positive inputs: every constant is attained."""
    rnn = ts.OrthoRNN(reads, 4, layers, "relu", batch_first=True, init="identity")
    for cell in rnn.layers:
        cell.read.weight = torch.eye(4, reads)
    return rnn.double().eval()


@pytest.mark.parametrize("length", [1, 2, 7, 30])
def test_the_constants_are_attained(length):
    x = torch.rand(length, 4) + 0.1
    for model, expected in (
        (ts.LastState(steady()), math.sqrt(length)),
        (States(steady()), 1 / (2 * math.sin(math.pi / (4 * length + 2)))),
        (ts.LastState(steady(2)), math.sqrt(sum(k**2 for k in range(1, length + 1)))),
    ):
        bound = ts.lipschitz_bound(model, (length, 4))
        seen = float(torch.linalg.matrix_norm(jacobian(model, x), 2))
        assert seen == pytest.approx(expected, rel=1e-9)
        assert seen <= bound == pytest.approx(expected, rel=1e-5)


def test_growth_by_a_matrix_that_is_rounded_is_part_of_the_constant():
    rnn = ts.OrthoRNN(4, 16, nonlinearity="relu", batch_first=True, init="random", dtype=torch.bfloat16)
    turn = torch.linalg.matrix_norm(rnn.layers[0].turn.weight.detach().double(), 2)
    read = torch.linalg.matrix_norm(rnn.layers[0].read.weight.detach().double(), 2)
    assert turn > 1.001
    bound = ts.LastState(rnn).lipschitz_constant((50, 4), torch.bfloat16)
    assert bound >= float(read * torch.stack([turn ** (2 * k) for k in range(50)]).sum().sqrt())
    assert ts.LastState(rnn).lipschitz_constant((50_000_000, 4), torch.bfloat16) == math.inf


@pytest.mark.parametrize("mend", [
    lambda rnn: rnn.register_forward_hook(lambda module, given, found: (2 * found[0], 2 * found[1])),
    lambda rnn: rnn.layers[0].function.register_forward_hook(lambda module, given, found: 2 * found),
    lambda rnn: setattr(rnn.layers[0].function, "forward", lambda x: 2 * x),
    lambda rnn: setattr(rnn.layers[0], "function", nn.SELU()),
])  # fmt: skip
def test_a_layer_that_computes_something_else_is_not_taken_at_its_word(mend):
    rnn = ts.OrthoRNN(3, 4, batch_first=True)
    mend(rnn)
    with pytest.raises(ValueError, match=r"hooks|not known to be 1-Lipschitz"):
        ts.lipschitz_bound(ts.LastState(rnn).eval(), (5, 3))


def test_what_has_no_meaning_is_refused():
    for arguments, message in (
        ({"nonlinearity": "gelu"}, "unknown nonlinearity 'gelu'"),
        ({"nonlinearity": nn.GELU()}, "not known to be 1-Lipschitz"),
        ({"nonlinearity": ts.MaxMin(dim=0)}, "on axis 1"),
        ({"nonlinearity": ts.Householder(8)}, "4 channels"),
        ({"init": "orthogonal"}, "unknown init"),
        ({"dropout": 1.0}, "dropout=1.0 must be"),
        ({"num_layers": 0}, "num_layers"),
        ({"orthogonalizer": "svd"}, "unknown orthogonalizer"),
    ):
        with pytest.raises(ValueError, match=message):
            ts.OrthoRNN(3, 4, **arguments)
    with pytest.raises(ValueError, match="5 channels"):
        ts.OrthoRNN(3, 5, nonlinearity="maxmin")
    rnn = ts.OrthoRNN(3, 4, 2, batch_first=True, dropout=0.5)
    for given in [(torch.zeros(2, 5, 4),), (torch.zeros(3),), (torch.zeros(2, 0, 3),)]:
        with pytest.raises(ValueError, match="input of shape"):
            rnn(*given)
    with pytest.raises(ValueError, match=r"hx has shape .* not \(2, 2, 4\)"):
        rnn(torch.zeros(2, 5, 3), torch.zeros(1, 2, 4))
    with pytest.raises(ValueError, match="hx has shape"):
        ts.OrthoRNNCell(3, 4)(torch.zeros(2, 3), torch.zeros(4))
    with pytest.raises(ValueError, match="dropout amplifies"):
        ts.LastState(rnn).lipschitz_constant((5, 3), torch.float32)
    assert ts.LastState(rnn).eval().lipschitz_constant((5, 3), torch.float32) < 7.5
    with pytest.raises(ValueError, match="batch_first=True"):
        ts.LastState(ts.OrthoRNN(3, 4))
    with pytest.raises(TypeError, match=r"OrthoRNN or nn\.RNN"):
        ts.LastState(nn.Linear(3, 4))
    with pytest.raises(ValueError, match="only an OrthoRNN"):
        ts.LastState(nn.RNN(3, 4, batch_first=True)).lipschitz_constant((5, 3), torch.float32)


def test_dropout_acts_between_layers_in_training_only():
    rnn = ts.OrthoRNN(3, 8, 2, dropout=0.5)
    x = torch.randn(5, 2, 3)
    assert not torch.equal(rnn(x)[0], rnn(x)[0])
    first = Recurrence.forward(rnn.layers[0], x.transpose(0, 1))
    torch.testing.assert_close(rnn(x)[1][0], first[:, -1])  # the first layer is not touched
    rnn.eval()
    assert torch.equal(rnn(x)[0], rnn(x)[0])


def test_exports_copies_and_casts():
    model = nn.Sequential(ts.LastState(ts.OrthoRNN(3, 6, 2, "maxmin", batch_first=True)), ts.OrthoLinear(6, 2)).eval()
    x = torch.randn(4, 5, 3)
    plain = ts.to_torch(model)
    assert not any(isinstance(m, ts.OrthoLinear) for m in plain.modules())
    torch.testing.assert_close(plain(x), model(x))
    again = copy.deepcopy(model)
    randomise(again)
    again.load_state_dict(model.state_dict())
    torch.testing.assert_close(again(x), model(x))
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(model(x).float(), model(x), rtol=0.1, atol=0.2, check_dtype=False)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), model(x))


def copies(count, delay=20, symbols=3, letters=4):
    """The copying task: repeat what was said before a long pause."""
    said = torch.randint(1, letters + 1, (count, symbols))
    pause = torch.zeros(count, delay + symbols, dtype=torch.long)
    pause[:, delay - 1] = letters + 1
    inputs = nn.functional.one_hot(torch.cat([said, pause], 1), letters + 2).float()
    return inputs, torch.cat([torch.zeros(count, symbols + delay, dtype=torch.long), said], 1)


def test_the_copying_task_starts_well():
    def trained(make):
        torch.manual_seed(0)
        rnn, head = make(), nn.Linear(32, 5)
        optimizer = torch.optim.RMSprop([*rnn.parameters(), *head.parameters()], 2e-3)
        for _ in range(250):
            x, y = copies(32)
            loss = nn.functional.cross_entropy(head(rnn(x)[0]).flatten(0, 1), y.flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        return float(loss.detach()) / (3 * math.log(4) / 26)  # 1: knows when to answer, not what

    assert trained(lambda: ts.OrthoRNN(6, 32, nonlinearity="maxmin", batch_first=True)) < 0.85
    assert trained(lambda: nn.RNN(6, 32, batch_first=True)) > 0.95


def sequences(count, length=16):
    """Noisy waves: the class is the number of turns."""
    labels = torch.randint(3, (count,))
    angle = 2 * math.pi * (labels + 1.0).unsqueeze(1) * torch.arange(length) / length
    return torch.stack([angle.cos(), angle.sin()], 1) + 0.1 * torch.randn(count, 2, length), labels


class Steps(nn.Module):
    """(batch, channels, length) to (batch, length, channels)."""

    def forward(self, x):
        return x.transpose(1, 2)


NETWORKS = {
    "convolutional": lambda: nn.Sequential(
        ts.OrthoConv1d(2, 8, 4, stride=2), ts.MaxMin(), ts.OrthoConv1d(8, 16, 4, stride=2), ts.MaxMin(), nn.Flatten(),
        ts.OrthoLinear(64, 3),
    ),
    "recurrent": lambda: nn.Sequential(
        Steps(), ts.LastState(ts.OrthoRNN(2, 16, nonlinearity="abs", batch_first=True)), ts.OrthoLinear(16, 3)
    ),
}  # fmt: skip


@pytest.mark.parametrize(("name", "bound"), [("convolutional", 1.0), ("recurrent", 4.0)])
def test_classifiers_of_sequences_are_trained_and_certified(name, bound):
    model = NETWORKS[name]()
    optimizer = torch.optim.Adam(model.parameters(), 5e-3)
    for _ in range(150):
        x, y = sequences(64)
        loss = nn.functional.cross_entropy(4 * model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    x, y = sequences(200)
    certificate = ts.certify(model, (x, y), epsilons=[0.1])
    assert ts.lipschitz_bound(model.eval(), (2, 16)) == pytest.approx(bound, rel=1e-3)
    sure = certificate.radii > 0.1
    assert sure.float().mean() > 0.9
    # No sequence within the radius has another answer: that of steepest ascent, scaled to the radius, among them.
    moved = x.clone().requires_grad_()
    for _ in range(10):
        out = model.eval()(moved)
        others = out.masked_fill(nn.functional.one_hot(y, 3).bool(), -math.inf).amax(1)
        (step,) = torch.autograd.grad((others - out.gather(1, y[:, None])[:, 0]).sum(), moved)
        with torch.no_grad():
            far = moved + step / step.flatten(1).norm(dim=1).clamp_min(1e-12)[:, None, None] - x
            scale = 0.999 * certificate.radii.float() / far.flatten(1).norm(dim=1)
        moved = (x + scale[:, None, None] * far).requires_grad_()
    assert (model(moved).argmax(1) == y)[certificate.radii > 0].all()
