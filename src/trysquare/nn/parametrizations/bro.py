"""BRO (2025): block reflectors ``I - 2 V (VᵀV)⁻¹ Vᵀ`` and nothing else, as an explicit kernel.

The original applies one block reflector for each frequency of the image. Here the kernel stays small: the orthonormal
matrix consists of the first rows or columns of a product of two block reflectors, and each missing tap is a projector
``N = V (VᵀV)⁻¹ Vᵀ``, that is ``(I - H) / 2`` for the reflector ``H = I - 2 N``.

Two block reflectors of half rank reach every rotation: split it into planes; the rotation of a plane is the product of
two reflections, one for each factor. (Matrices of determinant -1 are out of reach where the matrix is square.)
"""

from __future__ import annotations

from typing import ClassVar, Unpack

import torch
from torch import Tensor

from trysquare.nn.geometry import ConvGeometry
from trysquare.nn.linalg.orthonormal import orthonormal_rows, random_orthonormal, recondition
from trysquare.nn.parametrizations.aoc import AOC
from trysquare.nn.parametrizations.base import Factory


def reflect(matrix: Tensor, rows: Tensor) -> Tensor:
    """``matrix (I - 2 N)``, where ``N`` projects onto the span of the orthonormal ``rows``."""
    return matrix - 2 * torch.matmul(torch.matmul(matrix, rows.mT), rows)


class BRO(AOC):
    """Orthogonal kernel from block reflectors.

    Free tensors: rows ``(2, g, rank, size)`` of the two reflectors, where ``size`` is the larger side of the matrix,
    and frames of shape ``geometry.frames_shape`` if taps are missing.
    """

    options: ClassVar[tuple[str, ...]] = ("rank",)
    uses_orthogonalizer: ClassVar[bool] = False

    def __init__(
        self, geometry: ConvGeometry, orthogonalizer_name: str, rank: int | None = None, **factory: Unpack[Factory]
    ) -> None:
        self._size = max(geometry.matrix_shape[1:])
        self.rank = self._size // 2 if rank is None else rank
        if self._size == 1:
            raise ValueError(
                "nothing to learn: the only block reflectors of one channel are 1 and -1; use method='aoc' or at least "
                "2 channels per group"
            )
        if not isinstance(self.rank, int) or not 1 <= self.rank < self._size:
            raise ValueError(
                f"rank={rank!r} must be an integer from 1 to {self._size - 1}, less than the matrix's size"
            )
        self._reflectors_shape = (2, geometry.groups, self.rank, self._size)
        super().__init__(geometry, orthogonalizer_name, **factory)

    @property
    def matrix_shapes(self) -> tuple[tuple[int, ...], ...]:
        """Rows that span the two reflectors."""
        return (self._reflectors_shape,)

    def draw(self) -> list[Tensor]:
        """Uniformly distributed reflectors and frames."""
        return [random_orthonormal(*shape) for shape in self.free_shapes]

    def matrix(self, *free: Tensor) -> Tensor:
        """First rows and columns of the product of the two reflectors."""
        first, second = orthonormal_rows(free[0]).unbind()
        _, rows, columns = self.geometry.matrix_shape
        start = torch.eye(rows, self._size, dtype=first.dtype, device=first.device).expand(len(first), -1, -1)
        return reflect(reflect(start, first), second)[..., :columns]

    def reconditioned_matrix(self, *free: Tensor) -> list[Tensor]:
        """Return others of the same span: a reflector depends on nothing else."""
        return [recondition(rows, orthonormal_rows(rows)) for rows in free]

    @property
    def solves(self) -> bool:
        """Not for the reflectors."""
        return False

    def solve_matrix(self, matrix: Tensor) -> list[Tensor]:
        """No closed form: fresh reflectors, from which a search starts."""
        return [random_orthonormal(*self._reflectors_shape)]

    def describe_inner(self) -> str:
        return f"2 block reflectors of rank {self.rank}, {super().describe_inner()}"
