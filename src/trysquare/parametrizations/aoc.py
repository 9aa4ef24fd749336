"""AOC: every orthogonal convolution of ``geometry.py``, as ``matrix ∘ projectors``.

The paper composes a strided kernel ``RKO[n, c, r]`` with ``BCOP[c, m, k - r + 1]``, and BCOP ends
in a 1x1 matrix of its own. That matrix is not needed: moved through the projectors (which it turns
into other projectors) it merges with RKO's. So one orthonormal matrix and one projector for each
missing tap reach the same kernels.
"""

from __future__ import annotations

from torch import Tensor

from trysquare.linalg.projectors import peel
from trysquare.parametrizations.composed import Composed
from trysquare.parametrizations.orthonormal import free_for


class AOC(Composed):
    """Orthogonal kernel ``(out, in / groups, *k)`` from a free matrix and, where taps are missing, free frames.

    Free tensors: ``matrix`` of shape ``geometry.matrix_shape`` and ``frames`` of shape
    ``geometry.frames_shape``, all groups in one batch.
    """

    @property
    def inner_shapes(self) -> tuple[tuple[int, ...], ...]:
        """The frames, if there are any."""
        frames = self.geometry.frames_shape
        return () if frames is None else (frames,)

    def composed(self, kernel: Tensor, *inner: Tensor) -> Tensor:
        """The matrix, grown by one projector for each missing tap."""
        return self.grown(kernel, inner, self.geometry.frame_axes)

    def solve(self, weight: Tensor) -> list[Tensor]:
        """Peel the projectors off the kernel, outermost taps first; what remains is the matrix.

        Raises:
            ValueError: if the kernel is not orthogonal in this geometry.
        """
        geometry = self.geometry
        kernel = self._from_torch(weight)
        if kernel is None:
            return self.draw()
        if geometry.frame_axes and geometry.frames_shape is None:
            kernel, frames = self._uncentred(kernel), None
        else:
            kernel, frames = peel(kernel, geometry.frame_rank, geometry.frame_axes)
        free = self.solve_matrix(kernel.movedim(-2, 1).flatten(2))
        return free if frames is None else [*free, frames]

    def solve_matrix(self, matrix: Tensor) -> list[Tensor]:
        """Free tensors that give the orthonormal matrix."""
        return [free_for(self.orthogonalizer, matrix)]
