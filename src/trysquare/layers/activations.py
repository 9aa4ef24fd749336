"""Activations that never amplify, and most of them never attenuate: their Jacobians are orthogonal.

Sorting permutes, a Householder activation reflects, the others change signs. All of them are written so that the
Jacobian that autograd sees is orthogonal at ties and kinks too.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from trysquare.linalg.precision import at_least_float32
from trysquare.linalg.sorting import max_min


def _check_positive(name: str, value: int) -> None:
    if not isinstance(value, int) or value < 1:
        raise ValueError(f"{name}={value!r} must be a positive integer")


def _grouped(x: Tensor, group_size: int, dim: int) -> Tensor:
    """Split axis ``dim`` into neighbours: ``(..., channels / group_size, group_size, ...)``."""
    channels = x.shape[dim]
    if channels % group_size:
        raise ValueError(
            f"{channels} channels on axis {dim} cannot be split into groups of {group_size}; use a multiple of "
            f"{group_size}, such as {-(-channels // group_size) * group_size}"
        )
    return x.unflatten(dim, (channels // group_size, group_size))


def _after(dim: int) -> int:
    """The axis that ``unflatten`` puts after the group's own, whether counted from the front or the back."""
    return dim + 1 if dim >= 0 else dim


class MaxMin(nn.Module):
    """Sort neighbouring channels in pairs, larger first: ``GroupSort(2)``, faster.

    Isometric: it permutes. Channels ``2i`` and ``2i + 1`` make a pair, so that the outputs of a
    depthwise layer with multiplier 2 are sorted by input channel.

    Args:
        dim: axis of the channels, of even size.

    >>> MaxMin()(torch.tensor([[1.0, 2.0, 4.0, 3.0]]))
    tensor([[2., 1., 4., 3.]])
    """

    def __init__(self, dim: int = 1) -> None:
        super().__init__()
        self.dim = dim

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        """Sort pairs."""
        axis = _after(self.dim)
        return max_min(_grouped(input, 2, self.dim), axis).flatten(*_merged(axis))

    def extra_repr(self) -> str:
        """Axis, where it is not torch's."""
        return "" if self.dim == 1 else f"dim={self.dim}"


def _merged(axis: int) -> tuple[int, int]:
    return axis - 1, axis


class GroupSort(nn.Module):
    """Sort neighbouring channels in groups, largest first. Isometric: it permutes.

    Args:
        group_size: channels that are sorted together; must divide the number of channels.
        dim: axis of the channels.

    >>> GroupSort(3)(torch.tensor([[1.0, 3.0, 2.0, 4.0, 6.0, 5.0]]))
    tensor([[3., 2., 1., 6., 5., 4.]])
    """

    def __init__(self, group_size: int, dim: int = 1) -> None:
        super().__init__()
        _check_positive("group_size", group_size)
        self.group_size, self.dim = group_size, dim

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        """Sort groups."""
        axis = _after(self.dim)
        groups = _grouped(input, self.group_size, self.dim)
        return groups.sort(axis, descending=True).values.flatten(*_merged(axis))

    def extra_repr(self) -> str:
        """Size of the groups."""
        return f"group_size={self.group_size}" + ("" if self.dim == 1 else f", dim={self.dim}")


class FullSort(nn.Module):
    """Sort all channels, largest first. Isometric: it permutes.

    Args:
        dim: axis of the channels.

    >>> FullSort()(torch.tensor([[1.0, 3.0, 2.0]]))
    tensor([[3., 2., 1.]])
    """

    def __init__(self, dim: int = 1) -> None:
        super().__init__()
        self.dim = dim

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        """Sort channels."""
        return input.sort(self.dim, descending=True).values

    def extra_repr(self) -> str:
        """Axis, where it is not torch's."""
        return "" if self.dim == 1 else f"dim={self.dim}"


class Abs(nn.Module):
    """Absolute value. Isometric: it changes signs (the slope at 0 is taken as 1).

    >>> Abs()(torch.tensor([-1.0, 2.0]))
    tensor([1., 2.])
    """

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        """Absolute value."""
        # A factor and not abs(): its slope at 0 is 0.
        return input * torch.where(input < 0, -1.0, 1.0).to(input.dtype)


class Householder(nn.Module):
    """Fold the plane of each pair of channels along learnable lines (Singla, Singla and Feizi, 2022).

    One fold keeps the half plane on one side of the line through 0 at angle ``theta / 2`` and
    reflects the other half onto it: ``z - 2 min(v·z, 0) v`` with ``v = (sin(theta / 2),
    -cos(theta / 2))``. An activation of order ``n`` folds ``n`` times, each time with an angle of
    its own; with order 2 the plane falls into sectors that are kept, reflected or rotated. A
    composition of folds is continuous and isometric: every piece is orthogonal.

    Args:
        channels: number of channels, even; ``2i`` and ``2i + 1`` make a pair.
        order: number of folds.
        dim: axis of the channels.
        device: device of the angles.
        dtype: dtype of the angles.

    Order 1 starts as ``MaxMin`` (``theta = pi / 2``), and each further fold halves the wedge that
    the ones before left.

    >>> Householder(4)(torch.tensor([[1.0, 2.0, 4.0, 3.0]])).detach().round(decimals=4)
    tensor([[2., 1., 4., 3.]])
    """

    def __init__(self, channels: int, order: int = 1, dim: int = 1, device: Any = None, dtype: Any = None) -> None:
        super().__init__()
        _check_positive("channels", channels)
        _check_positive("order", order)
        if channels % 2:
            raise ValueError(f"channels={channels} cannot be split into pairs; use {channels + 1}")
        self.channels, self.order, self.dim = channels, order, dim
        self.theta = nn.Parameter(torch.empty(order, channels // 2, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Each fold halves what the ones before left of the plane."""
        # The first keeps directions from pi / 4 - pi to pi / 4; the middle of what is left is the next line.
        with torch.no_grad():
            for fold in range(self.order):
                self.theta[fold] = 2 * (math.pi / 4 - math.pi * (1 - 0.5**fold))

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        """Fold each pair of channels ``order`` times."""
        if input.shape[self.dim] != self.channels:
            raise ValueError(f"input has {input.shape[self.dim]} channels on axis {self.dim}, not {self.channels}")
        axis = _after(self.dim)
        first, second = _grouped(input, 2, self.dim).unbind(axis)
        trailing = first.ndim - 1 - self.dim if self.dim >= 0 else -1 - self.dim
        half = 0.5 * self.theta.to(at_least_float32(self.theta.dtype))
        normals = torch.stack((half.sin(), -half.cos())).to(input.dtype)
        for x, y in normals.unbind(1):
            x, y = (side.view(-1, *(1,) * trailing) for side in (x, y))
            outside = 2 * torch.clamp(first * x + second * y, max=0)
            first, second = first - outside * x, second - outside * y
        return torch.stack((first, second), axis).flatten(*_merged(axis))

    def extra_repr(self) -> str:
        """Channels and order."""
        return f"{self.channels}, order={self.order}" + ("" if self.dim == 1 else f", dim={self.dim}")


class NActivation(nn.Module):
    """``x - 2 clamp(x, low, high)``: slopes 1, -1, 1 with learnable kinks in each channel (Prach and Lampert, 2024).

    Isometric: the slope is 1 or -1 everywhere.

    Args:
        channels: number of channels.
        low: first kink at the start.
        high: second kink at the start. The default pair is the absolute value near 0; equal kinks
            are a linear activation.
        dim: axis of the channels.
        device: device of the kinks.
        dtype: dtype of the kinks.

    >>> NActivation(1)(torch.tensor([[-3.0], [-0.5], [2.0]])).flatten().detach()
    tensor([-1.0000,  0.5000,  2.0000])
    """

    def __init__(
        self, channels: int, low: float = -1.0, high: float = 0.0, dim: int = 1, device: Any = None, dtype: Any = None
    ) -> None:
        super().__init__()
        _check_positive("channels", channels)
        if low > high:
            raise ValueError(f"low={low} must not be above high={high}")
        self.channels, self.start, self.dim = channels, (low, high), dim
        self.kinks = nn.Parameter(torch.empty(2, channels, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """The kinks given to the constructor."""
        with torch.no_grad():
            for kink, value in zip(self.kinks, self.start, strict=True):
                kink.fill_(value)

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        """Reflect the values between the kinks."""
        if input.shape[self.dim] != self.channels:
            raise ValueError(f"input has {input.shape[self.dim]} channels on axis {self.dim}, not {self.channels}")
        trailing = input.ndim - 1 - self.dim if self.dim >= 0 else -1 - self.dim
        first, second = self.kinks.to(input.dtype).view(2, -1, *(1,) * trailing).unbind()
        # Training may carry the kinks past each other.
        return input - 2 * torch.clamp(input, torch.minimum(first, second), torch.maximum(first, second))

    def extra_repr(self) -> str:
        """Channels."""
        return f"{self.channels}" + ("" if self.dim == 1 else f", dim={self.dim}")


_MONOTONE = (
    nn.Hardsigmoid,
    nn.Hardtanh,
    nn.Identity,
    nn.LogSigmoid,
    nn.ReLU,
    nn.Sigmoid,
    nn.Softplus,
    nn.Softshrink,
    nn.Softsign,
    nn.Tanh,
    nn.Tanhshrink,
)


def with_slopes_in_unit_interval(activation: nn.Module | None) -> nn.Module:
    """``activation`` (ReLU if there is none), if it is known to act entry by entry with slopes between 0 and 1.

    Residual and sandwich blocks are 1-Lipschitz for these activations only: with ``MaxMin``, say,
    they amplify up to three times.

    Raises:
        ValueError: if it is not known to.
    """
    if activation is None:
        return nn.ReLU()
    leaky = isinstance(activation, nn.LeakyReLU) and 0 <= activation.negative_slope <= 1
    exponential = isinstance(activation, nn.ELU | nn.CELU) and 0 <= activation.alpha <= (
        1 if isinstance(activation, nn.ELU) else math.inf
    )
    if leaky or exponential or isinstance(activation, _MONOTONE):
        return activation
    names = ", ".join(kind.__name__ for kind in _MONOTONE)
    raise ValueError(
        f"activation={activation!r} is not known to act entry by entry with slopes between 0 and 1, which the block "
        f"needs to be 1-Lipschitz; use one of {names}, or LeakyReLU, ELU, CELU with slopes in that range"
    )
