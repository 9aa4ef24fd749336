"""Orthogonal weights for plain layers of torch."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from trysquare.nn.geometry import ConvGeometry, number, per_axis, positive
from trysquare.nn.linalg.checks import require_dense
from trysquare.nn.linalg.orthonormal import random_orthonormal
from trysquare.nn.parametrizations import AOC

Size = int | Sequence[int]


@torch.no_grad()
def orthogonal_(
    tensor: Tensor,
    stride: Size = 1,
    dilation: Size = 1,
    groups: int = 1,
    gain: float = 1.0,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Fill the weight of a plain convolution or linear layer so that the layer is orthogonal, times ``gain``.

    Torch's own ``nn.init.orthogonal_`` makes the flattened kernel orthonormal, which is not the layer: one with 3x3
    kernels then amplifies up to three times. Here all singular values of the layer are ``gain`` (on circular maps whose
    size the stride divides; with zero padding none is larger).

    Args:
        tensor: ``(out, in / groups, *kernel_size)``, ``(in, out / groups, *kernel_size)`` of a transposed layer, or
            ``(out, in)``.
        stride: stride of the layer.
        dilation: dilation of the layer.
        groups: groups of the layer.
        gain: all singular values.
        generator: source of random numbers; torch's own if not given.

    Returns:
        ``tensor``.

    Raises:
        ValueError: if no orthogonal kernel has these numbers, with a way out; if ``tensor`` is no dense one.
        TypeError: if it is no tensor.

    >>> conv = nn.Conv2d(8, 16, 3, stride=2, padding=1, padding_mode="circular")
    >>> _ = ts.init.orthogonal_(conv.weight, stride=2)
    >>> bool((ts.singular_values(conv, (8, 6, 6)) - 1).abs().max() < 1e-5)
    True
    """
    tensor = require_dense("tensor", tensor)
    if any(size > 1 and stride == 0 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)):
        raise ValueError("tensor has several entries in one place of memory (expand): fill a copy, tensor.clone()")
    if not tensor.dtype.is_floating_point or tensor.ndim < 2:
        raise ValueError(
            "tensor must be of a real floating point type and have at least two axes, (out, in, *kernel_size)"
        )
    if generator is not None and not isinstance(generator, torch.Generator):
        raise ValueError(f"generator must be a torch.Generator, not {type(generator).__name__}")
    gain = number("gain", gain)
    if not math.isfinite(gain):
        raise ValueError(f"gain={gain} must be finite")
    # The methods draw from torch's own source.
    with torch.random.fork_rng(devices=[], enabled=generator is not None):
        if generator is not None:
            torch.manual_seed(int(torch.randint(2**62, (), generator=generator, device=generator.device)))
        weight = _drawn(tensor, stride, dilation, positive("groups", groups))
    return tensor.copy_(gain * weight)


def _drawn(tensor: Tensor, stride: Size, dilation: Size, groups: int) -> Tensor:
    out, of_group, *kernel_size = tensor.shape
    if not kernel_size:
        if (stride, dilation, groups) != (1, 1, 1):
            raise ValueError(
                f"stride={stride}, dilation={dilation} and groups={groups} must be 1 for a matrix {tuple(tensor.shape)}"
            )
        return random_orthonormal(out, of_group)
    dims = len(kernel_size)
    sizes = tuple(kernel_size), per_axis("stride", stride, dims), per_axis("dilation", dilation, dims)
    # Not exact: of one channel per group there are signed shifts, which will do where nothing is to be learned.
    geometry = ConvGeometry(of_group * groups, out, *sizes, groups, exact=False)
    made = AOC(geometry, "qr", device=torch.device("cpu"), dtype=torch.float64)
    return made.build(*made.draw())
