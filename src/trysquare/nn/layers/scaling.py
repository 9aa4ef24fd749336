"""Scaling of the data in front of a network."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from trysquare.naming import shown
from trysquare.nn.layers.centering import per_channel
from trysquare.nn.layers.traceable import Traceable
from trysquare.nn.parametrizations.base import Device, factory_for

__all__ = ["InputScaling"]


class InputScaling(Traceable, nn.Module):
    """``(x - mean) / std``, channel by channel: the usual scaling of images, as a layer of the network.

    Inside of the network it is part of its Lipschitz constant, which it multiplies by ``1 / min(std)``, so that
    certificates are about the data as they come. The numbers are buffers: saved, moved and cast with the network.

    Args:
        mean: a number, or one for each channel.
        std: a positive number, or one for each channel.
        device: device of the buffers.
        dtype: dtype of the buffers.

    Raises:
        ValueError: if the numbers are not finite, ``std`` is not positive, or there are different numbers of channels.

    >>> InputScaling((0.5, 0.4), (0.25, 0.2))(torch.ones(1, 2, 1, 1)).flatten()
    tensor([2., 3.])
    """

    mean: Tensor
    std: Tensor

    def __init__(
        self,
        mean: float | Sequence[float],
        std: float | Sequence[float],
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        means, deviations = _numbers("mean", mean), _numbers("std", std)
        if min(deviations) <= 0:
            raise ValueError(f"std={std} must be positive: it divides the data")
        if len({len(means), len(deviations)} - {1}) > 1:
            raise ValueError(f"mean has {len(means)} numbers and std has {len(deviations)}: give one for each channel")
        factory = factory_for(device, dtype)
        self.register_buffer("mean", torch.tensor(means, **factory))
        self.register_buffer("std", torch.tensor(deviations, **factory))

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        channels = max(len(self.mean), len(self.std))
        if input.ndim < 2 or channels not in (1, input.shape[1]):
            raise ValueError(f"input of shape {tuple(input.shape)} must be (batch, {channels}, ...)")
        return (input - per_channel(self.mean, input)) / per_channel(self.std, input)

    def plain_forward(self, input: Tensor) -> Tensor:  # noqa: A002
        return ((input.transpose(1, -1) - self.mean) / self.std).transpose(1, -1)

    def inverse(self) -> InputScaling:
        """Return the layer that maps the result back to the data, with numbers of its own."""
        undone = copy.deepcopy(self)
        undone.mean, undone.std = -self.mean / self.std, 1 / self.std
        return undone

    def log_abs_det(self, x: Tensor) -> Tensor:
        """Return the logarithm of the volume by which samples are stretched: ``-log(std)`` for each number."""
        return -per_channel(self.std, x).log().expand_as(x[:1]).sum().to(x.dtype).expand(len(x))

    def extra_repr(self) -> str:
        return f"mean={_rounded(self.mean)}, std={_rounded(self.std)}"


def _numbers(name: str, value: float | Sequence[float]) -> list[float]:
    try:
        values: list[float] = torch.as_tensor(value, dtype=torch.float64, device="cpu").flatten().tolist()
    except (TypeError, ValueError, RuntimeError, OverflowError):  # torch's errors for what has no numbers
        values = []
    if not values or not all(map(math.isfinite, values)):
        raise ValueError(f"{name}={shown(value)} must be a finite number, or one for each channel")
    return values


def _rounded(values: Tensor) -> str:
    if values.is_meta:
        return "?"
    return "(" + ", ".join(f"{value:.4g}" for value in values.tolist()) + ")"
