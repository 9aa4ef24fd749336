"""ProjUNN: the algebra of a step against dense formulas, and a recurrent network that learns; groups of parameters."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import trysquare as ts
from trysquare.nn.linalg.fourier import apply_response, orthogonal_response
from trysquare.nn.linalg.unitary import distance_from_unitary, low_rank_factors, polish, rotate


def names_by_group(model, **options):
    names = {parameter: name for name, parameter in model.named_parameters()}
    return {g["name"]: {names[p] for p in g["params"]} for g in ts.parameter_groups(model, **options)}


def test_only_plain_weights_decay():
    model = nn.Sequential(
        ts.OrthoConv2d(3, 8, 3), ts.BatchCentering(8), ts.Householder(8), nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8),
        ts.LearnableResidual(ts.SLLBlock2d(8)), ts.FourierOrthoConv2d(8, 8, 3), nn.Flatten(),
        nn.utils.parametrizations.orthogonal(nn.Linear(8, 8)), ts.UnitNormLinear(8, 4),
    )  # fmt: skip
    groups = names_by_group(model, weight_decay=0.1)
    assert groups["decayed"] == {"3.weight"}
    free = {name for name in dict(model.named_parameters()) if ".original" in name} | {"6.weight"}
    assert groups["free"] == free
    assert groups["other"] == set(dict(model.named_parameters())) - free - {"3.weight"}
    assert [(g["lr"], g["weight_decay"]) for g in ts.parameter_groups(model, lr=0.2, weight_decay=0.1)] == [
        (0.2, 0.0), (0.2, 0.1), (0.2, 0.0)
    ]  # fmt: skip


def test_frozen_and_shared_parameters_and_what_is_no_model():
    model = nn.Sequential(ts.OrthoLinear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    model[2].weight = model[1].weight
    model[0].requires_grad_(False)
    assert names_by_group(model) == {"decayed": {"1.weight"}, "other": {"1.bias", "2.bias"}}
    assert ts.parameter_groups(nn.Sequential()) == []
    with pytest.raises(TypeError, match="list"):
        ts.parameter_groups(list(model.parameters()))


@pytest.mark.parametrize("method", ["aoc", "bcop", "rko", "sc-fac", "bro", "aol"])
@pytest.mark.parametrize("orthogonalizer", ["cholesky", "qr", "newton_schulz"])
def test_decay_of_free_tensors_leaves_the_weight_and_makes_steps_longer(method, orthogonalizer):
    if not ts.METHODS[method].uses_orthogonalizer and orthogonalizer != "cholesky":
        return
    options = {"orthogonalizer": orthogonalizer} if ts.METHODS[method].uses_orthogonalizer else {}
    layer = ts.OrthoConv2d(4, 8, 3, stride=2, method=method, dtype=torch.float64, **options)
    before = layer.weight.detach().clone()
    (2 * layer.weight).sin().sum().backward()
    gradients = [tensor.grad.clone() for tensor in layer.free_tensors]
    layer.zero_grad()
    with torch.no_grad():
        for tensor in layer.free_tensors[: 1 if method == "aol" else None]:
            tensor.mul_(0.5)
    torch.testing.assert_close(layer.weight, before)
    (2 * layer.weight).sin().sum().backward()
    for tensor, gradient in list(zip(layer.free_tensors, gradients, strict=True))[: 1 if method == "aol" else None]:
        torch.testing.assert_close(tensor.grad, 2 * gradient)


def unitary(*shape, dtype=torch.complex128):
    return torch.linalg.qr(torch.randn(*shape, dtype=dtype)).Q


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
def test_a_step_of_full_rank_is_the_exponential_map(dtype):
    matrix, gradient = unitary(3, 6, 6, dtype=dtype), torch.randn(3, 6, 6, dtype=dtype)
    tangent = (matrix.mH @ gradient - gradient.mH @ matrix) / 2
    expected = matrix @ torch.linalg.matrix_exp(-0.3 * tangent)
    torch.testing.assert_close(rotate(matrix, *low_rank_factors(gradient, 6), 0.3), expected)


@pytest.mark.parametrize("rank", [1, 2, 5])
def test_a_step_of_low_rank_is_the_exponential_map_of_the_approximation(rank):
    matrix, gradient = unitary(8, 8), torch.randn(8, 8, dtype=torch.complex128)
    left, right = low_rank_factors(gradient, rank)
    low = left @ right.mH
    assert torch.linalg.matrix_rank(low) == rank
    tangent = (matrix.mH @ low - low.mH @ matrix) / 2
    moved = rotate(matrix, left, right, 0.2)
    torch.testing.assert_close(moved, matrix @ torch.linalg.matrix_exp(-0.2 * tangent))
    assert distance_from_unitary(moved) < 1e-13


def test_the_approximation_is_nearly_the_best():
    values = torch.logspace(0, -4, 20, dtype=torch.float64)
    matrix = (unitary(20, 20, dtype=torch.float64) * values) @ unitary(20, 20, dtype=torch.float64)
    left, right = low_rank_factors(matrix, 4)
    error = torch.linalg.matrix_norm(matrix - left @ right.mH)
    assert error < 1.5 * values[4:].norm()
    tiny = low_rank_factors(1e-30 * matrix.float(), 4)
    assert all(factor.isfinite().all() for factor in tiny)


def test_polish_squares_the_distance():
    matrix = unitary(6, 6) + 1e-4 * torch.randn(6, 6, dtype=torch.complex128)
    assert distance_from_unitary(polish(matrix)) < 1e-6


@pytest.mark.parametrize("alpha", [0.0, 0.9])
def test_finds_a_rotation_and_stays_orthogonal(alpha):
    goal = unitary(10, 10, dtype=torch.float32)
    start = goal @ torch.linalg.matrix_exp(0.3 * (lambda a: a - a.T)(torch.randn(10, 10)))
    matrix = nn.Parameter(start)
    optimizer = ts.ProjUNN([matrix], lr=0.02 if alpha else 0.3, rank=2, alpha=alpha)
    losses = []
    for _ in range(250):
        optimizer.zero_grad()
        loss = (matrix - goal).square().sum()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.05 * losses[0]
    assert distance_from_unitary(matrix.detach()) < 1e-5


def test_fourier_kernels_stay_orthogonal_and_real():
    """Blocks of a real convolution: opposite frequencies stay conjugate, so the layer stays orthogonal."""
    channels, sizes = 3, (4, 6)
    start = orthogonal_response(torch.randn(1, channels, channels, 3, 3), sizes, (1, 1), "cayley")
    blocks = nn.Parameter(start.clone())
    optimizer = ts.ProjUNN([blocks], lr=0.05, rank=1)
    x, y = torch.randn(8, channels, *sizes), torch.randn(8, channels, *sizes)
    losses = []
    for _ in range(120):
        optimizer.zero_grad()
        loss = (apply_response(blocks, x, 2) - y).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.97 * losses[0]
    assert (blocks - start).abs().max() > 0.05
    basis = torch.eye(channels * 24).view(-1, channels, *sizes)
    values = torch.linalg.svdvals(apply_response(blocks.detach(), basis, 2).flatten(1).double())
    assert (values - 1).abs().max() < 1e-5


class UnitaryRNN(nn.Module):
    """An orthogonal recurrent matrix and a shrinking activation.

    It starts from the identity, which forgets the order of what it read. (A random orthogonal matrix would do the task
    as it is: the other layers learn to read it out.)
    """

    def __init__(self, symbols, hidden):
        super().__init__()
        self.recurrent = nn.Parameter(torch.eye(hidden))
        self.read = nn.Linear(symbols, hidden, bias=False)
        self.shrink = nn.Parameter(torch.zeros(hidden))
        self.write = nn.Linear(hidden, symbols - 1)

    def forward(self, x):
        state, outputs = torch.zeros(x.shape[1], len(self.shrink)), []
        for step in F.one_hot(x, self.read.in_features).float():
            state = state @ self.recurrent.T + self.read(step)
            state = state.sign() * F.relu(state.abs() + self.shrink)
            outputs.append(self.write(state))
        return torch.stack(outputs)


def copy_task(symbols, length, delay, batch):
    """Remember ``length`` symbols over a delay: 0 is blank, the last symbol asks for the copy."""
    remembered = torch.randint(1, symbols + 1, (length, batch))
    x = torch.zeros(delay + 2 * length, batch, dtype=torch.long)
    x[:length] = remembered
    x[length + delay - 1] = symbols + 1
    y = torch.zeros_like(x)
    y[-length:] = remembered
    return x, y


def learn(optimize, steps=900, symbols=4, length=4, delay=12):
    torch.manual_seed(0)
    model = UnitaryRNN(symbols + 2, 64)
    others = [p for p in model.parameters() if p is not model.recurrent]
    optimizers = [*optimize(model.recurrent), torch.optim.RMSprop(others, 1e-3)]
    losses = []
    for _ in range(steps):
        x, y = copy_task(symbols, length, delay, 64)
        loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        losses.append(float(loss.detach()))
    chance = length * math.log(symbols) / (delay + 2 * length)  # blanks right, symbols guessed
    return model, sum(losses[-20:]) / 20 / chance


def test_a_unitary_network_learns_the_copy_task():
    model, relative = learn(lambda matrix: [ts.ProjUNN([matrix], lr=0.3, rank=1)])
    assert relative < 0.2
    assert distance_from_unitary(model.recurrent.detach()) < 1e-5
    # It is ProjUNN that learns it: with the recurrent matrix left as it was, the same steps get nowhere near.
    _, frozen = learn(lambda matrix: [])
    assert frozen > 0.6


def test_state_closure_and_refusals():
    matrix = nn.Parameter(unitary(4, 4, dtype=torch.float32))
    optimizer = ts.ProjUNN([matrix], lr=0.1, alpha=0.9)

    def closure():
        optimizer.zero_grad()
        loss = matrix.square().mul(torch.arange(16.0).view(4, 4)).sum()
        loss.backward()
        return loss

    assert optimizer.step(closure) > 0
    other = ts.ProjUNN([nn.Parameter(matrix.detach().clone())], alpha=0.9)
    other.load_state_dict(optimizer.state_dict())
    assert other.param_groups[0]["lr"] == 0.1
    assert next(iter(other.state.values()))["step"] == 1
    for parameter, match in ((torch.randn(4, 4), "not orthogonal"), (torch.zeros(4, 3), "square matrices")):
        with pytest.raises(ValueError, match=match):
            ts.ProjUNN([nn.Parameter(parameter)])
    for options in ({"lr": -1.0}, {"rank": 0}, {"alpha": 1.0}):
        with pytest.raises(ValueError, match=next(iter(options))):
            ts.ProjUNN([matrix], **options)


def test_ranks_agree_though_their_generators_do_not():
    """Replicas of a distributed run: the same start and the same gradients, other seeds."""
    start, goal = unitary(10, 10, dtype=torch.float32), unitary(10, 10, dtype=torch.float32)
    moved = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        matrix = nn.Parameter(start.clone())
        optimizer = ts.ProjUNN([matrix], lr=0.3)
        for _ in range(20):
            optimizer.zero_grad()
            (matrix - goal).square().sum().backward()
            optimizer.step()
        moved.append(matrix.detach())
    assert (moved[0] - start).abs().max() > 0.1
    assert torch.equal(*moved)


def test_the_rank_is_that_of_the_step():
    """A step moves a matrix by a matrix of twice the rank at most."""
    for rank in (1, 2, 4):
        matrix = nn.Parameter(unitary(12, 12, dtype=torch.float64))
        optimizer = ts.ProjUNN([matrix], lr=0.1, rank=rank)
        before = matrix.detach().clone()
        matrix.mul(torch.randn(12, 12, dtype=torch.float64)).sum().backward()
        optimizer.step()
        assert torch.linalg.matrix_rank(matrix.detach() - before, atol=1e-9) == 2 * rank


@pytest.mark.parametrize("lr", [1e3, 1e6, 1e30])
@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64])
def test_any_step_stays_orthogonal(lr, dtype):
    matrix = nn.Parameter(unitary(3, 6, 6, dtype=dtype))
    optimizer = ts.ProjUNN([matrix], lr=lr, rank=2)
    for _ in range(20):
        optimizer.zero_grad()
        (1e3 * matrix.abs().square() * torch.randn(6, 6)).sum().backward()
        optimizer.step()
    assert distance_from_unitary(matrix.detach()) < 1e-3


def test_groups_that_are_added_are_checked():
    optimizer = ts.ProjUNN([nn.Parameter(torch.eye(4))])
    for group, match in (
        ({"params": [nn.Parameter(torch.ones(4, 4))]}, "not orthogonal"),
        ({"params": [nn.Parameter(torch.zeros(4, 3))]}, "square matrices"),
        ({"params": [nn.Parameter(torch.eye(4, dtype=torch.bfloat16))]}, "keep it in float32"),
        ({"params": [nn.Parameter(torch.eye(4))], "rank": True}, "rank=True"),
        ({"params": [nn.Parameter(torch.eye(4))], "lr": math.inf}, "lr=inf"),
    ):
        with pytest.raises(ValueError, match=match):
            optimizer.add_param_group(group)
    assert len(optimizer.param_groups) == 1
    optimizer.add_param_group({"params": [nn.Parameter(torch.eye(3))], "rank": 2})
    assert [group["rank"] for group in optimizer.param_groups] == [1, 2]


def trained(optimizer, parameters, steps, seed=0):
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        for parameter in parameters:
            parameter.grad = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
        optimizer.step()


@pytest.mark.parametrize("share", [0.3, 1.0])
def test_lookahead_is_its_recursion(share):
    start, gradients = torch.randn(7, dtype=torch.float64), torch.randn(10, 7, dtype=torch.float64)
    x = nn.Parameter(start.clone())
    optimizer = torch.optim.SGD([x], lr=0.1)
    ts.optim.Lookahead(optimizer, 4, share)
    fast, slow = start.clone(), start.clone()
    for number, gradient in enumerate(gradients, 1):
        x.grad = gradient.clone()
        optimizer.step()
        fast = fast - 0.1 * gradient
        if number % 4 == 0:
            slow = slow + share * (fast - slow)
            fast = slow
        torch.testing.assert_close(x.detach(), fast, rtol=0, atol=1e-14)


def test_the_average_is_its_recursion_and_leaves_training_alone():
    start, gradients = torch.randn(7, dtype=torch.float64), torch.randn(30, 7, dtype=torch.float64)
    x = nn.Parameter(start.clone())
    optimizer = torch.optim.SGD([x], lr=0.1)
    average = ts.optim.MovingAverage(optimizer, 0.6)
    plain, mean = start.clone(), start.clone()
    for number, gradient in enumerate(gradients, 1):
        x.grad = gradient.clone()
        optimizer.step()
        plain = plain - 0.1 * gradient
        decay = min(0.6, (1 + number) / (10 + number))
        mean = decay * mean + (1 - decay) * plain
        before = x.detach().clone()
        with average.applied():
            torch.testing.assert_close(x.detach(), mean, rtol=0, atol=1e-14)
        assert torch.equal(x.detach(), before)
        torch.testing.assert_close(before, plain, rtol=0, atol=1e-14)


def test_an_error_within_the_average_gives_the_parameters_back():
    layer = ts.OrthoLinear(4, 4)
    optimizer = torch.optim.AdamW(layer.parameters())
    average = ts.optim.MovingAverage(optimizer)
    trained(optimizer, list(layer.parameters()), 3)
    weight = layer.weight.detach().clone()
    with pytest.raises(RuntimeError, match="inside"), average.applied():
        raise RuntimeError("inside")
    assert torch.equal(layer.weight, weight)


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.NAdam, torch.optim.SGD])
def test_both_go_on_from_a_checkpoint(kind):
    def made():
        torch.manual_seed(0)
        layer = ts.OrthoLinear(5, 4)
        optimizer = kind(layer.parameters(), lr=0.01)
        ts.optim.Lookahead(optimizer, 3)
        return layer, optimizer, ts.optim.MovingAverage(optimizer, 0.9)

    whole, optimizer, average = made()
    trained(optimizer, list(whole.parameters()), 4, seed=1)
    weights = {name: value.clone() for name, value in whole.state_dict().items()}
    state = copy.deepcopy(optimizer.state_dict())
    trained(optimizer, list(whole.parameters()), 4, seed=2)

    resumed, later, later_average = made()
    resumed.load_state_dict(weights)
    later.load_state_dict(state)
    trained(later, list(resumed.parameters()), 4, seed=2)
    assert torch.equal(resumed.weight, whole.weight)
    with average.applied(), later_average.applied():
        assert torch.equal(resumed.weight, whole.weight)


def test_what_has_no_gradient_yet_is_left_alone():
    early, late = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    optimizer = torch.optim.NAdam([early, late], lr=0.1)
    ts.optim.Lookahead(optimizer, 2)
    average = ts.optim.MovingAverage(optimizer)
    trained(optimizer, [early], 2)
    late.grad = None
    with average.applied():
        assert torch.equal(late, torch.ones(2))
    trained(optimizer, [late], 4)
    assert not torch.equal(late, torch.ones(2))


@pytest.mark.parametrize("wrong", [0, -1, 1.5, math.nan, "x"])
def test_shares_are_checked(wrong):
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))])
    with pytest.raises(ValueError, match="share="):
        ts.optim.Lookahead(optimizer, 5, wrong)
    with pytest.raises(ValueError, match="decay="):
        ts.optim.MovingAverage(optimizer, wrong)
