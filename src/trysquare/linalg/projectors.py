"""Kernels grown from an orthonormal matrix by projectors, with exact gradients and no unrolled iteration.

For a symmetric projector ``N`` of any rank, the two-tap kernel ``[N, I - N]`` is orthogonal.
Composing with it is ``K ↦ K N + z (K - K N)``, where ``z`` shifts by one tap: one product and two
additions. The two-tap kernel itself is never formed.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from trysquare.linalg.functions import apply_function, eager_kind, is_differentiated, keep, nothing_for
from trysquare.linalg.orthonormal import factor_rows, rows_gradient, rows_tangent
from trysquare.linalg.precision import full_precision

# From so many channels on, backward does without the kernels on the way, which are most of the memory then: they save
# time with few channels only (`python -m benchmarks kernels` compares).
MANY_CHANNELS = 256


class _Grow(torch.autograd.Function):
    """``matrix ∘ [N₁, I - N₁] ∘ [N₂, I - N₂] …``.

    Returns the kernel, then what backward needs: the orthonormal frames and their factors, the coordinates of each
    kernel on the way in the next frame, and the kernels themselves after the first, unless they are large.
    """

    generate_vmap_rule = True
    eager: Any
    transformed: Any

    @staticmethod
    def forward(matrix: Tensor, rows: Tensor, axes: tuple[int, ...]) -> tuple[Tensor, ...]:
        with full_precision(matrix):
            basis, factor = factor_rows(rows.flatten(0, 1))
            kernel, coordinates, flats = _grown(matrix, basis, rows.shape, axes)
            grown = kernel.movedim((-2, -1), (1, 2)).contiguous()
        kept = flats[1:] if matrix.shape[-1] < MANY_CHANNELS else []
        return grown, basis, factor, *coordinates, *kept

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        matrix, rows, ctx.axes = inputs
        ctx.shape = rows.shape
        keep(ctx, output, 1, matrix)

    @staticmethod
    def backward(
        ctx: Any, grad: Tensor | None, grad_basis: Tensor | None, grad_factor: Tensor | None, *_: Any
    ) -> tuple[Tensor | None, ...]:
        """Walk from the last projector to the first.

        A frame ``F`` whose projector met the kernel ``K`` has the gradient ``Dᵀ T + (T Fᵀ)ᵀ K``, where ``D = K Fᵀ`` are
        the coordinates and ``T`` is the gradient of ``K N``. Where ``K`` was not kept the columns ``T Fᵀ`` wait for it:
        after each step the gradients of the frames met so far are ``sums + waitingᵀ K``, with the ``K`` of that step.
        """
        matrix, basis, factor, *rest = ctx.saved_tensors
        steps = len(ctx.axes)
        grad_rows: Tensor | None = None
        if grad_basis is not None or grad_factor is not None:
            with full_precision(basis):
                grad_rows = rows_gradient(basis, factor, grad_basis, grad_factor).view(ctx.shape)
        if grad is None:
            return (None, grad_rows, None) if grad_rows is not None else nothing_for(ctx)
        coordinates: list[Tensor] = list(rest[:steps])
        kernels: list[Any] = [matrix.flatten(1, -2), *(rest[steps:] or [None] * (steps - 1))]
        if is_differentiated():  # who differentiates this again must see how they depend on matrix and frames
            with full_precision(grad):
                coordinates, kernels = _grown(matrix, basis, ctx.shape, ctx.axes)[1:]
        each = list(zip(*_frames(basis, ctx.shape), coordinates, kernels, ctx.axes, strict=True))
        done: list[Tensor] = []
        waiting: Any = None
        sums: Any = None
        with full_precision(grad):
            grad = grad.movedim((1, 2), (-2, -1))
            for frame, turned, coordinate, kernel, axis in reversed(each):
                shape, (first, later) = grad.shape, _but_one_tap(grad, axis + 1)
                through = (first - later).flatten(1, -2)
                columns, known = torch.bmm(through, turned), torch.bmm(coordinate.mT, through)
                del through  # large, and the peak of a training step may be here
                grad = torch.bmm(columns, frame).view(later.shape).add_(later)
                if waiting is not None:
                    waiting, owed = _one_kernel_back(waiting.view(*shape[:-1], -1), coordinate, axis + 1)
                    columns = torch.cat([columns.view(*later.shape[:-1], -1), waiting], -1).flatten(1, -2)
                    known = torch.cat([known, torch.baddbmm(sums, owed, frame)], 1)
                if kernel is None:
                    waiting, sums = columns, known
                else:
                    waiting, done = None, [torch.baddbmm(known, columns.mT, kernel), *done]
            grads = torch.cat(done, 1).unflatten(1, (steps, -1))  # (g, p, h, c)
            found = rows_gradient(basis, factor, grads.transpose(0, 1).flatten(0, 1), span_only=True).view(ctx.shape)
        return grad, found if grad_rows is None else found + grad_rows, None


class _TransformedGrow(_Grow):
    """Differentiable in the frames and their factors too."""

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.shape, ctx.axes = inputs[1].shape, inputs[2]
        keep(ctx, output, 3, inputs[0])
        _TransformedGrow.save_for_tangents(ctx, inputs, output)

    @staticmethod
    def save_for_tangents(ctx: Any, inputs: Any, output: Any) -> None:
        """Save what ``jvp`` needs: the same as for backward, or vmap would take one for the other."""
        ctx.save_for_forward(inputs[0], *output[1:])
        ctx.others = len(output) - 3

    @staticmethod
    def jvp(ctx: Any, moved_matrix: Tensor | None, moved_rows: Tensor | None, _: Any) -> tuple[Tensor | None, ...]:
        """Product rule, step by step."""
        matrix, basis, factor = ctx.saved_tensors[:3]
        kernel, moved = matrix, torch.zeros_like(matrix) if moved_matrix is None else moved_matrix
        with full_precision(matrix):
            if moved_rows is None:
                moved_basis, moved_factor = torch.zeros_like(basis), torch.zeros_like(factor)
            else:
                moved_basis, moved_factor = rows_tangent(basis, factor, moved_rows.reshape(basis.shape))
            frames, tangents = (each.view(ctx.shape).unbind() for each in (basis, moved_basis))
            for frame, tangent, axis in zip(frames, tangents, ctx.axes, strict=True):
                flat, moved_flat = kernel.flatten(1, -2), moved.flatten(1, -2)
                coordinates = torch.bmm(flat, frame.mT)
                moved_coordinates = torch.bmm(moved_flat, frame.mT) + torch.bmm(flat, tangent.mT)
                projected = torch.bmm(coordinates, frame).view(kernel.shape)
                turned = torch.bmm(moved_coordinates, frame) + torch.bmm(coordinates, tangent)
                moved = _spread(moved, turned.view(moved.shape), axis + 1)
                kernel = _spread(kernel, projected, axis + 1)
            grown = moved.movedim((-2, -1), (1, 2)).contiguous()
        return grown, moved_basis, moved_factor, *(None,) * ctx.others


_Grow.transformed = _TransformedGrow
_Grow.eager = eager_kind(_Grow, _TransformedGrow)


def _grown(
    matrix: Tensor, basis: Tensor, shape: torch.Size, axes: tuple[int, ...]
) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """The kernel, channels last; the coordinates of each kernel on the way in its frame; and these kernels, flat."""
    kernel, flats, coordinates = matrix, [], []
    for frame, turned, axis in zip(*_frames(basis, shape), axes, strict=True):
        flats.append(kernel.flatten(1, -2))  # (g, taps * n, c)
        coordinates.append(torch.bmm(flats[-1], turned))
        projected = torch.bmm(coordinates[-1], frame).view(kernel.shape)
        kernel = _spread(kernel, projected, axis + 1)
    return kernel, coordinates, flats


def _one_kernel_back(waiting: Tensor, coordinate: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """``waitingᵀ G = laterᵀ K + owed F`` for the kernel ``G = z K + (1 - z) D F`` that was grown from ``K``.

    Returns:
        ``later`` and ``owed``.
    """
    first, later = _but_one_tap(waiting, dim)
    return later, torch.bmm((first - later).flatten(1, -2).mT, coordinate)


def _but_one_tap(kernel: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """Without the last tap along ``dim``, and without the first."""
    taps = kernel.shape[dim] - 1
    return kernel.narrow(dim, 0, taps), kernel.narrow(dim, 1, taps)


def _frames(basis: Tensor, shape: torch.Size) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """The frames ``(g, h, c)`` one by one, and their transposes."""
    frames = basis.view(shape)
    return frames.unbind(), frames.mT.unbind()


def _spread(kernel: Tensor, projected: Tensor, dim: int) -> Tensor:
    """``K N + z (K - K N)``: one more tap along ``dim``."""
    taps = kernel.shape[dim]
    if taps == 1:
        return torch.cat([projected, kernel - projected], dim)
    grown = torch.cat([projected, kernel.narrow(dim, taps - 1, 1)], dim)
    grown.narrow(dim, 1, taps - 1).add_(kernel.narrow(dim, 0, taps - 1))
    grown.narrow(dim, 1, taps).sub_(projected)
    return grown


def grow(matrix: Tensor, rows: Tensor, axes: tuple[int, ...]) -> Tensor:
    """Compose ``matrix`` with one two-tap kernel ``[N, I - N]`` for each frame, on its right.

    Args:
        matrix: ``(g, *r, n, c)``, the taps of an orthogonal kernel, channels last.
        rows: ``(p, g, h, c)``, any rows that span the projectors.
        axes: the kernel axis, from 0, that each of the ``p`` projectors grows.

    Returns:
        ``(g, n, c, *k)``, where ``k`` is ``r`` plus the number of projectors on each axis.
    """
    return apply_function(_Grow, matrix, rows, axes)[0]  # type: ignore[no-any-return]


def peel(kernel: Tensor, rank: int, axes: tuple[int, ...]) -> tuple[Tensor, Tensor | None]:
    """Undo ``grow``: find the frames from the span of the outermost taps, last one first.

    The first taps along the last axis grown have their rows in the span of ``N``, the last taps in
    its complement. Directions that neither shows are free, and are given to ``N`` until it has its
    rank.

    Args:
        kernel: ``(g, *k, n, c)``, channels last.
        rank: rank of the projectors.
        axes: the kernel axis that each frame grew.

    Returns:
        The kernel that is left, and the frames ``(p, g, h, c)`` or ``None`` if there are no axes.
    """
    frames: list[Tensor] = []
    for axis in reversed(axes):
        dim, last = axis + 1, kernel.shape[axis + 1] - 1
        inside, outside = (kernel.select(dim, tap).flatten(1, -2) for tap in (0, last))
        _, vectors = torch.linalg.eigh(torch.matmul(inside.mT, inside) - torch.matmul(outside.mT, outside))
        frame = vectors[..., -rank:].mT
        frames.insert(0, frame)
        flat = kernel.flatten(1, -2)
        projected = torch.bmm(torch.bmm(flat, frame.mT), frame).view(kernel.shape)
        kernel = projected.narrow(dim, 0, last) + (kernel - projected).narrow(dim, 1, last)
    return kernel, torch.stack(frames) if frames else None
