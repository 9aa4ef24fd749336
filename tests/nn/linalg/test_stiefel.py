"""Steps along orthonormal matrices against dense projections, exponentials and singular value decompositions."""

import pytest
import torch

from trysquare.nn.linalg.orthonormal import random_orthonormal
from trysquare.nn.linalg.stiefel import LARGEST_TURN, nearest, retract, skew_gradient, tangent, turn


def dense_tangent_projection(matrix, direction):
    """Least squares on a basis of the tangent space at ``X``: the kernel of ``D -> X Dᵀ + D Xᵀ``."""
    n, m = matrix.shape
    basis = torch.eye(n * m, dtype=torch.float64).view(-1, n, m)
    constraint = (matrix @ basis.mT + basis @ matrix.T).flatten(1).T
    _, values, right = torch.linalg.svd(constraint)
    rank = int((values > 1e-9).sum())
    assert rank == n * (n + 1) // 2
    tangents = right[rank:]
    return (tangents.T @ (tangents @ direction.flatten())).view(n, m)


@pytest.mark.parametrize("shape", [(1, 5), (3, 7), (4, 5), (6, 6)])
def test_projection_is_the_dense_one(shape):
    matrix, direction = random_orthonormal(*shape), torch.randn(shape, dtype=torch.float64)
    expected = dense_tangent_projection(matrix, direction)
    torch.testing.assert_close(tangent(matrix, direction), expected)
    if shape[0] == shape[1]:
        torch.testing.assert_close(matrix @ skew_gradient(matrix, direction), expected)


def skew(*shape, norm):
    free = torch.randn(*shape, dtype=torch.float64)
    free = free - free.mT
    return norm * free / torch.linalg.matrix_norm(free, 2)[..., None, None]


@pytest.mark.parametrize("norm", [0.0, 1e-3, 0.05, 0.1])
def test_turn_is_nearly_the_exponential(norm):
    matrix, step = random_orthonormal(3, 8, 8), skew(3, 8, 8, norm=norm)
    moved = turn(matrix, step)
    assert torch.linalg.matrix_norm(moved - matrix @ torch.linalg.matrix_exp(step), 2).max() <= 0.03 * norm**3
    # Singular values are the root of 1 + b⁴ σ⁸.
    assert (torch.linalg.svdvals(moved) - 1).abs().max() < 2.4e-4 * norm**8 + 1e-14


@pytest.mark.parametrize("norm", [1e-4, 0.05, 0.2, 0.39])
def test_retraction_is_the_polar_factor(norm):
    matrix = random_orthonormal(3, 5, 9)
    step = tangent(matrix, torch.randn(3, 5, 9, dtype=torch.float64))
    step = norm * step / torch.linalg.matrix_norm(step @ step.mT).sqrt()[..., None, None]
    left, _, right = torch.linalg.svd(matrix + step, full_matrices=False)
    torch.testing.assert_close(retract(matrix, step), left @ right, rtol=0, atol=1e-6)


@pytest.mark.parametrize("size", [1.0, 1e4, 1e15])
def test_long_steps_are_shortened(size):
    square, wide = random_orthonormal(2, 6, 6), random_orthonormal(2, 4, 9)
    long = skew(2, 6, 6, norm=size)
    turned = turn(square, long)
    assert (torch.linalg.svdvals(turned) - 1).abs().max() < 1e-6
    angle = torch.linalg.eigvals(square.mT @ turned).angle().abs().amax(-1)
    assert (angle <= LARGEST_TURN * 1.01).all()
    assert (angle >= LARGEST_TURN / 3**0.25 * 0.99).all()  # the bound is by three pairs of one size at worst
    torch.testing.assert_close(turned, turn(square, 1e3 * long))
    moved = retract(wide, tangent(wide, size * torch.randn(2, 4, 9, dtype=torch.float64)))
    assert (torch.linalg.svdvals(moved) - 1).abs().max() < 1e-6


def test_nearest_is_the_polar_factor_of_a_mean():
    first = random_orthonormal(4, 6, 6)
    second = first @ torch.linalg.matrix_exp(skew(4, 6, 6, norm=2.0))
    left, _, right = torch.linalg.svd((first + second) / 2)
    torch.testing.assert_close(nearest((first + second) / 2), left @ right)
