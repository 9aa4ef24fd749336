"""Convex potential layers (Meunier et al., 2022): residual blocks made 1-Lipschitz by one norm."""

from __future__ import annotations

from typing import Unpack

import torch
from torch import Tensor

from trysquare.nn.geometry import per_axis
from trysquare.nn.layers.potential import Contraction, PotentialConv, PotentialLinear
from trysquare.nn.linalg.norms import norm_bound
from trysquare.nn.linalg.rescaling import scaled_to_one
from trysquare.nn.parametrizations.base import Factory

__all__ = ["CPLBlock1d", "CPLBlock2d", "CPLBlock3d", "CPLLinear"]


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

    @property
    def free_shapes(self) -> tuple[tuple[int, ...], ...]:
        return (self.shape,)

    def draw(self) -> list[Tensor]:
        """Return a normal kernel."""
        return [self._draw_kernel()]

    def build(self, *free: Tensor) -> Tensor:
        """Divide by the bound."""
        kernel, _ = scaled_to_one(self._by_group(free[0]), dims=self.dims)
        bound = norm_bound(kernel, self.steps, dims=self.dims)
        return (kernel / torch.where(bound > 0, bound, 1.0)[(..., *(None,) * (kernel.ndim - 1))]).flatten(0, 1)

    def solve(self, weight: Tensor) -> list[Tensor]:
        """Return the weight itself: its bound is 1."""
        return [weight]

    def extra_repr(self) -> str:
        return f"{self.shape}, steps={self.steps}"


class CPLLinear(PotentialLinear):
    """``x - (2 / ‖W‖) Wᵀ σ(W x / ‖W‖ + b)`` for vectors, 1-Lipschitz; ``‖W‖`` is bounded from above.

    Args:
        features: size of input and output.
        hidden_features: rows of ``W``; ``features`` if not given.
        bias: whether there is a learnable ``b``.
        device: device of the parameters.
        dtype: dtype of the weight; free tensors are kept in float32 or float64.
        activation: acts entry by entry with slopes between 0 and 1; ReLU if not given.
        steps: squarings in ``trysquare.linalg.norm_bound``, 4 if not given: the norm is then at least 0.9 of the bound.

    >>> CPLLinear(16, 32)(torch.randn(2, 16)).shape
    torch.Size([2, 16])
    """

    contraction = NormContraction
    _options = ("steps",)


class _CPLBlock(PotentialConv):
    contraction = NormContraction
    _options = ("steps",)


class CPLBlock1d(_CPLBlock):
    """The block in one dimension; see ``CPLBlock2d``."""

    dims = 1


class CPLBlock2d(_CPLBlock):
    """``x - (2 / ‖K‖) Kᵀ σ(K x / ‖K‖ + b)`` with a convolution ``K``, 1-Lipschitz.

    The norm is bounded from above on feature maps of every size (``trysquare.linalg.norm_bound``).
    The power iteration of the original method approaches it from below, and so does not certify.


    Args:
        channels: channels of input and output.
        hidden_channels: channels of ``K x``; ``channels`` if not given.
        kernel_size: size of the kernel.
        dilation: spacing of the taps.
        groups: number of independent groups of channels.
        bias: whether there is a learnable ``b``.
        padding_mode: ``"circular"`` or ``"zeros"``.
        device: device of the parameters.
        dtype: dtype of the weight; free tensors are kept in float32 or float64.
        activation: acts entry by entry with slopes between 0 and 1; ReLU if not given.
        steps: squarings and frequencies in ``trysquare.linalg.norm_bound``, 4 if not given: the norm is then about 0.9
            of the bound. More are tighter and cost more.

    >>> CPLBlock2d(8)(torch.randn(1, 8, 6, 6)).shape
    torch.Size([1, 8, 6, 6])
    """

    dims = 2


class CPLBlock3d(_CPLBlock):
    """The block in three dimensions; see ``CPLBlock2d``."""

    dims = 3
