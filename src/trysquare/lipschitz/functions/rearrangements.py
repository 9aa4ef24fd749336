"""Facts about tensors, casts, and functions that move the numbers of one sample, leave some out or copy them.

A rule need not see that samples stay apart where the follower can see it from the shapes.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from trysquare.lipschitz.arguments import Call, Constants, SideBySide, on
from trysquare.lipschitz.factors import copies, padding_norm
from trysquare.lipschitz.registry import NoRuleError

_FACTS = ("shape", "ndim", "dtype", "device", "is_cuda", "layout", "itemsize", "nbytes")


@on("size", "dim", "numel", "nelement", "ndimension", torch.numel, "is_floating_point", torch.is_floating_point)
def fact(call: Call, input: Tensor, dim: int | None = None) -> Constants:
    """Facts about shapes and types."""
    return None


@on(torch.zeros_like, torch.ones_like, "new_zeros", "new_ones", variadic=True)
def constant_like(
    call: Call,
    input: Tensor,
    size: Any = (),
    *,
    dtype: Any = None,
    device: Any = None,
    layout: Any = None,
    requires_grad: bool = False,
    pin_memory: bool = False,
    memory_format: Any = None,
) -> Constants:
    """Constants with the shape or type of a value."""
    return None


@on(getattr)
def attribute(call: Call, input: Any, name: str) -> Constants:
    """Facts about shapes and types, or a transposed matrix."""
    if name in _FACTS:
        return None
    if name == "mT":
        own_dims(input, (-1, -2))
    elif name != "data":
        raise NoRuleError(f"attribute {name!r} of a tensor has no rule")
    return 1.0


def own_dims(input: Tensor, dims: Any) -> tuple[int, ...]:
    """Axes as non-negative numbers, none of them the batch; ``None`` for all there are."""
    each = (dims,) if isinstance(dims, int) else tuple(dims if dims is not None else range(input.ndim))
    own = tuple(dim % input.ndim for dim in each)
    if 0 in own:
        raise NoRuleError(f"dim={dims} moves or mixes the samples of a batch")
    return own


@on("float", "double", "half", "bfloat16", "contiguous", "clone", torch.clone)
def cast(call: Call, input: Tensor, memory_format: Any = None) -> Constants:
    """The same numbers; the follower refuses integers, and floats that are coarser than the network's."""
    return 1.0


@on("detach", torch.detach, "cpu")
def same(call: Call, input: Tensor) -> Constants:
    """The same numbers."""
    return 1.0


@on("to")
def to(
    call: Call,
    input: Tensor,
    target: Any = None,
    second: Any = None,
    third: Any = None,
    *,
    device: Any = None,
    dtype: Any = None,
    other: Any = None,
    non_blocking: bool = False,
    copy: bool = False,
    memory_format: Any = None,
) -> Constants:
    """As ``cast``, whatever says to which dtype: a tensor does so by its own."""
    return {"input": 1.0, "target": 0.0, "other": 0.0}


@on("type")
def type_(call: Call, input: Tensor, dtype: Any = None, non_blocking: bool = False) -> Constants:
    """As ``cast``, or the name of a type."""
    return None if dtype is None else 1.0


@on("type_as")
def type_as(call: Call, input: Tensor, other: Tensor) -> Constants:
    """As ``cast``."""
    return {"input": 1.0, "other": 0.0}


@on("view", variadic=True)
def view(call: Call, input: Tensor, size: Any = None, dtype: Any = None) -> Constants:
    """Another shape, but not the same bits as other numbers."""
    if any(isinstance(part, torch.dtype) for part in (dtype, *(size or ()))):
        raise NoRuleError("it reads the same bits as other numbers, which is not Lipschitz")
    return 1.0


@on("reshape", torch.reshape, variadic=True)
def reshape(call: Call, input: Tensor, shape: Any) -> Constants:
    """Another shape."""
    return 1.0


@on("view_as", "reshape_as")
def reshape_as(call: Call, input: Tensor, other: Tensor) -> Constants:
    """The shape of another value."""
    return {"input": 1.0, "other": 0.0}


@on("flatten", torch.flatten)
def flatten(call: Call, input: Tensor, start_dim: int = 0, end_dim: int = -1) -> Constants:
    """Fewer axes."""
    return 1.0


@on("unflatten", torch.unflatten)
def unflatten(call: Call, input: Tensor, dim: int, sizes: Any) -> Constants:
    """More axes."""
    own_dims(input, dim)
    return 1.0


@on("squeeze", torch.squeeze)
def squeeze(call: Call, input: Tensor, dim: Any = None) -> Constants:
    """Axes of size 1 less."""
    if dim is not None:
        own_dims(input, dim)
    return 1.0


@on("unsqueeze", torch.unsqueeze)
def unsqueeze(call: Call, input: Tensor, dim: int) -> Constants:
    """An axis of size 1 more, after the batch."""
    own_dims(call.result, dim)
    return 1.0


@on("chunk", torch.chunk)
def chunk(call: Call, input: Tensor, chunks: int, dim: int = 0) -> Constants:
    """Parts of the input."""
    own_dims(input, dim)
    return 1.0


@on("split", torch.split)
def split(call: Call, input: Tensor, split_size: Any, dim: int = 0) -> Constants:
    """Parts of the input."""
    own_dims(input, dim)
    return 1.0


@on("unbind", torch.unbind)
def unbind(call: Call, input: Tensor, dim: int = 0) -> Constants:
    """Slices of the input."""
    own_dims(input, dim)
    return 1.0


@on("narrow", torch.narrow)
def narrow(call: Call, input: Tensor, dim: int, start: int, length: int) -> Constants:
    """A part of the input."""
    own_dims(input, dim)
    return 1.0


@on("permute", torch.permute, variadic=True)
def permute(call: Call, input: Tensor, dims: Sequence[int]) -> Constants:
    """A rearrangement that keeps the batch in front."""
    if dims[0] % input.ndim:
        raise NoRuleError(f"permute{tuple(dims)} moves the samples of a batch")
    return 1.0


@on("transpose", torch.transpose)
def transpose(call: Call, input: Tensor, dim0: int, dim1: int) -> Constants:
    """Two axes other than the batch are exchanged."""
    own_dims(input, (dim0, dim1))
    return 1.0


@on("swapaxes", torch.swapaxes)
def swapaxes(call: Call, input: Tensor, axis0: int, axis1: int) -> Constants:
    """Two axes other than the batch are exchanged."""
    own_dims(input, (axis0, axis1))
    return 1.0


@on("movedim", torch.movedim)
def movedim(call: Call, input: Tensor, source: Any, destination: Any) -> Constants:
    """Axes other than the batch are moved."""
    own_dims(input, source)
    own_dims(input, destination)
    return 1.0


@on("flip", torch.flip, variadic=True)
def flip(call: Call, input: Tensor, dims: Any) -> Constants:
    """Axes other than the batch are reversed."""
    own_dims(input, dims)
    return 1.0


@on("roll", torch.roll)
def roll(call: Call, input: Tensor, shifts: Any, dims: Any = None) -> Constants:
    """Axes other than the batch are turned around."""
    own_dims(input, dims if dims != () else None)
    return 1.0


@on(operator.getitem)
def getitem(call: Call, input: Any, index: Any) -> Constants:
    """A slice: part of the input."""
    if isinstance(input, list | tuple):
        return 1.0
    parts = index if isinstance(index, tuple) else (index,)
    for part in parts:
        if isinstance(part, bool) or not (part is None or part is Ellipsis or isinstance(part, int | slice)):
            raise NoRuleError("indexing with tensors or lists can repeat positions")
    if not _keeps_samples(input, parts):
        raise NoRuleError("indexing picks samples of a batch")
    return 1.0


def _keeps_samples(input: Tensor, parts: tuple[Any, ...]) -> bool:
    if not parts:
        return True
    axes = sum(isinstance(part, int | slice) for part in parts)
    first = parts[1] if parts[0] is Ellipsis and axes == input.ndim else parts[0]
    return first is Ellipsis or first == slice(None)


@on(torch.cat, torch.concat, torch.concatenate, torch.stack)
def concatenate(call: Call, tensors: Any, dim: int = 0) -> Constants:
    """The parts side by side."""
    if dim % call.result.ndim == 0:
        raise NoRuleError("concatenation along the batch axis")
    return SideBySide({"tensors": 1.0})


@on("expand", variadic=True)
def expand(call: Call, input: Tensor, size: Any, implicit: bool = False) -> Constants:
    """Copies: the root of their number."""
    return copies(input.shape, call.result.shape)


@on("broadcast_to", torch.broadcast_to)
def broadcast_to(call: Call, input: Tensor, size: Any) -> Constants:
    """Copies: the root of their number."""
    return copies(input.shape, call.result.shape)


@on("expand_as")
def expand_as(call: Call, input: Tensor, other: Tensor) -> Constants:
    """Copies: the root of their number."""
    return {"input": copies(input.shape, call.result.shape), "other": 0.0}


@on("repeat", variadic=True)
def repeat(call: Call, input: Tensor, repeats: Any) -> Constants:
    """Copies: the root of their number."""
    return copies(input.shape, call.result.shape)


@on("tile", torch.tile, variadic=True)
def tile(call: Call, input: Tensor, dims: Any) -> Constants:
    """Copies: the root of their number."""
    return copies(input.shape, call.result.shape)


@on("repeat_interleave", torch.repeat_interleave)
def repeat_interleave(
    call: Call, input: Tensor, repeats: Any, dim: int | None = None, *, output_size: int | None = None
) -> Constants:
    """Copies: the root of the number that any position has at most."""
    own_dims(input, dim)
    return math.sqrt(int(torch.as_tensor(repeats).max()))


@on(F.pad)
def pad(call: Call, input: Tensor, pad: Any, mode: str = "constant", value: float | None = None) -> Constants:
    """Constants, or repeated positions."""
    if len(pad) >= 2 * input.ndim:
        raise NoRuleError("padding of the batch axis")
    return 1.0 if mode == "constant" else padding_norm(pad, mode, tuple(input.shape[1:]))
