import math

import pytest
import torch
from torch import nn

import trysquare as ts
from tests.jacobians import assert_isometric, assert_one_lipschitz, exact, jacobian, largest_ratio

SHAPES = {1: (2, 8), 2: (2, 6, 4), 3: (1, 4, 4, 2)}
POOLS = [ts.ScaledAvgPool1d, ts.ScaledAvgPool2d, ts.ScaledAvgPool3d, ts.L2NormPool1d, ts.L2NormPool2d, ts.L2NormPool3d,
         ts.LipschitzMaxPool1d, ts.LipschitzMaxPool2d, ts.LipschitzMaxPool3d]  # fmt: skip
GLOBAL = [ts.GlobalScaledAvgPool, ts.GlobalL2NormPool, ts.GlobalMaxPool]


@pytest.mark.parametrize("pool", POOLS)
@pytest.mark.parametrize("options", [(2,), (2, 1), (3, 2, 1), (2, 2, 1), (3, 1, 1)])
def test_never_amplifies(pool, options):
    assert_one_lipschitz(pool(*options), {**SHAPES, 3: (1, 3, 3, 4)}[pool.dims])


@pytest.mark.parametrize("pool", [ts.LipschitzMaxPool1d, ts.LipschitzMaxPool2d])
@pytest.mark.parametrize(("stride", "dilation"), [(1, 2), (2, 2), (2, 3), (4, 2)])
def test_dilated_max_pooling(pool, stride, dilation):
    shape = {1: (1, 12), 2: (1, 8, 8)}[pool.dims]
    assert_one_lipschitz(pool(2, stride, 0, dilation), shape)


def test_the_scale_of_max_pooling_is_needed_and_tight():
    x = torch.zeros(1, 5, 5, dtype=torch.float64)
    x[0, 2, 2] = 1
    layer, plain = ts.LipschitzMaxPool2d(3, 2), nn.MaxPool2d(3, 2)
    assert float((plain(x) - plain(0 * x)).norm()) == pytest.approx(2)
    assert float((layer(x) - layer(0 * x)).norm()) == pytest.approx(1)


@pytest.mark.parametrize("pool", [*POOLS[:6], *GLOBAL[:2]])
def test_tight_without_overlap(pool):
    dims = getattr(pool, "dims", 2)
    layer = exact(pool() if pool in GLOBAL else pool(2))
    x = torch.randn(SHAPES[dims], dtype=torch.float64)
    values = torch.linalg.svdvals(jacobian(layer, x))
    torch.testing.assert_close(values, torch.ones_like(values))  # orthonormal rows
    if pool in (*POOLS[3:6], ts.GlobalL2NormPool):
        torch.testing.assert_close(layer(x[None]).norm(), x.norm())


@pytest.mark.parametrize("pool", GLOBAL)
@pytest.mark.parametrize("shape", SHAPES.values())
def test_global(pool, shape):
    assert_one_lipschitz(pool(), shape)
    x = torch.randn(2, *shape)
    assert pool()(x).shape == (2, shape[0], *(1,) * (len(shape) - 1))
    torch.testing.assert_close(pool(keepdim=False)(x), pool()(x).flatten(1))


@pytest.mark.parametrize("layer", [ts.L2NormPool2d(2), ts.L2NormPool2d(3, 1, 1), ts.GlobalL2NormPool()])
def test_gradient_is_safe_at_zero(layer):
    x = torch.zeros(1, 2, 4, 4, requires_grad=True)
    layer(x).sum().backward()
    assert torch.equal(x.grad, torch.zeros_like(x))
    tiny = torch.full((1, 2, 4, 4), 1e-22, requires_grad=True)
    y = layer(tiny)
    y.sum().backward()
    assert tiny.grad.norm() <= 1.2 * y.numel() ** 0.5


def test_half_precision_does_not_overflow():
    x = torch.full((1, 1, 4, 4), 1000.0, dtype=torch.float16)
    assert ts.L2NormPool2d(2)(x).tolist() == [[[[2000.0] * 2] * 2]]
    assert ts.GlobalL2NormPool(keepdim=False)(x).tolist() == [[4000.0]]
    for pool in (ts.ScaledAvgPool2d(2), ts.LipschitzMaxPool2d(2), ts.L2NormPool2d(2)):
        assert pool(x.bfloat16()).dtype == torch.bfloat16


@pytest.mark.parametrize("pool", [*POOLS[:6], *GLOBAL[:2]])
def test_gradcheck(pool):
    dims = getattr(pool, "dims", 2)
    x = torch.randn(1, *SHAPES[dims], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(pool() if pool in GLOBAL else pool(2, 1), x)


DOWN = {1: ts.InvertibleDownsampling1d, 2: ts.InvertibleDownsampling2d, 3: ts.InvertibleDownsampling3d}
UP = {1: ts.InvertibleUpsampling1d, 2: ts.InvertibleUpsampling2d, 3: ts.InvertibleUpsampling3d}


@pytest.mark.parametrize("dims", [1, 2, 3])
def test_resampling_is_an_invertible_permutation(dims):
    factor = (2, 3, 2)[:dims]
    down, up = DOWN[dims](factor), UP[dims](factor)
    shape = (2, *(2 * f for f in factor))
    x = torch.randn(3, *shape)
    y = down(x)
    assert y.shape == (3, 2 * math.prod(factor), *(2,) * dims)
    assert torch.equal(up(y), x)
    assert torch.equal(up(down(x[0])), x[0])
    assert_isometric(down, shape)
    assert_isometric(up, tuple(y.shape[1:]))


def test_resampling_has_the_order_of_torch():
    x = torch.randn(2, 3, 6, 6)
    assert torch.equal(ts.InvertibleDownsampling2d(3)(x), nn.PixelUnshuffle(3)(x))
    y = torch.randn(2, 8, 3, 3)
    assert torch.equal(ts.InvertibleUpsampling2d(2)(y), nn.PixelShuffle(2)(y))


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: ts.ScaledAvgPool2d(2, padding=2), r"padding=\(2, 2\) must be at most half"),
        (lambda: ts.ScaledAvgPool2d((2, 2, 2)), "kernel_size"),
        (lambda: ts.GlobalMaxPool()(torch.zeros(2, 3)), "no positions"),
        (lambda: ts.InvertibleDownsampling2d(2)(torch.zeros(1, 1, 5, 4)), r"\(5, 4\) are not divisible"),
        (lambda: ts.InvertibleUpsampling1d(2)(torch.zeros(1, 3, 4)), "3 channels are not divisible by 2"),
        (lambda: ts.InvertibleDownsampling1d(2)(torch.zeros(4)), "must be"),
    ],
)  # fmt: skip
def test_errors(make, match):
    with pytest.raises(ValueError, match=match):
        make()


def test_shuffle_permutes_as_torch():
    x = torch.randn(2, 6, 4, 4)
    assert torch.equal(ts.ChannelShuffle(3)(x), nn.ChannelShuffle(3)(x))
    assert_isometric(ts.ChannelShuffle(2), (6,))
    assert_isometric(ts.ChannelShuffle(3), (6, 2))
    assert largest_ratio(ts.ChannelShuffle(3), (6, 2)) == pytest.approx(1)
    with pytest.raises(ValueError, match="6 channels cannot be split into groups=4"):
        ts.ChannelShuffle(4)(x)
    with pytest.raises(ValueError, match="groups=0"):
        ts.ChannelShuffle(0)


@pytest.mark.parametrize("pool", [ts.L2NormPool2d(2), ts.L2NormPool2d(3, 2, 1), ts.GlobalL2NormPool()])
@pytest.mark.parametrize("scale", [1e30, 1e20, 1e-10, 1e-22, 1e-30, 1e-40])
def test_norms_at_every_scale(pool, scale):
    x = (scale * torch.randn(2, 3, 5, 5, dtype=torch.float64)).float().requires_grad_()
    y = pool(x)
    torch.testing.assert_close(y.double(), pool(x.double()), atol=0, rtol=1e-4)
    for index in range(y[0].numel()):
        (gradient,) = torch.autograd.grad(y[0].flatten()[index], x, retain_graph=True)
        assert gradient.norm() <= 1 + 1e-5
        assert gradient.norm() > 0.99 * pool.overlap**-0.5 if hasattr(pool, "overlap") else gradient.norm() > 0.99


def test_norms_of_windows_against_torch():
    x = torch.randn(2, 3, 7, 8, dtype=torch.float64)
    for size, stride, padding in ((2, 2, 0), ((3, 2), (2, 1), (1, 0)), (3, 3, 1)):
        expected = torch.nn.functional.unfold(x.flatten(0, 1).unsqueeze(1), size, padding=padding, stride=stride).norm(
            dim=1
        )
        pool = ts.L2NormPool2d(size, stride, padding)
        torch.testing.assert_close(pool(x).reshape(expected.shape), expected * pool.overlap**-0.5)
