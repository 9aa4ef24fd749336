"""Spectra and bounds of layers against dense matrices in float64, over a wide sweep of geometries."""

import math
import random
import warnings

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

import trysquare as ts
from trysquare.verify import spectrum
from trysquare.verify.operators import read_layer

CONV = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
CONV_TRANSPOSE = {1: nn.ConvTranspose1d, 2: nn.ConvTranspose2d, 3: nn.ConvTranspose3d}


@torch.no_grad()
def dense(layer, shape):
    size = math.prod(shape)
    zero = layer(torch.zeros(1, *shape, dtype=torch.float64))
    return (layer(torch.eye(size, dtype=torch.float64).view(size, *shape)) - zero).flatten(1).T


def random_layer(rng, mode):
    """A layer of random geometry, and an input shape that may or may not fit."""
    dims = rng.choice([1, 1, 2, 2, 3])
    groups = rng.choice([1, 1, 2])

    def sizes(most, least=1):
        return tuple(rng.randint(least, most) for _ in range(dims))

    channels = groups * rng.randint(1, 3), groups * rng.randint(1, 4)
    kernel, stride, dilation, padding = sizes(4 if dims < 3 else 2), sizes(3), sizes(3), sizes(3, 0)
    shape = channels[0], *sizes({1: 12, 2: 6, 3: 4}[dims])
    if mode == "transposed":
        extra = tuple(rng.randint(0, max(s, d) - 1) for s, d in zip(stride, dilation, strict=True))
        return CONV_TRANSPOSE[dims](*channels, kernel, stride, padding, extra, groups, True, dilation).double(), shape
    if rng.random() < 0.2:
        padding, stride = "same", (1,) * dims
    elif mode == "circular" and rng.random() < 0.7:
        extents = [d * (k - 1) + 1 for k, d in zip(kernel, dilation, strict=True)]
        padding = tuple(max(0, -((s - e) // 2)) for e, s in zip(extents, stride, strict=True))
        shape = channels[0], *(s * rng.randint(1, 4) for s in stride)
    return CONV[dims](*channels, kernel, stride, padding, dilation, groups, True, mode).double(), shape


@pytest.mark.parametrize("mode", ["zeros", "circular", "reflect", "replicate", "transposed"])
def test_spectra_bounds_and_errors_over_random_geometries(mode, monkeypatch):
    rng, done, exact = random.Random(mode), 0, 0
    while done < 160:
        layer, shape = random_layer(rng, mode)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # torch on even kernels
                matrix = dense(layer, shape)
        except RuntimeError:
            with pytest.raises(ValueError, match="size"):
                ts.singular_values(layer, shape)
            continue
        done += 1
        values = torch.linalg.svdvals(matrix)
        torch.testing.assert_close(ts.singular_values(layer, shape), values, atol=1e-9, rtol=0)
        operator = read_layer(layer, shape)
        exact += operator.circular
        low, high, found = spectrum.norm_range(operator)
        top, bottom = float(values[0]), float(values[-1])
        assert low <= bottom + 1e-14
        assert top * (1 - 1e-6) - 1e-12 <= found <= top * (1 + 1e-12)
        assert top <= high * (1 + 1e-15) <= top * (1 + 1e-6) + 1e-12, (layer, shape)
        with monkeypatch.context() as patch:
            patch.setattr(spectrum, "_CERTIFIED_SIDE", 0)  # without the dense matrix
            patch.setattr(spectrum, "_SMALL_MAP_SIDE", 0)
            assert spectrum.norm_range(operator)[1] >= top * (1 - 1e-15)
            patch.setattr(spectrum, "_BUDGET", 1e4)  # nor all frequencies
            assert spectrum.norm_range(operator)[1] >= top * (1 - 1e-15)
            if done % 3 == 0:
                assert ts.spectral_norm_bound(layer) >= top * (1 - 1e-15)
        x = torch.randn(1, *operator.domain, dtype=torch.float64)
        y = torch.randn(1, *operator.image, dtype=torch.float64)
        torch.testing.assert_close((operator.apply(x) * y).sum(), (operator.transpose(y) * x).sum())
    assert mode not in ("zeros", "circular") or exact > 5


LAYERS = {
    "down": (lambda **o: ts.OrthoConv2d(4, 8, 3, stride=2, **o), (4, 8, 6)),
    "dilated groups": (lambda **o: ts.OrthoConv2d(4, 8, (3, 2), dilation=(1, 2), groups=2, **o), (4, 5, 6)),
    "up": (lambda **o: ts.OrthoConvTranspose2d(8, 4, 3, stride=2, **o), (8, 4, 3)),
    "up wide": (lambda **o: ts.OrthoConvTranspose2d(4, 8, (2, 3), stride=(3, 2), padding=(0, 1), **o), (4, 4, 3)),
    "1d": (lambda **o: ts.OrthoConv1d(4, 4, 5, **o), (4, 3)),
    "3d": (lambda **o: ts.OrthoConv3d(2, 4, 2, **o), (2, 3, 3, 4)),
}


@pytest.mark.parametrize("mode", ["circular", "zeros"])
@pytest.mark.parametrize("name", LAYERS)
def test_bounds_of_our_layers_are_within_a_thousandth(name, mode):
    make, shape = LAYERS[name]
    layer = make(padding_mode=mode)
    values = torch.linalg.svdvals(dense(ts.to_torch(layer).double() if shape[1] > 3 else layer.double(), shape))
    top = float(values[0])
    assert top <= ts.spectral_norm_bound(layer, shape) * (1 + 1e-12) <= top * (1 + 1e-3)
    assert 1 - 1e-6 <= ts.spectral_norm_bound(layer) <= 1 + 1e-3
    torch.testing.assert_close(ts.singular_values(layer, shape), values, atol=1e-6, rtol=0)


def test_linear_layers_repeat_over_leading_axes():
    layer = nn.Linear(5, 3).double()
    values = torch.linalg.svdvals(layer.weight.detach())
    torch.testing.assert_close(ts.singular_values(layer, (2, 5)), values.repeat_interleave(2))
    assert float(values[0]) <= ts.spectral_norm_bound(layer) <= float(values[0]) * (1 + 1e-6)


def test_weights_are_those_that_the_forward_pass_uses():
    layer = nn.Linear(16, 16)
    rounded = nn.Linear(16, 16).bfloat16()
    rounded.weight.data.copy_(layer.weight)
    with torch.autocast("cpu", torch.bfloat16):
        assert ts.spectral_norm_bound(layer) == ts.spectral_norm_bound(rounded)
    assert ts.spectral_norm_bound(layer) != ts.spectral_norm_bound(rounded)
    normal = parametrizations.spectral_norm(nn.Linear(16, 16)).eval()
    top = float(torch.linalg.matrix_norm(normal.weight.detach().double(), 2))
    assert top <= ts.spectral_norm_bound(normal) < top * (1 + 1e-6)


def test_extremes_of_layers_too_large_for_a_dense_matrix(monkeypatch):
    layer = nn.Conv2d(3, 4, 3, padding=1).double()
    values = torch.linalg.svdvals(dense(layer, (3, 7, 7)))
    monkeypatch.setattr(spectrum, "_CERTIFIED_SIDE", 0)
    found = ts.extreme_singular_values(layer, (3, 7, 7))
    assert abs(found.largest - values[0]) <= found.largest_tolerance + 1e-10
    assert abs(found.smallest - values[-1]) <= found.smallest_tolerance + 1e-9
    wide = nn.Conv2d(4, 1, 3, padding=1).double()
    top = float(torch.linalg.svdvals(dense(wide, (4, 7, 7)))[0])
    assert abs(ts.extreme_singular_values(wide, (4, 7, 7)).largest - top) < 1e-9
    circular = ts.OrthoConv2d(4, 4, 3)
    assert abs(ts.extreme_singular_values(circular, (4, 8, 8)).smallest - 1) < 1e-5


def test_bad_input_is_named():
    layer = nn.Conv2d(3, 8, 3)
    for shape in ((4, 8, 8), (3, 8), (3, 8, 8, 8)):
        with pytest.raises(ValueError, match="3 channels"):
            ts.singular_values(layer, shape)
    with pytest.raises(ValueError, match="positive integers"):
        ts.singular_values(layer, (3, 8, 0))
    with pytest.raises(ValueError, match="smaller than the kernel"):
        ts.spectral_norm_bound(layer, (3, 2, 2))
    with pytest.raises(ValueError, match="in_features=4"):
        ts.spectral_norm_bound(nn.Linear(4, 4), (5,))
    with pytest.raises(ValueError, match="too wide"):
        ts.spectral_norm_bound(nn.Conv2d(3, 3, 7, padding=3, padding_mode="reflect"), (3, 3, 9))
    with pytest.raises(ValueError, match="not divisible"):
        ts.spectral_norm_bound(ts.OrthoConv2d(4, 8, 3, stride=2), (4, 5, 5))
    with pytest.raises(TypeError, match="ReLU"):
        ts.spectral_norm_bound(nn.ReLU(), (3,))
    with pytest.raises(ValueError, match="extreme_singular_values"):
        ts.singular_values(nn.Conv2d(16, 16, 3, padding=1), (16, 32, 32))
    for bad in (math.nan, math.inf):
        layer.weight.data[0, 0, 0, 0] = bad
        for function in (ts.singular_values, ts.spectral_norm_bound, ts.extreme_singular_values):
            with pytest.raises(ValueError, match="1 values that are not finite"):
                function(layer, (3, 8, 8))


def test_subclasses_that_compute_something_else_are_refused():
    class Doubled(nn.Conv2d):
        def forward(self, x):
            return 2 * super().forward(x)

    class Standardised(nn.Conv2d):
        def _conv_forward(self, x, weight, bias):
            return super()._conv_forward(x, weight - weight.mean(), bias)

    for cls in (Doubled, Standardised):
        with pytest.raises(TypeError, match="overrides forward"):
            ts.spectral_norm_bound(cls(3, 3, 3), (3, 8, 8))


BOUNDS = (ts.singular_values, ts.spectral_norm_bound, ts.extreme_singular_values)


def largest(function, layer, shape):
    found = function(layer, shape)
    return float(found[0]) if isinstance(found, torch.Tensor) else getattr(found, "largest", found)


@pytest.mark.filterwarnings("ignore:.*weight_norm.*deprecated:FutureWarning")
@pytest.mark.parametrize("normalise", [nn.utils.weight_norm, nn.utils.spectral_norm])
def test_weights_that_a_hook_sets_are_those_of_the_next_forward_pass(normalise):
    source, layer = (normalise(nn.Linear(4, 4, bias=False).double()).eval() for _ in range(2))
    state = source.state_dict()
    for name in ("weight_g", "weight_orig"):
        if name in state:
            state[name] = state[name] * 7
    layer.load_state_dict(state)  # the attribute `weight` is still the old one
    found = [largest(function, layer, (4,)) for function in BOUNDS]
    top = float(torch.linalg.svdvals(dense(layer, (4,)))[0])
    assert found == pytest.approx([top] * 3, rel=1e-6)


def test_hooks_that_can_change_the_function_are_refused():
    def tenfold(module, args, output=None):
        return 10 * (args[0] if output is None else output)

    for register in ("register_forward_hook", "register_forward_pre_hook"):
        layer = nn.Conv2d(3, 3, 3)
        getattr(layer, register)(tenfold)
        for function in BOUNDS:
            with pytest.raises(ValueError, match="tenfold"):
                function(layer, (3, 8, 8))
    handle = nn.modules.module.register_module_forward_hook(tenfold)
    try:
        with pytest.raises(ValueError, match="tenfold"):
            ts.spectral_norm_bound(nn.Linear(3, 3))
    finally:
        handle.remove()


def test_calls_that_are_overridden_are_refused():
    class Doubled(nn.Linear):
        def __call__(self, x):
            return 2 * super().__call__(x)

    with pytest.raises(TypeError, match="overrides"):
        ts.spectral_norm_bound(Doubled(3, 3))


def test_complex_weights_are_refused():
    imaginary = nn.Linear(2, 2, bias=False, dtype=torch.cfloat)
    imaginary.weight.data.copy_(torch.eye(2) * 3j)
    for function in BOUNDS:
        with pytest.raises(ValueError, match="complex"):
            function(imaginary, (2,))


@pytest.mark.parametrize("value", [1.7e308, 5e-324, 0.0])
@pytest.mark.parametrize("padding_mode", ["circular", "zeros"])
def test_extreme_weights_neither_overflow_nor_vanish(value, padding_mode, monkeypatch):
    layer = nn.Conv1d(1, 1, 3, padding=1, padding_mode=padding_mode, bias=False).double()
    layer.weight.data.copy_(torch.tensor([[[0.0, value, 0.0]]], dtype=torch.float64))
    assert ts.singular_values(layer, (1, 6)).tolist() == pytest.approx([value] * 6, rel=1e-12)
    assert ts.extreme_singular_values(layer, (1, 6)).largest == pytest.approx(value, rel=1e-12)
    monkeypatch.setattr(spectrum, "_CERTIFIED_SIDE", 0)
    monkeypatch.setattr(spectrum, "_SMALL_MAP_SIDE", 0)
    assert ts.extreme_singular_values(layer, (1, 6)).largest == pytest.approx(value, rel=1e-12)
    assert ts.spectral_norm_bound(layer, (1, 6)) >= value


@pytest.mark.parametrize(("channels", "size"), [(512, 2), (96, 6)])
def test_zero_padding_is_tight_on_small_maps(channels, size):
    layer = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
    found = ts.extreme_singular_values(layer, (channels, size, size), steps=120)
    bound = ts.spectral_norm_bound(layer, (channels, size, size))
    assert found.largest <= bound < found.largest * (1 + 1e-3)


def test_stable_rank():
    layer = nn.Linear(5, 3, bias=False)
    layer.weight.data = torch.diag(torch.tensor([2.0, 1.0, 0.0])) @ torch.eye(3, 5)
    assert ts.stable_rank(layer, (5,)) == pytest.approx(1.25)
    assert ts.stable_rank(ts.OrthoConv2d(4, 8, 3, stride=2), (4, 6, 6)) == pytest.approx(72)
    layer.weight.data.zero_()
    assert ts.stable_rank(layer, (5,)) == 0
