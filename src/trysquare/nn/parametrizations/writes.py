"""Writes into a weight that a layer has returned: they have no effect, and are noticed."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from ctypes import c_char
from functools import cache
from weakref import ref
from zlib import crc32

import torch
from torch import Tensor

from trysquare import torch_internals
from trysquare.nn.linalg.precision import host_can_look

# How many weights are watched at once: those that forward passes used, and those that somebody asked for.
_USED, _READ = 4, 64

Fingerprint = tuple[torch.Size, torch.dtype, torch.device, int]


class WriteGuard:
    """Notices writes into a weight that was returned. They have no effect, because the next weight is built anew.

    Torch counts the writes to a tensor and its views. A tensor without memory can share that counter, and keeps nothing
    alive. Torch does not count writes through ``.data`` or NumPy, nor any in inference mode. On the CPU, the weight
    that was asked for last is therefore kept until the next use, with a checksum: ``layer.weight.data.normal_()`` is
    noticed, and only such a write to a weight that was asked for earlier is not.
    """

    _last: tuple[Tensor, Fingerprint] | None
    _newest: Callable[[], Tensor | None]

    def __init__(self, written: bool = False) -> None:
        self.forget()
        self._written = written
        self.inside = False  # a forward pass, which asks for a weight and writes nothing into it

    def watch(self, weight: Tensor) -> None:
        """Notice writes to ``weight`` from now on."""
        if type(weight) is not Tensor or torch_internals.transforms_are_active() or torch_internals.graph_recorder():
            return
        if not weight.is_inference() and self._newest() is not weight:
            self._newest = ref(weight)
            counter = torch_internals.make_subclass(Tensor, weight)
            counter.data = _empty(weight.dtype, weight.device)
            (self._used if self.inside else self._read).append((counter, weight._version))
        if not self.inside and host_can_look(weight):
            self._last = weight, _fingerprint(weight)

    def forget(self) -> None:
        """Forget the weights that were returned so far."""
        self._written = False
        self._newest = _nothing
        self._used: deque[tuple[Tensor, int]] = deque(maxlen=_USED)
        self._read: deque[tuple[Tensor, int]] = deque(maxlen=_READ)
        self._last = None

    def found(self) -> bool:
        """Whether somebody has written into a weight since the last call of ``forget``."""
        if self._last is not None:
            (weight, seen), self._last = self._last, None
            self._written = self._written or _fingerprint(weight) != seen
        for counters in (self._used, self._read):
            self._written = self._written or any(counter._version != seen for counter, seen in counters)
        return self._written

    def __reduce__(self) -> tuple[type[WriteGuard], tuple[bool]]:
        return WriteGuard, (self.found(),)  # a copy is built from the same free tensors, and must not lose the message


@cache
def _empty(dtype: torch.dtype, device: torch.device) -> Tensor:
    with torch.inference_mode(False):  # it serves later passes too
        return torch.empty(0, dtype=dtype, device=device)


def _nothing() -> None:
    return None


def _fingerprint(weight: Tensor) -> Fingerprint:
    # Read without a torch operation, which modes that count operations would see. Built weights lie in one piece.
    size = weight.numel() * weight.element_size()
    numbers = (c_char * size).from_address(weight.data_ptr()) if size and weight.is_contiguous() else b""
    return weight.shape, weight.dtype, weight.device, crc32(numbers)
