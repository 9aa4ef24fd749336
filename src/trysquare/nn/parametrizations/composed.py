"""What the orthogonal methods share: ``matrix ∘ inner``, any geometry from a stride-1 square kernel.

An orthonormal matrix that spans ``reach`` taps (the paper's RKO) does the stride and the change of channels. To its
right comes an orthogonal kernel ``c -> c`` without stride, of the size that is missing: one projector for each missing
tap, unless a method says otherwise.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import ClassVar, Unpack

import torch
import torch.nn.functional as F
from torch import Tensor

from trysquare.nn.geometry import ConvGeometry
from trysquare.nn.linalg.orthonormal import orthonormal_rows, random_orthonormal, recondition
from trysquare.nn.linalg.projectors import grow
from trysquare.nn.parametrizations.base import Factory
from trysquare.nn.parametrizations.method import KernelMethod
from trysquare.nn.parametrizations.projection import refuse_kernel


class Composed(KernelMethod):
    """Orthogonal kernel ``(out, in / groups, *k)``: an orthonormal matrix over ``reach`` taps, then an inner kernel.

    Free tensors: those of the matrix (``matrix_shapes``), then those of the inner kernel (``inner_shapes``), all groups
    in one batch. Where there are more outputs than inputs and no stride, everything is built for the adjoint and
    transposed.
    """

    # Whether the inner kernel has a square matrix of its own, so that without stride the first rows of the identity are
    # matrix enough.
    brings_matrix: ClassVar[bool] = False

    def __init__(self, geometry: ConvGeometry, orthogonalizer_name: str, **factory: Unpack[Factory]) -> None:
        super().__init__(geometry, orthogonalizer_name, **factory)
        self._matrix_count = len(self.matrix_shapes)

    @property
    def matrix_shapes(self) -> tuple[tuple[int, ...], ...]:
        """Free tensors of the matrix: one of its own shape, or none where the inner kernel makes it superfluous."""
        if self.brings_matrix and prod(self.geometry.reach) == 1:
            return ()
        return (self.geometry.matrix_shape,)

    @property
    def inner_shapes(self) -> tuple[tuple[int, ...], ...]:
        """Free tensors of the inner kernel: the frames of the projectors, if there are any."""
        frames = self.geometry.frames_shape
        return () if frames is None else (frames,)

    @property
    def free_shapes(self) -> tuple[tuple[int, ...], ...]:
        """Those of the matrix, then those of the inner kernel."""
        return self.matrix_shapes + self.inner_shapes

    def draw(self) -> list[Tensor]:
        """Uniformly distributed matrix, and what the inner kernel starts from."""
        matrices = [self._orthogonalizer.draw(*shape) for shape in self.matrix_shapes]
        return [*matrices, *self.draw_inner()]

    def draw_inner(self) -> list[Tensor]:
        """Fresh free tensors of the inner kernel: uniformly distributed frames."""
        return [random_orthonormal(*shape) for shape in self.inner_shapes]

    def build(self, *free: Tensor) -> Tensor:
        """Return the kernel in torch's layout."""
        count = self._matrix_count
        matrix = self.matrix(*free[:count]) if count else self._selection(free[0])
        return self._to_torch(self.composed(self._split_taps(matrix), *free[count:]))

    def build_together(self, *free: Tensor) -> Tensor:
        """Build the kernels as groups of one, from matrices ``(count, g, n, m)`` and frames ``(count, p, g, h, c)``."""
        joined = [each.movedim(0, -4).flatten(-4, -3) for each in free]
        return self.build(*joined).unflatten(0, (len(free[0]), -1))

    def matrix(self, *free: Tensor) -> Tensor:
        """Return the orthonormal matrix ``(g, rows, taps * c)``."""
        return self._orthogonalizer.apply(free[0])

    def composed(self, kernel: Tensor, *inner: Tensor) -> Tensor:
        """``kernel ∘ inner``: from ``(g, *reach, rows, c)`` to ``(g, rows, c, *k)``."""
        return self.grown(kernel, inner, self.geometry.frame_axes)

    def _selection(self, like: Tensor) -> Tensor:
        _, rows, columns = self.geometry.matrix_shape
        return torch.eye(rows, columns, dtype=like.dtype, device=like.device).expand(len(like), -1, -1)

    def _split_taps(self, matrix: Tensor) -> Tensor:
        """``(g, rows, taps * c)`` to ``(g, *reach, rows, c)``."""
        geometry = self.geometry
        groups, rows, _ = matrix.shape
        if prod(geometry.reach) == 1:
            return matrix.reshape(groups, *geometry.reach, rows, geometry.inner_channels)
        taps = matrix.reshape(groups, rows, *geometry.reach, geometry.inner_channels)
        return taps.movedim(1, -2).contiguous()

    def grown(self, kernel: Tensor, frames: Sequence[Tensor], axes: tuple[int, ...]) -> Tensor:
        """Compose with the projectors of ``frames``, at most one tensor, along ``axes``: ``(g, rows, c, *k)``.

        With one inner channel the only projectors are shifts, so the kernel goes to the middle.
        """
        if frames:
            return grow(kernel, frames[0], axes)
        missing = [axes.count(axis) for axis in range(self.geometry.dims)]
        if any(missing):
            pads = [pad for gap in reversed(missing) for pad in (gap // 2, gap - gap // 2)]
            kernel = F.pad(kernel, [0, 0, 0, 0, *pads])
        groups, *taps, rows, columns = kernel.shape
        if prod(taps) == 1:  # nothing moves, and the strides stay those of a new tensor
            return kernel.reshape(groups, rows, columns, *taps)
        return kernel.movedim((-2, -1), (1, 2))

    def _uncentred(self, kernel: Tensor) -> Tensor:
        """Return the middle taps."""
        sizes = zip(self.geometry.kernel_size, self.geometry.reach, strict=True)
        for dim, (k, r) in enumerate(sizes, start=1):
            kernel = kernel.narrow(dim, (k - r) // 2, r)
        return kernel

    def _to_torch(self, kernel: Tensor) -> Tensor:
        """``(g, rows, c, *k)`` to ``(out, in / g, *k)``."""
        if self.geometry.built_from_adjoint:
            kernel = kernel.transpose(1, 2)
        elif kernel.shape[2] > self.geometry.group_in:
            kernel = kernel.narrow(2, 0, self.geometry.group_in)
        return kernel.flatten(0, 1).contiguous()

    def _from_torch(self, weight: Tensor) -> Tensor | None:
        """``(out, in / g, *k)`` to ``(g, *k, rows, c)``, or ``None`` if channels were cut off."""
        kernel = weight.unflatten(0, (self.geometry.groups, -1)).movedim((1, 2), (-2, -1))
        if self.geometry.built_from_adjoint:
            kernel = kernel.mT
        return kernel if kernel.shape[-1] == self.geometry.inner_channels else None

    def reconditioned(self, *free: Tensor) -> list[Tensor]:
        count = self._matrix_count
        return [*self.reconditioned_matrix(*free[:count]), *self.reconditioned_inner(*free[count:])]

    def reconditioned_matrix(self, *free: Tensor) -> list[Tensor]:
        """Return the same matrix from well conditioned tensors."""
        return [self._orthogonalizer.reconditioned(matrix) for matrix in free]

    def reconditioned_inner(self, *free: Tensor) -> list[Tensor]:
        """Return the same inner kernel from well conditioned frames: a projector only depends on the span."""
        return [recondition(rows, orthonormal_rows(rows)) for rows in free]

    def refuse_unreachable(self, weight: Tensor) -> None:
        refuse_kernel(weight, self.geometry)

    def extra_repr(self) -> str:
        geometry = self.geometry
        kind = "square" if geometry.square else "rows" if geometry.row_orthogonal else "columns"
        return (
            f"orthonormal {kind}, matrix {geometry.matrix_shape} over {prod(geometry.reach)} taps, "
            f"{self.describe_inner()}, orthogonalizer={self.orthogonalizer}"
        )

    def describe_inner(self) -> str:
        return f"{len(self.geometry.frame_axes)} projectors of rank {self.geometry.frame_rank}"
