"""The weight of a linear layer: one orthonormal matrix."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from trysquare.nn.linalg.orthogonalize import orthogonalizer
from trysquare.nn.linalg.orthonormal import recondition
from trysquare.nn.parametrizations.base import Parametrization, random_orthonormal


def draw_for(name: str, *shape: int) -> Tensor:
    """A fresh free matrix from which the orthogonalizer ``name`` starts well."""
    if orthogonalizer(name).keeps_orthonormal:
        return random_orthonormal(*shape)
    return torch.randn(*shape, dtype=torch.float64) / max(shape[-2:]) ** 0.5


def reconditioned_for(name: str, matrix: Tensor) -> Tensor:
    """A free matrix that gives the same result as ``matrix`` and is safe to train on."""
    entry = orthogonalizer(name)
    if not entry.keeps_orthonormal:
        return matrix
    basis = entry.apply(matrix)
    if matrix.shape[-2] > matrix.shape[-1]:
        return recondition(matrix.mT, basis.mT).mT
    return recondition(matrix, basis)


def free_for(name: str, basis: Tensor) -> Tensor:
    """A free matrix that the orthogonalizer ``name`` maps to ``basis``, or a guess where there is no closed form."""
    inverse = orthogonalizer(name).inverse
    return draw_for(name, *basis.shape) if inverse is None else inverse(basis)


class OrthonormalMatrix(Parametrization):
    """``(..., out, in)`` with orthonormal rows if ``out <= in``, orthonormal columns otherwise."""

    def __init__(self, shape: tuple[int, ...], orthogonalizer_name: str, **factory: Any) -> None:
        super().__init__(**factory)
        self.shape = shape
        self.orthogonalizer = orthogonalizer_name
        self._apply_orthogonalizer = orthogonalizer(orthogonalizer_name).apply

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
        return [draw_for(self.orthogonalizer, *self.shape)]

    def build(self, *free: Tensor) -> Tensor:
        """The orthonormal matrix."""
        return self._apply_orthogonalizer(free[0]).contiguous()

    def reconditioned(self, *free: Tensor) -> list[Tensor]:
        """The same orthonormal matrix from a well conditioned one."""
        return [reconditioned_for(self.orthogonalizer, free[0])]

    def solve(self, weight: Tensor) -> list[Tensor]:
        """The orthogonalizer's inverse."""
        return [free_for(self.orthogonalizer, weight)]

    def extra_repr(self) -> str:
        """Shape and orthogonalizer."""
        return f"{'x'.join(map(str, self.shape))}, orthogonalizer={self.orthogonalizer}"
