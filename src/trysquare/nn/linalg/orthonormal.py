"""Orthonormal rows with the span of given ones: Gram-Schmidt by Cholesky, exact at any condition number.

``V = L R`` with ``L`` lower triangular (positive diagonal) and ``R Rᵀ = I`` determines ``R``. Two
Cholesky factorisations of the Gram matrix (CholeskyQR2) give it to machine precision up to
condition numbers of about ``1 / sqrt(eps)``. That it worked is *seen* from the second factor, which
must be close to the identity. Where it did not, Householder reflections in float64 do it, which have
no case in which they fail. Where looking would stall the device, shifted factorisations in float64
do it with no branch.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from trysquare.nn.linalg.precision import (
    Context,
    Gradients,
    Operation,
    full_precision,
    host_can_look,
    keep_outputs,
    nothing_for,
    only_first_derivatives,
)


def _lower(matrix: Tensor, factor: Tensor) -> Tensor:
    """``factor⁻¹ matrix``; asked for from the right because row-major rows then need no copy."""
    return torch.linalg.solve_triangular(factor.mT, matrix.mT, upper=True, left=False).mT


def _twice(rows: Tensor) -> tuple[Tensor, Tensor] | None:
    """Cholesky, then one first-order correction; ``None`` if what the first left over is too much for the second.

    With ``once onceᵀ = I + E``, the factor of ``I + E`` is ``I + Φ(E)`` up to ``E²``, where ``Φ``
    takes the lower triangle and half the diagonal. So ``E`` must be of the order of the square root
    of the precision, and is measured. The gradient takes ``first`` for the whole factor, which is
    right to the relative error ``|E|``: that of any factor computed from a Gram matrix.
    """
    first = torch.linalg.cholesky_ex(torch.bmm(rows, rows.mT)).L
    once = _lower(rows, first)
    left = torch.bmm(once, once.mT).tril_()
    left.diagonal(dim1=-2, dim2=-1).sub_(1).mul_(0.5)
    # A factorisation that failed needs no look of its own: its `once` is not orthonormal, and a NaN is not small.
    if not torch.linalg.vector_norm(left).item() < torch.finfo(rows.dtype).eps ** 0.5:
        return None
    return torch.baddbmm(once, left, once, alpha=-1), first


def _without_branches(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Four shifted Cholesky passes and one without a shift, in the dtype of the rows and with no look at a value.

    A pass leaves directions that are stronger than the root of its shift at a length near 1, and makes weaker ones so
    many times stronger: four passes made all rows that were tried well conditioned (up to 512 x 512). That no
    factorisation fails with these shifts is measured, not proved: a shift that is proved to be enough lifts too little.
    Directions that are missing altogether are supplied by a nudge towards fixed dense rows, no larger than the rounding
    of the rows themselves; zeros become such a row.

    What takes time on an accelerator is the number of calls, so each pass is four of them.
    """
    (h, c), eps = rows.shape[-2:], torch.finfo(rows.dtype).eps
    scale = torch.linalg.vector_norm(rows, math.inf, dim=-1, keepdim=True).clamp_min(torch.finfo(rows.dtype).tiny)
    dense = torch.arange(1, h * c + 1, dtype=rows.dtype, device=rows.device).square().sin().view(h, c)
    unit = torch.add(rows / scale, dense, alpha=2 * eps)
    norm = torch.linalg.vector_norm(unit, dim=-1, keepdim=True)
    unit = unit / norm
    columns, eye = unit.mT, torch.eye(h, dtype=rows.dtype, device=rows.device)
    # Of rows of length 1 the Gram matrix has a norm of up to h, and rounding in proportion; later it has one of 1.
    for shift in (2 * h * eps, *(2 * h**0.5 * eps,) * 3, 0.0):
        gram = torch.baddbmm(eye, columns.mT, columns, beta=shift)
        upper = torch.linalg.cholesky_ex(gram, upper=True).L
        columns = torch.linalg.solve_triangular(upper, columns, upper=True, left=False)
    # ``V = L R`` and ``R Rᵀ = I`` give the factor of all passes together. Where rank is lost the exact one has no
    # inverse, which the gradient takes: directions weaker than rounding count as a little stronger than that.
    factor = torch.baddbmm(eye, unit, columns, beta=max(1e-9, 8 * eps)).tril()
    # Autograd's forward mode refuses views as outputs.
    plain = torch.compiler.is_compiling() or only_first_derivatives()
    basis = columns.mT if plain else columns.mT.clone(memory_format=torch.contiguous_format)
    return basis, factor * (scale * norm).clamp_min(_smallest_length(rows.dtype))


def _smallest_length(dtype: torch.dtype) -> float:
    """Length of rows of which the dtype can still invert the weakest direction, 1e-7 of it."""
    return float(1e7 * torch.finfo(dtype).tiny ** 0.75)


def _householder(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return the same by reflections, for any rows: in float64 where that costs no more than a few times as much."""
    wide = rows.double() if host_can_look(rows) else rows
    tiny = torch.finfo(wide.dtype).tiny
    scale = torch.linalg.vector_norm(wide, math.inf, dim=-1, keepdim=True).clamp_min(tiny)
    unit = wide / scale
    norm = torch.linalg.vector_norm(unit, dim=-1, keepdim=True).clamp_min(tiny)
    basis, factor = torch.linalg.qr((unit / norm).mT)
    sign = torch.where(factor.diagonal(dim1=-2, dim2=-1) < 0, -1.0, 1.0).to(basis.dtype)
    # Products of transposes, not transposes of products: autograd's forward mode refuses views as outputs.
    basis, factor = basis.mT * sign.unsqueeze(-1), factor.mT * sign.unsqueeze(-2)
    # Directions weaker than 1e-7 of their row count as that strong, for the gradient.
    factor.diagonal(dim1=-2, dim2=-1).clamp_min_(1e-7)
    factor = factor * (scale * norm).clamp_min(_smallest_length(rows.dtype))
    return basis.to(rows.dtype), factor.to(rows.dtype)


def factor_rows(rows: Tensor, householder: bool = False) -> tuple[Tensor, Tensor]:
    """``R`` and ``L`` of ``V = L R`` for a batch ``(b, h, c)``, outside of autograd."""
    if householder:
        return _householder(rows)
    if host_can_look(rows):
        return _twice(rows) or _householder(rows)
    return _without_branches(rows)


# With ``X = L⁻¹ dV``, ``M = X Rᵀ`` and ``Φ`` the lower triangle with half of the diagonal,
#     dR = X - Φ(M + Mᵀ) R    and    dL = L Φ(M + Mᵀ).


def _half_lower(matrix: Tensor) -> Tensor:
    """``Φ``, which is its own adjoint."""
    return matrix.tril() - 0.5 * torch.diag_embed(matrix.diagonal(dim1=-2, dim2=-1))


def rows_tangent(basis: Tensor, factor: Tensor, tangent: Tensor) -> tuple[Tensor, Tensor]:
    """Tangents of ``R`` and ``L`` from that of ``V``."""
    moved = torch.linalg.solve_triangular(factor, tangent, upper=False)
    turned = torch.bmm(moved, basis.mT)
    turned = _half_lower(turned + turned.mT)
    return moved - torch.bmm(turned, basis), torch.bmm(factor, turned)


def rows_gradient(
    basis: Tensor, factor: Tensor, grad: Tensor | None, grad_factor: Tensor | None = None, *, span_only: bool = False
) -> Tensor:
    """Gradient of ``V`` from those of ``R`` and ``L``: the adjoint of ``rows_tangent``.

    ``span_only`` says that ``grad`` is that of a function of ``RᵀR`` alone, for which ``grad Rᵀ`` is symmetric.
    """
    if grad is not None:
        turned = torch.bmm(grad, basis.mT)
        if not span_only:
            turned = turned.tril() + turned.tril(-1).mT
        grad = torch.baddbmm(grad, turned, basis, alpha=-1)
    if grad_factor is not None:
        along = _half_lower(torch.bmm(factor.mT, grad_factor))
        along = torch.bmm(along + along.mT, basis)
        grad = along if grad is None else grad + along
    assert grad is not None
    return torch.linalg.solve_triangular(factor, grad.mT, upper=False, left=False).mT.contiguous()


class _OrthonormalRows(torch.autograd.Function):
    """``R`` and ``L`` of ``V = L R``; keeps nothing else."""

    generate_vmap_rule = True

    @staticmethod
    def forward(rows: Tensor, householder: bool) -> tuple[Tensor, Tensor]:
        return factor_rows(rows, householder)

    @staticmethod
    def setup_context(ctx: Context, inputs: tuple[Tensor, bool], output: tuple[Tensor, Tensor]) -> None:
        keep_outputs(ctx, output)

    @staticmethod
    def backward(ctx: Context, grad: Tensor | None, grad_factor: Tensor | None) -> Gradients:
        if grad is None and grad_factor is None:
            return nothing_for(ctx)
        basis, factor = ctx.saved_tensors
        with full_precision(basis):
            return rows_gradient(basis, factor, grad, grad_factor), None

    @staticmethod
    def jvp(ctx: Context, tangent: Tensor, _: None) -> tuple[Tensor, Tensor]:
        basis, factor = ctx.saved_tensors
        with full_precision(basis):
            return rows_tangent(basis, factor, tangent)


_orthonormal_rows = Operation(_OrthonormalRows)


def orthonormal_rows(rows: Tensor, householder: bool = False) -> Tensor:
    """Orthonormal rows with the same span, by Gram-Schmidt in the order given.

    Args:
        rows: ``(..., h, c)`` with ``h <= c``, float32 or float64. Scale, condition number and rank do not matter.
        householder: factor by Householder reflections instead of Cholesky.

    Returns:
        ``(..., h, c)``, ``R Rᵀ = I`` to the precision of the dtype. Directions that ``rows`` does
        not span are completed.
    """
    if rows.ndim == 3:
        return _orthonormal_rows(rows, householder)
    batch = rows.reshape(-1, *rows.shape[-2:])
    return _orthonormal_rows(batch, householder).view_as(rows)


def random_orthonormal(*shape: int) -> Tensor:
    """Return uniformly distributed matrices ``(..., n, m)`` with orthonormal rows or columns, float64 on the CPU."""
    normal = torch.randn(*shape, dtype=torch.float64)
    tall = normal if shape[-2] >= shape[-1] else normal.mT
    basis, upper = torch.linalg.qr(tall)
    basis = basis * torch.where(upper.diagonal(dim1=-2, dim2=-1) < 0, -1.0, 1.0).unsqueeze(-2)
    return (basis if shape[-2] >= shape[-1] else basis.mT).contiguous()


def recondition(rows: Tensor, basis: Tensor) -> Tensor:
    """Return free rows worth training on: ``rows``, or where they are nearly dependent ``basis`` at their scale.

    Rows are nearly dependent if one is within 1/30 of the span of those before it, or 30 times as
    long as another. No branch and no look at a value, so it may run on any device at any time.

    Args:
        rows: ``(..., h, c)``, free rows.
        basis: orthonormal rows that mean the same to whoever reads ``rows``.
    """
    if rows.shape != basis.shape:
        raise ValueError(f"rows {tuple(rows.shape)} and basis {tuple(basis.shape)} must have one shape")
    norm = torch.linalg.vector_norm(rows, dim=-1, keepdim=True)
    unit = rows / torch.where(norm > 0, norm, 1.0)
    factor, failed = torch.linalg.cholesky_ex(torch.matmul(unit, unit.mT))
    nearest = factor.diagonal(dim1=-2, dim2=-1).amin(-1)
    norm = norm.squeeze(-1)
    poor = (nearest < 1 / 30) | (failed > 0) | (norm.amin(-1) * 30 < norm.amax(-1))
    scale = norm.square().mean(-1).sqrt()
    scale = torch.where(scale > 0, scale, 1.0)
    return torch.where(poor[..., None, None], scale[..., None, None] * basis, rows)
