"""Steps along the manifold of orthonormal matrices, without a factorisation, and without a look at a value.

Matrices are wide, ``(..., n, m)`` with ``n <= m`` and ``X Xᵀ = I``; tall ones are transposed by whoever calls. Square
ones move by skew matrices, ``X exp(S)``, which is half the work, and needs no transport: a skew matrix means the same
turn wherever ``X`` is.
"""

from __future__ import annotations

import torch
from torch import Tensor

from trysquare.nn.linalg.precision import host_can_look
from trysquare.nn.linalg.unitary import polish

# Angle in radians by which a step turns at most. Up to here the polynomials below are orthonormal to 2e-7.
LARGEST_TURN = 0.4

# ``P(S) = I + S + S² / 2 + b S³ + b² S⁴`` with ``2 b² - 2 b + 1 / 4 = 0``. A skew matrix has eigenvalues ``± iσ``, at
# which ``|P|² = 1 + b⁴ σ⁸``: of all polynomials of degree 4 that start as the exponential does, nearest to orthogonal.
# The angle is ``σ + 0.02 σ³``. Taylor's polynomial of that degree has ``|P|² = 1 - σ⁶ / 72``, and costs as much.
_CUBIC = (2 - 2**0.5) / 4

# ``(1 + s)^(-1/2) - 1`` on ``[0, 0.16]``, with its value and slope at 0: largest error 7e-08.
_ROOT = (-0.5, 0.37477335, -0.30552039, 0.20442862)


def skew_gradient(matrix: Tensor, gradient: Tensor) -> Tensor:
    """Return the skew ``S`` for which ``X S`` is the projection of a gradient to the tangent space, for square ``X``.

    Args:
        matrix: ``(..., n, n)``, orthogonal.
        gradient: ``(..., n, n)``, of any function of matrices.
    """
    turned = torch.matmul(matrix.mT, gradient)
    return (turned - turned.mT) / 2


def tangent(matrix: Tensor, direction: Tensor) -> Tensor:
    """Return the projection of a matrix to the tangent space, ``G - sym(G Xᵀ) X``.

    Args:
        matrix: ``(..., n, m)`` with orthonormal rows.
        direction: ``(..., n, m)``.
    """
    along = torch.matmul(direction, matrix.mT)
    return direction - torch.matmul((along + along.mT) / 2, matrix)


def turn(matrix: Tensor, skew: Tensor) -> Tensor:
    """Return ``X P(S)``, where ``P`` is nearly the exponential; three products.

    Args:
        matrix: ``(..., n, n)``, orthogonal.
        skew: ``(..., n, n)``. It is shortened on the device if its norm, bounded by that of its square, may be larger
            than ``LARGEST_TURN``.
    """
    square = torch.matmul(skew, skew)
    # Singular values of skew matrices come in pairs, so ``2 σ⁴ <= |S²|²``.
    largest = (torch.linalg.matrix_norm(square, keepdim=True) / 2**0.5).sqrt()
    shorter = (LARGEST_TURN / largest.clamp_min(torch.finfo(skew.dtype).tiny)).clamp_max(1.0)
    skew, square = skew * shorter, square * shorter.square()
    higher = _CUBIC * skew + _CUBIC**2 * square
    higher.diagonal(dim1=-2, dim2=-1).add_(0.5)
    return matrix + torch.matmul(matrix, skew + torch.matmul(square, higher))


def retract(matrix: Tensor, step: Tensor) -> Tensor:
    """Return the nearest orthonormal matrix of ``X + D``, ``(I + D Dᵀ)^(-1/2) (X + D)``, for a tangent ``D``.

    Args:
        matrix: ``(..., n, m)`` with orthonormal rows.
        step: ``(..., n, m)``, tangent. It is shortened as in ``turn``.
    """
    gram = torch.matmul(step, step.mT)
    largest = torch.linalg.matrix_norm(gram, keepdim=True)
    shorter = (LARGEST_TURN**2 / largest.clamp_min(torch.finfo(step.dtype).tiny)).clamp_max(1.0)
    gram, moved = gram * shorter, matrix + step * shorter.sqrt()
    first, second, third, fourth = _ROOT
    higher = third * gram
    higher.diagonal(dim1=-2, dim2=-1).add_(second)
    square = torch.matmul(gram, gram)
    root = first * gram + torch.matmul(square, higher + fourth * square)
    return moved + torch.matmul(root, moved)


def nearest(matrix: Tensor) -> Tensor:
    """Return the nearest orthonormal matrix of one whose singular values are from 0.5 to 1.

    Such are those of means of two that are at most 120 degrees from each other. Others come nearer, but do not arrive.
    Newton-Schulz steps: six are enough. On a processor they end when they change nothing.
    """
    for _ in range(6):
        before, matrix = matrix, polish(matrix)
        change = torch.linalg.matrix_norm(matrix - before)
        if host_can_look(change) and bool(change.amax() < 1e-3 * torch.finfo(matrix.dtype).eps ** 0.5):
            break
    return matrix
