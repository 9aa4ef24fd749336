"""SOC without its kernel: the terms of the exponential are applied to the input one after the other.

The kernel that they add up to has ``terms (k - 1) + 1`` taps on each axis. In two and three dimensions these are many
more than those of ``terms`` small kernels, and adding them up for each step of training costs more than most batches.
For backward a map is kept for each term. Which of the two ways a layer takes is decided when it is built.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Self

import torch.nn.functional as F
from torch import Tensor

from trysquare.nn.geometry import ConvGeometry
from trysquare.nn.layers.convolution import Convolution
from trysquare.nn.linalg.precision import as_autocast, is_traced
from trysquare.nn.parametrizations import SOC, Parametrization


@dataclass(frozen=True)
class Series:
    """How ``matrix ∘ exp(skew)``, or its adjoint, is applied to an input on a circular domain.

    Attributes:
        geometry: numbers of the convolution.
        coefficients: of the polynomial that stands for the exponential, from the constant one upwards.
        skew: how the skew kernel is applied, in every term.
        matrix: how the matrix is applied.
    """

    geometry: ConvGeometry
    coefficients: list[float]
    skew: Convolution
    matrix: Convolution

    @classmethod
    def of(cls, parametrization: Parametrization, geometry: ConvGeometry, whole: Convolution) -> Self | None:
        """Return the series of a layer, if it takes fewer products than the ``whole`` kernel and does the same.

        It does not do the same with zeros around the map, because every term would be padded, nor where the padding is
        less than that of the terms, nor where there is a stride but no matrix to do it. Each term is rounded, and the
        rest of the series amplifies that up to ``exp(norm)`` times.
        """
        if not isinstance(parametrization, SOC) or whole.mode != "circular" or parametrization.norm > 1:
            return None
        k, terms = parametrization.skew_size, parametrization.terms
        halves = [d * (size - 1) // 2 for size, d in zip(k, whole.dilation, strict=True)]
        axes = zip(whole.pads, halves, strict=True)
        rest = tuple((left - terms * half, right - terms * half) for (left, right), half in axes)
        if min(map(min, rest)) < 0 or (max(whole.stride) > 1 and prod(geometry.reach) == 1):
            return None
        # Products for each position of the map without stride, where the terms are applied.
        by_terms = terms * prod(k) * geometry.inner_channels**2
        by_kernel = prod(whole.kernel_size) * geometry.group_in * geometry.group_out / prod(whole.stride)
        if by_terms >= by_kernel:
            return None
        skew = Convolution.same(k, (1,) * whole.dims, whole.dilation, whole.groups, "circular")
        matrix = Convolution(
            geometry.reach, whole.stride, whole.dilation, whole.groups, rest, "circular", whole.transposed
        )
        # The adjoint of ``S``, which a transposed convolution is about, is ``-S``.
        sign = -1 if geometry.transposed else 1
        coefficients = [a * sign**j for j, a in enumerate(parametrization.coefficients)]
        return cls(geometry, coefficients, skew, matrix)

    def __call__(self, x: Tensor, matrix: Tensor | None, skew: Tensor, bias: Tensor | None) -> Tensor:
        """Apply the factors, see ``SOC.factors``, to ``(batch, channels, *sizes)``, or without the batch."""
        if self._rotates_first:
            y = self._mixed(self._rotated(self._widened(x), skew), matrix)
        else:
            y = self._narrowed(self._rotated(self._mixed(x, matrix), skew))
        return as_autocast(y if bias is None else y + bias.view(-1, *(1,) * self.skew.dims))

    @property
    def _rotates_first(self) -> bool:
        """Whether the rotation comes before the matrix, as in convolutions that are not built from their adjoint."""
        return self.geometry.built_from_adjoint == self.geometry.transposed

    def _rotated(self, x: Tensor, skew: Tensor) -> Tensor:
        """Return ``Σ_j coefficients[j] Sʲ x`` by Horner's scheme."""
        *lower, last = self.coefficients
        y = last * x
        traced = is_traced()  # torch.func.linearize crashes in `add` with `alpha` (torch 2.13)
        for coefficient in reversed(lower):
            y = self.skew(y, skew)
            y = y + coefficient * x if traced else y.add(x, alpha=coefficient)
        return y

    def _mixed(self, x: Tensor, matrix: Tensor | None) -> Tensor:
        return x if matrix is None else self.matrix(x, matrix)

    @property
    def _missing(self) -> int:
        """Channels of a group that the skew kernel has and the input of the convolution has not."""
        return 0 if self.geometry.built_from_adjoint else self.geometry.inner_channels - self.geometry.group_in

    def _widened(self, x: Tensor) -> Tensor:
        """Append zeros for the channels that are missing."""
        if not self._missing:
            return x
        axis = -1 - self.skew.dims
        groups = x.unflatten(axis, (self.geometry.groups, self.geometry.group_in))
        return F.pad(groups, [*(0, 0) * self.skew.dims, 0, self._missing]).flatten(axis - 1, axis)

    def _narrowed(self, y: Tensor) -> Tensor:
        """Apply the adjoint of ``_widened``."""
        if not self._missing:
            return y
        axis = -1 - self.skew.dims
        groups = y.unflatten(axis, (self.geometry.groups, -1))
        return groups.narrow(axis, 0, self.geometry.group_in).flatten(axis - 1, axis)
