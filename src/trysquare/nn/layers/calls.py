"""Layers in place of calls: sums, concatenations, means and scales of converted networks (``nn.conversion``).

If every value in a network depends on the input in a 1-Lipschitz way, then so does each of these: a sum whose weights
add up to 1, values side by side divided by the root of their number, a mean subtracted.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor, nn

from trysquare.nn.layers.traceable import Traceable, shifted
from trysquare.nn.linalg.precision import at_least_float32
from trysquare.nn.parametrizations.base import Device


class ConvexSum(Traceable, nn.Module):
    """``(1 - t) x + t y`` with a learnable ``t`` between 0 and 1, at the start 1/2.

    >>> from trysquare.nn.layers.calls import ConvexSum
    >>> ConvexSum()(torch.zeros(2), torch.ones(2)).detach()
    tensor([0.5000, 0.5000])
    """

    def __init__(self, device: Device = None, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.logit = nn.Parameter(torch.zeros((), device=device, dtype=dtype))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        share = self.logit.to(at_least_float32(self.logit.dtype)).sigmoid()
        return x * (1 - share).to(x.dtype) + y * share.to(y.dtype)

    def plain_forward(self, x: Tensor, y: Tensor) -> Tensor:
        share = self.logit.sigmoid()
        return x * (1 - share) + y * share


class LearnableSum(Traceable, nn.Module):
    """``(a x + b y) / (|a| + |b|)`` with learnable ``a`` and ``b``, at the start 1: signs can change.

    >>> from trysquare.nn.layers.calls import LearnableSum
    >>> LearnableSum()(torch.zeros(2), torch.ones(2)).detach()
    tensor([0.5000, 0.5000])
    """

    def __init__(self, device: Device = None, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.factors = nn.Parameter(torch.ones(2, device=device, dtype=dtype))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        factors = self.factors.to(at_least_float32(self.factors.dtype))
        # Not below what float32 can divide by: with both factors 0 the sum is 0.
        first, second = factors / factors.abs().sum().clamp_min(torch.finfo(factors.dtype).tiny)
        return x * first.to(x.dtype) + y * second.to(y.dtype)

    def plain_forward(self, x: Tensor, y: Tensor) -> Tensor:
        total = self.factors.abs().sum()
        return (x * self.factors[0] + y * self.factors[1]) / torch.where(total > 0, total, 1.0)


class ScaledConcat(Traceable, nn.Module):
    """``torch.cat`` or ``torch.stack``, divided by the root of the number of values that depend on the input.

    Args:
        dim: axis of the concatenation.
        number: how many values depend on the input.
        stack: whether the axis is a new one.
    """

    def __init__(self, dim: int, number: int, stack: bool = False) -> None:
        super().__init__()
        self.dim, self.number, self.stack = dim, number, stack

    def forward(self, values: Sequence[Tensor]) -> Tensor:
        joined = torch.stack(list(values), self.dim) if self.stack else torch.cat(list(values), self.dim)
        return joined * self.number**-0.5

    def plain_forward(self, input: list[Tensor]) -> Tensor:  # noqa: A002
        joined = torch.stack(input, self.dim) if self.stack else torch.cat(input, self.dim)
        return joined * self.number**-0.5

    def extra_repr(self) -> str:
        return f"dim={self.dim}, number={self.number}, stack={self.stack}"


class ScaledMean(Traceable, nn.Module):
    """Mean over some axes, times the root of how many numbers each is of: orthonormal rows.

    >>> from trysquare.nn.layers.calls import ScaledMean
    >>> ScaledMean((1,), keepdim=False)(torch.ones(1, 4, 2))
    tensor([[2., 2.]])
    """

    def __init__(self, dims: Sequence[int], keepdim: bool) -> None:
        super().__init__()
        self.dims, self.keepdim = tuple(dims), keepdim

    def forward(self, x: Tensor) -> Tensor:
        return x.mean(self.dims, self.keepdim) * prod(x.shape[dim] for dim in self.dims) ** 0.5

    plain_forward = forward

    def extra_repr(self) -> str:
        return f"dims={self.dims}, keepdim={self.keepdim}"


class LastAxesCentering(Traceable, nn.Module):
    """``nn.LayerNorm`` without the division: subtract the mean over the last axes, add a learnable bias.

    >>> from trysquare.nn.layers.calls import LastAxesCentering
    >>> LastAxesCentering((3,))(torch.tensor([[1.0, 2.0, 6.0]])).detach()
    tensor([[-2., -1.,  3.]])
    """

    def __init__(
        self, shape: Sequence[int], bias: bool = True, device: Device = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__()
        self.shape = tuple(shape)
        self.bias = nn.Parameter(torch.zeros(self.shape, device=device, dtype=dtype)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        axes = tuple(range(-len(self.shape), 0))
        centred = x - x.to(at_least_float32(x.dtype)).mean(axes, keepdim=True).to(x.dtype)
        return centred if self.bias is None else centred + self.bias.to(x.dtype)

    def plain_forward(self, input: Tensor) -> Tensor:  # noqa: A002
        centred = input - input.mean(tuple(range(-len(self.shape), 0)), keepdim=True)
        return centred if self.bias is None else centred + self.bias

    def extra_repr(self) -> str:
        return f"{self.shape}, bias={self.bias is not None}"


class GroupCentering(Traceable, nn.Module):
    """``nn.GroupNorm`` without the division: subtract the mean of each group of channels, add a learnable bias.

    With as many groups as channels this is ``nn.InstanceNorm`` without the division.
    """

    def __init__(
        self,
        groups: int,
        channels: int,
        bias: bool = True,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.groups, self.channels = groups, channels
        self.bias = nn.Parameter(torch.zeros(channels, device=device, dtype=dtype)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        grouped = x.unflatten(1, (self.groups, -1))
        axes = tuple(range(2, grouped.ndim))
        mean = grouped.to(at_least_float32(x.dtype)).mean(axes, keepdim=True).to(x.dtype)
        centred = (grouped - mean).flatten(1, 2)
        return centred if self.bias is None else centred + self.bias.to(x.dtype).view(-1, *(1,) * (x.ndim - 2))

    def plain_forward(self, input: Tensor) -> Tensor:  # noqa: A002
        flat = input.unflatten(1, (self.groups, -1)).flatten(2)
        return shifted((flat - flat.mean(-1, keepdim=True)).view_as(input), self.bias)

    def extra_repr(self) -> str:
        return f"{self.groups}, {self.channels}, bias={self.bias is not None}"


class BoundedScale(Traceable, nn.Module):
    """Product with a learnable tensor, divided by its largest entry where that is above 1.

    It starts with a largest entry of 1: the tiny factors with which networks start their branches would leave a branch
    of a convex sum out.

    Args:
        scale: the tensor, up to a factor, of a shape that does not enlarge what it is multiplied with; zeros count as
            ones.

    >>> from trysquare.nn.layers.calls import BoundedScale
    >>> BoundedScale(torch.tensor([1e-6, -2e-6]))(torch.ones(2)).detach()
    tensor([ 0.5000, -1.0000])
    """

    def __init__(self, scale: Tensor) -> None:
        super().__init__()
        largest = scale.detach().abs().max()
        self.scale = nn.Parameter(scale.detach() / largest if largest > 0 else torch.ones_like(scale))

    def forward(self, x: Tensor) -> Tensor:
        scale = self.scale.to(at_least_float32(self.scale.dtype))
        return x * (scale / scale.abs().max().clamp_min(1.0)).to(x.dtype)

    def plain_forward(self, input: Tensor) -> Tensor:  # noqa: A002
        return input * (self.scale / self.scale.abs().max().clamp_min(1.0))

    def extra_repr(self) -> str:
        return f"{tuple(self.scale.shape)}"


class Divided(Traceable, nn.Module):
    """A module, divided by its Lipschitz constant.

    Args:
        module: the module.
        constant: the constant, positive.
    """

    def __init__(self, module: nn.Module, constant: float) -> None:
        super().__init__()
        self.module, self.constant = module, constant

    def forward(self, x: Tensor) -> Tensor:
        return self.module(x) * (1 / self.constant)

    plain_forward = forward

    def extra_repr(self) -> str:
        return f"constant={self.constant:.6g}"
