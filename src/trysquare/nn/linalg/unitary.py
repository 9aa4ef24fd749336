"""Steps along the orthogonal and unitary groups whose cost is that of a low rank."""

from __future__ import annotations

import torch
from torch import Tensor

# Angle, in the norm of largest row sums, by which one step turns at most.
_LARGEST_TURN = 30.0


def low_rank_factors(matrix: Tensor, rank: int, seed: int | None = None) -> tuple[Tensor, Tensor]:
    """``L``, ``R`` of an approximation ``L R*`` of low rank near the best one: a random range after a power iteration.

    All matrices of a batch are sampled with the same real vectors, so conjugate matrices get conjugate factors.

    Args:
        matrix: ``(..., n, m)``, real or complex.
        rank: columns of the factors; at most ``min(n, m)``.
        seed: of the vectors, so that several processes draw the same; torch's own generator without it.

    Returns:
        ``(..., n, rank)`` with orthonormal columns, and ``(..., m, rank)``.
    """
    generator = None if seed is None else torch.Generator().manual_seed(seed)
    probe = torch.randn(matrix.shape[-1], rank, dtype=matrix.real.dtype, generator=generator).to(matrix)
    # Normalised in between: two products of tiny gradients would underflow.
    once, _ = torch.linalg.qr(torch.matmul(matrix, probe))
    left, _ = torch.linalg.qr(torch.matmul(matrix, torch.linalg.qr(torch.matmul(matrix.mH, once)).Q))
    return left, torch.matmul(matrix.mH, left)


def rotate(matrix: Tensor, left: Tensor, right: Tensor, step: float) -> Tensor:
    """``U exp(-step A)``, where ``A = (U* G - G* U) / 2`` is the tangent direction of the gradient ``G = left right*``.

    ``A`` has a rank of at most twice that of ``G``, so with an orthonormal basis ``Q`` of its range the exponential is
    ``I + Q (exp(-step Q* A Q) - I) Q*``: products of ``n x n`` with thin matrices, and a small exponential.

    Args:
        matrix: ``(..., n, n)``, orthogonal or unitary.
        left: ``(..., n, rank)``.
        right: ``(..., n, rank)``.
        step: length of the step. It is cut where it would turn by more than several full turns, whose exponential
            would not be orthogonal to rounding any more.
    """
    turned = torch.matmul(matrix.mH, left)
    basis, _ = torch.linalg.qr(torch.cat([turned, right], -1))
    inner = torch.matmul(torch.matmul(basis.mH, turned), torch.matmul(right.mH, basis))
    skew = (inner - inner.mH) / 2
    eye = torch.eye(skew.shape[-1], dtype=skew.dtype, device=skew.device)
    size = skew.abs().sum(-1).amax(-1)[..., None, None]
    length = (_LARGEST_TURN / size.clamp_min(torch.finfo(size.dtype).tiny)).clamp_max(step)
    change = torch.linalg.matrix_exp(-length * skew) - eye
    return matrix + torch.matmul(torch.matmul(torch.matmul(matrix, basis), change), basis.mH)


def polish(matrix: Tensor) -> Tensor:
    """Take a Newton-Schulz step, which squares the distance of ``(..., n, m)``, ``n <= m``, from orthonormal rows."""
    return 1.5 * matrix - 0.5 * torch.matmul(torch.matmul(matrix, matrix.mH), matrix)


def corrected(matrix: Tensor) -> Tensor:
    """``polish`` of what a formula makes orthonormal up to rounding, unseen by derivatives.

    The step changes no orthonormal matrix, so that derivatives along those, of any order, are the same without it.
    """
    values = matrix.detach()
    return matrix + (polish(values) - values)


def distance_from_unitary(matrix: Tensor) -> float:
    """Return the largest entry of ``U* U - I`` over the batch."""
    eye = torch.eye(matrix.shape[-1], dtype=matrix.dtype, device=matrix.device)
    return float((torch.matmul(matrix.mH, matrix) - eye).abs().max())
