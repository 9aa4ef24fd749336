"""Activations that never amplify, and most of them never attenuate: their Jacobians are orthogonal.

Sorting permutes, a Householder activation reflects, the others change signs. All of them are written so that the
Jacobian that autograd sees is orthogonal at ties and kinks too.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, fx, nn

from trysquare import torch_internals
from trysquare.naming import shown
from trysquare.nn.geometry import Sizes, flag, number, positive
from trysquare.nn.layers.traceable import Traceable
from trysquare.nn.linalg.lattice import ROUND_UP
from trysquare.nn.linalg.operator import checked_weight
from trysquare.nn.linalg.precision import at_least_float32
from trysquare.nn.linalg.sorting import max_min
from trysquare.nn.parametrizations.base import Device, factory_for

__all__ = ["Abs", "FullSort", "GroupSort", "Householder", "MaxMin", "NActivation", "SoftHuber"]


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
    """Return the axis that ``unflatten`` puts after the group's own, whether counted from the front or the back."""
    return dim + 1 if dim >= 0 else dim


class MaxMin(Traceable, nn.Module):
    """Sort neighbouring channels in pairs, larger first: ``GroupSort(2)``, faster.

    Isometric: it permutes. Channels ``2i`` and ``2i + 1`` make a pair, so that the outputs of a
    depthwise layer with multiplier 2 are sorted by input channel.

    Args:
        dim: axis of the channels, of even size.
        halves: whether channel ``i`` makes a pair with the one half of the channels further on instead, as in most
            other libraries: all larger ones come first, then all smaller ones.

    >>> MaxMin()(torch.tensor([[1.0, 2.0, 4.0, 3.0]]))
    tensor([[2., 1., 4., 3.]])
    >>> MaxMin(halves=True)(torch.tensor([[1.0, 2.0, 4.0, 3.0]]))
    tensor([[4., 3., 1., 2.]])
    """

    def __init__(self, dim: int = 1, *, halves: bool = False) -> None:
        super().__init__()
        self.dim, self.halves = dim, flag("halves", halves)

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        if isinstance(input, fx.Proxy):
            return self.plain_forward(input)
        axis = _after(self.dim)
        pairs = _grouped(input, 2, self.dim)
        ordered = max_min(input.unflatten(self.dim, (2, -1)), axis - 1) if self.halves else max_min(pairs, axis)
        return ordered.flatten(*_merged(axis))

    def plain_forward(self, input: Tensor) -> Tensor:  # noqa: A002
        axis = _after(self.dim) - self.halves
        pairs = input.unflatten(self.dim, (2, -1) if self.halves else (-1, 2))
        first, second = pairs.select(axis, 0), pairs.select(axis, 1)
        ordered = torch.stack((torch.maximum(first, second), torch.minimum(first, second)), axis)
        return ordered.flatten(*_merged(_after(self.dim)))

    def extra_repr(self) -> str:
        shown = ([] if self.dim == 1 else [f"dim={self.dim}"]) + ["halves=True"] * self.halves
        return ", ".join(shown)


def _merged(axis: int) -> tuple[int, int]:
    return axis - 1, axis


class GroupSort(Traceable, nn.Module):
    """Sort neighbouring channels in groups, largest first. Isometric: it permutes.

    Args:
        group_size: channels that are sorted together; must divide the number of channels.
        dim: axis of the channels.

    >>> GroupSort(3)(torch.tensor([[1.0, 3.0, 2.0, 4.0, 6.0, 5.0]]))
    tensor([[3., 2., 1., 6., 5., 4.]])
    """

    def __init__(self, group_size: int, dim: int = 1) -> None:
        super().__init__()
        self.group_size, self.dim = positive("group_size", group_size), dim

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        if isinstance(input, fx.Proxy):
            return self.plain_forward(input)
        axis = _after(self.dim)
        groups = _grouped(input, self.group_size, self.dim)
        return groups.sort(axis, descending=True).values.flatten(*_merged(axis))

    def plain_forward(self, input: Tensor) -> Tensor:  # noqa: A002
        axis = _after(self.dim)
        groups = input.unflatten(self.dim, (-1, self.group_size))
        return torch.sort(groups, dim=axis, descending=True)[0].flatten(*_merged(axis))

    def extra_repr(self) -> str:
        return f"group_size={self.group_size}" + ("" if self.dim == 1 else f", dim={self.dim}")


class FullSort(Traceable, nn.Module):
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
        return torch.sort(input, dim=self.dim, descending=True)[0]

    plain_forward = forward

    def extra_repr(self) -> str:
        return "" if self.dim == 1 else f"dim={self.dim}"


class Abs(Traceable, nn.Module):
    """Absolute value, of all numbers or of the first channels. Isometric: it changes signs (the slope at 0 is 1).

    Half of the channels is as good as ``MaxMin`` up to an orthogonal change of basis on either side, and cheaper.

    Args:
        share: of the channels, axis 1, rounded down; the others stay as they are.

    >>> Abs()(torch.tensor([-1.0, 2.0]))
    tensor([1., 2.])
    >>> Abs(share=0.5)(torch.tensor([[-1.0, -2.0]]))
    tensor([[ 1., -2.]])
    """

    def __init__(self, share: float = 1.0) -> None:
        super().__init__()
        if not isinstance(share, int | float) or not 0 <= share <= 1:
            raise ValueError(f"share={shown(share)} of the channels must be from 0 to 1")
        self.share = float(share)

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        if isinstance(input, fx.Proxy):
            return self.plain_forward(input)
        if self.share == 1:
            return _absolute(input)
        if input.ndim < 2:
            raise ValueError(f"an input of shape {tuple(input.shape)} must be (batch, channels, ...)")
        size = math.floor(self.share * input.shape[1])
        first, rest = input.split([size, input.shape[1] - size], dim=1)
        return torch.cat([_absolute(first), rest], dim=1)

    def plain_forward(self, input: Tensor) -> Tensor:  # noqa: A002
        if self.share == 1:
            return input.abs()
        size = math.floor(self.share * input.shape[1])
        return torch.cat([input[:, :size].abs(), input[:, size:]], dim=1)

    def extra_repr(self) -> str:
        return "" if self.share == 1 else f"share={self.share:g}"


def _absolute(x: Tensor) -> Tensor:
    if not torch.is_grad_enabled() and torch_internals.jit_trace() is None:
        return x.abs()
    # A factor and not abs(): its slope at 0 is 0.
    return x * torch.where(x < 0, -1.0, 1.0).to(x.dtype)


class SoftHuber(Traceable, nn.Module):
    """``δ (sqrt(1 + (x / δ)²) - 1)``: a smooth absolute value, with slopes between -1 and 1. 1-Lipschitz.

    Args:
        delta: size of ``x`` below which it is nearly ``x² / 2δ``.

    >>> SoftHuber(0.5)(torch.tensor([0.0, -1.2]))
    tensor([0.0000, 0.8000])
    """

    def __init__(self, delta: float = 0.05) -> None:
        super().__init__()
        self.delta = number("delta", delta)
        if not 0 < self.delta < math.inf:
            raise ValueError(f"delta={delta} must be positive and finite")

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        return torch.hypot(input, input.new_full((), self.delta)) - self.delta

    def plain_forward(self, input: Tensor) -> Tensor:  # noqa: A002
        return ((input / self.delta).square() + 1).sqrt() * self.delta - self.delta

    def lipschitz_constant(self, input_shape: Sizes, dtype: torch.dtype) -> float:
        """Slopes are below 1."""
        return 1.0

    def extra_repr(self) -> str:
        return f"delta={self.delta:g}"


class Householder(Traceable, nn.Module):
    """Fold the plane of each pair of channels along learnable lines (Singla, Singla and Feizi, 2022).

    Order 1 keeps the half plane on the left of the line through 0 at angle ``theta / 2`` and reflects
    the other half onto it: ``z - 2 min(v·z, 0) v`` with ``v = (-sin(theta / 2), cos(theta / 2))``.

    Order 2 has three angles and cuts the plane into four sectors. In polar coordinates, from the ray
    at angle ``theta0 / 2`` on,

    ================== ====================================== ==============================
    width              what is done                           direction ``p`` becomes
    ================== ====================================== ==============================
    ``theta1 / 2``     kept                                   ``p``
    ``theta2 / 2``     reflected by the ray before it         ``theta0 + theta1 - p``
    ``pi - theta1/2``  rotated                                ``p - theta2``
    ``pi - theta2/2``  reflected by the ray after it          ``theta0 - p``
    ================== ====================================== ==============================

    The directions agree on the four rays, so the activation is continuous, and as every piece is
    orthogonal it is isometric. A continuous map of this kind with four sectors is this one, up to a
    rotation of its outputs: its directions turn forwards and backwards in turn, and come back to where
    they started only if both amount to ``pi``. Order 1 is order 2 with ``theta1 = 2 pi``. The widths of
    ``theta1`` and ``theta2`` outside of ``[0, 2 pi]`` are folded back into it.

    Args:
        channels: number of channels, even; ``2i`` and ``2i + 1`` make a pair.
        order: 1 or 2.
        dim: axis of the channels.
        device: device of the angles.
        dtype: dtype of the angles.

    Order 1 starts as ``MaxMin`` (``theta = -3 pi / 2``; at the published start, ``pi / 2``, the smaller
    comes first), order 2 with sectors of equal widths.

    >>> Householder(4)(torch.tensor([[1.0, 2.0, 4.0, 3.0]])).detach().round(decimals=4)
    tensor([[2., 1., 4., 3.]])
    """

    def __init__(
        self, channels: int, order: int = 1, dim: int = 1, device: Device = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__()
        if positive("channels", channels) % 2:
            raise ValueError(f"channels={channels} cannot be split into pairs; use {channels + 1}")
        if positive("order", order) > 2:
            raise ValueError(f"order={order} must be 1 or 2")
        self.channels, self.order, self.dim = channels, order, dim
        self.theta = nn.Parameter(torch.empty(2 * order - 1, channels // 2, **factory_for(device, dtype)))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Half of the plane is kept (order 1), or a quarter (order 2)."""
        with torch.no_grad():
            self.theta.fill_(math.pi)
            self.theta[0] = -1.5 * math.pi

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        if isinstance(input, fx.Proxy):
            return self.plain_forward(input)
        if input.shape[self.dim] != self.channels:
            raise ValueError(f"input has {input.shape[self.dim]} channels on axis {self.dim}, not {self.channels}")
        axis = _after(self.dim)
        first, second = _grouped(input, 2, self.dim).unbind(axis)
        trailing = first.ndim - 1 - self.dim if self.dim >= 0 else -1 - self.dim
        theta = self.theta.to(at_least_float32(self.theta.dtype)).view(len(self.theta), -1, *(1,) * trailing)
        if self.order == 1:
            folded = _fold_in_half(first, second, theta[0])
        else:
            folded = _fold_in_four(first, second, theta, torch.promote_types(first.dtype, theta.dtype))
        return torch.stack(folded, axis).flatten(*_merged(axis))

    def plain_forward(self, input: Tensor) -> Tensor:  # noqa: A002
        pairs = input.transpose(self.dim, -1).unflatten(-1, (-1, 2))
        first, second = pairs.select(-1, 0), pairs.select(-1, 1)
        if self.order == 1:
            folded = _fold_in_half(first, second, self.theta[0])
        else:
            folded = _fold_in_four(first, second, self.theta, first.dtype)
        return torch.stack(folded, -1).flatten(-2, -1).transpose(self.dim, -1)

    def lipschitz_constant(self, input_shape: Sizes, dtype: torch.dtype) -> float:
        """Return the norm of the largest piece as it was rounded; see ``linalg.operator.LipschitzLayer``.

        In order 1 that is a fold by ``I - 2 v vᵀ``, of norm ``max(1, 2 |v|² - 1)``. In order 2 each of the four pieces
        has a cosine and a sine with an error of half a unit in the last place. The rounding of their borders moves the
        output as that of any sum does.
        """
        theta = checked_weight(self.theta, type(self).__name__).to(at_least_float32(self.theta.dtype))
        if self.order == 2:
            return 1.0 + 2 * torch.finfo(dtype).eps
        normals = torch.stack(((theta / 2).sin(), (theta / 2).cos())).to(dtype).double()
        square = 2 * normals.square().sum(0) - 1
        return float(square.clamp_min(1.0).max()) * ROUND_UP

    def extra_repr(self) -> str:
        return f"{self.channels}, order={self.order}" + ("" if self.dim == 1 else f", dim={self.dim}")


def _fold_in_half(first: Tensor, second: Tensor, theta: Tensor) -> tuple[Tensor, Tensor]:
    """Reflect the half plane on the right of the line at angle ``theta / 2``; continuous for every rounding of it."""
    x, y = (-(theta / 2).sin()).to(first.dtype), (theta / 2).cos().to(first.dtype)
    outside = 2 * torch.clamp(first * x + second * y, max=0)
    return first - outside * x, second - outside * y


def _fold_in_four(first: Tensor, second: Tensor, theta: Tensor, exact: torch.dtype) -> tuple[Tensor, Tensor]:
    """Order 2 of ``Householder`` for angles ``(3, pairs, ...)``, which are computed with in the dtype ``exact``."""
    kept, turned = (_within_half_turn(theta[k].to(exact) / 2) for k in (1, 2))
    start = theta[0].to(exact)
    with torch.no_grad():  # which sector, not where in it
        direction = torch.remainder(torch.atan2(second.to(exact), first.to(exact)) - start / 2, 2 * math.pi)
        sector = [direction < kept, direction < kept + turned, direction < math.pi + turned]
    zero = torch.zeros_like(start)
    shift = _first_that_holds(sector, [zero, start + 2 * kept, -2 * turned, start])
    sign = _first_that_holds(sector, [zero + 1, zero - 1, zero + 1, zero - 1])
    cosine, sine = shift.cos().to(first.dtype), shift.sin().to(first.dtype)
    sign = sign.to(first.dtype)
    return first * cosine - sign * sine * second, first * sine + sign * cosine * second


def _first_that_holds(conditions: list[Tensor], values: list[Tensor]) -> Tensor:
    """Return the value whose condition is the first that holds, or the last value."""
    chosen = values[-1]
    for condition, value in zip(reversed(conditions), reversed(values[:-1]), strict=True):
        chosen = torch.where(condition, value, chosen)
    return chosen


def _within_half_turn(angle: Tensor) -> Tensor:
    """Fold any angle into ``[0, pi]``, with slope 1 or -1 everywhere, so that training never gets stuck outside."""
    turned = torch.remainder(angle + math.pi, 2 * math.pi) - math.pi
    return turned * torch.where(turned < 0, -1.0, 1.0).to(turned.dtype)


class NActivation(Traceable, nn.Module):
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
        self,
        channels: int,
        low: float = -1.0,
        high: float = 0.0,
        dim: int = 1,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        low, high = number("low", low), number("high", high)
        if not low <= high:
            raise ValueError(f"low={low} must not be above high={high}")
        self.channels, self.start, self.dim = positive("channels", channels), (low, high), dim
        self.kinks = nn.Parameter(torch.empty(2, self.channels, **factory_for(device, dtype)))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """The kinks given to the constructor."""
        with torch.no_grad():
            for kink, value in zip(self.kinks, self.start, strict=True):
                kink.fill_(value)

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        if isinstance(input, fx.Proxy):
            return self.plain_forward(input)
        if input.shape[self.dim] != self.channels:
            raise ValueError(f"input has {input.shape[self.dim]} channels on axis {self.dim}, not {self.channels}")
        trailing = input.ndim - 1 - self.dim if self.dim >= 0 else -1 - self.dim
        first, second = self.kinks.to(input.dtype).view(2, -1, *(1,) * trailing).unbind()
        # Training may carry the kinks past each other.
        return input - 2 * torch.clamp(input, torch.minimum(first, second), torch.maximum(first, second))

    def plain_forward(self, input: Tensor) -> Tensor:  # noqa: A002
        x, first, second = input.transpose(self.dim, -1), self.kinks[0], self.kinks[1]
        reflected = x - 2 * torch.clamp(x, torch.minimum(first, second), torch.maximum(first, second))
        return reflected.transpose(self.dim, -1)

    def lipschitz_constant(self, input_shape: Sizes, dtype: torch.dtype) -> float:
        """Slopes are 1 and -1, whatever the kinks."""
        return 1.0

    def extra_repr(self) -> str:
        return f"{self.channels}" + ("" if self.dim == 1 else f", dim={self.dim}")


MONOTONE = (
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


# Softplus is linear beyond its threshold, and jumps there by log(1 + exp(-threshold)) / beta: at 20, which is torch's
# own, by 2e-9, which is less than float32 resolves at the values where it happens.
_SMOOTH_THRESHOLD = 20.0


def with_slopes_in_unit_interval(activation: nn.Module | None) -> nn.Module:
    """``activation`` (ReLU if there is none), if it is known to act entry by entry with slopes between 0 and 1.

    Residual and sandwich blocks are 1-Lipschitz for these activations only: with ``MaxMin``, say,
    they amplify up to three times. A ``Softplus`` with a threshold below 20 jumps where it becomes
    linear.

    Raises:
        ValueError: if it is not known to.
    """
    if activation is None:
        return nn.ReLU()
    if isinstance(activation, nn.Softplus) and not (activation.beta > 0 and activation.threshold >= _SMOOTH_THRESHOLD):
        raise ValueError(
            f"activation={activation!r} jumps where it becomes linear, or falls: it must have beta > 0 and a threshold "
            f"of at least {_SMOOTH_THRESHOLD:.0f}, where the jump is below rounding; use nn.Softplus(beta)"
        )
    leaky = isinstance(activation, nn.LeakyReLU) and 0 <= activation.negative_slope <= 1
    exponential = isinstance(activation, nn.ELU | nn.CELU) and 0 <= activation.alpha <= (
        1 if isinstance(activation, nn.ELU) else math.inf
    )
    if leaky or exponential or isinstance(activation, MONOTONE):
        return activation
    names = ", ".join(kind.__name__ for kind in MONOTONE)
    raise ValueError(
        f"activation={shown(activation)} is not known to act entry by entry with slopes between 0 and 1, which the "
        f"block needs to be 1-Lipschitz; use one of {names}, or LeakyReLU, ELU, CELU with slopes in that range"
    )
