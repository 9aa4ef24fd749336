"""Blocks that are recognised in plain calls: right where they are what they seem, and above every slope where not."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import trysquare as ts
from tests.jacobians import randomise
from tests.verify.lipschitz.networks import Fn
from tests.verify.lipschitz.test_fooling import sound
from trysquare.verify.lipschitz import analyse


def step(x, kernel, bias, act=torch.relu, factor=2.0, left=1, mode="constant", extra=0):
    """``x - factor Kᵀ σ(K x + b)`` with a kernel of three taps; ``extra`` shifts the way back."""
    hidden = act(F.conv1d(F.pad(x, (left, 2 - left), mode=mode), kernel, bias))
    back = F.conv_transpose1d(F.pad(hidden, (2, 2), mode=mode), kernel)
    return x - factor * back[..., 2 + left + extra :][..., : x.shape[-1]]


STEPS = {
    "plain": ({}, True), "circular": ({"mode": "circular"}, True), "to the left": ({"left": 0}, True),
    "to the right": ({"left": 2, "mode": "circular"}, True), "tanh": ({"act": torch.tanh}, True),
    "leaky": ({"act": lambda v: F.leaky_relu(v, 0.3)}, True), "smaller": ({"factor": 0.7}, True),
    "longer": ({"factor": 3.0}, False), "other sign": ({"factor": -1.0}, False), "shifted": ({"extra": 1}, False),
    "shifted around": ({"extra": -1, "mode": "circular"}, False), "sine": ({"act": torch.sin}, False),
    "steep": ({"act": lambda v: F.leaky_relu(v, 3.0)}, False),
    "down": ({"act": lambda v: F.leaky_relu(v, -0.5)}, False),
}  # fmt: skip


@pytest.mark.parametrize("name", STEPS)
def test_steps_along_a_gradient(name):
    options, contracts = STEPS[name]
    torch.manual_seed(0)
    kernel = nn.Parameter(torch.randn(3, 2, 3, dtype=torch.float64))
    kernel.data /= ts.spectral_norm_bound(_conv(kernel), (2, 6))
    model = Fn(lambda m, x: step(x, m.kernel, m.bias, **options), kernel=kernel, bias=torch.randn(3).double())
    found = sound(model, (2, 6))
    assert found is not None
    assert (found <= 1 + 1e-6) == contracts


def _conv(kernel):
    layer = nn.Conv1d(2, 3, 3, padding=1, padding_mode="circular").double()
    layer.weight.data = kernel.detach()
    return layer


BLOCKS = {
    "SLLLinear": (lambda: randomise(ts.SLLLinear(6, 9)), (3, 6)),
    "CPLLinear": (lambda: ts.CPLLinear(6, 9, steps=20), (6,)),
    "SLLBlock1d": (lambda: randomise(ts.SLLBlock1d(4, 6, dilation=2, groups=2)), (4, 6)),
    "SLLBlock2d, zeros": (lambda: randomise(ts.SLLBlock2d(4, 6, padding_mode="zeros")), (4, 5, 5)),
    "CPLBlock2d": (lambda: ts.CPLBlock2d(4, 6, (2, 3), steps=20), (4, 5, 6)),
    "SLLAOCBlock2d": (lambda: randomise(ts.SLLAOCBlock2d(4, 6, stride=2)), (4, 6, 6)),
    "SLLAOCBlock1d, all": (lambda: ts.SLLAOCBlock1d(4, 6, 4, 2, 3, 2, padding_mode="zeros"), (4, 6)),
    "SLLAOCBlockTranspose1d": (lambda: randomise(ts.SLLAOCBlockTranspose1d(4, 2, stride=2)), (4, 6)),
    "SLLAOCBlockTranspose2d, zeros": (lambda: ts.SLLAOCBlockTranspose2d(8, 2, 3, 2, padding_mode="zeros"), (8, 3, 3)),
    "SandwichLinear": (lambda: randomise(ts.SandwichLinear(6, 4)), (6,)),
    "SandwichLinear, wide": (lambda: randomise(ts.SandwichLinear(6, 4, hidden_features=14)), (3, 6)),
    "SandwichAOCConv2d": (lambda: randomise(ts.SandwichAOCConv2d(3, 8, 3, stride=2)), (3, 6, 6)),
    "SandwichAOCConv1d, all": (lambda: randomise(ts.SandwichAOCConv1d(4, 6, 3, 2, 3, 2)), (4, 6)),
    "SandwichAOCConvTranspose2d": (lambda: ts.SandwichAOCConvTranspose2d(8, 4, 2, 2), (8, 3, 3)),
    "L2NormPool2d": (lambda: ts.L2NormPool2d(2), (4, 4, 4)),
}  # fmt: skip


@pytest.mark.parametrize("name", BLOCKS)
def test_plain_torch_of_our_blocks_is_bounded_as_the_blocks_are(name):
    make, shape = BLOCKS[name]
    torch.manual_seed(0)
    plain = ts.to_torch(make()).eval()
    assert ts.lipschitz_bound(plain, shape) <= 1.001
    assert sound(plain, shape) is not None
    for module in plain.modules():
        if isinstance(module, nn.Linear | nn.Conv1d | nn.Conv2d):
            module.weight.data *= 1.5
            break
    changed = sound(plain, shape)
    assert changed is not None


LARGE = {"cifar10-robust", "imagenet-accurate", "imagenet-robust", "liresnet-aoc"}
# Options of models that take minutes as they are published.
REDUCED = {
    "liresnet": {"width": 32, "depth": 3, "dense_width": 64, "dense_layers": 2},
    "bronet": {"width": 32, "depth": 3, "dense_width": 64, "dense_layers": 2},
    "lipnext": {"width": 48, "depth": 3, "patch": 2},
    "aol-mlp": {"depth": 1},
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if name in LARGE else []) for name in ts.models.MODELS]
)
def test_plain_torch_of_our_models(name):
    torch.manual_seed(0)
    shape = (3, 64, 64) if name.startswith("imagenet") else (3, 32, 32)
    model = ts.models.build(name, shape, 10, **REDUCED.get(name, {})).eval()
    live = ts.lipschitz_bound(model, shape)
    assert ts.lipschitz_bound(ts.to_torch(model), shape) == pytest.approx(live, rel=1e-3)


def test_rounding_inside_of_a_block_counts():
    matrix = torch.linalg.qr(torch.randn(4, 4, dtype=torch.float64))[0]

    def model(bias):
        block = Fn(lambda m, x: x - 2 * F.linear(F.linear(x, matrix, m.bias).relu(), matrix.T) + m.back)
        block.bias = torch.full((4,), bias, dtype=torch.float64)
        block.back = 2 * matrix.T @ block.bias
        return nn.Sequential(block, nn.Linear(4, 3).double()).double()

    images, labels = torch.randn(6, 4, dtype=torch.float64), torch.zeros(6).long()
    assert ts.certify(model(1.0), (images, labels)).rounding < 1e-12
    assert ts.certify(model(1e13), (images, labels)).rounding > 1e-3


ROOTS = {
    "norm": (lambda x: x.pow(2).sum(1, keepdim=True).sqrt(), 1.0),
    "with eps": (lambda x: (x * x).mean(1, keepdim=True).add(1e-3) ** 0.5, 0.5),
    "weighted": (lambda x: (0.25 * x**2 + 0.75 * x.flip(1) ** 2).sqrt(), 1.0),
    "at least": (lambda x: x.square().clamp_min(1e-3).sqrt(), 1.0),
    "pooling by norms": (lambda x: F.lp_pool1d(x, 2.0, 2), 1.0),
    "soft absolute value": (lambda x: 3 * (torch.sqrt(1 + (x / 3) ** 2) - 1), 1.0),
    "hypot": (lambda x: torch.hypot(x, x.flip(1)), 2**0.5),
    "both sides": (lambda x: torch.cat([F.relu(x), F.relu(-x)], 1), 1.0),
    "both ends": (lambda x: torch.cat([x.amax(1, keepdim=True), x.amin(1, keepdim=True)], 1), 1.0),
    "less than squares": (lambda x: (x**2 - 0.5 * x.flip(1) ** 2).abs().sqrt(), None),
    "less a constant": (lambda x: (x**2 - 0.1).relu().sqrt(), None),
    "fourth root": (lambda x: (x**2).sqrt().sqrt(), None),
    "cubes": (lambda x: (x**3).abs() ** (1 / 3), None),
}


@pytest.mark.parametrize("name", ROOTS)
def test_roots_of_squares(name):
    function, constant = ROOTS[name]
    found = sound(Fn(lambda m, x: function(x) * m.one, one=torch.ones(1).double()), (4, 6))
    assert found == (None if constant is None else pytest.approx(constant, rel=1e-5))


def test_two_layers_of_anybody_are_bounded_together():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16)).double()
    found = sound(model, (16,))
    norms = [float(torch.linalg.matrix_norm(model[i].weight.detach(), 2)) for i in (0, 2)]
    assert found < 0.95 * norms[0] * norms[1]
    assert any(node.op == "block" for node in analyse(model, (16,)).walk.nodes)
    rows = ts.audit(model, (16,)).layers
    assert all(row.bound >= row.largest for row in rows if row.largest is not None)
