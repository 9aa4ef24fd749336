"""What layers say about themselves: their linear operator, their Lipschitz constant, their plain form."""

import pytest
import torch
from torch import nn

import trysquare as ts
from tests.oracle import CONV, CONV_TRANSPOSE, dense
from trysquare.nn.linalg.operator import LinearLayer, LipschitzLayer

LINEAR = {
    "linear": (lambda: ts.OrthoLinear(6, 4), (6,)),
    "unit rows": (lambda: ts.UnitNormLinear(6, 4), (6,)),
    "1d": (lambda: CONV[1](2, 3, 3), (2, 7)),
    "stride": (lambda: CONV[2](2, 6, 3, stride=2), (2, 6, 4)),
    "groups, dilation": (lambda: CONV[2](4, 8, 3, dilation=2, groups=2), (4, 5, 6)),
    "zeros": (lambda: CONV[2](3, 5, (3, 2), padding_mode="zeros"), (3, 5, 4)),
    "3d": (lambda: CONV[3](2, 2, 2), (2, 3, 4, 2)),
    "transposed zeros": (lambda: CONV_TRANSPOSE[2](6, 2, 3, stride=2, padding_mode="zeros"), (6, 3, 4)),
    "terms": (lambda: CONV[2](4, 4, 3, method="soc"), (4, 8, 9)),
}
BLOCKS = {
    "householder": (lambda: ts.Householder(4, order=2), (4, 3)),
    "n-activation": (lambda: ts.NActivation(4), (4, 3)),
    "sll": (lambda: ts.SLLBlock2d(3, 4), (3, 5, 4)),
    "cpl linear": (lambda: ts.CPLLinear(5), (5,)),
    "sll aoc": (lambda: ts.SLLAOCBlock2d(2, 4, stride=2), (2, 4, 6)),
    "sll aoc up": (lambda: ts.SLLAOCBlockTranspose1d(4, 2, stride=2), (4, 3)),
    "sandwich": (lambda: ts.SandwichLinear(5, 3), (5,)),
    "sandwich aoc": (lambda: ts.SandwichAOCConv2d(2, 4, 3, stride=2, padding_mode="zeros"), (2, 4, 4)),
    "fourier": (lambda: ts.FourierOrthoConv2d(2, 4, 3, stride=2), (2, 4, 6)),
    "fourier up": (lambda: ts.FourierOrthoConvTranspose2d(4, 2, 3, stride=2), (4, 2, 3)),
    "fourier sandwich": (lambda: ts.SandwichConv2d(2, 4, 3, stride=2), (2, 4, 6)),
}


@pytest.mark.parametrize("name", LINEAR)
def test_the_operator_is_what_the_layer_does(name):
    torch.manual_seed(0)
    make, shape = LINEAR[name]
    layer = make().double()
    assert isinstance(layer, LinearLayer)
    operator, matrix = layer.linear_operator(shape), dense(layer, shape)
    x = torch.randn(2, *shape, dtype=torch.float64)
    apply, transpose = operator.apply, operator.transpose
    if operator.transposed:
        apply, transpose = transpose, apply
    y = apply(x)
    torch.testing.assert_close(y.flatten(1), x.flatten(1) @ matrix.T, rtol=0, atol=1e-12)
    torch.testing.assert_close(transpose(y).flatten(1), y.flatten(1) @ matrix, rtol=0, atol=1e-12)
    blocks = torch.linalg.svdvals(operator.dense()).flatten().sort(descending=True).values
    torch.testing.assert_close(blocks, torch.linalg.svdvals(matrix), rtol=0, atol=1e-11)


def test_another_weight_can_be_given():
    layer = ts.OrthoLinear(6, 4)
    weight = torch.randn(4, 6, dtype=torch.float64)
    assert torch.equal(layer.linear_operator((6,), weight).kernel, weight)
    with pytest.raises(ValueError, match="not finite"):
        layer.linear_operator((6,), weight / 0)
    with pytest.raises(ValueError, match="in_features=6"):
        layer.linear_operator((5,))
    with pytest.raises(ValueError, match="not divisible by stride"):
        CONV[1](2, 4, 3, stride=2).linear_operator((2, 5))


@pytest.mark.parametrize("name", BLOCKS)
def test_the_constant_is_above_every_slope_and_near_1(name):
    torch.manual_seed(0)
    make, shape = BLOCKS[name]
    layer = make().double().eval()
    assert isinstance(layer, LipschitzLayer)
    bound = layer.lipschitz_constant(shape, torch.float64)
    assert bound < 1 + 1e-6
    for _ in range(5):
        x = torch.randn(1, *shape, dtype=torch.float64)
        jacobian = torch.autograd.functional.jacobian(layer, x).flatten(len(shape) + 1).flatten(0, len(shape))
        assert torch.linalg.matrix_norm(jacobian, 2) <= bound


def test_the_constant_is_about_the_weights_as_they_are():
    """A step that is too long: ``x - 2 Mᵀ σ(M x)`` with ``‖M‖² = 2`` turns some directions into -3 times themselves."""
    block = ts.SLLBlock2d(2, activation=nn.Identity())
    nn.utils.parametrize.remove_parametrizations(block, "weight")
    with torch.no_grad():
        block.weight.zero_()[0, 0, 1, 1] = 2**0.5
    assert 3 <= block.lipschitz_constant((2, 4, 4), torch.float32) < 3.001


def test_what_is_not_linear_has_no_operator():
    assert not isinstance(ts.SLLBlock2d(2), LinearLayer)
    assert not isinstance(ts.FourierOrthoConv2d(2, 2, 3), LinearLayer)
    assert not isinstance(CONV[2](2, 2, 3), LipschitzLayer)
