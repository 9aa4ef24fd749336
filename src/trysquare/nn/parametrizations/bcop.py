"""BCOP (Li et al., 2019): pairs of projectors along alternating axes, then a 1x1 matrix.

``K = (P Q) ∘ (P Q) ∘ … ∘ M``. Without stride it reaches the same kernels as ``aoc``: moved to the left through the
projectors, ``M`` becomes AOC's matrix. What differs is the cost, and the path that an optimizer takes:

* without stride, a change of channels cuts rows or columns off a square kernel of the larger channel count, as BCOP
  does, so ``M`` is square and has more entries than AOC's rectangular matrix;
* with a stride the kernel is ``RKO ∘ (P Q) ∘ … ∘ M``, as the paper writes it. ``M`` then repeats what the RKO matrix
  can do already, and ``aoc`` leaves it out. (The original emulates a stride by invertible downsampling: ``prod(s)``
  times the channels.)

Neither reaches every orthogonal kernel (the paper, appendix F). With projectors of half rank the determinant of the
response is ``(z w)^(c (k - 1) / 2)`` up to sign, so a lone tap is out of reach of a 2x2 kernel and in reach of 3x3; and
channels that filter along the axes in different orders are out of reach of 2x2, but a part of a 3x3 kernel with twice
the channels. ``tests/nn/parametrizations/test_bcop.py`` shows both.
"""

from __future__ import annotations

from math import prod

from torch import Tensor

from trysquare.nn.linalg.kernels import compose
from trysquare.nn.linalg.projectors import peel
from trysquare.nn.parametrizations.composed import Composed


def multiply(kernel: Tensor, matrix: Tensor) -> Tensor:
    """``kernel ∘ matrix`` for ``(g, rows, c, *k)`` and ``(g, c, d)``."""
    dims = kernel.ndim - 3
    return compose(kernel, matrix[(..., *(None,) * dims)], dims=dims)


class BCOP(Composed):
    """Orthogonal kernel as projectors, then a square 1x1 matrix.

    Free tensors: with a stride the matrix over ``reach`` taps; the square matrix ``(g, c, c)``; frames of shape
    ``geometry.frames_shape`` if taps are missing.
    """

    brings_matrix = True

    @property
    def inner_shapes(self) -> tuple[tuple[int, ...], ...]:
        """The 1x1 matrix, and the frames if there are any."""
        geometry, c = self.geometry, self.geometry.inner_channels
        square = (geometry.groups, c, c)
        return (square,) if geometry.frames_shape is None else (square, geometry.frames_shape)

    def draw_inner(self) -> list[Tensor]:
        """Uniformly distributed matrix and frames."""
        square, *_ = self.inner_shapes
        return [self._orthogonalizer.draw(*square), *super().draw_inner()[1:]]

    def composed(self, kernel: Tensor, *inner: Tensor) -> Tensor:
        """Grow by all projectors, then multiply by the matrix."""
        square, *frames = inner
        return multiply(self.grown(kernel, frames, self.geometry.frame_axes), self._orthogonalizer.apply(square))

    def reconditioned_inner(self, *free: Tensor) -> list[Tensor]:
        """Return the same inner kernel from well conditioned tensors."""
        square, *frames = free
        return [self._orthogonalizer.reconditioned(square), *super().reconditioned_inner(*frames)]

    def solve(self, weight: Tensor) -> list[Tensor]:
        """Without stride or change of channels: peel the projectors off the left; what remains is the matrix."""
        geometry = self.geometry
        kernel = self._from_torch(weight)
        if kernel is None or prod(geometry.reach) > 1 or kernel.shape[-1] != kernel.shape[-2]:
            return self.draw()
        if geometry.frames_shape is None:
            kernel, frames = self._uncentred(kernel), None
        else:
            kernel, frames = peel(kernel.mT, geometry.frame_rank, geometry.frame_axes[::-1])
            kernel = kernel.mT
        free = [self._orthogonalizer.free(kernel.flatten(1, -3).squeeze(1))]
        return free if frames is None else [*free, frames.flip(0)]
