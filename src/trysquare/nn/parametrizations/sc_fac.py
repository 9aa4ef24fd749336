"""SC-Fac (Su et al., 2022): separable orthogonal kernels, one axis after the other.

``K = (all 2x1 kernels) ∘ M ∘ (all 1x2 kernels)``, where ``M`` is a 1x1 matrix. In one dimension this is every
orthogonal kernel that projectors reach; in two and three dimensions only the separable ones, fewer than those of
``bcop`` and ``aoc`` with the same number of parameters. With three axes the order is: first axis, ``M``, second axis,
third axis. A kernel that is built for its adjoint (more outputs than inputs, no stride) has the axes in reverse order.
"""

from __future__ import annotations

from itertools import chain
from math import prod

import torch
from torch import Tensor

from trysquare.nn.linalg.projectors import peel
from trysquare.nn.parametrizations.bcop import BCOP, multiply


class SCFac(BCOP):
    """Orthogonal kernel as projectors along the first axis, a square 1x1 matrix, projectors along the other axes.

    Free tensors: those of ``BCOP``; the frames are sorted by axis.
    """

    @property
    def _axes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Axes of the frames before and after the matrix."""
        counts = [self.geometry.frame_axes.count(axis) for axis in range(self.geometry.dims)]
        first, *others = ([axis] * count for axis, count in enumerate(counts))
        return tuple(first), tuple(chain.from_iterable(others))

    def composed(self, kernel: Tensor, *inner: Tensor) -> Tensor:
        """Grow along the first axis, multiply by the matrix, grow along the others."""
        square, *frames = inner
        first, others = self._axes
        split = [rows.split((len(first), len(others))) for rows in frames]
        before, after = [pair[0] for pair in split if first], [pair[1] for pair in split if others]
        turned = multiply(self.grown(kernel, before, first), self._orthogonalizer.apply(square))
        return self.grown(turned.movedim((1, 2), (-2, -1)), after, others)

    def solve(self, weight: Tensor) -> list[Tensor]:
        """Without stride or change of channels: peel one side, then the other; what remains is the matrix."""
        kernel = self._from_torch(weight)
        geometry = self.geometry
        if kernel is None or prod(geometry.reach) > 1 or kernel.shape[-1] != kernel.shape[-2]:
            return self.draw()
        if geometry.frames_shape is None:
            return [self._orthogonalizer.free(self._uncentred(kernel).flatten(1, -3).squeeze(1))]
        first, others = self._axes
        kernel, after = peel(kernel, geometry.frame_rank, others)
        kernel, before = peel(kernel.mT, geometry.frame_rank, first)
        frames = [*([] if before is None else before.flip(0)), *([] if after is None else after)]
        matrix = self._orthogonalizer.free(kernel.mT.flatten(1, -3).squeeze(1))
        return [matrix, torch.stack(frames)]

    def describe_inner(self) -> str:
        first, others = self._axes
        return f"{len(first)} projectors, a matrix, {len(others)} projectors of rank {self.geometry.frame_rank}"
