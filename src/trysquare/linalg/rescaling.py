"""Kernels and matrices made 1-Lipschitz by rescaling, with bounds that hold on every domain.

All bounds come from one fact: the norm of a symmetric operator ``A`` is at most ``max_i Σ_j |A_ij| q_j / q_i`` for any
positive ``q`` (Gershgorin, after a diagonal change of basis). For a convolution, ``A`` is itself one, so ``j`` runs
over channels and taps. The bound holds on every circular domain (taps that fall together add up to less than the sum
of their sizes), on the infinite one, and with zero padding, which restricts it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from trysquare.linalg.kernels import adjoint, compose
from trysquare.linalg.precision import full_precision


def unit_rows(matrix: Tensor) -> Tensor:
    """Divide each row of ``(..., n, m)`` by its norm; rows of zeros stay.

    >>> from trysquare.linalg.rescaling import unit_rows
    >>> unit_rows(torch.tensor([[3.0, 4.0], [0.0, 0.0]]))
    tensor([[0.6000, 0.8000],
            [0.0000, 0.0000]])
    """
    # Scaled first: squares of very small and very large rows would leave the range.
    largest = matrix.detach().abs().amax(-1, keepdim=True)
    scaled = matrix / torch.where(largest > 0, largest, 1.0)
    square = scaled.square().sum(-1, keepdim=True)
    return scaled * torch.where(square > 0, square, 1.0).rsqrt()


# Logarithms of free positive factors stay within this. Unbounded, one large step of an optimizer makes them overflow.
_LOG_LIMIT = 5.0


def positive(free: Tensor) -> Tensor:
    """``exp`` near 0, bounded by ``exp(±5)``: positive factors from free numbers, finite whatever these are.

    >>> from trysquare.linalg.rescaling import positive
    >>> positive(torch.tensor([-1e6, 0.0]))
    tensor([0.0067, 1.0000])
    """
    return (_LOG_LIMIT * torch.tanh(free / _LOG_LIMIT)).exp()


def positive_inverse(factors: Tensor) -> Tensor:
    """Free numbers that ``positive`` maps to ``factors``, or near them if they are out of bounds."""
    return _LOG_LIMIT * torch.atanh((factors.log() / _LOG_LIMIT).clamp(-0.999999, 0.999999))


def gram(kernel: Tensor) -> Tensor:
    """Kernel ``(n, n, *(2k - 1))`` of ``K Kᵀ`` for the convolution ``K`` with kernel ``(n, m, *k)``, or a matrix."""
    return compose(kernel, adjoint(kernel))


def row_sums(symmetric: Tensor, q: Tensor | None = None) -> Tensor:
    """``Σ_j |A_ij| q_j / q_i`` over channels ``j`` and all taps.

    Args:
        symmetric: kernel ``(n, n, *k)`` of a symmetric operator ``A``, or a matrix.
        q: positive weights ``(n)``; ones if not given.

    Returns:
        ``T`` of shape ``(n)``: ``diag(T) - A`` is positive semidefinite on every domain.
    """
    sums = symmetric.abs().flatten(2).sum(-1) if symmetric.ndim > 2 else symmetric.abs()
    return sums.sum(1) if q is None else torch.mv(sums, q) / q


def contract_rows(kernel: Tensor, q: Tensor | None = None) -> Tensor:
    """Scale output channels so that the convolution is 1-Lipschitz on every domain: ``T^(-1/2) K``.

    ``T`` are the row sums of ``K Kᵀ`` with weights ``q`` (Araujo et al., 2023). Every ``q`` gives a
    contraction, and another one: larger weights leave more of their channels.

    Args:
        kernel: ``(n, m, *k)``, or a matrix.
        q: positive weights ``(n)``; ones if not given.

    Returns:
        The shape of ``kernel``; channels of zeros stay.

    >>> from trysquare.linalg.rescaling import contract_rows
    >>> bool(torch.linalg.matrix_norm(contract_rows(torch.randn(4, 6)), 2) <= 1)
    True
    """
    with full_precision(kernel):
        largest = kernel.detach().abs().amax()
        scaled = kernel / torch.where(largest > 0, largest, 1.0)
        sums = row_sums(gram(scaled), q)
        scale = torch.where(sums > 0, torch.where(sums > 0, sums, 1.0).rsqrt(), 0.0)
        return scaled * scale.view(-1, *(1,) * (kernel.ndim - 1))


def norm_bound(kernel: Tensor, steps: int = 1) -> Tensor:
    """Upper bound of the norm of a convolution on every domain, or of a matrix; differentiable.

    With ``A = K Kᵀ`` (or ``Kᵀ K``, whichever has fewer channels) it is ``‖A^(2^steps)‖^(1 / 2^(steps + 1))`` with the
    norm bounded by row sums. Each step takes the square root of the factor by which the bound is
    too large, and doubles the taps of the kernel whose row sums are taken.

    Args:
        kernel: ``(n, m, *k)``, or a matrix.
        steps: number of squarings.

    Returns:
        A scalar; 0 for a kernel of zeros.

    >>> from trysquare.linalg.rescaling import norm_bound
    >>> norm_bound(torch.eye(3))
    tensor(1.)
    """
    if steps < 0:
        raise ValueError(f"steps={steps} must be at least 0")
    with full_precision(kernel):
        scale = kernel.detach().abs().amax()
        scale = torch.where(scale > 0, scale, 1.0)
        power = gram((kernel if kernel.shape[0] <= kernel.shape[1] else adjoint(kernel)) / scale)
        # The norm is scale · ‖power‖^exponent: what is divided out is kept with its exponent.
        exponent = 0.5
        for _ in range(steps):
            size = row_sums(power.detach()).amax()
            size = torch.where(size > 0, size, 1.0)
            power, scale, exponent = compose(power / size, power / size), scale * size**exponent, exponent / 2
        bound = row_sums(power).amax()
        return torch.where(bound > 0, scale * torch.where(bound > 0, bound, 1.0) ** exponent, 0.0)
