"""What is added to a map before a convolution and cut off after a transposed one; torch's functions by dimension."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.nn.functional as F
from torch import nn

from trysquare.geometry import PADDING_MODES, ConvGeometry, Pads, Sizes

CONV = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
CONV_TRANSPOSE = {1: F.conv_transpose1d, 2: F.conv_transpose2d, 3: F.conv_transpose3d}
PLAIN_CONV: dict[int, Any] = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
PLAIN_CONV_TRANSPOSE: dict[int, Any] = {1: nn.ConvTranspose1d, 2: nn.ConvTranspose2d, 3: nn.ConvTranspose3d}
CIRCULAR_PAD: dict[int, Any] = {1: nn.CircularPad1d, 2: nn.CircularPad2d, 3: nn.CircularPad3d}
ZERO_PAD: dict[int, Any] = {1: nn.ZeroPad1d, 2: nn.ZeroPad2d, 3: nn.ZeroPad3d}


def flat(pads: Pads) -> list[int]:
    """Torch's order: last axis first, left before right."""
    return [amount for pad in reversed(pads) for amount in pad]


def symmetric(pads: Pads) -> bool:
    """Whether both sides of every axis have the same."""
    return all(left == right for left, right in pads)


def check_padding_mode(mode: str) -> None:
    """Refuse boundaries under which a convolution amplifies more than its kernel."""
    if mode not in PADDING_MODES:
        raise ValueError(
            f"padding_mode={mode!r} must be one of {', '.join(map(repr, PADDING_MODES))}; the other modes of torch "
            "repeat pixels and amplify them"
        )


def native_crop(crops: Pads, stride: Sizes, dilation: Sizes) -> tuple[Sizes, Sizes, Pads]:
    """Torch's ``padding`` and ``output_padding`` that cut ``crops`` off a full transposed convolution, and the rest."""
    starts, ends = zip(*crops, strict=True)
    limits = [max(s, d) for s, d in zip(stride, dilation, strict=True)]
    padding = tuple(min(start, end + limit - 1) for start, end, limit in zip(starts, ends, limits, strict=True))
    extra = tuple(max(0, pad - end) for pad, end in zip(padding, ends, strict=True))
    rest = tuple((p - start, p - e - end) for p, e, start, end in zip(padding, extra, starts, ends, strict=True))
    return padding, extra, rest


def crops(geometry: ConvGeometry, padding: str | int | Sequence[int], output_padding: Sizes, mode: str) -> Pads:
    """What to cut off both ends of the full transposed convolution, or to wrap around, for torch's arguments.

    Raises:
        ValueError: if they do not fit each other.
    """
    pads = geometry.pads(padding, mode)
    if padding == "same":
        if any(output_padding):
            raise ValueError(
                f"output_padding={output_padding} has no effect with padding='same', whose output is input x stride"
            )
        axes = zip(pads, geometry.extent, geometry.stride, strict=True)
        return tuple((left, extent - stride - left) for (left, _), extent, stride in axes)
    limits = [max(s, d) for s, d in zip(geometry.stride, geometry.dilation, strict=True)]
    if any(extra >= limit for extra, limit in zip(output_padding, limits, strict=True)):
        raise ValueError(f"output_padding={output_padding} must be smaller than stride or dilation, {tuple(limits)}")
    cut = tuple((left, right - extra) for (left, right), extra in zip(pads, output_padding, strict=True))
    if mode == "circular":
        geometry.check_circular(cut)
    return cut


def crops_for(geometry: ConvGeometry, pads: Pads, mode: str, sizes: Sequence[int], output_size: Sequence[int]) -> Pads:
    """Crops of a transposed layer with crops ``pads`` that make ``output_size`` of an input of ``sizes``.

    Raises:
        ValueError: if there are none.
    """
    dims, stride = geometry.dims, geometry.stride
    wanted = tuple(output_size)[-dims:]
    if len(wanted) != dims:
        raise ValueError(f"output_size={tuple(output_size)} must have {dims} sizes, one per axis")
    full = [(size - 1) * s + e for size, s, e in zip(sizes, stride, geometry.extent, strict=True)]
    cut = tuple((left, f - left - want) for (left, _), f, want in zip(pads, full, wanted, strict=True))
    fits = [abs(new - old) < s for (_, new), (_, old), s in zip(cut, pads, stride, strict=True)]
    if mode == "circular":
        fits = [want == size * s for want, size, s in zip(wanted, sizes, stride, strict=True)]
    if not all(fits):
        raise ValueError(f"output_size={wanted} cannot be made from an input of size {tuple(sizes)} at stride={stride}")
    return cut
