"""Rules of functions: every way to write a call is the same call, and the constant is never below the Jacobian."""

import math
import operator

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import trysquare as ts
from tests.verify.lipschitz.networks import Fn, bound, seen
from trysquare.verify.lipschitz import NoRuleError

WEIGHT = torch.randn(4, 3, 3, 3, generator=torch.Generator().manual_seed(1))
UP = torch.randn(3, 4, 3, 3, generator=torch.Generator().manual_seed(2))
SLOPES = torch.tensor([0.5, -2.0, 1.0])
MAP = (3, 6, 6)

# (function, shape, whether the rule is the norm itself rather than above it)
CALLS = {
    "mean with keepdim by position": (lambda m, x: x.mean(1, True), (4,), True),
    "sum with keepdim by position": (lambda m, x: x.sum(1, True), (4,), True),
    "mean of a list of axes": (lambda m, x: x.mean([2, 3], keepdim=True), MAP, True),
    "mean by numpy's names": (lambda m, x: torch.mean(x, axis=2, keepdims=True), MAP, True),
    "add by keywords": (lambda m, x: torch.add(input=x, other=x, alpha=2), (4,), True),
    "sub with alpha": (lambda m, x: torch.sub(x, 2 * x, alpha=0.25), (4,), False),
    "a number minus": (lambda m, x: 1 - x, (4,), True),
    "rsub": (lambda m, x: torch.rsub(x, 1), (4,), True),
    "mul by keywords": (lambda m, x: torch.mul(input=x, other=-3), (4,), True),
    "division of a constant divisor by keywords": (lambda m, x: torch.div(input=x, other=0.25), (4,), True),
    "permute by keyword": (lambda m, x: x.permute(dims=(0, 3, 1, 2)), MAP, True),
    "permute from the end": (lambda m, x: x.permute(-4, 3, 1, 2), MAP, True),
    "permute of a tuple": (lambda m, x: torch.permute(x, (0, 3, 2, 1)), MAP, True),
    "transpose by keywords": (lambda m, x: x.transpose(dim0=1, dim1=2), MAP, True),
    "movedim": (lambda m, x: x.movedim(1, -1), MAP, True),
    "roll": (lambda m, x: torch.roll(x, (1, 2), (2, 3)), MAP, True),
    "flip": (lambda m, x: x.flip(1, 2), MAP, True),
    "tile": (lambda m, x: x.tile(2, 1, 2), MAP, True),
    "repeat": (lambda m, x: x.repeat(1, 2, 1, 2), MAP, True),
    "repeat_interleave": (lambda m, x: x.repeat_interleave(3, dim=1), MAP, True),
    "uneven repeat_interleave": (
        lambda m, x: x.repeat_interleave(torch.tensor([1, 7, 1]), dim=1), MAP, True,
    ),
    "expand_as": (lambda m, x: x.mean(1, True).expand_as(x), (4,), True),
    "view_as another value": (lambda m, x: (2 * x).flatten(1).view_as(x), MAP, True),
    "view of a list": (lambda m, x: x.view([x.shape[0], -1]), MAP, True),
    "unflatten": (lambda m, x: x.unflatten(1, (3, 1)), MAP, True),
    "squeeze": (lambda m, x: x.unsqueeze(dim=1).squeeze(1), MAP, True),
    "constants like a value": (lambda m, x: x * torch.ones_like(x) + x.new_zeros(4), (4,), True),
    "narrow": (lambda m, x: x.narrow(1, 0, 2), MAP, True),
    "cat by keywords": (lambda m, x: torch.cat(tensors=(x, 2 * x), dim=-1), MAP, True),
    "stack by axis": (lambda m, x: torch.stack([x, x], axis=1), MAP, True),
    "clamp by keywords": (lambda m, x: x.clamp(min=-1, max=1), MAP, True),
    "convolution by keywords": (lambda m, x: F.conv2d(input=x, weight=m.w, padding="same"), MAP, False),
    "convolution with stride": (lambda m, x: F.conv2d(x, m.w, None, (2, 1), [1, 0], (1, 1)), MAP, False),
    "transposed convolution": (lambda m, x: F.conv_transpose2d(x, m.up, None, 2, 1, 1), MAP, False),
    "prelu": (lambda m, x: F.prelu(x, m.slopes), MAP, True),
    "pooling of torch": (lambda m, x: torch.max_pool2d(x, 3, 2, 1), MAP, False),
    "pooling with ceil_mode by position": (lambda m, x: F.max_pool2d(x, 3, 2, 1, 1, True), MAP, False),
    "average by keywords": (lambda m, x: F.avg_pool2d(input=x, kernel_size=2, stride=1), MAP, True),
    "adaptive": (lambda m, x: F.adaptive_avg_pool2d(x, (2, 4)), MAP, True),
    "interpolate": (lambda m, x: F.interpolate(x, [7, 5], mode="bilinear"), MAP, True),
    "windows": (lambda m, x: F.unfold(x, 2, 1, 0, 1), MAP, True),
    "windows added up": (lambda m, x: F.fold(F.unfold(x, 2), x.shape[2:], 2), MAP, True),
    "windows added up in steps": (
        lambda m, x: F.fold(F.unfold(x, 2, 2, 1, 1) * m.w.flatten()[:12].view(-1, 1), (4, 5), 2, 2, 1, 1),
        (3, 4, 5),
        False,
    ),
    "leaky_relu": (lambda m, x: F.leaky_relu(x, negative_slope=-3.0), MAP, True),
    "elu": (lambda m, x: F.elu(x, 3.0), MAP, False),
    "softmax": (lambda m, x: F.softmax(x, 1), (4,), False),
    "log_softmax": (lambda m, x: x.log_softmax(-1), (4,), False),
    "matrix from the left": (lambda m, x: m.w[:, :, 0, 0] @ x.flatten(2), MAP, True),
    "vector": (lambda m, x: x @ m.w[0, 0, 0], (4, 3), True),
    "linear by keywords": (lambda m, x: F.linear(input=x, weight=m.w[:, 0, 0]), (4, 3), True),
    "in place": (lambda m, x: (x * 1).mul_(2).add_(x), (4,), True),
    "padding": (lambda m, x: F.pad(x, pad=(1, 2, 0, 0), mode="reflect"), MAP, True),
    "running sums": (lambda m, x: x.cumsum(-1), MAP, True),
    "running sums from the end": (lambda m, x: x.flip(1).cumsum(dim=1), (5,), True),
    "numbers added at positions": (
        lambda m, x: x.new_zeros(len(x), 4).index_add(1, torch.tensor([0, 2, 2, 1, 0, 0]), x), (6,), True,
    ),
    "numbers added to others, with a factor": (
        lambda m, x: x.index_add(1, torch.tensor([0, 0, 1]), x[:, 3:], alpha=-2.0), (6,), False,
    ),
    "scattered": (
        lambda m, x: x.new_ones(len(x), 3).scatter_add(1, torch.tensor([[2, 0, 2, 0, 0]]).expand(len(x), -1), 2 * x),
        (5,),
        True,
    ),
    "scattered in place": (
        lambda m, x: x.new_zeros(len(x), 3).scatter_add_(1, torch.tensor([[2, 0, 2]]).expand_as(x), x), (3,), True,
    ),
    "filled at an index": (lambda m, x: x.index_fill(1, torch.tensor([0, 2]), 3.0), (4,), True),
    "one number put in several places": (
        lambda m, x: x.new_ones(len(x), 3).index_put(
            (torch.arange(len(x))[:, None], torch.tensor([[0, 1, 1]])), x[:, :1], accumulate=True
        ),
        (4,),
        True,
    ),
    "logarithm of a sum of exponentials": (lambda m, x: torch.logaddexp(x[:, :2], 3 * x[:, 2:]), (4,), False),
    "the same of powers of two": (lambda m, x: torch.logaddexp2(x, x.flip(1)), (4,), False),
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_every_way_to_call_has_the_constant_of_its_jacobian(name):
    function, shape, exact = CALLS[name]
    tensors = {"w": WEIGHT, "up": UP, "slopes": SLOPES}
    found, norm = bound(function, shape, **tensors), seen(function, shape, **tensors)
    assert norm <= found * (1 + 1e-12)
    if exact:
        assert found <= norm * (1 + 1e-6)


@pytest.mark.parametrize(
    "function",
    [
        lambda m, x: x.to(torch.int64).to(x.dtype),
        lambda m, x: x.type_as(m.count).float(),
        lambda m, x: x.view(torch.int32),
        lambda m, x: x.view(torch.float16),
        lambda m, x: x.view(dtype=torch.bfloat16),
        lambda m, x: x.long() * 1.0,
        lambda m, x: x.bool().float(),
        lambda m, x: x.to(torch.float8_e4m3fn).float(),
        lambda m, x: x.type(torch.int32).float(),
    ],
)
def test_integers_and_reinterpreted_bits_jump(function):
    with pytest.raises(NoRuleError, match=r"round|bits|jump|tokens"):
        bound(function, (4,), count=torch.zeros(1, dtype=torch.int64))


def test_casts_between_floats_pass():
    assert bound(lambda m, x: x.double().to(torch.float32).type_as(m.w), (4,), w=torch.ones(1)) == pytest.approx(1)
    assert bound(lambda m, x: x.to(m.w), (4,), w=torch.ones(1)) == pytest.approx(1)
    assert bound(lambda m, x: x.to(device="cpu", dtype=torch.float64), (4,)) == pytest.approx(1)


def test_numbers_are_as_exact_as_the_arithmetic():
    for factor in (0.7, 1 / 3, 1.1):
        double = bound(lambda m, x, f=factor: x * f * m.one, (4,), one=torch.ones(1, dtype=torch.float64))
        single = bound(lambda m, x, f=factor: f * x, (4,))
        assert factor <= double <= factor * (1 + 1e-12)
        assert max(factor, float(torch.tensor(factor))) <= single
        quotient = bound(lambda m, x, f=factor: x / f, (4,))
        assert quotient >= max(1 / factor, 1 / float(torch.tensor(factor)))
    tensor = torch.tensor(0.7, dtype=torch.float64)
    assert bound(lambda m, x: x * m.t, (4,), t=tensor) >= 0.7


def test_tiny_factors_are_not_zero_and_not_constant():
    one = torch.ones(1, dtype=torch.float64)
    assert 1 <= bound(lambda m, x: x * m.one * 1e-50 * 1e30 * 1e20, (4,), one=one) < 1 + 1e-6
    with pytest.raises(NoRuleError, match="multiplied"):
        bound(lambda m, x: (x / 1e40) * x, (4,))
    assert bound(lambda m, x: x * 1e-200 * 1e-200, (4,)) > 0
    assert bound(lambda m, x: m.w + 0 * x, (4,), w=torch.ones(4)) == 0


def test_exact_values_are_rounded_up_not_down():
    functions = {
        math.sqrt(3): lambda m, x: x.expand(-1, 3),
        math.sqrt(1 / 7): lambda m, x: x.expand(-1, 7).mean(1),
        math.sqrt(6): lambda m, x: torch.cat([x] * 6, 1),
        math.sqrt(5): lambda m, x: (x, 2 * x),
    }
    for value, function in functions.items():
        assert value <= bound(function, (1,)) < value * (1 + 1e-9) * math.sqrt(7)
        assert bound(function, (1,)) ** 2 >= round(value**2 * 7) / 7 * (1 - 2**-60) or value < 1


# Functions whose slope depends on the numbers that they get, and the largest slope between these.
BETWEEN = {
    "log": (lambda m, x: x.clamp_min(1).log(), 1.0), "log1p": (lambda m, x: x.relu().log1p(), 1.0),
    "inverse": (lambda m, x: 1 / (1 + x.abs()), 1.0), "exp": (lambda m, x: (-x.relu()).exp(), 1.0),
    "exp of a maximum": (lambda m, x: torch.exp(1 - torch.maximum(x.abs(), m.level)), math.sqrt(math.e)),
    "root": (lambda m, x: (x.abs() + 0.25).sqrt(), 1.0), "inverse root": (lambda m, x: (x.relu() + 1).rsqrt(), 0.5),
    "power": (lambda m, x: x.clamp(-2, 1) ** 3, 12.0), "square": (lambda m, x: (x.clamp(-1, 2) - 1).square(), 4.0),
    "negative power": (lambda m, x: (2 + x.tanh()) ** -1.5, 1.5),
    "sinh": (lambda m, x: x.clamp(-3, 2).sinh(), math.cosh(3)),
    "cosh": (lambda m, x: x.clamp(-1, 2).cosh(), math.sinh(2)),
    "below zero": (lambda m, x: 1 / (x.clamp_max(1) - 3), 0.25),
    "log10": (lambda m, x: (x.sigmoid() + 1).log10(), 0.25 / math.log(10)),
    "exp2": (lambda m, x: torch.exp2(3 * x.softmax(1)), 12 * math.log(2)),
    "softsign": (lambda m, x: x / (0.5 + x.abs()), 2.0), "its negative": (lambda m, x: (-x) / (x.abs() + m.level), 2.0),
    "tanhshrink": (lambda m, x: x - x.tanh(), 1.0),
    "exponent": (lambda m, x: 3.0 ** x.clamp(-1, 2), 9 * math.log(3)),
    "exponents": (lambda m, x: torch.tensor([0.5, 1, 0.1, 2]).to(x) ** x.tanh(), 10 * math.log(10)),
}  # fmt: skip


@pytest.mark.parametrize("name", BETWEEN)
def test_slopes_between_the_numbers_that_a_function_gets(name):
    function, slope = BETWEEN[name]
    half = torch.tensor(0.5, dtype=torch.float64)
    found, norm = bound(function, (4,), level=half), seen(function, (4,), points=50, level=half)
    assert norm <= found * (1 + 1e-12)
    assert found <= slope * (1 + 1e-6)


@pytest.mark.parametrize(
    "function",
    [
        lambda m, x: x.log(), lambda m, x: x.abs().log(), lambda m, x: x.sigmoid().log(), lambda m, x: 1 / x.tanh(),
        lambda m, x: torch.cat([x.abs() + 1, m.zero.expand(len(x), 1)], 1).log(), lambda m, x: (x.abs() - 1e-9).sqrt(),
        lambda m, x: (x.tanh() + 1) ** 0.5, lambda m, x: x.relu().exp(), lambda m, x: (x.clamp(-1, 2) + 1) ** -1,
        lambda m, x: torch.pow(x.clamp(1, 2), x), lambda m, x: 2**x, lambda m, x: (x.sin() + 1 - 1e-12).rsqrt(),
        lambda m, x: x / (x.abs() - 1), lambda m, x: x / (1 + x.flip(1).abs()),
        lambda m, x: x / torch.add(x.abs(), -1),
        lambda m, x: x.cos() / torch.sub(1, x.cos().abs()), lambda m, x: (-2.0) ** x.tanh(),
        lambda m, x: 0.0 ** x.sigmoid(),
    ],
)  # fmt: skip
def test_where_a_slope_has_no_bound_it_is_refused(function):
    with pytest.raises(NoRuleError):
        bound(function, (4,), zero=torch.zeros(1, 1))


@pytest.mark.parametrize("name", ["softsign", "tanhshrink"])
def test_modules_whose_functions_were_replaced_compute_what_they_compute(name, monkeypatch):
    monkeypatch.setattr(F, name, lambda x: 50 * x)
    assert ts.lipschitz_bound({"softsign": nn.Softsign, "tanhshrink": nn.Tanhshrink}[name](), (3,)) >= 50


@pytest.mark.parametrize("activation", [nn.Softsign(), nn.Tanhshrink()], ids=repr)
def test_rounding_of_softened_steps(activation):
    model = nn.Sequential(nn.Linear(6, 6), activation).double()
    found = ts.lipschitz.analyse(model, (6,))
    exact = ts.lipschitz.ExactEvaluation(found.graph, found.gains)
    for scale in (1e-3, 1.0, 1e3):
        x = scale * torch.randn(2, 6, dtype=torch.float64)
        h = x.numpy().astype("longdouble") @ model[0].weight.detach().numpy().T.astype("longdouble")
        h = h + model[0].bias.detach().numpy()
        expected = h / (1 + abs(h)) if isinstance(activation, nn.Softsign) else h - np.tanh(h)
        values, error = exact(x)
        off = float(np.sqrt(((values.detach().numpy() - expected) ** 2).sum()))
        assert off <= error < 1e-12 * (1 + scale)


def test_an_index_may_be_shorter_than_what_is_scattered():
    def scattered(m, x):  # autograd refuses this, so that there is no Jacobian to compare with
        return x.new_zeros(len(x), 3).scatter_add(1, torch.tensor([[2, 2]]).expand(len(x), -1), x)

    assert bound(scattered, (4,)) == pytest.approx(math.sqrt(2))


def test_what_has_no_rule_says_so():
    refused = {
        "bits": lambda m, x: x.view(torch.int16),
        "_upsample_bilinear2d_aa": lambda m, x: F.interpolate(
            x[:, None, None], (1, 3), mode="bilinear", antialias=True
        ),
        "divisor depends": lambda m, x: 1 / x,
        "jumps": lambda m, x: x.max(dim=1, keepdim=True).indices,
        "'min' depends": lambda m, x: torch.clamp(x, x.mean(1, True)),
        "attention": lambda m, x: F.scaled_dot_product_attention(x[:, None], x[:, None], x[:, None]),
        "deviation": lambda m, x: F.layer_norm(x, (4,)),
        "slope has no bound": lambda m, x: x.exp(),
        "rounding jumps": lambda m, x: torch.div(x, 2, rounding_mode="floor"),
        "finite": lambda m, x: x * math.inf,
        "zero": lambda m, x: x / 0,
        "integers": lambda m, x: x.scatter_add(1, x.argsort(1), x),
        "gates and states": lambda m, x: torch.lstm_cell(x, (x, x), torch.ones(16, 4), torch.ones(16, 4))[0],
        "tokens": lambda m, x: F.embedding_bag(x, m.w),
        "first axis of inputs and outputs": lambda m, x: (x, torch.ones(3)),
    }
    for message, function in refused.items():
        with pytest.raises(ValueError, match=message):
            bound(function, (4,), w=torch.eye(4))


def test_operators_in_place_are_the_same_rules():
    def scaled(m, x):
        y = operator.iadd(x * 2, x)
        return operator.itruediv(y, 0.5)

    assert bound(scaled, (4,)) == pytest.approx(6)


def test_autocast_rounds_the_weights_of_functions():
    weight = torch.full((1, 1), 1 + 2**-8 + 2**-12)  # bfloat16 rounds it up
    rounded = float(weight.bfloat16())
    down = torch.full((1, 1), 1 + 2**-9)
    assert rounded > float(weight)
    assert float(down.bfloat16()) < float(down)
    functions = {
        "linear": lambda m, x: F.linear(x, m.w),
        "matmul": lambda m, x: x @ m.w,
        "conv": lambda m, x: F.conv1d(x.unsqueeze(1), m.w.unsqueeze(2)),
        "up": lambda m, x: F.conv_transpose1d(x.unsqueeze(1), m.w.unsqueeze(2)),
    }
    for name, function in functions.items():
        with torch.autocast("cpu", torch.bfloat16):
            assert bound(function, (1,), w=weight) >= rounded, name
            assert bound(function, (1,), w=down.double()) >= float(down), name  # autocast leaves float64 alone
        assert bound(function, (1,), w=weight) < rounded, name


def test_functions_in_low_precision_models():
    model = nn.Sequential(nn.Linear(4, 4), Fn(lambda m, x: F.leaky_relu(x, 1.1) * 0.7)).bfloat16()
    weight = torch.linalg.matrix_norm(model[0].weight.detach().double(), 2)
    assert ts.lipschitz_bound(model, (4,)) >= float(weight) * 0.77


class Loop(nn.Module):
    """A recurrent network as people write it."""

    def __init__(self, cell, whole=False):
        super().__init__()
        self.cell, self.whole = cell, whole

    def forward(self, x):
        state, states = x.new_zeros(len(x), 6), []
        for t in range(x.shape[1]):
            state = self.cell(x[:, t], state)
            states.append(state)
        return torch.stack(states, 1) if self.whole else state


@pytest.mark.parametrize("steps", [1, 4, 16])
@pytest.mark.parametrize("nonlinearity", ["tanh", "relu"])
def test_changes_of_different_inputs_add_up_by_their_squares(steps, nonlinearity):
    cell = nn.RNNCell(6, 6, nonlinearity=nonlinearity)
    nn.init.orthogonal_(cell.weight_ih)
    nn.init.orthogonal_(cell.weight_hh)
    # With orthogonal weights and slopes of 1, the last state is a sum of rotated inputs: its norm is sqrt(steps).
    assert ts.lipschitz_bound(Loop(cell), (steps, 6)) == pytest.approx(math.sqrt(steps), rel=1e-4)
    # All states are running sums of these.
    running = torch.linalg.svdvals(torch.ones(steps, steps, dtype=torch.float64).tril())[0]
    assert running * (1 - 1e-4) <= ts.lipschitz_bound(Loop(cell, whole=True), (steps, 6)) <= 1.2 * running


def test_changes_of_the_same_input_still_add_up():
    mixed = bound(lambda m, x: x[:, :2] + x[:, 1:3] + x[:, 2:], (4,))
    jacobian = torch.zeros(2, 4, dtype=torch.float64)
    for k in range(3):
        jacobian[:, k : k + 2] += torch.eye(2, dtype=torch.float64)
    assert torch.linalg.matrix_norm(jacobian, 2) <= mixed <= 3


class Rescaled(nn.Module):
    """A branch that starts as nothing: by a factor of zero, or a normalisation with a weight of zero."""

    def __init__(self, kind):
        super().__init__()
        self.branch = nn.Sequential(nn.Conv2d(3, 3, 3, padding=1, bias=False), nn.BatchNorm2d(3), nn.ReLU())
        self.last, self.kind, self.factor = nn.BatchNorm2d(3), kind, nn.Parameter(torch.zeros(1))
        nn.init.zeros_(self.last.weight)

    def forward(self, x):
        branch = self.branch(x)
        return x + (self.last(branch) if self.kind == "norm" else self.factor * branch)


@pytest.mark.parametrize("kind", ["norm", "factor"])
def test_branches_of_zero_add_nothing(kind):
    model = nn.Sequential(*(Rescaled(kind) for _ in range(10)), nn.Flatten(), nn.Linear(75, 3)).eval()
    norm = float(torch.linalg.matrix_norm(model[-1].weight.detach().double(), 2))
    assert ts.lipschitz_bound(model, (3, 5, 5)) == pytest.approx(norm, rel=1e-4)
    images = torch.randn(4, 3, 5, 5)
    certificate = ts.certify(model, (images, model(images).argmax(1)))
    assert certificate.rounding < 1e-9
