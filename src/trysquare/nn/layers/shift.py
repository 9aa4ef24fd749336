"""Shifts of channels and learned positions: with orthogonal 1x1 layers, a network that needs no larger kernels.

A circular convolution of one channel is an isometry only if its kernel is a single tap of size 1, which is a shift.
LipNeXt (2026) therefore mixes neighbours by shifts, and channels by orthogonal matrices.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from trysquare.naming import shown
from trysquare.nn.geometry import flag, per_axis
from trysquare.nn.layers.invertible import Isometry
from trysquare.nn.parametrizations.base import Device

__all__ = ["ChannelShift", "Positions"]


class ChannelShift(Isometry, nn.Module):
    """Shift groups of channels by one position, circularly: each along one axis, forwards or backwards.

    Isometric: it permutes. Of every axis behind the channels, two groups are shifted, and the other channels stay.

    Args:
        share: of the channels in each of these groups, rounded down: an eighth or a sixteenth is usual.
        back: shift the other way.

    >>> ChannelShift(0.25)(torch.arange(12.0).view(1, 4, 3))
    tensor([[[ 2.,  0.,  1.],
             [ 4.,  5.,  3.],
             [ 6.,  7.,  8.],
             [ 9., 10., 11.]]])
    """

    def __init__(self, share: float = 0.125, back: bool = False) -> None:
        super().__init__()
        if not isinstance(share, int | float) or not 0 < share <= 0.5:
            raise ValueError(f"share={shown(share)} of the channels must be above 0 and at most a half")
        self.share, self.back = float(share), flag("back", back)

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        """Shift each group."""
        if input.ndim < 3:
            raise ValueError(f"an input of shape {tuple(input.shape)} has no axis to shift behind (batch, channels)")
        channels, axes = input.shape[1], range(2, input.ndim)
        size = int(self.share * channels)
        if not size or 2 * len(axes) * size > channels:
            raise ValueError(
                f"{2 * len(axes)} groups of {size} channels, a share of {self.share:g} each, must be made of "
                f"{channels}: take another share, at most {1 / (2 * len(axes)):g}"
            )
        *groups, rest = input.split([*[size] * (2 * len(axes)), channels - 2 * len(axes) * size], dim=1)
        steps = [(axis, -step if self.back else step) for axis in axes for step in (1, -1)]
        moved = [group.roll(step, axis) for group, (axis, step) in zip(groups, steps, strict=True)]
        return torch.cat([*moved, rest], dim=1)

    def inverse(self) -> ChannelShift:
        """Return the module that shifts back."""
        return ChannelShift(self.share, not self.back)

    adjoint = inverse

    def extra_repr(self) -> str:
        return f"share={self.share:g}" + ", back=True" * self.back


class Positions(Isometry, nn.Module):
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
        self.bias = nn.Parameter(torch.zeros(sizes, device=device, dtype=dtype))

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        """Add the numbers."""
        return input + self._fitting(input)

    def _fitting(self, x: Tensor) -> Tensor:
        sizes, wanted = x.shape[1:], self.bias.shape
        if len(sizes) != len(wanted) or any(own not in (1, size) for size, own in zip(sizes, wanted, strict=True)):
            raise ValueError(f"positions of shape {tuple(wanted)} do not fit an input of shape {tuple(x.shape)}")
        return self.bias.to(x.dtype)

    def inverse(self) -> nn.Module:
        """Return the module that subtracts the numbers; it shares them."""
        return _WithoutPositions(self)

    def extra_repr(self) -> str:
        return f"{tuple(self.bias.shape)}"


class _WithoutPositions(Isometry, nn.Module):
    """The inverse of ``Positions``."""

    def __init__(self, positions: Positions) -> None:
        super().__init__()
        self.positions = positions

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        """Take the numbers off."""
        return input - self.positions._fitting(input)

    def inverse(self) -> Positions:
        """Return the module that adds them."""
        return self.positions
