"""Several kernels from one parametrization, so that they share free tensors, precision and cache."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from math import prod
from typing import Unpack, cast

import torch
from torch import Tensor, nn

from trysquare.nn.parametrizations import Parametrization
from trysquare.nn.parametrizations.base import Factory

Shapes = tuple[tuple[int, ...], ...]


class PackedKernels(Parametrization):
    """Kernels made of parametrized parts, laid out one after the other in one vector.

    Subclasses give ``kernel_shapes`` and ``build_kernels``. The free tensors are those of the
    parts, then those of ``extra`` shapes, which start at 0.
    """

    def __init__(self, parts: Sequence[Parametrization], extra: Shapes = (), **factory: Unpack[Factory]) -> None:
        super().__init__(**factory)
        self.parts = cast("Sequence[Parametrization]", nn.ModuleList(parts))
        self.extra = extra

    @property
    @abstractmethod
    def kernel_shapes(self) -> Shapes:
        """Shapes of the kernels."""

    @abstractmethod
    def build_kernels(self, *tensors: Tensor) -> Sequence[Tensor]:
        """Build the kernels from the weight of each part and the extra free tensors."""

    @property
    def weight_shape(self) -> tuple[int, ...]:
        return (sum(map(prod, self.kernel_shapes)),)

    @property
    def free_shapes(self) -> Shapes:
        return (*(shape for part in self.parts for shape in part.free_shapes), *self.extra)

    def draw(self) -> list[Tensor]:
        parts = [tensor for part in self.parts for tensor in part.draw()]
        return [*parts, *(torch.zeros(shape, dtype=torch.float64) for shape in self.extra)]

    def build(self, *free: Tensor) -> Tensor:
        return torch.cat([kernel.reshape(-1) for kernel in self.build_kernels(*self.parts_from(*free))])

    def parts_from(self, *free: Tensor) -> list[Tensor]:
        """Return the weight of each part, and the extra free tensors: the arguments of ``build_kernels``."""
        owned, extra = self._owned(free)
        return [*(part.build(*own) for part, own in zip(self.parts, owned, strict=True)), *extra]

    def reconditioned(self, *free: Tensor) -> list[Tensor]:
        owned, extra = self._owned(free)
        pairs = zip(self.parts, owned, strict=True)
        return [*(tensor for part, own in pairs for tensor in part.reconditioned(*own)), *extra]

    def solve(self, weight: Tensor) -> list[Tensor]:
        """Refuse: kernels that belong together cannot be assigned."""
        raise ValueError(
            f"the {len(self.kernel_shapes)} kernels of this block are made together and cannot be assigned; load a "
            "state_dict, or write to the free tensors"
        )

    def _owned(self, free: tuple[Tensor, ...]) -> tuple[list[tuple[Tensor, ...]], tuple[Tensor, ...]]:
        """Return the free tensors of each part, and the extra ones."""
        owned, start = [], 0
        for part in self.parts:
            count = len(part.free_shapes)
            owned.append(free[start : start + count])
            start += count
        return owned, free[start:]

    def extra_repr(self) -> str:
        return f"kernels {', '.join(map(str, self.kernel_shapes))}"


def unpack(weight: Tensor, shapes: Shapes) -> list[Tensor]:
    """Return the kernels as views of the vector."""
    parts = weight.split([prod(shape) for shape in shapes])
    return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]
