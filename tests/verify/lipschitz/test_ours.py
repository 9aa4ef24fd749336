"""Rules of our own layers: above every Jacobian, near 1 in float32, and honest about weights rounded to bfloat16."""

import copy
import inspect
import math

import pytest
import torch
from torch import nn

import trysquare as ts
from tests.jacobians import norms, points, randomise
from trysquare.nn.export import with_fixed_weights
from trysquare.nn.layers.conv import AffineInverse
from trysquare.verify.lipschitz import NoRuleError

CONV = {1: ts.OrthoConv1d, 2: ts.OrthoConv2d, 3: ts.OrthoConv3d}


def square(channels=4, dims=2):
    return nn.Sequential(CONV[dims](channels, channels, 3), ts.MaxMin())


def doubled(channels=4):
    """A branch that amplifies twice."""
    layer = nn.Conv2d(channels, channels, 1, bias=False)
    layer.weight.data = 2 * torch.eye(channels)[..., None, None]
    return layer


def counted(layer):
    """A normalisation that divides by 0.4."""
    layer.running_square.copy_(torch.tensor([0.04, 0.16, 0.1, 0.0]))
    return layer


# name: (layer, shape, whether the bound is larger in bfloat16)
MAP, SMALL, LINE, CUBE = (4, 6, 6), (4, 4, 4), (4, 6), (2, 4, 4, 4)
CASES = {
    "MaxMin": (ts.MaxMin, SMALL, False),
    "MaxMin, halves": (lambda: ts.MaxMin(halves=True), SMALL, False),
    "MaxMin, last axis": (lambda: ts.MaxMin(dim=-1), LINE, False),
    "GroupSort": (lambda: ts.GroupSort(2), SMALL, False),
    "FullSort": (ts.FullSort, LINE, False),
    "Abs": (ts.Abs, LINE, False),
    "Abs, half": (lambda: ts.Abs(0.5), LINE, False),
    "ChannelShift": (lambda: ts.ChannelShift(0.25), SMALL, False),
    "Positions": (lambda: ts.Positions(SMALL), SMALL, False),
    "SoftHuber": (lambda: ts.SoftHuber(0.3), LINE, False),
    "Householder": (lambda: randomise(ts.Householder(4, order=2)), LINE, True),
    "NActivation": (lambda: randomise(ts.NActivation(4)), LINE, False),
    "ChannelShuffle": (lambda: ts.ChannelShuffle(2), SMALL, False),
    "InvertibleDownsampling1d": (ts.InvertibleDownsampling1d, LINE, False),
    "ChannelUnshuffle": (lambda: ts.ChannelUnshuffle(2), SMALL, False),
    "InvertibleSequential": (
        lambda: ts.InvertibleSequential(ts.OrthoConv2d(4, 4, 3), ts.ChannelShuffle(2)),
        SMALL,
        True,
    ),
    "InvertibleDownsampling2d": (ts.InvertibleDownsampling2d, SMALL, False),
    "InvertibleDownsampling3d": (ts.InvertibleDownsampling3d, CUBE, False),
    "InvertibleUpsampling1d": (ts.InvertibleUpsampling1d, LINE, False),
    "InvertibleUpsampling2d": (ts.InvertibleUpsampling2d, SMALL, False),
    "InvertibleUpsampling3d": (ts.InvertibleUpsampling3d, (8, 2, 2, 2), False),
    "ScaledAvgPool1d": (lambda: ts.ScaledAvgPool1d(2), LINE, False),
    "ScaledAvgPool2d": (lambda: ts.ScaledAvgPool2d(3, 2, 1), SMALL, False),
    "ScaledAvgPool3d": (lambda: ts.ScaledAvgPool3d(2), CUBE, False),
    "L2NormPool1d": (lambda: ts.L2NormPool1d(3, 1), LINE, False),
    "L2NormPool2d": (lambda: ts.L2NormPool2d(3, 2, 1), SMALL, False),
    "L2NormPool3d": (lambda: ts.L2NormPool3d(2), CUBE, False),
    "LipschitzMaxPool1d": (lambda: ts.LipschitzMaxPool1d(3, 1), LINE, False),
    "LipschitzMaxPool2d": (lambda: ts.LipschitzMaxPool2d(3, 2, 1), SMALL, False),
    "LipschitzMaxPool3d": (lambda: ts.LipschitzMaxPool3d(2), CUBE, False),
    "GlobalScaledAvgPool": (ts.GlobalScaledAvgPool, SMALL, False),
    "GlobalL2NormPool": (ts.GlobalL2NormPool, SMALL, False),
    "GlobalMaxPool": (ts.GlobalMaxPool, SMALL, False),
    "BatchCentering": (lambda: ts.BatchCentering(4), SMALL, False),
    "BatchLipNorm": (lambda: counted(ts.BatchLipNorm(4)), SMALL, None),
    "LayerCentering": (lambda: ts.LayerCentering(4), SMALL, False),
    "LearnableResidual": (lambda: ts.LearnableResidual(square(), scale=0.3, learnable_skip=True), SMALL, True),
    "LearnableResidual with shortcut": (
        lambda: ts.LearnableResidual(ts.OrthoConv2d(4, 6, 3, stride=2), ts.OrthoConv2d(4, 6, 2, stride=2), 0.7),
        SMALL,
        True,
    ),
    "ConvexResidual": (lambda: ts.ConvexResidual(square(), weight=0.3), SMALL, True),
    "ConcatResidual": (lambda: ts.ConcatResidual(square(2)), SMALL, True),
    "L2Residual": (lambda: ts.L2Residual(square(), angle=0.7), SMALL, True),
    "AdjointResidual": (lambda: ts.AdjointResidual(ts.OrthoConv2d(4, 6, 3, stride=2)), SMALL, True),
    "AdjointResidual, zeros": (
        lambda: ts.AdjointResidual(ts.OrthoConv1d(4, 6, 3, padding_mode="zeros"), nn.Tanh()),
        LINE,
        True,
    ),
    "AdjointResidual, linear": (lambda: ts.AdjointResidual(ts.OrthoLinear(6, 4)), (3, 6), True),
    "AdjointResidual, Fourier": (lambda: ts.AdjointResidual(ts.FourierOrthoConv1d(4, 4, 3)), LINE, False),
    "DepthwiseResidualBlock1d": (lambda: ts.DepthwiseResidualBlock1d(4, scale=-2.3), LINE, True),
    "DepthwiseResidualBlock2d": (lambda: ts.DepthwiseResidualBlock2d(4, padding_mode="zeros"), SMALL, True),
    "DepthwiseResidualBlock3d": (lambda: ts.DepthwiseResidualBlock3d(2), (2, 3, 3, 3), True),
    "SLLBlock1d": (lambda: randomise(ts.SLLBlock1d(4, 1)), LINE, False),
    "SLLBlock2d": (lambda: randomise(ts.SLLBlock2d(4, 6, padding_mode="zeros")), SMALL, False),
    "SLLBlock3d": (lambda: ts.SLLBlock3d(2), (2, 3, 3, 3), False),
    "SLLLinear": (lambda: randomise(ts.SLLLinear(6, 9)), (3, 6), False),
    "CPLBlock1d": (lambda: ts.CPLBlock1d(4, steps=5), LINE, False),
    "CPLBlock2d": (lambda: ts.CPLBlock2d(4, 6, padding_mode="zeros"), SMALL, False),
    "CPLBlock3d": (lambda: ts.CPLBlock3d(2), (2, 3, 3, 3), False),
    "CPLLinear": (lambda: ts.CPLLinear(6, 9, steps=8), (6,), True),
    "SLLAOCBlock1d": (lambda: randomise(ts.SLLAOCBlock1d(4, 6, stride=2)), LINE, True),
    "SLLAOCBlock2d": (lambda: ts.SLLAOCBlock2d(4, 6, stride=2, padding_mode="zeros"), SMALL, True),
    "SLLAOCBlock2d, large kernel": (lambda: ts.SLLAOCBlock2d(4, 4, 5, activation=nn.Tanh()), SMALL, True),
    "SLLAOCBlock3d": (lambda: ts.SLLAOCBlock3d(2, 2, hidden_channels=3), (2, 3, 3, 3), True),
    "SLLBlock2d, groups and dilation": (lambda: randomise(ts.SLLBlock2d(4, dilation=2, groups=2)), SMALL, False),
    "CPLBlock2d, groups and dilation": (lambda: ts.CPLBlock2d(4, 6, 2, 3, 2, padding_mode="zeros"), SMALL, False),
    "SLLAOCBlock1d, all": (lambda: ts.SLLAOCBlock1d(4, 6, 3, 2, 3, 2), LINE, True),
    "SLLAOCBlock1d, all, zeros": (lambda: ts.SLLAOCBlock1d(4, 6, 4, 2, 3, 2, padding_mode="zeros"), LINE, True),
    "SLLAOCBlockTranspose1d": (lambda: randomise(ts.SLLAOCBlockTranspose1d(4, 6, 3, 2, 3, 2)), LINE, True),
    "SLLAOCBlockTranspose2d": (lambda: ts.SLLAOCBlockTranspose2d(4, 2, stride=2), SMALL, True),
    "SLLAOCBlockTranspose2d, zeros": (
        lambda: ts.SLLAOCBlockTranspose2d(4, 2, (3, 4), 2, 3, 2, padding_mode="zeros", mid_channels=4),
        (4, 2, 3),
        True,
    ),
    "SLLAOCBlockTranspose3d": (lambda: ts.SLLAOCBlockTranspose3d(4, 2, 3, (1, 2, 1)), (4, 2, 2, 2), True),
    "SandwichLinear": (lambda: randomise(ts.SandwichLinear(6, 4, hidden_features=12)), (3, 6), True),
    "SandwichAOCConv1d": (lambda: randomise(ts.SandwichAOCConv1d(4, 6, 3, stride=2)), LINE, True),
    "SandwichAOCConv2d": (lambda: ts.SandwichAOCConv2d(4, 6, 3, stride=2, padding_mode="zeros"), SMALL, True),
    "SandwichAOCConv3d": (lambda: ts.SandwichAOCConv3d(2, 2, 2), (2, 3, 3, 3), True),
    "SandwichAOCConv1d, all": (lambda: randomise(ts.SandwichAOCConv1d(4, 6, 3, 2, 3, 2)), LINE, True),
    "SandwichAOCConv1d, all, zeros": (
        lambda: ts.SandwichAOCConv1d(4, 6, 4, 2, 3, 2, padding_mode="zeros"),
        LINE,
        True,
    ),
    "SandwichAOCConvTranspose1d": (lambda: randomise(ts.SandwichAOCConvTranspose1d(4, 6, 3, 2, 3, 2)), LINE, True),
    "SandwichAOCConvTranspose2d": (
        lambda: ts.SandwichAOCConvTranspose2d(4, 2, (3, 4), 2, 3, padding_mode="zeros"),
        (4, 2, 3),
        True,
    ),
    "SandwichAOCConvTranspose3d": (lambda: ts.SandwichAOCConvTranspose3d(4, 2, 2, (1, 2, 1)), (4, 2, 2, 2), True),
    # Built in float32 whatever the dtype of the layer: nothing is rounded to bfloat16 but its input and output.
    "SandwichConv1d": (lambda: randomise(ts.SandwichConv1d(4, 6, 3, stride=2)), LINE, False),
    "SandwichConv2d": (lambda: ts.SandwichConv2d(4, 6, 3, stride=2, bias=False), SMALL, False),
    "SandwichConv3d": (lambda: ts.SandwichConv3d(2, 2, 2), (2, 3, 3, 3), False),
    "SandwichConv2d, all": (lambda: randomise(ts.SandwichConv2d(4, 6, 3, 2, 2, 2)), SMALL, False),
    "SandwichConvTranspose1d": (lambda: randomise(ts.SandwichConvTranspose1d(4, 6, 3, 2, 2, 2)), LINE, False),
    "SandwichConvTranspose2d": (lambda: ts.SandwichConvTranspose2d(4, 2, 3, 2), (4, 2, 3), False),
    "SandwichConvTranspose3d": (lambda: ts.SandwichConvTranspose3d(4, 2, 2, (1, 2, 1)), (4, 2, 2, 2), False),
    "FourierOrthoConv1d": (lambda: ts.FourierOrthoConv1d(4, 6, 3, stride=2), LINE, False),
    "FourierOrthoConv2d": (lambda: ts.FourierOrthoConv2d(4, 6, 3, method="lot"), SMALL, False),
    "FourierOrthoConv3d": (lambda: ts.FourierOrthoConv3d(2, 2, 2, groups=2), (2, 3, 3, 3), False),
    "FourierOrthoConvTranspose1d": (lambda: ts.FourierOrthoConvTranspose1d(4, 6, 3), LINE, False),
    "FourierOrthoConvTranspose2d": (lambda: ts.FourierOrthoConvTranspose2d(8, 4, 3, stride=2), (8, 3, 3), False),
    "FourierOrthoConvTranspose3d": (lambda: ts.FourierOrthoConvTranspose3d(2, 2, 2), (2, 3, 3, 3), False),
    "AffineInverse": (lambda: ts.OrthoConv2d(4, 4, 3).inverse(), SMALL, True),
    # Not 1-Lipschitz: the bound says so.
    "LastState": (lambda: ts.LastState(ts.OrthoRNN(4, 6, nonlinearity="abs", batch_first=True)), (5, 4), None),
    "LastState, all": (
        lambda: ts.LastState(ts.OrthoRNN(4, 3, 2, "relu", batch_first=True, bidirectional=True)),
        (5, 4),
        None,
    ),
    "InputScaling": (lambda: ts.InputScaling((0.5, 0.4, 0.3, 0.2), (0.7, 0.3, 0.9, 0.6)), SMALL, None),
    "SpectralLinear": (lambda: randomise(ts.SpectralLinear(6, 5)), (3, 6), True),
    "UnitNormLinear": (lambda: ts.UnitNormLinear(6, 5), (6,), None),
    "amplifying branch": (lambda: ts.LearnableResidual(doubled(), scale=0.5), SMALL, None),
    "amplifying shortcut": (lambda: ts.ConvexResidual(square(), doubled()), SMALL, None),
    "amplifying half": (lambda: ts.ConcatResidual(doubled(2)), SMALL, None),
    "amplifying norm": (lambda: ts.L2Residual(doubled(), square()), SMALL, None),
}


def frozen(layer):
    """The function of the weights as they are, rounded, in float64."""
    return with_fixed_weights(layer).double().eval()


def largest_jacobian(layer, shape):
    seen = [norms(layer, x)[1] for x in [*points(shape), *(torch.randn(shape) for _ in range(3))]]
    return max(seen)


@pytest.mark.parametrize("name", CASES)
def test_bound_is_above_every_jacobian(name):
    make, shape, rounds = CASES[name]
    layer = make().eval()
    found = ts.lipschitz_bound(layer, shape)
    fourier = "Fourier" in name or name.startswith("SandwichConv")
    assert largest_jacobian(frozen(layer), shape) <= found * (1 + (1e-6 if fourier else 1e-12))
    short = copy.deepcopy(layer).bfloat16()
    rounded = ts.lipschitz_bound(short, shape)
    assert largest_jacobian(frozen(short), shape) <= rounded * (1 + (1e-6 if fourier else 1e-12))
    if rounds is None:
        assert found > 1.05
        return
    assert found <= 1 + 1e-5
    assert rounded <= 1.03
    assert rounds or rounded <= 1 + 1e-5


def test_every_public_module_has_a_rule_and_a_case():
    public = {
        name: thing
        for name in ts.__all__
        if inspect.isclass(thing := getattr(ts, name)) and issubclass(thing, nn.Module)
    }
    assert len(public) > 60
    ours = [n for n in public if not n.startswith("Ortho")]  # those are in test_bound.py
    assert set(ours) <= set(CASES)
    assert isinstance(CASES["AffineInverse"][0](), AffineInverse)


def test_constants_of_residuals_are_what_the_formulas_say():
    def bound(block):
        return ts.lipschitz_bound(block, MAP)

    assert bound(ts.LearnableResidual(doubled(), scale=-0.5)) == pytest.approx((1 + 0.5 * 2) / 1.5, rel=1e-6)
    assert bound(ts.LearnableResidual(nn.Identity(), doubled(), scale=3.0)) == pytest.approx((2 + 3) / 4, rel=1e-6)
    assert bound(ts.ConvexResidual(doubled(), weight=0.25)) == pytest.approx(1.25, rel=1e-6)
    assert bound(ts.ConcatResidual(doubled(2))) == pytest.approx(2, rel=1e-6)
    angle = 0.4
    expected = math.sqrt(math.cos(angle) ** 2 + 4 * math.sin(angle) ** 2)
    assert bound(ts.L2Residual(doubled(), angle=angle)) == pytest.approx(expected, rel=1e-6)
    nothing = ts.LearnableResidual(nn.Identity(), scale=0.0, learnable_skip=True)
    nothing.skip_scale.data.zero_()
    assert bound(nothing) == 0


def test_factors_are_rounded_to_the_dtype_of_the_input():
    model = nn.Sequential(ts.OrthoConv2d(4, 4, 3, bias=False, dtype=torch.bfloat16), ts.ConvexResidual(nn.Identity()))
    model[1].logit.data.fill_(0.008)
    alone = ts.lipschitz_bound(model[0], MAP)
    weight = model[1].logit.detach().sigmoid()
    halves = [float(w.to(torch.bfloat16)) for w in (weight, 1 - weight)]
    assert sum(halves) > 1
    assert ts.lipschitz_bound(model, MAP) >= alone * sum(halves)


def test_potential_steps_with_weights_that_are_no_contraction():
    layer = ts.SLLLinear(4)
    nn.utils.parametrize.remove_parametrizations(layer, "weight")
    layer.weight.data = 2 * torch.eye(4)
    assert ts.lipschitz_bound(layer, (4,)) == pytest.approx(7, rel=1e-6)
    block = ts.SandwichLinear(4, 4)
    nn.utils.parametrize.remove_parametrizations(block, "weight")
    found = ts.lipschitz_bound(block, (4,))  # from its kernels alone
    assert found <= 1 + 1e-5
    block.weight.data *= 2
    assert ts.lipschitz_bound(block, (4,)) == pytest.approx(4 * found, rel=1e-5)


class Steep(nn.ReLU):
    def forward(self, x):
        return 3 * x


def test_what_the_theorems_do_not_cover_raises():
    for block in (ts.SLLBlock2d(4), ts.SLLAOCBlock2d(4, 4), ts.SandwichAOCConv2d(4, 4, 3), ts.SandwichConv2d(4, 4, 3)):
        block.activation = Steep()
        with pytest.raises(NoRuleError, match="overrides forward"):
            ts.lipschitz_bound(block, MAP)
        block.activation = ts.MaxMin()
        with pytest.raises(ValueError, match="slopes between 0 and 1"):
            ts.lipschitz_bound(block, MAP)
    for layer in (ts.MaxMin(0), ts.FullSort(0), ts.ConcatResidual(nn.Identity(), dim=0), ts.BatchCentering(4).train()):
        with pytest.raises((NoRuleError, ValueError)):
            ts.lipschitz_bound(layer, MAP)
    hooked = nn.Sequential(nn.Identity())
    hooked[0].register_forward_hook(lambda module, args, out: 5 * out)
    assert ts.lipschitz_bound(ts.LearnableResidual(hooked), MAP) == pytest.approx(3)

    class Louder(ts.GlobalMaxPool):
        def _pool(self, positions):
            return 2 * super()._pool(positions)

    assert ts.lipschitz_bound(nn.Sequential(Louder()), MAP) == pytest.approx(2)
    broken = ts.FourierOrthoConv2d(4, 4, 3, bias=False)
    broken.weight.data.fill_(math.nan)
    with pytest.raises((ValueError, ArithmeticError)):
        ts.lipschitz_bound(broken, MAP)


def mixed(dtype=torch.float32):
    return (
        nn.Sequential(
            ts.SandwichConv2d(4, 4, 3, bias=False),
            ts.OrthoConv2d(4, 8, 3, stride=2, bias=False),
            ts.MaxMin(),
            ts.SLLAOCBlock2d(8, 8),
            ts.DepthwiseResidualBlock2d(8),
            ts.FourierOrthoConv2d(8, 8, 3),
            ts.BatchCentering(8),
            ts.L2NormPool2d(3),
            nn.Flatten(),
            ts.UnitNormLinear(8, 3, bias=False),
        )
        .to(dtype)
        .eval()
    )


def test_bfloat16_models_without_bias_are_followed_with_their_rounded_weights():
    layer = ts.OrthoConv2d(4, 8, 3, bias=False).bfloat16()
    assert layer.free_tensors[0].dtype == torch.float32
    plain = torch.linalg.svdvals(torch.fft.fft2(layer.weight.detach().double(), (6, 6)).permute(2, 3, 0, 1))
    assert ts.lipschitz_bound(layer, MAP) == pytest.approx(float(plain.max()), rel=1e-6)
    assert float(plain.max()) > 1 + 1e-4
    model = mixed(torch.bfloat16)
    report = ts.audit(model, MAP)
    assert report.bound == ts.lipschitz_bound(model, MAP)
    assert report.lower_bound <= report.bound
    assert report.bound > ts.lipschitz_bound(mixed(), MAP)
    remarks = {row.type: row.remark for row in report.layers}
    assert "rounded to bfloat16" in remarks["OrthoConv2d"]
    assert "rounded to bfloat16" in remarks["SLLAOCBlock2d"]
    assert "see their rows" in remarks["DepthwiseResidualBlock2d"]


def test_blocks_are_rows_of_the_audit():
    report = ts.audit(mixed(), MAP)
    verdicts = {row.type: row.verdict for row in report.layers}
    assert verdicts == {
        "SandwichConv2d": "1-Lipschitz",
        "OrthoConv2d": "orthogonal",
        "MaxMin": "1-Lipschitz",
        "SLLAOCBlock2d": "1-Lipschitz",
        "DepthwiseResidualBlock2d": "1-Lipschitz",
        "FourierOrthoConv2d": "1-Lipschitz",
        "BatchCentering": "1-Lipschitz",
        "L2NormPool2d": "1-Lipschitz",
        "Flatten": "1-Lipschitz",
        "UnitNormLinear": "amplifies",
    }
    assert "certified_radii" in str(report)
    residual = ts.audit(nn.Sequential(ts.ConcatResidual(doubled(2))), MAP).layers[0]
    assert residual.verdict == "amplifies"
    assert "see their rows" in residual.remark
