"""AOC: every orthogonal convolution of ``geometry.py``, as ``matrix ∘ projectors``.

The paper composes a strided kernel ``RKO[n, c, r]`` with ``BCOP[c, m, k - r + 1]``, and BCOP ends
in a 1x1 matrix of its own. That matrix is not needed: moved through the projectors (which it turns
into other projectors) it merges with RKO's. So one orthonormal matrix and one projector for each
missing tap reach the same kernels.
"""

from __future__ import annotations

from math import prod
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from trysquare.geometry import ConvGeometry
from trysquare.linalg.orthogonalize import orthogonalizer
from trysquare.linalg.orthonormal import orthonormal_rows, recondition
from trysquare.linalg.projectors import grow, peel
from trysquare.linalg.spectrum import circular_singular_values
from trysquare.parametrizations.base import Parametrization, random_orthonormal
from trysquare.parametrizations.orthonormal import draw_for, free_for, reconditioned_for


class AOC(Parametrization):
    """Orthogonal kernel ``(out, in / groups, *k)`` from a free matrix and, where taps are missing, free frames.

    Free tensors: ``matrix`` of shape ``geometry.matrix_shape`` and ``frames`` of shape
    ``geometry.frames_shape``, all groups in one batch.
    """

    def __init__(self, geometry: ConvGeometry, orthogonalizer_name: str, **factory: Any) -> None:
        super().__init__(**factory)
        self.geometry = geometry
        self.orthogonalizer = orthogonalizer_name
        self._apply_orthogonalizer = orthogonalizer(orthogonalizer_name).apply

    @property
    def free_shapes(self) -> tuple[tuple[int, ...], ...]:
        """The matrix, and the frames if there are any."""
        frames = self.geometry.frames_shape
        return (self.geometry.matrix_shape,) if frames is None else (self.geometry.matrix_shape, frames)

    @property
    def weight_shape(self) -> tuple[int, ...]:
        """Shape of the kernel."""
        return self.geometry.weight_shape

    def draw(self) -> list[Tensor]:
        """Uniformly distributed matrix and frames."""
        matrix, *frames = self.free_shapes
        return [
            draw_for(self.orthogonalizer, *matrix),
            *(random_orthonormal(*shape) for shape in frames),
        ]

    def build(self, *free: Tensor) -> Tensor:
        """The kernel in torch's layout."""
        kernel = self._split_taps(self._apply_orthogonalizer(free[0]))
        if len(free) > 1:
            return self._to_torch(grow(kernel, free[1], self.geometry.frame_axes))
        if self.geometry.frame_axes:
            kernel = self._centred(kernel)
        return self._to_torch(kernel.movedim((-2, -1), (1, 2)))

    def _split_taps(self, matrix: Tensor) -> Tensor:
        """``(g, rows, taps * c)`` to ``(g, *reach, rows, c)``."""
        geometry = self.geometry
        groups, rows, _ = matrix.shape
        if prod(geometry.reach) == 1:
            return matrix.view(groups, *geometry.reach, rows, geometry.inner_channels)
        taps = matrix.reshape(groups, rows, *geometry.reach, geometry.inner_channels)
        return taps.movedim(1, -2).contiguous()

    def _centred(self, kernel: Tensor) -> Tensor:
        """One inner channel: the only projectors are shifts, so the matrix goes to the middle of the kernel."""
        missing = [k - r for k, r in zip(self.geometry.kernel_size, self.geometry.reach, strict=True)]
        pads = [pad for gap in reversed(missing) for pad in (gap // 2, gap - gap // 2)]
        return F.pad(kernel, [0, 0, 0, 0, *pads])

    def _uncentred(self, kernel: Tensor) -> Tensor:
        """The middle taps."""
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

    def reconditioned(self, *free: Tensor) -> list[Tensor]:
        """The same kernel from well conditioned tensors: a projector only depends on the span."""
        matrix, *frames = free
        return [
            reconditioned_for(self.orthogonalizer, matrix),
            *(recondition(rows, orthonormal_rows(rows)) for rows in frames),
        ]

    def solve(self, weight: Tensor) -> list[Tensor]:
        """Peel the projectors off the kernel, outermost taps first; what remains is the matrix.

        Raises:
            ValueError: if the kernel is not orthogonal in this geometry.
        """
        geometry = self.geometry
        self._check_orthogonal(weight)
        kernel = weight.unflatten(0, (geometry.groups, -1)).movedim((1, 2), (-2, -1))
        if geometry.built_from_adjoint:
            kernel = kernel.mT
        if kernel.shape[-1] != geometry.inner_channels:
            return self.draw()
        if geometry.frame_axes and geometry.frames_shape is None:
            kernel, frames = self._uncentred(kernel), None
        else:
            kernel, frames = peel(kernel, geometry.frame_rank, geometry.frame_axes)
        matrix = kernel.movedim(-2, 1).flatten(2)
        free = [free_for(self.orthogonalizer, matrix)]
        return free if frames is None else [*free, frames]

    def _check_orthogonal(self, weight: Tensor) -> None:
        geometry = self.geometry
        sizes = tuple(s * k for s, k in zip(geometry.stride, geometry.kernel_size, strict=True))
        values = circular_singular_values(weight, sizes, geometry.stride, geometry.dilation, geometry.groups)
        if (values - 1).abs().max() > 0.01:
            raise ValueError(
                f"this kernel is not orthogonal: its singular values reach from {float(values[-1]):.3g} to "
                f"{float(values[0]):.3g} at stride={geometry.stride}, dilation={geometry.dilation}, "
                f"groups={geometry.groups}"
            )

    def extra_repr(self) -> str:
        """Numbers of the construction."""
        geometry = self.geometry
        kind = "square" if geometry.square else "rows" if geometry.row_orthogonal else "columns"
        return (
            f"orthonormal {kind}, matrix {geometry.matrix_shape} over {prod(geometry.reach)} taps, "
            f"{len(geometry.frame_axes)} projectors of rank {geometry.frame_rank}, orthogonalizer={self.orthogonalizer}"
        )
