import itertools

import pytest
import torch

from trysquare.nn.linalg import sandwich_pair
from trysquare.nn.linalg.fourier import free_response
from trysquare.nn.linalg.orthogonalize import cayley_rows
from trysquare.nn.linalg.sandwich import mix


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
@pytest.mark.parametrize("inputs", [0, 1, 3, 5])
@pytest.mark.parametrize("size", [1e-3, 1.0, 100.0])
def test_cayley_rows_are_orthonormal(dtype, inputs, size):
    rows = cayley_rows(size * torch.randn(2, 3, 3 + inputs, dtype=dtype))
    eye = torch.eye(3, dtype=dtype).expand(2, 3, 3)
    torch.testing.assert_close(rows @ rows.mH, eye, atol=1e-10, rtol=0)


def test_real_kernels_have_real_responses():
    rows = cayley_rows(free_response(torch.randn(1, 2, 5, 3, dtype=torch.float64), (6,), (1,)))
    assert rows.shape == (4, 1, 2, 5)
    assert rows[0].imag.abs().max() < 1e-12
    assert rows[-1].imag.abs().max() < 1e-12


def test_the_layer_is_a_contraction_for_all_slopes_and_the_bound_is_attained():
    largest = 0.0
    for _ in range(10):
        a, b = cayley_rows(torch.randn(4, 7, dtype=torch.float64)).split((4, 3), 1)
        first, second = sandwich_pair(a, b, torch.randn(4, 1, dtype=torch.float64).exp())
        for slopes in itertools.product((0.0, 1.0), repeat=4):
            jacobian = second.T @ torch.diag(torch.tensor(slopes, dtype=torch.float64)) @ first
            norm = float(torch.linalg.matrix_norm(jacobian, 2))
            assert norm <= 1 + 1e-12
            largest = max(largest, norm)
    assert largest > 0.99


def test_mixing_orthonormal_kernels_keeps_rows_orthonormal():
    matrix, a, b = (torch.linalg.qr(torch.randn(m, n, dtype=torch.float64)).Q.T for m, n in ((8, 4), (6, 4), (5, 4)))
    mixed = torch.cat(mix(matrix[None], a, b), 1)
    torch.testing.assert_close(mixed @ mixed.T, torch.eye(4, dtype=torch.float64))


def test_gradcheck():
    free = torch.randn(2, 5, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(cayley_rows, free)
    kernel = torch.randn(2, 2, 3, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda k: cayley_rows(free_response(k, (4,), (2,))).abs().square(), kernel)
