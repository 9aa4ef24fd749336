"""The residual depthwise block of the paper."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import nn

from trysquare.nn.geometry import Size, positive
from trysquare.nn.layers.activations import MaxMin
from trysquare.nn.layers.conv import CONVOLUTION
from trysquare.nn.layers.residual import LearnableResidual
from trysquare.nn.parametrizations.base import Device

__all__ = ["DepthwiseResidualBlock1d", "DepthwiseResidualBlock2d", "DepthwiseResidualBlock3d"]


class _DepthwiseResidualBlock(LearnableResidual):
    dims: ClassVar[int] = 2

    def __init__(
        self,
        channels: int,
        kernel_size: Size = 3,
        multiplier: int = 2,
        bias: bool = True,
        padding_mode: str = "circular",
        scale: float = 1.0,
        device: Device = None,
        dtype: torch.dtype | None = None,
        **convolution: Any,
    ) -> None:
        hidden = positive("multiplier", multiplier) * positive("channels", channels)
        if hidden % 2:
            raise ValueError(f"channels={channels} x multiplier={multiplier} is odd, but MaxMin sorts pairs")
        options = {"bias": bias, "padding_mode": padding_mode, "device": device, "dtype": dtype, **convolution}
        layer = CONVOLUTION[self.dims]
        branch = nn.Sequential(
            layer(channels, hidden, kernel_size, groups=channels, **options),
            MaxMin(dim=-1 - self.dims),
            layer(hidden, channels, 1, **options),
        )
        super().__init__(branch, scale=scale, device=device, dtype=dtype)


class DepthwiseResidualBlock1d(_DepthwiseResidualBlock):
    """The block in one dimension; see ``DepthwiseResidualBlock2d``."""

    dims = 1


class DepthwiseResidualBlock2d(_DepthwiseResidualBlock):
    """Depthwise convolution that doubles the channels, ``MaxMin``, pointwise convolution, learnable skip.

    1-Lipschitz. The depthwise layer needs the multiplier: with one output for each input there is
    nothing to learn, because the only orthogonal filters are shifts.

    Args:
        channels: channels of input and output.
        kernel_size: size of the depthwise kernel (the paper: 3 for CIFAR-10, 5 for ImageNet).
        multiplier: outputs of the depthwise layer for each input channel, at least 2; the hidden
            channels must be even.
        bias: whether the convolutions have a bias.
        padding_mode: ``"circular"`` or ``"zeros"``.
        scale: first value of the factor in front of the branch.
        device: device of the parameters.
        dtype: dtype of the weights.
        convolution: further arguments for both convolutions, such as ``orthogonalizer``.

    >>> DepthwiseResidualBlock2d(8)(torch.randn(1, 8, 6, 6)).shape
    torch.Size([1, 8, 6, 6])
    """

    dims = 2


class DepthwiseResidualBlock3d(_DepthwiseResidualBlock):
    """The block in three dimensions; see ``DepthwiseResidualBlock2d``."""

    dims = 3
