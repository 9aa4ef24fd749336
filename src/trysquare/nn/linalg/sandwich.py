"""Pairs of operators for sandwich layers (Wang and Manchester, 2023).

``x ↦ √2 Aᵀ Ψ σ(√2 Ψ⁻¹ B x + b)`` is 1-Lipschitz for every positive diagonal ``Ψ`` and every activation with slopes in
``[0, 1]`` if ``[A B]`` is a contraction. Proof: with slopes ``D`` and unit vectors ``u``, ``v``, ``2 uᵀAᵀDBv =
½ (sᵀDs - dᵀDd) ≤ ½ ‖s‖² ≤ 1`` where ``s = Au + Bv`` and ``d = Au - Bv``, because ``s = [A B] (u, v)``.
"""

from __future__ import annotations

from torch import Tensor

from trysquare.nn.linalg.kernels import compose


def sandwich_pair(a: Tensor, b: Tensor, psi: Tensor) -> tuple[Tensor, Tensor]:
    """``√2 Ψ⁻¹ B`` and ``√2 Ψ A``, matrices or kernels.

    Args:
        a: ``(h, n, *k)``, or ``(..., h, n)``.
        b: ``(h, m, *l)``, or ``(..., h, m)``.
        psi: positive diagonal of ``Ψ``, in a shape like ``(h, 1, ...)`` that multiplies ``a`` and ``b`` along ``h``.
    """
    root = 2**0.5
    return b * (root / psi), a * (root * psi)


def mix(matrix: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """``[A B] = [M₁ a, M₂ b]`` for the halves of a matrix with orthonormal rows, one for each group of channels.

    ``[A B]`` is a contraction if ``a`` and ``b`` are; its rows are orthonormal if theirs are.

    Args:
        matrix: ``[M₁ M₂]``, ``(groups, h / groups, 2 h / groups)``.
        a: kernel ``(h, n / groups, *k)``.
        b: kernel ``(h, m / groups, *l)``.
    """
    groups = matrix.shape[0]
    one_tap = matrix.flatten(0, 1)[(..., *(None,) * (a.ndim - 2))]
    first, second = one_tap.chunk(2, 1)
    return compose(first, a, groups), compose(second, b, groups)
