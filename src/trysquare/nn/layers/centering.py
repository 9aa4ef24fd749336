"""Centering: batch and layer normalisation without the division, which is what makes those not 1-Lipschitz.

Batch normalisation by one number for all channels divides too, and its constant is a factor of the network's.
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from trysquare.nn.geometry import flag, number, positive
from trysquare.nn.layers.traceable import Traceable, shifted
from trysquare.nn.linalg.precision import Context, at_least_float32
from trysquare.nn.parametrizations.base import Device, factory_for

__all__ = ["BatchCentering", "BatchLipNorm", "LayerCentering"]


class _SumContext(Context, Protocol):
    group: dist.ProcessGroup | None


class _SumOverRanks(torch.autograd.Function):
    """Sum of a tensor over the ranks of a process group; the gradient is summed in the same way."""

    @staticmethod
    def forward(ctx: _SumContext, tensor: Tensor, group: dist.ProcessGroup | None) -> Tensor:
        ctx.group = group
        total = tensor.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: _SumContext, *grads: Tensor) -> tuple[Tensor, None]:
        total = grads[0].clone()
        dist.all_reduce(total, group=ctx.group)
        return total, None


def _several_ranks(group: dist.ProcessGroup | None) -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size(group) > 1


def per_channel(values: Tensor, like: Tensor) -> Tensor:
    return values.to(like.dtype).view(-1, *(1,) * (like.ndim - 2))


class BatchCentering(Traceable, nn.Module):
    """Batch normalisation without division: subtract each channel's mean, add a learnable bias.

    In training the mean is that of the batch (over all ranks, if there are several, so that they
    agree), and a projector subtracts it. In eval it is the running mean, and the layer is a
    translation: isometric. Works for ``(batch, channels)`` and any number of axes after that.

    Args:
        num_features: number of channels.
        momentum: weight of a new batch in the running mean; ``None`` for the mean of all batches.
        bias: whether to add a learnable bias.
        device: device of the parameters.
        dtype: dtype of the parameters.
        process_group: ranks that share a mean; all of them if not given.

    >>> layer = BatchCentering(4)
    >>> bool(layer(torch.randn(8, 4, 5, 5)).mean((0, 2, 3)).abs().max() < 1e-5)
    True
    """

    running_mean: Tensor
    num_batches_tracked: Tensor

    def __init__(
        self,
        num_features: int,
        momentum: float | None = 0.1,
        bias: bool = True,
        device: Device = None,
        dtype: torch.dtype | None = None,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__()
        positive("num_features", num_features)
        self.num_features, self.momentum, self.process_group = num_features, momentum, process_group
        factory = factory_for(device, dtype)
        self.bias = nn.Parameter(torch.zeros(num_features, **factory)) if flag("bias", bias) else None
        self.register_buffer("running_mean", torch.zeros(num_features, **factory))
        self.register_buffer("num_batches_tracked", torch.zeros((), dtype=torch.long, device=device))

    def reset_parameters(self) -> None:
        """Forget the running mean and the bias."""
        for tensor in (self.running_mean, self.num_batches_tracked, self.bias):
            if tensor is not None:
                nn.init.zeros_(tensor)

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        self._check(input)
        if self.training:
            mean = self._batch_mean(input)
            self._track(mean.detach())
        else:
            mean = self.running_mean
        shift = mean if self.bias is None else mean - self.bias
        return input - per_channel(shift, input)

    def _check(self, x: Tensor) -> None:
        if x.ndim < 2 or x.shape[1] != self.num_features:
            raise ValueError(f"input of shape {tuple(x.shape)} must be (batch, {self.num_features}, ...)")

    def plain_forward(self, input: Tensor) -> Tensor:  # noqa: A002
        return shifted(shifted(input, -self.running_mean), self.bias)

    def _batch_mean(self, x: Tensor) -> Tensor:
        # Mean over the batch, then the positions: no transposed copy is made.
        rows = x.to(at_least_float32(x.dtype)).flatten(2) if x.ndim > 2 else x.to(at_least_float32(x.dtype))
        axes = (0, 2) if rows.ndim > 2 else (0,)
        if not _several_ranks(self.process_group):
            return rows.mean(axes)
        # Ranks may hold batches of different sizes: the counts travel with the sums.
        count = rows.new_full((1,), rows.numel() / self.num_features)
        total: Tensor = _SumOverRanks.apply(torch.cat((rows.sum(axes), count)), self.process_group)
        return total[:-1] / total[-1]

    @torch.no_grad()
    def _track(self, *found: Tensor) -> None:
        """Take means of this batch into the running ones, in the order of these buffers."""
        self.num_batches_tracked.add_(1)
        for running, new in zip((self.running_mean, getattr(self, "running_square", None)), found, strict=False):
            assert running is not None
            if self.momentum is not None:
                running.lerp_(new.to(running.dtype), self.momentum)
            else:
                running.add_((new - running).to(running.dtype) / self.num_batches_tracked)

    def extra_repr(self) -> str:
        return f"{self.num_features}, momentum={self.momentum}, bias={self.bias is not None}"


class BatchLipNorm(BatchCentering):
    """Batch normalisation that divides all channels by one number, the largest deviation of a channel.

    ``(x - mean) / σ + bias``: all directions stay in proportion, and the constant is ``1 / σ``, of running means in
    eval mode. It may be above 1: ``lipschitz_bound`` counts it, and the constant of a network is the product. Margins
    of losses have to know it (``ts.margin_for_radius(radius, lipschitz=...)``).

    Args:
        num_features: number of channels.
        momentum: weight of a new batch in the running means; ``None`` for the mean of all batches.
        bias: whether to add a learnable bias.
        device: device of the parameters.
        dtype: dtype of the parameters.
        process_group: ranks that share means; all of them if not given.
        eps: added to the variance.

    >>> layer, x = BatchLipNorm(2), torch.randn(64, 2) * torch.tensor([4.0, 1.0])
    >>> layer(x).std(0).detach().round(decimals=1)
    tensor([1.0000, 0.2000])
    """

    running_square: Tensor

    def __init__(
        self,
        num_features: int,
        momentum: float | None = 0.1,
        bias: bool = True,
        device: Device = None,
        dtype: torch.dtype | None = None,
        process_group: dist.ProcessGroup | None = None,
        eps: float = 1e-5,
    ) -> None:
        super().__init__(num_features, momentum, bias, device, dtype, process_group)
        self.eps = number("eps", eps)
        if not 0 < self.eps < float("inf"):
            raise ValueError(f"eps={eps} must be positive and finite")
        self.register_buffer("running_square", torch.ones(num_features, **factory_for(device, dtype)))

    def reset_parameters(self) -> None:
        """Forget the running means and the bias."""
        super().reset_parameters()
        nn.init.ones_(self.running_square)

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        self._check(input)
        if not self.training:
            return self.plain_forward(input)
        mean = self._batch_mean(input)
        centred = input - per_channel(mean, input)
        square = self._batch_mean(centred.square())
        self._track(mean.detach(), square.detach())
        scaled = centred * (square.max() + self.eps).rsqrt().to(input.dtype)
        return scaled if self.bias is None else scaled + per_channel(self.bias, input)

    def plain_forward(self, input: Tensor) -> Tensor:  # noqa: A002
        factor = (self.running_square.max() + self.eps).rsqrt()
        return shifted(shifted(input, -self.running_mean) * factor, self.bias)


class LayerCentering(Traceable, nn.Module):
    """Layer normalisation without division: subtract each sample's mean, add a learnable bias. 1-Lipschitz.

    The mean is over channels and positions, or over positions alone. It is a projector, the same in
    training and eval.

    Args:
        num_features: number of channels.
        per_channel: whether each channel has a mean of its own (over its positions).
        bias: whether to add a learnable bias for each channel.
        device: device of the bias.
        dtype: dtype of the bias.

    >>> bool(LayerCentering(4)(torch.randn(2, 4, 8)).mean((1, 2)).abs().max() < 1e-5)
    True
    """

    def __init__(
        self,
        num_features: int,
        per_channel: bool = False,
        bias: bool = True,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        positive("num_features", num_features)
        self.num_features, self.per_channel = num_features, flag("per_channel", per_channel)
        with_bias = flag("bias", bias)
        self.bias = nn.Parameter(torch.zeros(num_features, **factory_for(device, dtype))) if with_bias else None

    def reset_parameters(self) -> None:
        """Forget the bias."""
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        if input.ndim < 2 or input.shape[1] != self.num_features:
            raise ValueError(f"input of shape {tuple(input.shape)} must be (batch, {self.num_features}, ...)")
        if self.per_channel and input.ndim < 3:
            raise ValueError(
                f"input of shape {tuple(input.shape)} has a single value per channel, which is its own mean; use "
                "per_channel=False"
            )
        axes = tuple(range(2 if self.per_channel else 1, input.ndim))
        mean = input.to(at_least_float32(input.dtype)).mean(axes, keepdim=True).to(input.dtype)
        centred = input - mean
        return centred if self.bias is None else centred + per_channel(self.bias, input)

    def plain_forward(self, input: Tensor) -> Tensor:  # noqa: A002
        flat = input.flatten(2 if self.per_channel else 1)
        return shifted((flat - flat.mean(-1, keepdim=True)).view_as(input), self.bias)

    def extra_repr(self) -> str:
        return f"{self.num_features}, per_channel={self.per_channel}, bias={self.bias is not None}"
