"""Circular boundaries: reading past the edge, and adding what falls past it."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from trysquare.geometry import Pads


def circular_pad(x: Tensor, pads: Pads) -> Tensor:
    """Extend the last axes of ``x`` periodically, by any amount.

    Torch's own is faster, but stops at one period.
    """
    sizes = x.shape[-len(pads) :]
    for axis, ((left, right), size) in enumerate(zip(pads, sizes, strict=True), start=-len(pads)):
        x = x.index_select(axis, torch.arange(-left, size + right, device=x.device) % size)
    return x


def circular_fold(full: Tensor, lefts: tuple[int, ...], sizes: tuple[int, ...]) -> Tensor:
    """Adjoint of ``circular_pad``: add position ``p`` to ``(p - left) mod size`` on each of the last axes."""
    for axis, (left, size) in enumerate(zip(lefts, sizes, strict=True), start=-len(sizes)):
        length = full.shape[axis]
        front = -left % size
        back = -(front + length) % size
        pads = [0, 0] * (-axis - 1) + [front, back]
        full = F.pad(full, pads).unflatten(axis, (-1, size)).sum(axis - 1)
    return full
