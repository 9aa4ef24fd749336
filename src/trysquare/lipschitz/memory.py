"""Operations in place: what they write into, and what that does to the other names of the same memory."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor

from trysquare.lipschitz.upward import scaled, side_by_side


def tensors(value: Any) -> list[Tensor]:
    """The tensors in nested lists, tuples and dictionaries."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    return [t for part in value for t in tensors(part)] if isinstance(value, list | tuple) else []


class Watch:
    """Remembers the versions of tensors before an operation, to tell afterwards which it wrote into."""

    def __init__(self, values: Any) -> None:
        self._before = [(tensor, tensor._version) for tensor in tensors(values)]

    def written(self) -> list[Tensor]:
        """The tensors that were written into since."""
        return [tensor for tensor, version in self._before if tensor._version != version]


def shares_memory(tensor: Tensor, other: Tensor) -> bool:
    """Whether two tensors live in the same storage."""
    memory = tensor.untyped_storage()
    return memory.nbytes() > 0 and memory.data_ptr() == other.untyped_storage().data_ptr()


def bound_after(alias: Tensor, old: float | None, written: Tensor, new: float | None) -> float | None:
    """Bound of another name of memory that was written into.

    If the whole memory was written it holds what was written, a number as often as the name repeats it; otherwise
    that next to what was there.
    """
    if new is None and old is None:
        return None
    repeats = math.prod(size for size, step in zip(alias.shape, alias.stride(), strict=True) if step == 0)
    there = scaled(math.sqrt(repeats), new or 0.0)
    whole = written.numel() * written.element_size() == written.untyped_storage().nbytes()
    return side_by_side([there] if whole and 0 not in written.stride() else [there, old or 0.0])
