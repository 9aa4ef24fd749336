"""Kernels and matrices made 1-Lipschitz by rescaling, with bounds that hold on every domain.

All bounds come from one fact: the norm of a symmetric operator ``A`` is at most ``max_i Σ_j |A_ij| q_j / q_i`` for any
positive ``q`` (Gershgorin, after a diagonal change of basis). For a convolution, ``A`` is itself one, so ``j`` runs
over channels and taps. The bound holds on every circular domain (taps that fall together add up to less than the sum
of their sizes), on the infinite one, and with zero padding, which restricts it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from trysquare.nn.linalg.kernels import adjoint, compose
from trysquare.nn.linalg.precision import full_precision


def _divided(tensor: Tensor, largest: Tensor) -> Tensor:
    """``tensor / largest`` for its largest entries, which have no gradient; zeros stay.

    A function of the result does not depend on the scale of ``tensor``, so its gradient grows as ``1 / largest``. That
    is held at what the dtype can express: below ``tiny^(3/4)`` values are exact, and gradients are those of
    ``tensor / tiny^(3/4)``.
    """
    safe = torch.where(largest > 0, largest, 1.0)
    damped = tensor / safe.clamp_min(torch.finfo(tensor.dtype).tiny ** 0.75)
    return damped + (tensor.detach() / safe - damped.detach())


def unit_rows(matrix: Tensor) -> Tensor:
    """Divide each row of ``(..., n, m)`` by its norm; rows of zeros become rows of the identity, repeated if need be.

    >>> from trysquare.nn.linalg.rescaling import unit_rows
    >>> unit_rows(torch.tensor([[3.0, 4.0], [0.0, 0.0]]))
    tensor([[0.6000, 0.8000],
            [0.0000, 1.0000]])
    """
    if matrix.is_complex():
        raise ValueError(f"matrix must be real, not {matrix.dtype}")
    # Scaled first: squares of very small and very large rows would leave the range.
    scaled = _divided(matrix, matrix.detach().abs().amax(-1, keepdim=True))
    square = scaled.square().sum(-1, keepdim=True)
    n, m = matrix.shape[-2:]
    column = torch.arange(m, device=matrix.device)
    basis = (torch.arange(n, device=matrix.device).unsqueeze(-1) % m == column).to(matrix.dtype)
    return torch.where(square > 0, scaled * torch.where(square > 0, square, 1.0).rsqrt(), basis)


# Logarithms of free positive factors stay within this. Unbounded, one large step of an optimizer makes them overflow.
_LOG_LIMIT = 5.0


def positive_factors(free: Tensor) -> Tensor:
    """``exp`` near 0, bounded by ``exp(±5)``: positive factors from free numbers, finite whatever these are.

    >>> from trysquare.nn.linalg.rescaling import positive_factors
    >>> positive_factors(torch.tensor([-1e6, 0.0]))
    tensor([0.0067, 1.0000])
    """
    return (_LOG_LIMIT * torch.tanh(free / _LOG_LIMIT)).exp()


def free_of_factors(factors: Tensor) -> Tensor:
    """Return free numbers that ``positive_factors`` maps to ``factors``, or near them if they are out of bounds."""
    return _LOG_LIMIT * torch.atanh((factors.log() / _LOG_LIMIT).clamp(-0.999999, 0.999999))


def gram(kernel: Tensor, *, dims: int | None = None) -> Tensor:
    """Return the kernel ``(*batch, n, n, *(2k - 1))`` of ``K Kᵀ`` for a convolution ``K``, ``(*batch, n, m, *k)``.

    ``dims`` is the number of kernel axes, 0 for a matrix; all but the first two axes unless given.
    """
    return compose(kernel, adjoint(kernel, dims=dims), dims=dims)


def channel_sums(symmetric: Tensor, *, dims: int | None = None) -> Tensor:
    """Return ``Σ |A_ij|`` over the taps: the matrix ``(*batch, n, n)`` of a kernel ``(*batch, n, n, *k)``."""
    dims = symmetric.ndim - 2 if dims is None else dims
    return symmetric.abs().flatten(symmetric.ndim - dims).sum(-1) if dims else symmetric.abs()


def row_sums(symmetric: Tensor, q: Tensor | None = None, *, dims: int | None = None) -> Tensor:
    """Return ``Σ_j |A_ij| q_j / q_i`` over channels ``j`` and all taps.

    Args:
        symmetric: kernel ``(*batch, n, n, *k)`` of a symmetric operator ``A``, or a matrix.
        q: positive weights ``(*batch, n)``; ones if not given.
        dims: number of kernel axes; all but the first two axes unless given.

    Returns:
        ``T`` of shape ``(*batch, n)``: ``diag(T) - A`` is positive semidefinite on every domain.
    """
    sums = channel_sums(symmetric, dims=dims)
    return sums.sum(-1) if q is None else torch.matmul(sums, q.unsqueeze(-1)).squeeze(-1) / q


def contract_rows(kernel: Tensor, q: Tensor | None = None, *, dims: int | None = None) -> Tensor:
    """Scale output channels so that the convolution is 1-Lipschitz on every domain: ``T^(-1/2) K``.

    ``T`` are the row sums of ``K Kᵀ`` with weights ``q`` (Araujo et al., 2023). Every ``q`` gives a
    contraction, and another one: larger weights leave more of their channels.

    Args:
        kernel: ``(*batch, n, m, *k)``, or a matrix.
        q: positive weights ``(*batch, n)``; ones if not given.
        dims: number of kernel axes; all but the first two axes unless given.

    Returns:
        The shape of ``kernel``; channels of zeros stay.

    >>> from trysquare.nn.linalg.rescaling import contract_rows
    >>> bool(torch.linalg.matrix_norm(contract_rows(torch.randn(4, 6)), 2) <= 1)
    True
    """
    channels = kernel.shape[: kernel.ndim - 1 - (kernel.ndim - 2 if dims is None else dims)]
    if q is not None and q.shape != channels:
        raise ValueError(f"q of shape {tuple(q.shape)} must have one number for each row, {tuple(channels)}")
    with full_precision(kernel):
        scaled, _ = scaled_to_one(kernel, dims=dims)
        sums = row_sums(gram(scaled, dims=dims), q, dims=dims)
        scale = torch.where(sums > 0, torch.where(sums > 0, sums, 1.0).rsqrt(), 0.0)
        return scaled * scale[(..., *(None,) * (kernel.ndim - scale.ndim))]


def scaled_to_one(kernel: Tensor, *, dims: int | None = None) -> tuple[Tensor, Tensor]:
    """Return ``(*batch, n, m, *k)`` divided by its largest entry, so that no product leaves the range, and that entry.

    The second has shape ``(*batch)`` and no gradient; it is 1 for a kernel of zeros.
    """
    dims = kernel.ndim - 2 if dims is None else dims
    largest = kernel.detach().abs().flatten(kernel.ndim - dims - 2).amax(-1)
    return _divided(kernel, largest[(..., *(None,) * (dims + 2))]), torch.where(largest > 0, largest, 1.0)


def limited(kernel: Tensor, most: float, *, dims: int | None = None) -> Tensor:
    """Scale a kernel ``(*batch, n, m, *k)`` down if the norms of its rows have a root mean square above ``most``.

    >>> from trysquare.nn.linalg.rescaling import limited
    >>> limited(torch.tensor([[3e30, 4e30]]), 10.0).round(decimals=3)
    tensor([[6., 8.]])
    """
    dims = kernel.ndim - 2 if dims is None else dims
    scaled, largest = scaled_to_one(kernel, dims=dims)
    rows = kernel.shape[kernel.ndim - dims - 2]
    size = torch.linalg.vector_norm(scaled.flatten(kernel.ndim - dims - 2), dim=-1) / rows**0.5
    size = torch.where(size > 0, size, 1.0)
    shape = (..., *(None,) * (dims + 2))
    return torch.where((size > most / largest)[shape], scaled * (most / size)[shape], kernel)
