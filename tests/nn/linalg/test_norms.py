"""Bounds of norms that gradients pass through: above the norm at every scale, and of every shape."""

import math

import pytest
import torch

import trysquare as ts
from trysquare.nn.linalg.norms import gram_norm_bound, kernel_norm_bound, norm_bound


@pytest.mark.parametrize("shape", [(0, 3), (3, 0), (0, 0), (2, 0, 3), (2, 4, 0), (0, 2, 3)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64])
def test_the_norm_of_an_empty_matrix_is_zero(shape, dtype):
    matrix = torch.empty(shape, dtype=dtype, requires_grad=True)
    found = gram_norm_bound(matrix)
    assert found.shape == shape[:-2]
    assert found.dtype == torch.float32
    assert not found.any()
    found.sum().backward()
    assert matrix.grad.shape == shape


@pytest.mark.parametrize("exponent", [-45, -44, -43, -42, -41, -40, -39, -38, -30, 0, 30, 37])
@pytest.mark.parametrize("squarings", [0, 1, 4])
def test_the_bound_is_not_low_at_any_scale(exponent, squarings):
    torch.manual_seed(0)
    matrices = (torch.randn(200, 3, 5, dtype=torch.float64) * 10.0**exponent).float()
    exact = torch.linalg.matrix_norm(matrices.double() * 10.0**-exponent, 2)  # in the middle of the range
    found = gram_norm_bound(matrices, squarings).double() * 10.0**-exponent
    assert (found >= exact * (1 - 1e-6)).all()
    assert (found <= exact * 3**0.5 * (1 + 1e-5) + 2e-45 * 10.0**-exponent).all()


@pytest.mark.parametrize("exponent", [-44, -43, -42, -41, -40, -38, 0])
def test_bounds_of_convolutions_are_not_low_at_any_scale(exponent):
    torch.manual_seed(0)
    kernels = (torch.randn(50, 2, 2, 3, 3, dtype=torch.float64) * 10.0**exponent).float()
    rows = kernels.double() * 10.0**-exponent
    response = torch.fft.fftn(rows, s=(32, 32), dim=(-2, -1)).movedim((-2, -1), (1, 2))
    exact = torch.linalg.matrix_norm(response, 2).amax((1, 2))
    for found in (norm_bound(kernels, dims=2), kernel_norm_bound(kernels, 2)):
        assert (found.double() * 10.0**-exponent >= exact * (1 - 1e-6)).all()


def test_zeros_stay_zeros():
    assert gram_norm_bound(torch.zeros(3, 4)) == 0
    assert norm_bound(torch.zeros(3, 4, 3, 3)) == 0


GEOMETRIES = [((4, 3, 3, 3), (6, 5), 1, 1, 1), ((4, 2, 3, 2), (8, 6), (2, 3), 1, 1), ((6, 2, 3), (12,), 2, 3, 3),
              ((4, 2, 5, 3), (4, 4), 1, (2, 1), 2), ((2, 3, 2, 2, 2), (4, 4, 2), (2, 1, 1), 1, 1)]  # fmt: skip


@pytest.mark.parametrize(("shape", "sizes", "stride", "dilation", "groups"), GEOMETRIES)
def test_spectral_norm_is_the_largest_singular_value(shape, sizes, stride, dilation, groups):
    dims = len(sizes)
    layer = ts.OrthoConv1d if dims == 1 else ts.OrthoConv2d if dims == 2 else ts.OrthoConv3d
    conv = layer(
        shape[1] * groups, shape[0], shape[2:], stride, dilation=dilation, groups=groups, method="aol",
        dtype=torch.float64, bias=False,
    )  # fmt: skip
    kernel = torch.randn(shape, dtype=torch.float64)

    def apply(x):
        return conv._convolution(x, kernel)

    domain = (shape[1] * groups, *sizes)
    basis = torch.eye(math.prod(domain), dtype=torch.float64).view(-1, *domain)
    exact = torch.linalg.matrix_norm(apply(basis).flatten(1), 2)
    found = ts.linalg.spectral_norm(kernel, sizes, stride, dilation, groups)
    torch.testing.assert_close(found, exact)
    kernel.requires_grad_()
    assert torch.autograd.gradcheck(lambda k: ts.linalg.spectral_norm(k, sizes, stride, dilation, groups), kernel)


def test_spectral_norm_says_what_it_cannot_be_of():
    with pytest.raises(ValueError, match="not divisible by stride"):
        ts.linalg.spectral_norm(torch.ones(2, 2, 3), 5, stride=2)
    with pytest.raises(ValueError, match="no axes"):
        ts.linalg.spectral_norm(torch.ones(2, 2), 4)
    with pytest.raises(ValueError, match="groups=3"):
        ts.linalg.spectral_norm(torch.ones(4, 2, 3), 6, groups=3)
