"""RKO (reshaped kernel orthogonalization): one orthonormal matrix, reshaped into a kernel.

The layer cuts the input into windows of ``m * prod(k)`` numbers and multiplies each by the matrix. A position of the
input is in at most ``prod(⌈k q / s⌉)`` windows, ``q = gcd(s, d)``: tap ``j`` of window ``i`` reads ``i s + j d``, so
the taps that can read a given position are those of one class modulo ``s / q``, and each of them belongs to one window.
Cutting into windows thus has a norm of at most the square root of that number, by which the kernel is divided.

Where no position is read twice (``k <= s / q`` on each axis) nothing has to be divided, and the layer is orthogonal if
an orthogonal layer exists at all. Elsewhere it is 1-Lipschitz, for every number of channels.
"""

from __future__ import annotations

from math import prod
from typing import ClassVar, Unpack

import torch
from torch import Tensor

from trysquare.nn.geometry import ConvGeometry, window_overlap
from trysquare.nn.parametrizations.base import Factory
from trysquare.nn.parametrizations.method import KernelMethod
from trysquare.nn.parametrizations.projection import refuse_singular_values


class RKO(KernelMethod):
    """An orthonormal ``n x (m prod(k))`` matrix a group, reshaped, divided by the square root of the overlap.

    Free tensor: the matrix ``(g, n, prod(k) * m)``.
    """

    orthogonal: ClassVar[bool] = False

    def __init__(self, geometry: ConvGeometry, orthogonalizer_name: str, **factory: Unpack[Factory]) -> None:
        super().__init__(geometry, orthogonalizer_name, **factory)
        overlap = window_overlap(geometry.kernel_size, geometry.stride, geometry.dilation)
        self.scale: float = overlap**-0.5

    @property
    def is_orthogonal(self) -> bool:
        """Whether windows do not overlap, in a geometry that has an orthogonal kernel."""
        return self.scale == 1 and (self.geometry.row_orthogonal or self.geometry.column_orthogonal)

    @property
    def free_shapes(self) -> tuple[tuple[int, ...], ...]:
        geometry = self.geometry
        return ((geometry.groups, geometry.group_out, prod(geometry.kernel_size) * geometry.group_in),)

    def draw(self) -> list[Tensor]:
        """Return a uniformly distributed matrix."""
        return [self._orthogonalizer.draw(*self.free_shapes[0])]

    def build(self, *free: Tensor) -> Tensor:
        """Orthonormalise, reshape and scale."""
        matrix = self._orthogonalizer.apply(free[0])
        taps = matrix.unflatten(-1, (*self.geometry.kernel_size, self.geometry.group_in))
        kernel = taps.movedim(-1, 2).flatten(0, 1)
        return (kernel if self.scale == 1 else self.scale * kernel).contiguous()

    def build_together(self, *free: Tensor) -> Tensor:
        """Return the kernels, built as groups of one."""
        return self.build(free[0].flatten(0, 1)).unflatten(0, (len(free[0]), -1))

    def reconditioned(self, *free: Tensor) -> list[Tensor]:
        return [self._orthogonalizer.reconditioned(free[0])]

    @property
    def solves(self) -> bool:
        """Whether the orthogonalizer has an inverse."""
        return self._orthogonalizer.inverse is not None

    def refuse_unreachable(self, weight: Tensor) -> None:
        matrix = weight.unflatten(0, (self.geometry.groups, -1)).movedim(2, -1).flatten(2) / self.scale
        # By the smaller Gram matrix: the matrix has as many columns as the kernel has taps.
        rows = matrix if matrix.shape[-2] <= matrix.shape[-1] else matrix.mT
        values = torch.linalg.eigvalsh(torch.matmul(rows, rows.mT)).clamp_min(0).sqrt()
        refuse_singular_values(values, "the matrix of this kernel is not orthonormal")

    def solve(self, weight: Tensor) -> list[Tensor]:
        """Return the matrix that the kernel is a reshaped copy of."""
        matrix = weight.unflatten(0, (self.geometry.groups, -1)).movedim(2, -1).flatten(2)
        return [self._orthogonalizer.free(matrix / self.scale)]

    def extra_repr(self) -> str:
        kind = "orthogonal" if self.is_orthogonal else f"1-Lipschitz, scaled by {self.scale:.3g}"
        return f"matrix {self.free_shapes[0]}, {kind}, orthogonalizer={self.orthogonalizer}"
