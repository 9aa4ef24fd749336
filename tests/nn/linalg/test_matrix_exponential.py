"""The exponential against torch's own, which takes other formulas, and against eigenvectors."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from trysquare.nn.linalg import matrix_exponential as module
from trysquare.nn.linalg.matrix_exponential import matrix_exponential

DTYPES = [torch.float32, torch.float64, torch.complex64, torch.complex128]
REAL = {torch.float32: torch.float32, torch.complex64: torch.float32}


def rounding(dtype):
    return torch.finfo(REAL.get(dtype, torch.float64)).eps


def skew(*shape, dtype=torch.float64):
    free = torch.randn(*shape, dtype=dtype)
    return free - free.mH


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale", [0.0, 1e-30, 1e-3, 0.1, 0.4, 1.0, 3.0, 30.0])
def test_of_skew_matrices_is_that_of_their_eigenvalues(dtype, scale):
    matrix = scale * skew(3, 9, 9, dtype=torch.complex128 if dtype.is_complex else torch.float64)
    matrix = matrix.to(dtype)
    angles, vectors = torch.linalg.eigh(-1j * matrix.to(torch.complex128))
    expected = (vectors * torch.exp(1j * angles)[..., None, :]) @ vectors.mH
    if not dtype.is_complex:
        expected = expected.real
    found = matrix_exponential(matrix)
    assert found.dtype == dtype
    error = (found.to(expected.dtype) - expected).abs().max()
    assert error < 20 * rounding(dtype) * (1 + angles.abs().max())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("power", [-3, 0, 1, 2, 3, 4])
def test_of_matrices_that_are_not_normal(dtype, power):
    """Nearly nilpotent ones among them, whose powers are far smaller than those of their norm."""
    free = torch.randn(4, 7, 7, dtype=torch.float64)
    free[1] = free[1].triu(1) + 1e-6 * free[1]
    free[2] = 100 * free[2].triu(2)
    free[3] = torch.diag(torch.linspace(-1, 1, 7, dtype=torch.float64)) + 50 * torch.eye(7).roll(1, 0).triu(1)
    for matrix in 2.0**power * free:
        expected = torch.linalg.matrix_exp(matrix)
        found = matrix_exponential(matrix.to(dtype)).to(torch.complex128)
        assert (found - expected).abs().max() < 300 * 2.0 ** max(power, 0) * rounding(dtype) * expected.abs().max()


def test_shapes_without_entries():
    assert matrix_exponential(torch.zeros(0, 3, 3)).shape == (0, 3, 3)
    assert matrix_exponential(torch.zeros(2, 0, 0)).shape == (2, 0, 0)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e30])
def test_what_is_no_number_stays_so(value):
    assert not matrix_exponential(torch.full((3, 3), value)).isfinite().all()


def test_members_of_a_batch_do_not_spoil_each_other():
    few = skew(4, 5, 5)
    few[1:] *= torch.tensor([1e-8, 1e6, 1.0], dtype=torch.float64)[:, None, None]
    few[3, 0, 1] = float("nan")
    found = matrix_exponential(few)
    for member, alone, error in zip(found[:3], few[:3], (1e-14, 1e-14, 1e-8), strict=True):
        torch.testing.assert_close(member, torch.linalg.matrix_exp(alone), rtol=0, atol=error)
    assert found[3].isnan().all()


def test_the_default_device_is_not_asked_for():
    matrix = skew(3, 3)
    with torch.device("meta"):
        found = matrix_exponential(matrix)
    torch.testing.assert_close(found, matrix_exponential(matrix))


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
def test_derivatives(dtype):
    matrix = torch.randn(2, 3, 3, dtype=dtype, requires_grad=True)
    assert torch.autograd.gradcheck(matrix_exponential, (matrix,))
    assert torch.autograd.gradgradcheck(matrix_exponential, (matrix,))


def test_gradient_is_that_of_torch():
    matrix = (0.05 * skew(12, 12)).requires_grad_()
    direction = torch.randn(12, 12, dtype=torch.float64)
    ways = (matrix_exponential, torch.linalg.matrix_exp)
    (ours,), (theirs,) = (torch.autograd.grad(way(matrix), matrix, direction) for way in ways)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=2e-14)


def test_the_way_without_a_look_is_the_same(monkeypatch):
    matrix = skew(6, 6)
    looked = matrix_exponential(matrix)
    monkeypatch.setattr(module, "host_can_look", lambda _: False)
    torch.testing.assert_close(matrix_exponential(matrix), looked)


def test_backward_costs_twice_the_forward_pass():
    n = 16
    matrix = skew(n, n).requires_grad_()
    with FlopCounterMode(display=False) as forward:
        result = matrix_exponential(matrix)
    with FlopCounterMode(display=False) as backward:
        result.sum().backward()
    assert backward.get_total_flops() <= 2.05 * forward.get_total_flops()


def test_many_angles_take_few_squarings():
    """A norm of all entries, or of sums of a row, is several times the largest angle of a large matrix."""
    matrix = skew(128, 128)
    turn = torch.linalg.matrix_norm(matrix, 2)
    with FlopCounterMode(display=False) as counter:
        matrix_exponential(matrix / turn)
    products = counter.get_total_flops() / (2 * 128**3)
    assert products < 5 + 3 + 0.5
