"""Layers in the place of calls: against torch's own, and against dense matrices."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import trysquare as ts
from trysquare.nn.layers import calls


def jacobian(module, *inputs):
    """Of the output with respect to all inputs together, as a matrix."""
    parts = torch.autograd.functional.jacobian(lambda *x: module(*x).flatten(), inputs)
    return torch.cat([part.flatten(1) for part in parts], 1)


@pytest.mark.parametrize("groups", [1, 2, 6])
def test_group_centering_is_group_norm_without_the_division(groups):
    torch.manual_seed(0)
    x = 3 + 2 * torch.randn(4, 6, 5, 3, dtype=torch.float64)
    layer = calls.GroupCentering(groups, 6, dtype=torch.float64)
    deviations = x.view(4, groups, -1).std(2, correction=0).repeat_interleave(6 // groups, 1)[:, :, None, None]
    torch.testing.assert_close(layer(x), F.group_norm(x, groups, eps=0.0) * deviations)
    with torch.no_grad():
        layer.bias.copy_(torch.arange(6.0))
    torch.testing.assert_close(
        layer(x).mean((0, 2, 3)).view(groups, -1).mean(1), torch.arange(6.0).view(groups, -1).mean(1).double()
    )
    assert calls.GroupCentering(groups, 6, bias=False).bias is None


@pytest.mark.parametrize("shape", [(6,), (4, 6)])
def test_last_axes_centering_is_layer_norm_without_the_division(shape):
    torch.manual_seed(0)
    x = 3 + 2 * torch.randn(3, 4, 6, dtype=torch.float64)
    axes = tuple(range(-len(shape), 0))
    deviations = x.std(axes, correction=0, keepdim=True)
    layer = calls.LastAxesCentering(shape, dtype=torch.float64)
    torch.testing.assert_close(layer(x), F.layer_norm(x, shape, eps=0.0) * deviations)


@pytest.mark.parametrize("kind", [calls.ConvexSum, calls.LearnableSum])
def test_sums_keep_what_each_term_depends_on(kind):
    """For ``|a - a'| <= 1`` and ``|b - b'| <= 1`` the sum changes by at most 1, whatever the parameters are."""
    torch.manual_seed(0)
    layer = kind(dtype=torch.float64)
    a, b = torch.randn(2, 5, dtype=torch.float64)
    torch.testing.assert_close(layer(a, b), (a + b) / 2)
    for _ in range(20):
        with torch.no_grad():
            for parameter in layer.parameters():
                parameter.copy_(3 * torch.randn(parameter.shape))
        (first,), (second,) = (jacobian(layer, a[:1], b[:1])[:, i] for i in (0, 1))
        assert float(first.abs() + second.abs()) == pytest.approx(1, abs=1e-12)


def test_a_learnable_sum_of_nothing_is_finite():
    layer = calls.LearnableSum()
    with torch.no_grad():
        layer.factors.zero_()
    y = layer(torch.ones(2), torch.ones(2))
    assert torch.equal(y, torch.zeros(2))


@pytest.mark.parametrize("stack", [True, False])
def test_a_concatenation_of_copies_has_norm_1(stack):
    layer = calls.ScaledConcat(1, 3, stack)
    matrix = jacobian(lambda x: layer([x, x, x]), torch.randn(1, 4, dtype=torch.float64))
    torch.testing.assert_close(torch.linalg.svdvals(matrix), torch.ones(4, dtype=torch.float64))


def test_means_have_orthonormal_rows():
    matrix = jacobian(calls.ScaledMean((1, 3), False), torch.randn(2, 3, 4, 5, dtype=torch.float64))
    torch.testing.assert_close(matrix @ matrix.mT, torch.eye(8, dtype=torch.float64))
    assert calls.ScaledMean((1,), True)(torch.zeros(2, 3, 4)).shape == (2, 1, 4)


def test_a_scale_is_bounded_and_starts_at_1():
    layer = calls.BoundedScale(torch.tensor([1e-6, 5e-7]))
    torch.testing.assert_close(layer(torch.ones(2)).detach(), torch.tensor([1.0, 0.5]))
    with torch.no_grad():
        layer.scale.copy_(torch.tensor([4.0, -8.0]))
    torch.testing.assert_close(layer(torch.ones(2)).detach(), torch.tensor([0.5, -1.0]))
    assert torch.equal(calls.BoundedScale(torch.zeros(3)).scale, torch.ones(3))


@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (calls.GroupCentering(2, 6), (6, 4)), (calls.LastAxesCentering((4,)), (6, 4)),
        (calls.ScaledMean((1,), True), (6, 4)),
        (calls.BoundedScale(torch.tensor([0.2, 3.0])), (5, 2)),
        (calls.Divided(nn.Upsample(scale_factor=2), 2**0.5), (3, 4)),
    ],
    ids=lambda value: type(value).__name__,
)  # fmt: skip
def test_bounds_in_short_dtypes(layer, shape):
    assert ts.lipschitz_bound(layer.eval(), shape) == pytest.approx(1, abs=1e-6)
    short = layer.bfloat16()
    assert short(torch.randn(2, *shape, dtype=torch.bfloat16)).dtype == torch.bfloat16
    assert repr(layer)
