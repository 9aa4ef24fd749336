import itertools

import pytest
import torch

from trysquare.linalg import cayley_pair, sandwich_pair
from trysquare.linalg.sandwich import frequency_pair, mix


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
@pytest.mark.parametrize("inputs", [0, 1, 3, 5])
@pytest.mark.parametrize("size", [1e-3, 1.0, 100.0])
def test_cayley_pair_has_orthonormal_rows(dtype, inputs, size):
    a, b = cayley_pair(size * torch.randn(2, 3 + inputs, 3, dtype=dtype), 3)
    assert b.shape == (2, 3, inputs)
    eye = torch.eye(3, dtype=dtype).expand(2, 3, 3)
    torch.testing.assert_close(a @ a.mH + b @ b.mH, eye, atol=1e-10, rtol=0)


def test_real_kernels_have_real_responses():
    a, b = frequency_pair(torch.randn(5, 2, 3, dtype=torch.float64), (6,), 2)
    assert a.shape == (4, 2, 2)
    assert b.shape == (4, 2, 3)
    for response in (a, b):
        assert response[0].imag.abs().max() < 1e-12
        assert response[-1].imag.abs().max() < 1e-12


def test_the_layer_is_a_contraction_for_all_slopes_and_the_bound_is_attained():
    largest = 0.0
    for _ in range(10):
        a, b = cayley_pair(torch.randn(7, 4, dtype=torch.float64), 4)
        first, second = sandwich_pair(a, b, torch.randn(4, dtype=torch.float64).exp())
        for slopes in itertools.product((0.0, 1.0), repeat=4):
            jacobian = second.T @ torch.diag(torch.tensor(slopes, dtype=torch.float64)) @ first
            norm = float(torch.linalg.matrix_norm(jacobian, 2))
            assert norm <= 1 + 1e-12
            largest = max(largest, norm)
    assert largest > 0.99


def test_mixing_orthonormal_kernels_keeps_rows_orthonormal():
    matrix, a, b = (torch.linalg.qr(torch.randn(m, n, dtype=torch.float64)).Q.T for m, n in ((8, 4), (6, 4), (5, 4)))
    mixed = torch.cat(mix(matrix, a, b), 1)
    torch.testing.assert_close(mixed @ mixed.T, torch.eye(4, dtype=torch.float64))


def test_gradcheck():
    free = torch.randn(5, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda f: cayley_pair(f, 2), free)
    kernel = torch.randn(3, 2, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda k: [t.abs().square() for t in frequency_pair(k, (4,), 2)], kernel)
