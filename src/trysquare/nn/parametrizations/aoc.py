"""AOC: every orthogonal convolution of ``geometry.py``, as ``matrix ∘ projectors``.

The paper composes a strided kernel ``RKO[n, c, r]`` with ``BCOP[c, m, k - r + 1]``, and BCOP ends
in a 1x1 matrix of its own. That matrix is not needed: moved through the projectors (which it turns
into other projectors) it merges with RKO's. So one orthonormal matrix and one projector for each
missing tap reach the same kernels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from trysquare.naming import shown
from trysquare.nn.geometry import ConvGeometry
from trysquare.nn.linalg.projectors import peel
from trysquare.nn.parametrizations.assignment import search_free_tensors
from trysquare.nn.parametrizations.composed import Composed

# Random starts for the frames of one group in one guess, and what counts as an arrival.
_GRAM_STARTS = 4
_GRAM_TOLERANCE = 1e-7


class AOC(Composed):
    """Orthogonal kernel ``(out, in / groups, *k)`` from a free matrix and, where taps are missing, free frames.

    Free tensors: ``matrix`` of shape ``geometry.matrix_shape`` and ``frames`` of shape
    ``geometry.frames_shape``, all groups in one batch. How the kernel is built of them is what ``Composed`` does if
    nothing else is said; here is how they are found for a given kernel.

    Args:
        geometry: numbers of the layer.
        orthogonalizer_name: how the matrix is made orthonormal.
        axis_order: in which order projectors grow the axes, next to the matrix first: all axes, each once. Projectors
            do not commute, so that kernels of another order are others, of equal number; orthogonium has the last axis
            first in layers without stride that change channels.
        factory: device and dtype.
    """

    options: ClassVar[tuple[str, ...]] = ("axis_order",)

    def __init__(
        self,
        geometry: ConvGeometry,
        orthogonalizer_name: str,
        axis_order: Sequence[int] | None = None,
        **factory: Any,
    ) -> None:
        if axis_order is not None:
            order, axes = axis_order, range(geometry.dims)
            if not isinstance(order, Sequence) or any(type(a) is not int for a in order) or sorted(order) != [*axes]:
                raise ValueError(f"axis_order={shown(order)} must be the axes {tuple(axes)} in some order")
            geometry = replace(geometry, axis_order=tuple(order))
        super().__init__(geometry, orthogonalizer_name, **factory)

    @property
    def solves(self) -> bool:
        """Whether no channels were cut off and the orthogonalizer has an inverse."""
        geometry = self.geometry
        whole = geometry.built_from_adjoint or geometry.inner_channels == geometry.group_in
        return whole and self._orthogonalizer.inverse is not None

    def solve(self, weight: Tensor) -> list[Tensor]:
        """Peel the projectors off the kernel, outermost taps first; what remains is the matrix.

        Each projector is the one that leaves least outside of the taps that remain, and the matrix the polar factor of
        these, so that a kernel that is not orthogonal is near that of the result. Channels that were cut off are taken
        to be 0, which they are not.
        """
        geometry = self.geometry
        kernel = self._from_torch(weight)
        if kernel is None:
            missing = geometry.inner_channels - geometry.group_in
            kernel = F.pad(weight.unflatten(0, (geometry.groups, -1)).movedim((1, 2), (-2, -1)), (0, missing))
        if geometry.frame_axes and geometry.frames_shape is None:
            kernel, frames = self._uncentred(kernel), None
        else:
            kernel, frames = peel(kernel, geometry.frame_rank, geometry.frame_axes)
        free = self.solve_matrix(kernel.movedim(-2, 1).flatten(2))
        return free if frames is None else [*free, frames]

    def guess(self, weight: Tensor) -> list[Tensor]:
        """Return frames that explain the Gram matrix of the taps, with the best matrix, if channels were cut off.

        The taps are ``K = A B`` with the orthonormal matrix ``A`` and a ``B`` that only the frames know, so
        ``KᵀK = BᵀB``: a search among the frames of one group, which misses far less often than one among all free
        tensors.
        """
        geometry = self.geometry
        if geometry.built_from_adjoint or geometry.inner_channels == geometry.group_in:
            return self.draw()
        taps = self._as_matrix(weight.unflatten(0, (geometry.groups, -1)))
        frames = self._frames_by_gram(torch.matmul(taps.mT, taps)) if self.inner_shapes else []
        known = self._taps_without_matrix(*frames)
        left, _, right = torch.linalg.svd(torch.matmul(taps, known.mT), full_matrices=False)
        return [*self.solve_matrix(torch.matmul(left, right)), *frames]

    def _frames_by_gram(self, wanted: Tensor) -> list[Tensor]:
        def gram(frames: Tensor) -> Tensor:
            known = self._taps_without_matrix(frames)
            return torch.matmul(known.mT, known)

        found = []
        for group, target in enumerate(wanted.unsqueeze(1)):
            starts = ([self.draw_inner()[0][:, group : group + 1]] for _ in range(_GRAM_STARTS))
            found.append(search_free_tensors(gram, starts, target, _GRAM_TOLERANCE)[0][0])
        return [torch.cat(found, 1)]

    def _taps_without_matrix(self, *frames: Tensor) -> Tensor:
        """Return the taps ``(g, columns, taps * in)`` that the matrix is multiplied with, from the right."""
        groups = frames[0].shape[1] if frames else self.geometry.groups
        every = torch.eye(self.geometry.matrix_shape[-1], dtype=torch.float64).expand(groups, -1, -1)
        return self._as_matrix(self.composed(self._split_taps(every), *frames))

    def _as_matrix(self, kernel: Tensor) -> Tensor:
        """``(g, rows, c, *k)`` to ``(g, rows, taps * in)``, without the channels that are cut off."""
        return kernel.narrow(2, 0, self.geometry.group_in).movedim(2, -1).flatten(2)

    def solve_matrix(self, matrix: Tensor) -> list[Tensor]:
        """Return free tensors that give the orthonormal matrix."""
        return [self._orthogonalizer.free(matrix)]
