import pytest
import torch
import torch.nn.functional as F

from trysquare.nn.linalg import contract_rows, norm_bound, unit_rows
from trysquare.nn.linalg.kernels import adjoint
from trysquare.nn.linalg.rescaling import free_of_factors, gram, positive_factors, row_sums

CONV = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
SHAPES = [(5, 3), (3, 5), (4, 3, 3), (2, 5, 4), (4, 3, 3, 2), (3, 4, 2, 2, 2)]


def dense(kernel, size):
    """Matrix of the circular convolution, from the response to every basis vector."""
    dims = kernel.ndim - 2
    if not dims:
        return kernel
    channels = kernel.shape[1]
    basis = torch.eye(channels * size**dims, dtype=kernel.dtype).view(-1, channels, *(size,) * dims)
    for axis, k in enumerate(kernel.shape[2:], start=2):
        basis = torch.cat([basis] * (1 + -(-k // size)), axis).narrow(axis, 0, size + k - 1)
    return CONV[dims](basis, kernel).flatten(1).T


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("size", [1, 2, 5])
def test_contracted_rows_and_the_inequality_of_sll(shape, size):
    kernel = torch.randn(shape, dtype=torch.float64)
    q = torch.randn(shape[0], dtype=torch.float64).exp()
    positions = size ** (len(shape) - 2)
    big = dense(kernel, size)
    t = row_sums(gram(kernel), q).repeat_interleave(positions)
    # T - W^T W is positive semidefinite, with W^T the convolution.
    assert torch.linalg.eigvalsh(torch.diag(t) - big @ big.T)[0] > -1e-9
    # So I - 2 W T^-1 D W^T is a contraction for all slopes D.
    for slopes in (torch.ones_like(t), torch.rand_like(t), (torch.rand_like(t) > 0.5).double()):
        step = torch.eye(big.shape[1], dtype=torch.float64) - 2 * big.T @ torch.diag(slopes / t) @ big
        assert torch.linalg.matrix_norm(step, 2) < 1 + 1e-9
    assert torch.linalg.matrix_norm(dense(contract_rows(kernel, q), size), 2) < 1 + 1e-9


def test_row_sums_are_those_of_the_dense_matrix():
    kernel, q = torch.randn(4, 3, 3, dtype=torch.float64), torch.rand(4, dtype=torch.float64) + 0.1
    size = 7  # no taps of K Kᵀ fall together
    big = dense(kernel, size)
    weights = q.repeat_interleave(size)
    expected = ((big @ big.T).abs() @ weights / weights).view(4, size)
    torch.testing.assert_close(row_sums(gram(kernel), q), expected[:, 0])
    torch.testing.assert_close(expected, expected[:, :1].expand(-1, size))


def test_the_weights_q_act():
    kernel = torch.randn(4, 3, 3, dtype=torch.float64)
    q = torch.ones(4, dtype=torch.float64)
    even = contract_rows(kernel, q)
    torch.testing.assert_close(even, contract_rows(kernel))
    q[0] = 10
    tilted = contract_rows(kernel, q)
    share = tilted.flatten(1).norm(dim=1) / even.flatten(1).norm(dim=1)
    assert share[0] > 1.05
    assert share[1:].max() < 0.9
    torch.testing.assert_close(contract_rows(kernel, 5 * q), tilted)  # only ratios matter
    free = q.clone().requires_grad_()
    assert torch.autograd.gradcheck(lambda q: contract_rows(kernel, q), free)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("steps", [0, 1, 3])
def test_norm_bound_is_one_on_every_domain(shape, steps):
    if steps == 3 and len(shape) == 5:
        steps = 2
    for kernel in (torch.randn(shape, dtype=torch.float64), torch.rand(shape, dtype=torch.float64)):
        true = max(float(torch.linalg.matrix_norm(dense(kernel, size), 2)) for size in (1, 2, 5))
        bound = float(norm_bound(kernel, steps))
        assert true <= bound * (1 + 1e-9)
        assert bound <= float(norm_bound(kernel, 0)) * (1 + 1e-9)


def test_steps_tighten_the_bound_to_the_norm():
    kernel = torch.randn(4, 3, 3, dtype=torch.float64)
    true = max(float(torch.linalg.matrix_norm(dense(kernel, size), 2)) for size in range(1, 24))
    bounds = [float(norm_bound(kernel, steps)) for steps in range(6)]
    assert bounds == sorted(bounds, reverse=True)
    assert bounds[0] < 2 * true
    assert bounds[5] < 1.06 * true


@pytest.mark.parametrize("shape", [(1, 1, 2), (1, 1, 3), (1, 1, 5), (1, 1, 2, 4), (2, 3, 3, 1)])
def test_the_grid_never_misses_the_norm(shape):
    """Kernels whose response peaks between the frequencies of the grid."""
    for shift in torch.linspace(0, 1, 9, dtype=torch.float64):
        phases = sum(torch.cos(3.0 * shift * torch.arange(k)).view(-1, *(1,) * (len(shape) - 3 - axis))
                     for axis, k in enumerate(shape[2:]))  # fmt: skip
        kernel = phases.expand(shape).contiguous()
        axes = tuple(range(2, len(shape)))
        response = torch.fft.fftn(kernel, (240,) * len(axes), dim=axes).movedim(axes, tuple(range(len(axes))))
        true = float(torch.linalg.svdvals(response).max())
        for steps in (0, 1, 2, 4):
            assert float(norm_bound(kernel, steps)) >= true * (1 - 1e-12)


def test_power_iteration_would_have_underestimated():
    matrix = torch.diag(torch.tensor([1.0, 0.99, 0.98], dtype=torch.float64))
    vector = torch.tensor([0.1, 1.0, 1.0], dtype=torch.float64)
    for _ in range(5):
        vector = F.normalize(matrix @ vector, dim=0)
    assert (matrix @ vector).norm() < 0.99
    assert norm_bound(matrix) >= 1


@pytest.mark.parametrize("scale", [1e-25, 1e-3, 1e25])
@pytest.mark.parametrize("steps", [0, 2])
def test_scale_free_in_float32(scale, steps):
    kernel = torch.randn(4, 3, 3)
    torch.testing.assert_close(norm_bound(kernel * scale, steps) / scale, norm_bound(kernel, steps))
    torch.testing.assert_close(contract_rows(kernel * scale), contract_rows(kernel))
    torch.testing.assert_close(unit_rows(kernel * scale), unit_rows(kernel))


def test_zeros_stay_zeros_with_finite_gradients():
    for function in (norm_bound, contract_rows):
        kernel = torch.zeros(3, 2, 2, requires_grad=True)
        value = function(kernel)
        assert value.abs().max() == 0
        value.sum().backward()
        assert kernel.grad.isfinite().all()
    kernel = torch.randn(3, 2)
    kernel[1] = 0
    kernel.requires_grad_()
    contract_rows(kernel).sum().backward()
    assert kernel.grad.isfinite().all()


def test_rows_of_zeros_become_unit_rows():
    rows = torch.zeros(3, 2, requires_grad=True)
    unit = unit_rows(rows)
    assert torch.equal(unit, torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 0.0]]))
    unit.sum().backward()
    assert rows.grad.isfinite().all()


@pytest.mark.parametrize("function", [contract_rows, unit_rows, lambda k: k / norm_bound(k)])
@pytest.mark.parametrize("scale", [1e-40, 1e-38, 1e-30, 1e30])
def test_tiny_and_huge_kernels_have_exact_values_and_finite_gradients(function, scale):
    kernel = torch.randn(4, 3)
    free = (scale * kernel.double()).float().requires_grad_()
    value = function(free)
    torch.testing.assert_close(value, function(kernel), atol=1e-4, rtol=1e-3)
    if function in (contract_rows, unit_rows):
        (value * torch.randn(4, 3)).sum().backward()
        assert free.grad.isfinite().all()


@pytest.mark.parametrize("function", [norm_bound, contract_rows, unit_rows])
@pytest.mark.parametrize("shape", [(3, 2), (2, 3, 2), (2, 2, 2, 2)])
def test_gradcheck(function, shape):
    assert torch.autograd.gradcheck(function, torch.randn(shape, dtype=torch.float64, requires_grad=True))


@pytest.mark.parametrize("function", [norm_bound, contract_rows, gram, row_sums])
@pytest.mark.parametrize("shape", [(3, 3), (2, 2, 4), (2, 2, 2, 3)])
def test_a_batch_is_many_kernels(function, shape):
    kernels = torch.randn(3, *shape, dtype=torch.float64)
    kernels[1] = 0
    together = function(kernels, dims=len(shape) - 2)
    torch.testing.assert_close(together, torch.stack([function(kernel) for kernel in kernels]))


def test_gram_is_the_product():
    kernel = torch.randn(3, 2, 2, dtype=torch.float64)
    torch.testing.assert_close(gram(kernel), adjoint(gram(kernel)))
    with pytest.raises(ValueError, match="steps=-1"):
        norm_bound(kernel, -1)


def test_positive_factors_stay_finite_and_invert():
    free = torch.tensor([-1e30, -1.0, 0.0, 0.5, 1e30], dtype=torch.float64)
    factors = positive_factors(free)
    assert (factors > 0).all()
    assert factors.isfinite().all()
    torch.testing.assert_close(factors[1:4], free[1:4].exp(), atol=0.01, rtol=0)
    torch.testing.assert_close(free_of_factors(factors)[1:4], free[1:4])
