"""Kernels grown from an orthonormal matrix by projectors, with exact gradients and no unrolled iteration.

For a symmetric projector ``N`` of any rank, the two-tap kernel ``[N, I - N]`` is orthogonal.
Composing with it is ``K ↦ K N + z (K - K N)``, where ``z`` shifts by one tap: one product and two
additions. The two-tap kernel itself is never formed.
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from trysquare.nn.linalg.orthonormal import factor_rows, orthonormal_rows, rows_gradient
from trysquare.nn.linalg.precision import (
    Context,
    Gradients,
    apply_function,
    compiler_is_for_training,
    for_first_derivatives,
    full_precision,
    host_can_look,
    is_traced,
    only_first_derivatives,
    outside_of_graphs,
)

# From so many channels on, backward does without the kernels on the way, which are most of the memory then: they save
# time with few channels only (`python -m benchmarks kernels` compares).
MANY_CHANNELS = 256


class _GrowContext(Context, Protocol):
    shape: torch.Size
    axes: tuple[int, ...]


def _compute(ctx: _GrowContext, matrix: Tensor, rows: Tensor, axes: tuple[int, ...]) -> Tensor:
    """``matrix ∘ [N₁, I - N₁] ∘ [N₂, I - N₂] …``, with what a gradient needs that is cheaper than torch's own.

    Kept for backward: frames and their factors, the coordinates of each kernel on the way in the next frame, and the
    kernels themselves after the first, unless they are large.
    """
    # On an accelerator calls take longer than the products of a few hundred channels, and doing without costs calls.
    many = MANY_CHANNELS if host_can_look(matrix) else 4 * MANY_CHANNELS
    in_place = not is_traced()
    basis, factor = factor_rows(rows.flatten(0, 1))
    kernel, coordinates, flats = _grown(matrix, basis, rows.shape, axes, in_place)
    kept = flats[1:] if matrix.shape[-1] < many else []
    ctx.save_for_backward(matrix, basis, factor, *coordinates, *kept)
    ctx.shape, ctx.axes = rows.shape, axes
    return _channels_first(kernel)


def _gradient(ctx: _GrowContext, grad: Tensor) -> Gradients:
    """Walk from the last projector to the first.

    A frame ``F`` whose projector met the kernel ``K`` has the gradient ``Dᵀ T + (T Fᵀ)ᵀ K``, where ``D = K Fᵀ`` are
    the coordinates and ``T`` is the gradient of ``K N``. Where ``K`` was not kept the columns ``T Fᵀ`` wait for it:
    after each step the gradients of the frames met so far are ``sums + waitingᵀ K``, with the ``K`` of that step.
    """
    matrix, basis, factor, *rest = ctx.saved_tensors
    shape, axes = ctx.shape, ctx.axes
    steps = len(axes)
    coordinates: list[Tensor] = list(rest[:steps])
    kernels = [_rows_of(matrix), *(rest[steps:] or (None,) * (steps - 1))]
    each = list(zip(*_frames(basis, shape), coordinates, kernels, axes, strict=True))
    done: list[Tensor] = []
    waiting: tuple[Tensor, Tensor] | None = None  # columns, and sums
    grad = grad.movedim((1, 2), (-2, -1))
    for frame, turned, coordinate, kernel, axis in reversed(each):
        sizes, (first, later) = grad.shape, _but_one_tap(grad, axis + 1)
        through = _rows_of(first - later)
        columns, known = torch.bmm(through, turned), torch.bmm(coordinate.mT, through)
        del through  # large, and the peak of a training step may be here
        grad = torch.bmm(columns, frame).view(later.shape).add_(later)
        if waiting is not None:
            behind, owed = _one_kernel_back(waiting[0].view(*sizes[:-1], -1), coordinate, axis + 1)
            columns = _rows_of(torch.cat([columns.view(*later.shape[:-1], -1), behind], -1))
            known = torch.cat([known, torch.baddbmm(waiting[1], owed, frame)], 1)
            del behind
        if kernel is None:
            waiting = columns, known
        else:
            waiting, done = None, [torch.baddbmm(known, columns.mT, kernel), *done]
    # Where the kernels were not kept, those of all frames became known together.
    frames = torch.stack(done if len(done) == steps else done[0].split(shape[2], 1))  # (p, g, h, c)
    return grad, rows_gradient(basis, factor, frames.reshape(basis.shape), span_only=True).view(shape), None


def _grow_in_steps(matrix: Tensor, rows: Tensor, axes: tuple[int, ...]) -> Tensor:
    """``grow`` in operations that torch differentiates itself, as often as one likes."""
    basis = orthonormal_rows(rows.flatten(0, 1))
    return _channels_first(_grown(matrix, basis, rows.shape, axes, not is_traced())[0])


_grow = for_first_derivatives("Grow", _compute, _gradient, _grow_in_steps)


def _channels_first(kernel: Tensor) -> Tensor:
    return kernel.movedim((-2, -1), (1, 2)).contiguous()


def _grown(
    matrix: Tensor, basis: Tensor, shape: torch.Size, axes: tuple[int, ...], in_place: bool
) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """Return the kernel, channels last, the coordinates of each kernel on the way in its frame, and these, flat.

    Not ``in_place`` where a graph is recorded: ``torch.func.linearize`` loses what is written into views (torch 2.13).
    """
    kernel, flats, coordinates = matrix, [], []
    for frame, turned, axis in zip(*_frames(basis, shape), axes, strict=True):
        flats.append(_rows_of(kernel))  # (g, taps * n, c)
        coordinates.append(torch.bmm(flats[-1], turned))
        projected = torch.bmm(coordinates[-1], frame).view(kernel.shape)
        kernel = _spread(kernel, projected, axis + 1, in_place)
    return kernel, coordinates, flats


def _one_kernel_back(waiting: Tensor, coordinate: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """``waitingᵀ G = laterᵀ K + owed F`` for the kernel ``G = z K + (1 - z) D F`` that was grown from ``K``.

    Returns:
        ``later`` and ``owed``.
    """
    first, later = _but_one_tap(waiting, dim)
    return later, torch.bmm(_rows_of(first - later).mT, coordinate)


def _rows_of(kernel: Tensor) -> Tensor:
    """``(g, *k, n, c)`` to ``(g, taps * n, c)``; torch's batched gradients have no rule for ``flatten``."""
    return kernel.reshape(len(kernel), -1, kernel.shape[-1])


def _but_one_tap(kernel: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """Without the last tap along ``dim``, and without the first."""
    taps = kernel.shape[dim] - 1
    return kernel.narrow(dim, 0, taps), kernel.narrow(dim, 1, taps)


def _frames(basis: Tensor, shape: torch.Size) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """Return the frames ``(g, h, c)`` one by one, and their transposes."""
    frames = basis.view(shape)
    return frames.unbind(), frames.mT.unbind()


def _spread(kernel: Tensor, projected: Tensor, dim: int, in_place: bool) -> Tensor:
    """``K N + z (K - K N)``: one more tap along ``dim``."""
    taps = kernel.shape[dim]
    if taps == 1:
        return torch.cat([projected, kernel - projected], dim)
    if not in_place:
        apart = [0, 0] * (kernel.ndim - 1 - dim)
        return F.pad(projected, [*apart, 0, 1]) + F.pad(kernel - projected, [*apart, 1, 0])
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
    if torch.compiler.is_compiling() and not compiler_is_for_training():
        return outside_of_graphs(grow, matrix, rows, axes)
    if torch.compiler.is_compiling() or only_first_derivatives():
        with full_precision(matrix):
            return apply_function(_grow, matrix, rows, axes)
    return _grow_in_steps(matrix, rows, axes)


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
