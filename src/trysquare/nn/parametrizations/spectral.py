"""Spectral normalisation, from above: a free kernel divided by a bound of its norm, and nothing else.

One number for the whole kernel leaves its singular values in proportion: the layer is 1-Lipschitz, and far from
orthogonal unless training makes it so. The bound (``linalg.norm_bound``) holds without stride and on domains of every
size. A stride leaves rows of the matrix out, dilation makes several copies on coarser lattices, and zero padding
restricts it, none of which makes the norm larger; groups are independent blocks.
"""

from __future__ import annotations

from math import prod
from typing import ClassVar, Unpack

import torch
from torch import Tensor

from trysquare.nn.geometry import ConvGeometry, per_axis
from trysquare.nn.linalg.norms import norm_bound
from trysquare.nn.linalg.orthonormal import random_orthonormal
from trysquare.nn.linalg.rescaling import scaled_to_one
from trysquare.nn.parametrizations.aol import nearly_orthogonal
from trysquare.nn.parametrizations.base import Factory, Parametrization
from trysquare.nn.parametrizations.method import KernelMethod
from trysquare.nn.parametrizations.projection import refuse_kernel, refuse_singular_values


class Contraction(Parametrization):
    """A kernel ``(hidden, channels / groups, *k)`` of norm at most 1 on every domain; groups are independent."""

    def __init__(self, shape: tuple[int, ...], groups: int = 1, **factory: Unpack[Factory]) -> None:
        super().__init__(**factory)
        self.shape, self.groups = shape, groups

    @property
    def weight_shape(self) -> tuple[int, ...]:
        return self.shape

    @property
    def dims(self) -> int:
        """Number of spatial axes of the kernel."""
        return len(self.shape) - 2

    def _by_group(self, tensor: Tensor) -> Tensor:
        """Return a kernel or weights with the hidden channels of each group on the second axis."""
        return tensor.unflatten(0, (self.groups, -1))

    def _draw_kernel(self) -> Tensor:
        return torch.randn(self.shape, dtype=torch.float64) / prod(self.shape[1:]) ** 0.5


def _contracted(groups: Tensor, steps: int, dims: int) -> Tensor:
    """Return kernels ``(groups, out, in, *k)``, each divided by a bound of its norm, as one kernel of groups."""
    kernel, _ = scaled_to_one(groups, dims=dims)
    bound = norm_bound(kernel, steps, dims=dims)
    return (kernel / torch.where(bound > 0, bound, 1.0)[(..., *(None,) * (kernel.ndim - 1))]).flatten(0, 1)


class NormContraction(Contraction):
    """``K / bound`` for a free kernel ``K`` and an upper bound of its norm, in each group.

    Args:
        shape: of the kernel.
        groups: number of groups.
        steps: of ``trysquare.linalg.norm_bound``.
        factory: device and dtype.
    """

    def __init__(self, shape: tuple[int, ...], groups: int = 1, steps: int = 4, **factory: Unpack[Factory]) -> None:
        super().__init__(shape, groups, **factory)
        (self.steps,) = per_axis("steps", steps, 1, least=0)

    def draw(self) -> list[Tensor]:
        """Return a normal kernel."""
        return [self._draw_kernel()]

    def build(self, *free: Tensor) -> Tensor:
        return _contracted(self._by_group(free[0]), self.steps, self.dims)

    def solve(self, weight: Tensor) -> list[Tensor]:
        """Return the weight itself: its bound is 1."""
        return [weight]

    def extra_repr(self) -> str:
        return f"{self.shape}, steps={self.steps}"


class SpectralMatrix(NormContraction):
    """The weight of a linear layer; it starts orthonormal."""

    def draw(self) -> list[Tensor]:
        """Return a uniformly distributed orthonormal matrix."""
        return [random_orthonormal(*self.shape)]

    def refuse_unreachable(self, weight: Tensor) -> None:
        refuse_singular_values(torch.linalg.svdvals(weight), "this matrix amplifies", contraction=True)


class Spectral(KernelMethod):
    """``K / bound`` as the kernel of a layer; it starts as nearly orthogonal as that of ``aol``.

    Args:
        geometry: numbers of the layer.
        orthogonalizer_name: not used; there is no orthonormal matrix.
        steps: squarings and frequencies in ``trysquare.linalg.norm_bound``: more are tighter and cost more.
        factory: device and dtype.
    """

    orthogonal: ClassVar[bool] = False
    uses_orthogonalizer: ClassVar[bool] = False
    options: ClassVar[tuple[str, ...]] = ("steps",)

    def __init__(
        self, geometry: ConvGeometry, orthogonalizer_name: str, steps: int = 4, **factory: Unpack[Factory]
    ) -> None:
        super().__init__(geometry, orthogonalizer_name, **factory)
        (self.steps,) = per_axis("steps", steps, 1, least=0)

    @property
    def alike(self) -> None:
        """Nothing: kernels are divided one by one."""
        return None

    def draw(self) -> list[Tensor]:
        """Return a kernel that is orthonormal in some middle taps, with a little noise."""
        return [nearly_orthogonal(self.geometry).flatten(0, 1)]

    def build(self, *free: Tensor) -> Tensor:
        return _contracted(free[0].unflatten(0, (self.geometry.groups, -1)), self.steps, free[0].ndim - 2)

    def solve(self, weight: Tensor) -> list[Tensor]:
        """Return the weight itself: its bound is 1."""
        return [weight]

    def refuse_unreachable(self, weight: Tensor) -> None:
        refuse_kernel(weight, self.geometry, contraction=True)

    def extra_repr(self) -> str:
        return f"{self.weight_shape}, steps={self.steps}"
