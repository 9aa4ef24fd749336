"""Convolution with a kernel at hand, and its export: what blocks with several kernels share."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trysquare.geometry import PADDING_MODES, Pads
from trysquare.layers.base import copy_weights
from trysquare.layers.conv import _CIRCULAR_PAD, _CONV, _PLAIN_CONV, _ZERO_PAD, _flat, _symmetric
from trysquare.layers.wrapping import circular_pad


def check_padding_mode(mode: str) -> None:
    """Refuse boundaries under which a convolution amplifies more than its kernel."""
    if mode not in PADDING_MODES:
        raise ValueError(
            f"padding_mode={mode!r} must be one of {', '.join(map(repr, PADDING_MODES))}; the other modes of torch "
            "repeat pixels and amplify them"
        )


def flipped(pads: Pads) -> Pads:
    """Padding of the adjoint of a stride 1 convolution with padding ``pads``."""
    return tuple((right, left) for left, right in pads)


def convolve(x: Tensor, kernel: Tensor, bias: Tensor | None, pads: Pads, mode: str, stride: Any = 1) -> Tensor:
    """Convolution of ``(batch, channels, *sizes)`` with padding of any amount, circular or zeros.

    Raises:
        ValueError: if the padding is circular and the stride does not divide the sizes.
    """
    dims = kernel.ndim - 2
    sizes = x.shape[-dims:]
    if mode == "zeros":
        x = F.pad(x, _flat(pads))
    elif stride != 1 and any(size % s for size, s in zip(sizes, stride, strict=True)):
        raise ValueError(
            f"a circular map of size {tuple(sizes)} is not divisible by stride={stride}, so windows overlap where it "
            "wraps and the block would amplify; pad or crop the input to a multiple, or use padding_mode='zeros'"
        )
    elif all(max(pad) <= size for pad, size in zip(pads, sizes, strict=True)):
        x = F.pad(x, _flat(pads), mode="circular") if any(map(any, pads)) else x
    else:
        x = circular_pad(x, pads)
    return _CONV[dims](x, kernel, bias, stride)


def plain_convolution(
    kernel: Tensor, bias: Tensor | None, pads: Pads, mode: str, training: bool, stride: Any = 1
) -> nn.Module:
    """A plain ``nn.Conv*d`` with this kernel, after a padding layer where torch has no argument for the padding."""
    dims = kernel.ndim - 2
    padding = tuple(left for left, _ in pads) if _symmetric(pads) else 0
    plain = _PLAIN_CONV[dims](
        kernel.shape[1], kernel.shape[0], kernel.shape[2:], stride, padding, bias=bias is not None, padding_mode=mode,
        device="meta",
    )  # fmt: skip
    copy_weights(plain, kernel, bias, training)
    if _symmetric(pads):
        return plain  # type: ignore[no-any-return]
    pad = _CIRCULAR_PAD if mode == "circular" else _ZERO_PAD
    return nn.Sequential(pad[dims](tuple(_flat(pads))), plain)


def plain_linear(weight: Tensor, bias: Tensor | None, training: bool) -> nn.Module:
    """A plain ``nn.Linear`` with this weight."""
    plain = nn.Linear(weight.shape[1], weight.shape[0], bias is not None, device="meta")
    return copy_weights(plain, weight, bias, training)


class Sum(nn.Module):
    """``first(x) + second(x)``: what exported residual blocks are made of, besides layers of torch."""

    def __init__(self, first: nn.Module, second: nn.Module) -> None:
        super().__init__()
        self.first = first
        self.second = second

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        """Sum of both."""
        total: Tensor = self.first(input) + self.second(input)
        return total


def hidden_bias(size: int, bias: bool, factory: dict[str, Any]) -> nn.Parameter | None:
    """Bias of a hidden layer, not yet drawn."""
    return nn.Parameter(torch.empty(size, **factory)) if bias else None
