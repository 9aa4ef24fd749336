"""What the benchmarks share: interleaved timing, and counts that do not depend on the machine."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode


def interleaved(calls: dict[str, Callable[[], Any]], rounds: int) -> dict[str, float]:
    """Median seconds of each call, taken in turns so that all see the same state of the machine."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        call()
    for _ in range(rounds):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            times[name].append(time.perf_counter() - start)
    return {name: sorted(seconds)[rounds // 2] for name, seconds in times.items()}


def flops(call: Callable[[], Any]) -> int:
    """Floating point operations of all products, by torch's counter."""
    with FlopCounterMode(display=False) as counter:
        call()
    return counter.get_total_flops()


class _CallCounter(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def aten_calls(call: Callable[[], Any]) -> int:
    """Number of operations that torch dispatches."""
    with _CallCounter() as counter:
        call()
    return counter.count


def saved_bytes(forward: Callable[[], Any]) -> int:
    """Bytes that autograd keeps between forward and backward, each storage once."""
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = forward()
    del result
    return sum(kept.values())
