import pytest
import torch
from torch import nn

import trysquare as ts
from tests.jacobians import assert_one_lipschitz, randomise


@pytest.mark.parametrize("cls", [ts.SLLBlock2d, ts.CPLBlock2d])
@pytest.mark.parametrize("shape", [(1, 1, 3, 3), (2, 2, 2, 3), (3, 1, 1, 1)])
def test_kernels_for_which_the_bound_is_attained(cls, shape):
    """Equal positive taps: row sums are the response to a constant, so the step is a reflection."""
    hidden, channels, *taps = shape
    block = cls(channels, hidden, tuple(taps), bias=False, activation=nn.Identity())
    with torch.no_grad():
        block.free_tensors[0].fill_(0.7)
    x = torch.ones(1, channels, 4, 4)
    torch.testing.assert_close(block(x), -x)
    assert assert_one_lipschitz(block, (channels, 4, 4)) == pytest.approx(1)


@pytest.mark.parametrize("cls", [ts.SLLLinear, ts.CPLLinear])
def test_one_hidden_unit_is_a_reflection(cls):
    layer = cls(5, 1, bias=False, activation=nn.Identity()).double()
    x = torch.randn(5, dtype=torch.float64)
    torch.testing.assert_close(layer(x).norm(), x.norm())
    torch.testing.assert_close(layer(layer(x)), x)
    relu = cls(5, 1, bias=False).double()
    relu.load_state_dict(layer.state_dict())
    half = torch.where(x @ layer.weight[0] > 0, layer(x), x)  # fold along one plane
    torch.testing.assert_close(relu(x), half)


@pytest.mark.parametrize(
    "make",
    [lambda: ts.SLLBlock2d(3, 4), lambda: ts.SLLLinear(5, 3), lambda: ts.CPLBlock1d(3, 4), lambda: ts.CPLLinear(5)],
)
def test_kernels_can_be_assigned(make):
    source, block = randomise(make()), make()
    weight = source.weight.detach()
    block.weight = weight
    torch.testing.assert_close(block.weight, weight, atol=1e-6, rtol=0)


def test_kernels_that_belong_together_cannot():
    block = ts.SandwichLinear(4, 4)
    with pytest.raises(ValueError, match="2 kernels of this block are made together"):
        block.weight = ts.SandwichLinear(4, 4).weight.detach()  # its own present weight is recognised
