"""What the benchmarks share: interleaved timing, counts that do not depend on the machine, fitted exponents."""

from __future__ import annotations

import json
import math
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import contextmanager
from random import Random
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.results import system_field
from trysquare.progress import track

Call = Callable[[], Any]
Samples = dict[str, list[float]]


def interleaved(
    calls: dict[str, Call], rounds: int, *, patience: float = math.inf, always: Container[str] = (), label: str = ""
) -> Samples:
    """Seconds of each call, taken in turns so that all see the same state of the machine.

    The order within a turn is another each time: a call leaves its successor the caches as it used them.

    Args:
        calls: what to time; each runs once before, which does not count.
        rounds: samples of each.
        patience: a call whose samples have taken more seconds than this is sampled no more; it has one in any case.
        always: calls that are sampled in every turn, however long they take.
        label: of the progress bar.
    """
    times: Samples = {name: [] for name in calls}
    order, shuffle = list(calls), Random(0).shuffle
    for number in track(range(rounds + 1), label or "timing", rounds + 1):
        for name in order:
            taken, limit = times[name], math.inf if name in always else patience
            if sum(taken) < limit:
                seconds = _seconds(calls[name])
                if number:  # what is built and kept, and memory that is new, belong to the run before
                    taken.append(seconds)
        shuffle(order)
    return times


def _seconds(call: Call) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def ratios(samples: Sequence[float], reference: Sequence[float]) -> list[float]:
    """Of samples that were taken in the same turn, so that a machine that is slower for a while is so for both."""
    return [sample / other for sample, other in zip(samples, reference, strict=False)]


def ratio(samples: Sequence[float], reference: Sequence[float]) -> float:
    """Median of ``ratios``."""
    return median(ratios(samples, reference))


def flops(call: Call) -> int:
    """Floating point operations of all products, by torch's counter (factorisations and solves are not in it)."""
    with FlopCounterMode(display=False) as counter:
        call()
    return counter.get_total_flops()


class _Counter(TorchDispatchMode):
    """Operations, and the bytes of the results of all but views."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = self.written = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.calls += 1
        if not func.is_view:
            self.written += sum(leaf.nbytes for leaf in tree_leaves(result) if isinstance(leaf, Tensor))
        return result


def aten_calls(call: Call) -> int:
    """Number of operations that torch dispatches."""
    with _Counter() as counter:
        call()
    return counter.calls


def written_bytes(call: Call) -> int:
    """Bytes of the results of all these operations but views."""
    with _Counter() as counter:
        call()
    return counter.written


def saved_bytes(forward: Call) -> int:
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


def weight_of(layer: Any, size: int) -> tuple[Tensor, ...]:
    """What a layer multiplies a map of that size with: its weight, or in the Fourier domain its response."""
    if not hasattr(layer, "response"):
        return (layer.weight,)
    made = layer.response(tuple(size // s for s in layer.stride))
    return made if isinstance(made, tuple) else (made,)


def weight_gradient(layer: nn.Module, size: int = 16) -> Call:
    """A call that makes ``weight_of`` a layer and takes its gradient, nothing else."""
    directions = [torch.randn_like(part) for part in weight_of(layer, size)]
    return lambda: torch.autograd.backward(weight_of(layer, size), directions)


class Power(NamedTuple):
    """``y = factor · x ** exponent``, and the share of the variance of ``log y`` that it explains."""

    exponent: float
    factor: float
    explained: float


def fit_power(x: Sequence[float], y: Sequence[float]) -> Power:
    """Least squares of ``log y`` against ``log x``.

    Raises:
        ValueError: if there are fewer than two different ``x``, or a number is not positive.
    """
    if len(x) != len(y) or len(set(x)) < 2 or min(*x, *y) <= 0:
        raise ValueError(f"a power needs two different positive x and positive y, got x={list(x)}, y={list(y)}")
    u, v = ([math.log(value) for value in values] for values in (x, y))
    mean_u, mean_v = sum(u) / len(u), sum(v) / len(v)
    du, dv = [value - mean_u for value in u], [value - mean_v for value in v]
    exponent = sum(a * b for a, b in zip(du, dv, strict=True)) / sum(a * a for a in du)
    left = sum((b - exponent * a) ** 2 for a, b in zip(du, dv, strict=True))
    total = sum(b * b for b in dv)
    return Power(exponent, math.exp(mean_v - exponent * mean_u), 1 - left / total if total > 0 else 1.0)


class ChildError(RuntimeError):
    """A child process did not give a result."""


def in_child(module: str, arguments: Sequence[Any], limit: float) -> dict[str, Any]:
    """What a module prints as JSON on the last line of its output, run by a fresh interpreter.

    Raises:
        ChildError: if it takes longer than ``limit`` seconds, is killed or fails; it says how.
    """
    command = [sys.executable, "-m", module, *map(str, arguments)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit, check=False)
    except subprocess.TimeoutExpired as error:
        raise ChildError(f"not ready after {limit:g} s") from error
    if done.returncode < 0:
        raise ChildError(f"killed by signal {-done.returncode}, as a process is that needs more memory than there is")
    if done.returncode:
        raise ChildError((done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1])
    return json.loads(done.stdout.splitlines()[-1])


def peak_bytes() -> int:
    """Most memory that this process has held so far.

    On Linux not ``ru_maxrss``: a child starts with the one of the process that started it.
    """
    held = system_field("/proc/self/status", "VmHWM")
    if held is not None:
        return int(held.removesuffix("kB")) * 1024
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024


@contextmanager
def limited_memory(gigabytes: float) -> Iterator[None]:
    """Let allocations of this process fail beyond that much, before the system kills somebody for it.

    Raises:
        MemoryError: if they do.
    """
    before = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (int(gigabytes * 1e9), before[1]))
    try:
        yield
    except Exception as error:
        if not _out_of_memory(error):
            raise
        raise MemoryError(f"needs more than {gigabytes:g} GB of memory") from error
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)


def _out_of_memory(error: Exception) -> bool:
    """Whether torch, or Python, could not allocate."""
    return isinstance(error, MemoryError) or "allocate memory" in str(error)
