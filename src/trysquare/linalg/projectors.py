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

from trysquare.linalg.precision import full_precision


class _Grow(torch.autograd.Function):
    """``matrix ∘ [N₁, I - N₁] ∘ [N₂, I - N₂] …``; keeps the intermediate kernels and their coordinates in the frames."""

    @staticmethod
    def forward(ctx: Any, kernel: Tensor, frames: Tensor, axes: tuple[int, ...]) -> Tensor:
        saved = []
        for frame, axis in zip(frames.unbind(), axes, strict=True):
            flat = kernel.flatten(1, -2)  # (g, taps * n, c)
            coordinates = torch.bmm(flat, frame.mT)
            projected = torch.bmm(coordinates, frame).view(kernel.shape)
            saved += [flat, coordinates]
            kernel = _spread(kernel, projected, axis + 1)
        ctx.axes = axes
        ctx.save_for_backward(frames, *saved)
        return kernel

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        frames, *saved = ctx.saved_tensors
        grads = []
        with full_precision(grad):
            for frame, axis in zip(reversed(frames.unbind()), reversed(ctx.axes), strict=True):
                coordinates, flat = saved.pop(), saved.pop()
                taps = grad.shape[axis + 1] - 1
                later = grad.narrow(axis + 1, 1, taps)
                through = (grad.narrow(axis + 1, 0, taps) - later).flatten(1, -2)  # gradient of K N
                back = torch.bmm(through, frame.mT)
                grads.append(torch.baddbmm(torch.bmm(coordinates.mT, through), back.mT, flat))
                grad = torch.bmm(back, frame).view(later.shape).add_(later)
        return grad, torch.stack(grads[::-1]), None


def _spread(kernel: Tensor, projected: Tensor, dim: int) -> Tensor:
    """``K N + z (K - K N)``: one more tap along ``dim``."""
    taps = kernel.shape[dim]
    grown = torch.cat([projected, kernel.narrow(dim, taps - 1, 1)], dim)
    if taps > 1:
        grown.narrow(dim, 1, taps - 1).add_(kernel.narrow(dim, 0, taps - 1))
    grown.narrow(dim, 1, taps).sub_(projected)
    return grown


def grow(matrix: Tensor, frames: Tensor, axes: tuple[int, ...]) -> Tensor:
    """Compose ``matrix`` with one two-tap kernel ``[N, I - N]`` for each frame, on its right.

    Args:
        matrix: ``(g, *r, n, c)``, the taps of an orthogonal kernel, channels last.
        frames: ``(p, g, h, c)`` with orthonormal rows; the projectors are ``N = frameᵀ frame``.
        axes: the kernel axis, from 0, that each of the ``p`` frames grows.

    Returns:
        ``(g, *k, n, c)``, where ``k`` is ``r`` plus the number of frames on each axis.
    """
    return _Grow.apply(matrix, frames, axes)  # type: ignore[no-any-return]


def peel(kernel: Tensor, rank: int, axes: tuple[int, ...]) -> tuple[Tensor, Tensor | None]:
    """Undo ``grow``: find the frames from the span of the outermost taps, last one first.

    The first taps along the last axis grown have their rows in the span of ``N``, the last taps in
    its complement. Directions that neither shows are free, and are given to ``N`` until it has its
    rank.

    Args:
        kernel: ``(g, *k, n, c)`` as made by ``grow``.
        rank: rank of the projectors.
        axes: the kernel axis that each frame grew.

    Returns:
        The kernel that is left, and the frames ``(p, g, h, c)`` or ``None`` if there are no axes.
    """
    frames: list[Tensor] = []
    for axis in reversed(axes):
        dim, last = axis + 1, kernel.shape[axis + 1] - 1
        inside, outside = (kernel.select(dim, tap).flatten(1, -2) for tap in (0, last))
        _, vectors = torch.linalg.eigh(
            torch.matmul(inside.mT, inside) - torch.matmul(outside.mT, outside)
        )
        frame = vectors[..., -rank:].mT
        frames.insert(0, frame)
        flat = kernel.flatten(1, -2)
        projected = torch.bmm(torch.bmm(flat, frame.mT), frame).view(kernel.shape)
        kernel = projected.narrow(dim, 0, last) + (kernel - projected).narrow(dim, 1, last)
    return kernel, torch.stack(frames) if frames else None
