"""Shifts of channels and learned positions: with orthogonal 1x1 layers, a network that needs no larger kernels.

A circular convolution of one channel is an isometry only if its kernel is a single tap of size 1, which is a shift.
LipNeXt (2026) therefore mixes neighbours by shifts, and channels by orthogonal matrices.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, fx, nn

from trysquare.naming import shown
from trysquare.nn.geometry import flag, per_axis, positive
from trysquare.nn.layers.invertible import Isometry
from trysquare.nn.layers.traceable import Traceable
from trysquare.nn.linalg.checks import require_dense
from trysquare.nn.parametrizations.base import Device, factory_for

__all__ = ["ChannelShift", "Positions"]


class ChannelShift(Traceable, Isometry, nn.Module):
    """Shift groups of channels by one position, circularly: each along one axis, forwards or backwards.

    Isometric: it permutes. Of every axis behind the channels, two groups are shifted, and the other channels stay.

    Args:
        share: of the channels in each of these groups, rounded down: an eighth or a sixteenth is usual.
        dims: number of axes behind the channels.
        back: shift the other way.

    >>> ChannelShift(0.25, dims=1)(torch.arange(12.0).view(1, 4, 3))
    tensor([[[ 2.,  0.,  1.],
             [ 4.,  5.,  3.],
             [ 6.,  7.,  8.],
             [ 9., 10., 11.]]])
    """

    def __init__(self, share: float = 0.125, dims: int = 2, back: bool = False) -> None:
        super().__init__()
        self.dims = positive("dims", dims)
        if not isinstance(share, int | float) or not 0 < share <= 1 / (2 * self.dims):
            raise ValueError(
                f"share={shown(share)} of the channels must be above 0, and at most {1 / (2 * self.dims):g} for "
                f"{2 * self.dims} groups"
            )
        self.share, self.back = float(share), flag("back", back)

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        if not isinstance(input, fx.Proxy):
            if input.ndim != self.dims + 2:
                raise ValueError(
                    f"an input of shape {tuple(input.shape)} must be (batch, channels) and {self.dims} more axes: "
                    "dims says how many"
                )
            if math.floor(self.share * input.shape[1]) < 1:
                raise ValueError(f"a share of {self.share:g} of {input.shape[1]} channels is none: take a larger one")
        return self.plain_forward(input)

    def plain_forward(self, input: Tensor) -> Tensor:  # noqa: A002
        size = math.floor(self.share * input.shape[1])
        steps = [(axis, -step if self.back else step) for axis in range(2, self.dims + 2) for step in (1, -1)]
        parts = [
            torch.roll(input[:, place * size : (place + 1) * size], step, axis)
            for place, (axis, step) in enumerate(steps)
        ]
        return torch.cat([*parts, input[:, len(steps) * size :]], dim=1)

    def inverse(self) -> ChannelShift:
        """Return the module that shifts back."""
        return ChannelShift(self.share, self.dims, not self.back)

    adjoint = inverse

    def extra_repr(self) -> str:
        return f"share={self.share:g}, dims={self.dims}" + ", back=True" * self.back


class Positions(Traceable, Isometry, nn.Module):
    """Add a learned number at each position, so that layers that treat all positions alike can tell them apart.

    Isometric: a translation. The numbers start at 0.

    Args:
        shape: of an input without the batch; axes of size 1 share their numbers.
        device: of the parameter.
        dtype: of the parameter.

    >>> Positions((4, 8, 8))(torch.ones(2, 4, 8, 8)).shape
    torch.Size([2, 4, 8, 8])
    """

    def __init__(self, shape: Sequence[int], device: Device = None, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        if not isinstance(shape, tuple | list) or not shape:
            raise TypeError(f"shape={shown(shape)} must be that of an input without the batch, such as (64, 8, 8)")
        sizes = per_axis("shape", shape, len(shape))
        self.bias = nn.Parameter(torch.zeros(sizes, **factory_for(device, dtype)))

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        return self.plain_forward(input) if isinstance(input, fx.Proxy) else input + self._fitting(input)

    def plain_forward(self, input: Tensor) -> Tensor:  # noqa: A002
        return input + self.bias

    def _fitting(self, x: Tensor) -> Tensor:
        sizes, wanted = require_dense("input", x).shape[1:], self.bias.shape
        if len(sizes) != len(wanted) or any(own not in (1, size) for size, own in zip(sizes, wanted, strict=True)):
            raise ValueError(f"positions of shape {tuple(wanted)} do not fit an input of shape {tuple(x.shape)}")
        return self.bias.to(x.dtype)

    def inverse(self) -> nn.Module:
        """Return the module that subtracts the numbers; it shares them."""
        return _WithoutPositions(self)

    def extra_repr(self) -> str:
        return f"{tuple(self.bias.shape)}"


class _WithoutPositions(Traceable, Isometry, nn.Module):
    """The inverse of ``Positions``."""

    def __init__(self, positions: Positions) -> None:
        super().__init__()
        self.positions = positions

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        return self.plain_forward(input) if isinstance(input, fx.Proxy) else input - self.positions._fitting(input)

    def plain_forward(self, input: Tensor) -> Tensor:  # noqa: A002
        return input - self.positions.bias

    def inverse(self) -> Positions:
        """Return the module that adds them."""
        return self.positions
