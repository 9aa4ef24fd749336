import pytest
import torch
import torch.nn.functional as F

import trysquare as ts
from tests.jacobians import exact, jacobian, randomise
from trysquare.nn.linalg import norm_bound


def test_equation_of_the_paper():
    layer = randomise(ts.CPLLinear(5, 4)).double()
    w = layer.free_tensors[0].detach()
    bound = norm_bound(w, 4)
    assert torch.linalg.matrix_norm(w, 2) <= bound <= 1.05 * torch.linalg.matrix_norm(w, 2)
    x = torch.randn(10, 5, dtype=torch.float64)
    expected = x - 2 / bound**2 * F.relu(x @ w.T + bound * layer.bias) @ w
    torch.testing.assert_close(layer(x), expected)


def test_jacobian_is_symmetric_with_eigenvalues_between_minus_one_and_one():
    block = exact(randomise(ts.CPLBlock2d(2, 6)))
    matrix = jacobian(block, torch.randn(2, 4, 4, dtype=torch.float64))
    torch.testing.assert_close(matrix, matrix.T)  # the gradient step of a potential
    values = torch.linalg.eigvalsh(matrix)
    assert values[0] >= -1
    assert values[-1] <= 1 + 1e-12
    assert values[0] < 0.5


@pytest.mark.parametrize("channels", [4, 16])
def test_the_default_bound_is_close(channels):
    """The contraction that the block uses has a norm near 1, on the domain where it is largest."""
    block = exact(ts.CPLBlock2d(channels))
    kernel = block.kernels[0].detach()
    response = torch.fft.fft2(kernel, (60, 60)).permute(2, 3, 0, 1)
    assert 0.88 < float(torch.linalg.svdvals(response).max()) <= 1
