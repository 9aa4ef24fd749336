"""Weights from other libraries: the outputs of their own layers are the oracle."""

import importlib
import inspect
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

import trysquare as ts
from benchmarks import peers
from tests.oracle import CONV, CONV_TRANSPOSE

needs_orthogonium = pytest.mark.skipif(not peers.installed(), reason="the extra of peers is not installed")


def settled(model):
    """Their power iteration goes on at every look at a weight; ours is that of the state.

    Matrices over taps are those of a trained layer: their 12 steps are too few for the normal ones that they start as.
    """
    for module in model.modules():
        for held in getattr(module, "parametrizations", {}).values():
            if type(held[0]).__name__ == "RKOParametrizer":
                for of_group in held.original.data.flatten(1).chunk(module.groups):
                    nn.init.orthogonal_(of_group)
        for name in ("weight", "kernel", "weight_1", "weight_2"):
            for _ in range(60):
                getattr(module, name, None)
    return model.eval()


def assert_same(ours, theirs, *shape, tolerance=3e-5):
    x = torch.randn(2, *shape)
    with torch.no_grad():
        torch.testing.assert_close(ours.eval()(x), theirs.eval()(x), rtol=0, atol=tolerance)


# name: in, out, kernel, stride, groups, dilation
GEOMETRIES = {
    "square": (6, 6, 3, 1, 1, 1), "5x5": (4, 4, 5, 1, 1, 1), "7x7": (4, 4, 7, 1, 1, 1), "8x8": (4, 4, 8, 1, 1, 1),
    "fewer": (7, 4, 3, 1, 1, 1), "more": (4, 6, 4, 1, 1, 1), "odd, more": (3, 5, 3, 1, 1, 1), "1x1": (4, 6, 1, 1, 1, 1),
    "depthwise": (4, 8, 3, 1, 4, 1), "groups": (8, 4, 3, 1, 2, 1), "dilation": (4, 4, 3, 1, 1, 2),
    "stride": (4, 8, 3, 2, 1, 1), "stride, fewer": (8, 4, 5, 2, 1, 1), "stride, many": (2, 16, 3, 2, 1, 1),
    "stride, groups": (4, 48, 4, 2, 2, 1), "patches": (3, 8, 2, 2, 1, 1), "first layer": (3, 32, 3, 2, 1, 1),
}  # fmt: skip


@needs_orthogonium
@pytest.mark.parametrize("way", ["bjorck", "qr", "exponential"])
@pytest.mark.parametrize("geometry", GEOMETRIES)
@pytest.mark.parametrize("transposed", [False, True])
def test_convolutions_of_orthogonium(way, geometry, transposed):
    channels_in, channels_out, k, s, groups, dilation = GEOMETRIES[geometry]
    names = {"bjorck": "DEFAULT", "qr": "QR", "exponential": "EXP"}
    params = peers.load("reparametrizers", f"{names[way]}_ORTHO_PARAMS")
    sizes = {"stride": s, "groups": groups, "dilation": dilation, "padding": 0, "padding_mode": "zeros"}
    kind = "AdaptiveOrthoConvTranspose2d" if transposed else "AdaptiveOrthoConv2d"
    channels = (channels_out, channels_in) if transposed else (channels_in, channels_out)
    theirs = peers.load("layers.conv.AOC", kind)(*channels, k, ortho_params=params, **sizes)
    order = {"axis_order": (1, 0)} if s == 1 and channels_in != channels_out else {}
    ours = (CONV_TRANSPOSE if transposed else CONV)[2](*channels, k, **sizes, **order)
    moved = ts.load_weights(ours, settled(theirs).state_dict(), orthogonalizer=way)
    assert list(moved) == ["weight"]
    assert moved["weight"] < 1e-6
    # Twelve terms of the exponential are off by that much.
    assert_same(ours, theirs, channels[0], 16, 16, tolerance=2e-4 if way == "exponential" else 2e-5)


@needs_orthogonium
def test_what_is_not_orthogonal_there_moves_and_says_how_far():
    aoc, params = (
        peers.load("layers.conv.AOC", "AdaptiveOrthoConv2d"),
        peers.load("reparametrizers", "CHOLESKY_ORTHO_PARAMS"),
    )
    theirs = aoc(8, 8, 3, ortho_params=params).eval()  # its singular values are off by some percent
    ours = ts.OrthoConv2d(8, 8, 3).eval()
    moved = ts.load_weights(ours, theirs.state_dict(), orthogonalizer="cholesky")["weight"]
    distance = float(((ours.weight - theirs.weight).norm() / theirs.weight.norm()).detach())
    assert 1e-4 < moved < 0.05
    assert moved == pytest.approx(distance, rel=0.05)  # theirs is singular in float32, ours is read in float64


@needs_orthogonium
def test_a_network_of_orthogonium():
    layer = peers.load
    aoc, linear = layer("layers.conv.AOC", "AdaptiveOrthoConv2d"), layer("layers", "OrthoLinear")
    homes = {
        "layers": "MaxMin BatchCentering2D LayerCentering2D ChannelShuffle UnitNormLinear",
        "layers.residual": "AdditiveResidual PrescaledAdditiveResidual ConcatResidual L2NormResidual",
        "layers.conv.SLL": "SDPBasedLipschitzResBlock",
    }
    there = SimpleNamespace(**{name: layer(home, name) for home, names in homes.items() for name in names.split()})
    square = {"padding": 1, "padding_mode": "circular"}
    theirs = nn.Sequential(
        aoc(3, 16, 3, stride=2, **square), there.MaxMin(), there.BatchCentering2D(16), there.ChannelShuffle(4, 4),
        there.PrescaledAdditiveResidual(nn.Sequential(aoc(16, 32, 3, groups=16), there.MaxMin(), aoc(32, 16, 1)), 0.7),
        there.AdditiveResidual(aoc(16, 16, 3), 0.4), there.ConcatResidual(aoc(8, 8, 3)),
        there.L2NormResidual(aoc(16, 16, 3), eps=0.0), there.LayerCentering2D(16),
        there.SDPBasedLipschitzResBlock(16, 2, 3), nn.Flatten(), linear(256, 32), there.MaxMin(),
        there.UnitNormLinear(32, 10),
    )  # fmt: skip
    ours = nn.Sequential(
        ts.OrthoConv2d(3, 16, 3, stride=2), ts.MaxMin(halves=True), ts.BatchCentering(16), ts.ChannelShuffle(4),
        ts.LearnableResidual(
            nn.Sequential(
                ts.OrthoConv2d(16, 32, 3, groups=16, axis_order=(1, 0)),
                ts.MaxMin(halves=True),
                ts.OrthoConv2d(32, 16, 1),
            )
        ),
        ts.ConvexResidual(ts.OrthoConv2d(16, 16, 3)), ts.ConcatResidual(ts.OrthoConv2d(8, 8, 3)),
        ts.L2Residual(ts.OrthoConv2d(16, 16, 3)), ts.LayerCentering(16, per_channel=True),
        ts.SLLBlock2d(16, 32, padding_mode="zeros"), nn.Flatten(), ts.OrthoLinear(256, 32),
        ts.MaxMin(halves=True), ts.UnitNormLinear(32, 10),
    )  # fmt: skip
    for module in theirs.modules():  # numbers as after training
        if type(module).__name__.endswith("Centering2D"):
            nn.init.normal_(module.bias)
            if hasattr(module, "running_mean"):
                module.running_mean = torch.randn(1, 16, 1, 1)
    moved = ts.load_weights(ours, settled(theirs).state_dict())
    assert set(moved) >= {"0.weight", "4.branch.0.weight", "9.weight", "13.weight"}
    assert max(moved.values()) < 1e-5
    assert_same(ours, theirs, 3, 8, 8, tolerance=1e-4)
    assert ts.lipschitz_bound(ours, (3, 8, 8)) < 1.5  # the rows of the last layer


@needs_orthogonium
def test_what_cannot_be_read_is_refused():
    aoc, linear, soc, sll = (
        peers.load(f"layers{home}", name)
        for home, name in {
            ".conv.AOC": "AdaptiveOrthoConv2d", ".linear": "OrthoLinear", ".conv.adaptiveSOC": "AdaptiveSOCConv2d",
            ".conv.SLL": "SDPBasedLipschitzDense",
        }.items()
    )  # fmt: skip
    state = nn.Sequential(aoc(4, 4, 3), nn.Flatten(), linear(16, 4)).state_dict()
    ours = nn.Sequential(ts.OrthoConv2d(4, 4, 3), nn.Flatten(), ts.OrthoLinear(16, 4))
    with pytest.raises(ValueError, match="orthogonalizer='cholesky'"):
        ts.load_weights(ours, state, orthogonalizer="cholesky")
    with pytest.raises(ValueError, match="did you mean 'bjorck'"):
        ts.load_weights(ours, state, orthogonalizer="bjork")
    with pytest.raises(ValueError, match="no place for"):
        ts.load_weights(ours, {**state, "3.bias": torch.zeros(4)})
    with pytest.raises(ValueError, match=r"there is no 2\.bias"):
        ts.load_weights(ours, {name: value for name, value in state.items() if name != "2.bias"})
    with pytest.raises(ValueError, match=r"0\.weight.*\(4, 4, 3, 3\).*\(4, 4, 5, 5\)"):
        ts.load_weights(nn.Sequential(ts.OrthoConv2d(4, 4, 5), *ours[1:]), state)
    with pytest.raises(ValueError, match="must be a state_dict"):
        ts.load_weights(ours, ours)
    with pytest.raises(ValueError, match="take them off"):
        ts.load_weights(ts.OrthoConv2d(4, 4, 3, method="soc"), soc(4, 4, 3).state_dict())
    with pytest.raises(ValueError, match="SLLBlock2d"):
        ts.load_weights(ts.SLLLinear(8), sll(8, 8, 8).state_dict())
    with pytest.raises(ValueError, match="take them off"):
        ts.load_weights(ts.OrthoLinear(4, 4), nn.utils.parametrizations.orthogonal(nn.Linear(4, 4)).state_dict())


def test_plain_weights_of_deel_torchlip():
    torchlip = pytest.importorskip("deel.torchlip", reason="the extra of peers is not installed")
    theirs = torchlip.Sequential(
        torchlip.SpectralConv2d(3, 8, 3, padding=1), torchlip.GroupSort2(), torchlip.ScaledAvgPool2d(2),
        nn.Flatten(), torchlip.SpectralLinear(128, 16), torchlip.GroupSort2(), torchlip.SpectralLinear(16, 4),
    )  # fmt: skip
    theirs(torch.randn(2, 3, 8, 8))  # in training mode, which makes the weights that are kept
    moved = {}
    ours = nn.Sequential(
        ts.OrthoConv2d(3, 8, 3, padding=1, padding_mode="zeros", method="rko"), ts.GroupSort(2), ts.ScaledAvgPool2d(2),
        nn.Flatten(), ts.OrthoLinear(128, 16), ts.GroupSort(2), ts.OrthoLinear(16, 4),
    )  # fmt: skip
    moved = ts.load_weights(ours, theirs.eval().vanilla_export().state_dict())
    assert max(moved.values()) < 1e-3  # its iteration stops when a step is smaller than that
    x = torch.randn(2, 3, 8, 8)
    torch.testing.assert_close(ours[0](x), theirs[0](x), rtol=0, atol=2e-3)
    flipped = ours[1](ours[0](x)).unflatten(1, (4, 2)).flip(2).flatten(1, 2)  # the smaller one comes first there
    torch.testing.assert_close(flipped, theirs[1](theirs[0](x)), rtol=0, atol=2e-3)


def test_plain_weights_of_parametrizations_of_torch():
    theirs = nn.Sequential(nn.utils.parametrizations.orthogonal(nn.Linear(6, 4)), nn.Tanh(), nn.Linear(4, 3))
    parametrize.remove_parametrizations(theirs[0], "weight")
    ours = nn.Sequential(ts.OrthoLinear(6, 4), nn.Tanh(), nn.Linear(4, 3))
    assert ts.load_weights(ours, theirs.state_dict())["0.weight"] < 1e-6
    assert_same(ours, theirs, 6, tolerance=1e-6)


def names_of(*modules):
    """Layers and losses that modules of a peer define or offer."""
    for module in map(importlib.import_module, modules):
        for key, value in vars(module).items():
            home = getattr(value, "__module__", "").split(".")[0]
            if inspect.isclass(value) and issubclass(value, nn.Module) and home in ("deel", "orthogonium"):
                yield key


@needs_orthogonium
@pytest.mark.filterwarnings("ignore")
def test_every_layer_and_loss_of_the_peers_is_in_the_tables():
    layers = ("", ".linear", ".residual", ".normalization", ".custom_activations", ".channel_shuffle")
    theirs = {
        *names_of("deel.torchlip", "orthogonium.losses", *(f"orthogonium.layers{name}" for name in layers)),
        *names_of(*(f"orthogonium.layers.conv.{name}" for name in ("AOC", "AOL", "SLL", "adaptiveSOC"))),
    }
    page = Path(__file__).parents[2].joinpath("docs", "coming-from.md").read_text()
    assert len(theirs) > 60
    assert theirs - set(re.findall(r"\w+", page)) == set()


def stretched(*shape):
    """A tensor of many numbers, as a small file may claim to hold."""
    return torch.ones(()).expand(shape)


def frames(*shape, vector=()):
    start = "parametrizations.weight."
    return {
        f"{start}original": stretched(*shape),
        f"{start}0.parametrizations.u.original": stretched(*vector),
        f"{start}0.parametrizations.v.original": stretched(*vector),
        "bias": torch.zeros(4),
    }


PLAIN = {"weight": torch.eye(4), "bias": torch.zeros(4)}
STRANGE = {
    "a matrix of terabytes": {**PLAIN, "weight": stretched(10**6, 10**6)},
    "a bias of terabytes": {**PLAIN, "bias": stretched(10**12)},
    "free numbers of terabytes": frames(10**6, 10**6),
    "a long kernel": frames(1, 20_000, 4, 2),
    "a long kernel of vectors": {**frames(1, 20_000, 4, 1)},
    "a kernel of nothing": frames(1, 10**9, 0, 2),
    "a vector of terabytes": frames(1, 6, 4, 2, vector=(10**12, 1)),
    "a vector that is copied along": frames(1, 6, 4, 2, vector=(16, 1, 4, 1)),
    "frames without axes": frames(),
    "sparse": {**PLAIN, "weight": torch.eye(4).to_sparse()},
    "meta": {**PLAIN, "bias": torch.zeros(4, device="meta")},
    "complex": {**PLAIN, "bias": torch.zeros(4, dtype=torch.complex64)},
    "not finite": {**PLAIN, "bias": torch.full((4,), torch.nan)},
    "beyond float32": {**PLAIN, "bias": torch.full((4,), 1e300, dtype=torch.float64)},
    "numbers for names": {0: torch.zeros(4)},
    "nothing": {},
}


@pytest.mark.parametrize("name", STRANGE)
def test_weights_of_strangers_are_refused_before_they_take_memory(name):
    for model in (ts.OrthoLinear(4, 4), ts.OrthoConv2d(4, 4, 3)):
        with pytest.raises(ValueError, match=r"bias|weight"):
            ts.load_weights(model, STRANGE[name])


def test_what_cannot_take_weights():
    with pytest.raises(TypeError, match=r"torch\.nn\.Module"):
        ts.load_weights(None, PLAIN)
    with pytest.raises(ValueError, match="meta device"):
        ts.load_weights(ts.OrthoLinear(4, 4, device="meta"), PLAIN)
