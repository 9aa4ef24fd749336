"""Kernels grown from an orthonormal matrix by projectors, with exact gradients and no unrolled iteration.

For a symmetric projector ``N`` of any rank, the two-tap kernel ``[N, I - N]`` is orthogonal.
Composing with it is ``K ↦ K N + z (K - K N)``, where ``z`` shifts by one tap: one product and two
additions. The two-tap kernel itself is never formed.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from trysquare.linalg.orthonormal import factor_rows, rows_gradient
from trysquare.linalg.precision import apply_function, full_precision


class _Grow(torch.autograd.Function):
    """``matrix ∘ [N₁, I - N₁] ∘ [N₂, I - N₂] …``.

    Returns the kernel, then what backward needs: the orthonormal frames and their factors, each kernel on the way and
    its coordinates in the next frame.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(matrix: Tensor, rows: Tensor, axes: tuple[int, ...]) -> tuple[Tensor, ...]:
        with full_precision(matrix):
            basis, factor = factor_rows(rows.flatten(0, 1))
            kernel, flats, coordinates = matrix, [], []
            for frame, turned, axis in zip(*_frames(basis, rows.shape), axes, strict=True):
                flats.append(kernel.flatten(1, -2))  # (g, taps * n, c)
                coordinates.append(torch.bmm(flats[-1], turned))
                projected = torch.bmm(coordinates[-1], frame).view(kernel.shape)
                kernel = _spread(kernel, projected, axis + 1)
            grown = kernel.movedim((-2, -1), (1, 2)).contiguous()
        return grown, basis, factor, *flats[1:], *coordinates

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        matrix, rows, ctx.axes = inputs
        ctx.shape = rows.shape
        _, basis, factor, *rest = output
        ctx.mark_non_differentiable(basis, factor, *rest)
        ctx.save_for_backward(basis, factor, matrix, *rest)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, *_: Any) -> tuple[Tensor, Tensor, None]:
        basis, factor, *saved = ctx.saved_tensors
        steps = len(ctx.axes)
        flats, coordinates = [saved[0].flatten(1, -2), *saved[1:steps]], saved[steps:]
        grads = []
        with full_precision(grad):
            grad = grad.movedim((1, 2), (-2, -1)).contiguous()
            each = zip(*_frames(basis, ctx.shape), flats, coordinates, ctx.axes, strict=True)
            for frame, turned, flat, coordinate, axis in reversed(list(each)):
                dim, taps = axis + 1, grad.shape[axis + 1] - 1
                later = grad.narrow(dim, 1, taps)
                through = (grad.narrow(dim, 0, taps) - later).flatten(1, -2)  # gradient of K N
                back = torch.bmm(through, turned)
                grads.append(torch.baddbmm(torch.bmm(coordinate.mT, through), back.mT, flat))
                grad = torch.bmm(back, frame).view(later.shape).add_(later)
            grad_rows = rows_gradient(basis, factor, torch.cat(grads[::-1]), span_only=True)
        return grad, grad_rows.view(ctx.shape), None


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
