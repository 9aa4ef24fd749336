"""The weight of a linear layer: one orthonormal matrix."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Unpack

import torch
from torch import Tensor

from trysquare.nn.linalg.orthogonalize import orthogonalizer
from trysquare.nn.parametrizations.base import Factory, Parametrization
from trysquare.nn.parametrizations.projection import refuse_singular_values


class OrthonormalMatrix(Parametrization):
    """``(..., out, in)`` with orthonormal rows if ``out <= in``, orthonormal columns otherwise."""

    def __init__(self, shape: tuple[int, ...], orthogonalizer_name: str, **factory: Unpack[Factory]) -> None:
        super().__init__(**factory)
        self.shape = shape
        self.orthogonalizer = orthogonalizer_name
        self._orthogonalizer = orthogonalizer(orthogonalizer_name)

    @property
    def is_orthogonal(self) -> bool:
        return True

    @property
    def weight_shape(self) -> tuple[int, ...]:
        return self.shape

    def draw(self) -> list[Tensor]:
        """Return a uniformly distributed orthonormal matrix, or what the orthogonalizer starts from."""
        return [self._orthogonalizer.draw(*self.shape)]

    def build(self, *free: Tensor) -> Tensor:
        return self._orthogonalizer.apply(free[0]).contiguous()

    @property
    def alike(self) -> Hashable:
        return type(self), self.shape, self.orthogonalizer

    def build_together(self, *free: Tensor) -> Tensor:
        return self.build(*free)

    def reconditioned(self, *free: Tensor) -> list[Tensor]:
        return [self._orthogonalizer.reconditioned(free[0])]

    @property
    def solves(self) -> bool:
        """Whether the orthogonalizer has an inverse."""
        return self._orthogonalizer.inverse is not None

    def refuse_unreachable(self, weight: Tensor) -> None:
        refuse_singular_values(torch.linalg.svdvals(weight), "this matrix is not orthonormal")

    def solve(self, weight: Tensor) -> list[Tensor]:
        """Return the orthogonalizer's inverse of the nearest orthonormal matrix."""
        return [self._orthogonalizer.free(weight)]

    def extra_repr(self) -> str:
        return f"{'x'.join(map(str, self.shape))}, orthogonalizer={self.orthogonalizer}"
