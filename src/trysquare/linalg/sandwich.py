"""Pairs of operators for sandwich layers (Wang and Manchester, 2023).

``x ↦ √2 Aᵀ Ψ σ(√2 Ψ⁻¹ B x + b)`` is 1-Lipschitz for every positive diagonal ``Ψ`` and every activation with slopes in
``[0, 1]`` if ``[A B]`` is a contraction. Proof: with slopes ``D`` and unit vectors ``u``, ``v``, ``2 uᵀAᵀDBv =
½ (sᵀDs - dᵀDd) ≤ ½ ‖s‖² ≤ 1`` where ``s = Au + Bv`` and ``d = Au - Bv``, because ``s = [A B] (u, v)``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from trysquare.linalg.kernels import compose, wrap_taps


def sandwich_pair(a: Tensor, b: Tensor, psi: Tensor) -> tuple[Tensor, Tensor]:
    """Kernels of ``√2 Ψ⁻¹ B`` and ``√2 Ψ A`` for the diagonal matrix ``Ψ`` on the first axis.

    Args:
        a: ``(h, n, *k)``.
        b: ``(h, m, *l)``.
        psi: positive, ``(h)``.
    """
    root = 2**0.5
    return b * (root / psi).view(-1, *(1,) * (b.ndim - 1)), a * (root * psi).view(-1, *(1,) * (a.ndim - 1))


def mix(matrix: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """``[A B] = [M₁ a, M₂ b]`` for the halves of a matrix ``(h, 2h)`` with orthonormal rows.

    ``[A B]`` is a contraction if ``a`` and ``b`` are; its rows are orthonormal if theirs are.

    Args:
        matrix: ``[M₁ M₂]``.
        a: kernel ``(h, n, *k)``.
        b: kernel ``(h, m, *l)``.
    """
    first, second = matrix.chunk(2, -1)
    return compose(first[(..., *(None,) * (a.ndim - 2))], a), compose(second[(..., *(None,) * (b.ndim - 2))], b)


def cayley_pair(free: Tensor, outputs: int) -> tuple[Tensor, Tensor]:
    """``A`` and ``B`` with ``A Aᴴ + B Bᴴ = I`` by the Cayley transform of ``[U; V]``, real or complex.

    Args:
        free: ``(..., n + m, n)``.
        outputs: ``n``.

    Returns:
        ``(..., n, n)`` and ``(..., n, m)``.
    """
    upper, lower = free[..., :outputs, :], free[..., outputs:, :]
    skew = upper - upper.mH + torch.matmul(lower.mH, lower)
    eye = torch.eye(outputs, dtype=free.dtype, device=free.device)
    both = torch.cat([eye - skew, -2 * lower], dim=-2)
    columns = torch.linalg.solve(eye + skew, both, left=False)
    # One Newton-Schulz step squares what rounding left of the distance to orthonormal columns.
    columns = 1.5 * columns - 0.5 * torch.matmul(columns, torch.matmul(columns.mH, columns))
    return columns[..., :outputs, :].mH, columns[..., outputs:, :].mH


def frequency_pair(free: Tensor, sizes: tuple[int, ...], outputs: int) -> tuple[Tensor, Tensor]:
    """``cayley_pair`` of a kernel at every frequency of a circular domain.

    Args:
        free: kernel ``(n + m, n, *k)``; its middle tap is the one at no distance.
        sizes: sizes of the domain.
        outputs: ``n``.

    Returns:
        ``(frequencies, n, n)`` and ``(frequencies, n, m)``, complex, at the frequencies of
        ``torch.fft.rfftn`` in its order.
    """
    axes = tuple(range(2, free.ndim))
    centred = torch.roll(wrap_taps(free, sizes, (1,) * len(sizes)), [-(k // 2) for k in free.shape[2:]], axes)
    response = torch.fft.rfftn(centred, dim=axes)
    return cayley_pair(response.flatten(2).permute(2, 0, 1), outputs)
