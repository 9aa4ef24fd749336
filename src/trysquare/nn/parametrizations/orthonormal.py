"""The weight of a linear layer: one orthonormal matrix."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from torch import Tensor

from trysquare.nn.linalg.orthogonalize import orthogonalizer
from trysquare.nn.parametrizations.base import Parametrization


class OrthonormalMatrix(Parametrization):
    """``(..., out, in)`` with orthonormal rows if ``out <= in``, orthonormal columns otherwise."""

    def __init__(self, shape: tuple[int, ...], orthogonalizer_name: str, **factory: Any) -> None:
        super().__init__(**factory)
        self.shape = shape
        self.orthogonalizer = orthogonalizer_name
        self._orthogonalizer = orthogonalizer(orthogonalizer_name)

    @property
    def free_shapes(self) -> tuple[tuple[int, ...], ...]:
        """One free matrix, of the shape of the weight."""
        return (self.shape,)

    @property
    def weight_shape(self) -> tuple[int, ...]:
        """Shape of the weight."""
        return self.shape

    def draw(self) -> list[Tensor]:
        """A uniformly distributed orthonormal matrix, or what the orthogonalizer starts from."""
        return [self._orthogonalizer.draw(*self.shape)]

    def build(self, *free: Tensor) -> Tensor:
        """The orthonormal matrix."""
        return self._orthogonalizer.apply(free[0]).contiguous()

    @property
    def alike(self) -> Hashable:
        """Shape and orthogonalizer."""
        return type(self), self.shape, self.orthogonalizer

    def build_together(self, *free: Tensor) -> Tensor:
        """The matrices, orthonormalised in one batch."""
        return self.build(*free)

    def reconditioned(self, *free: Tensor) -> list[Tensor]:
        """The same orthonormal matrix from a well conditioned one."""
        return [self._orthogonalizer.reconditioned(free[0])]

    def solve(self, weight: Tensor) -> list[Tensor]:
        """The orthogonalizer's inverse."""
        return [self._orthogonalizer.free(weight)]

    def extra_repr(self) -> str:
        """Shape and orthogonalizer."""
        return f"{'x'.join(map(str, self.shape))}, orthogonalizer={self.orthogonalizer}"
