"""What the benchmarks share: timing in turns, counts that do not depend on the machine, peak memory."""

from __future__ import annotations

import json
import math
import resource
import subprocess
import sys
import time
import weakref
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from contextlib import contextmanager
from random import Random
from statistics import linear_regression, median
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.results import memory_gigabytes, system_field

Call = Callable[[], Any]
Samples = dict[str, list[float]]


def interleaved(
    calls: dict[str, Call], rounds: int, *, patience: float = math.inf, always: Container[str] = (), label: str = ""
) -> Samples:
    """Return the seconds of each call, taken in turns so that all see the same state of the machine.

    The order within a turn is shuffled, because a call leaves the caches to its successor.

    This does not use ``torch.utils.benchmark.Timer``, which calls ``torch.set_num_threads`` around each sample: after
    that, torch's batched factorisations of more than 150 rows can be wrong (pytorch issue 142815), and they are what
    most contestants do. It also runs a statement three times for one sample; a step of a network may take a minute.

    Args:
        calls: what to time; each runs once before, which does not count.
        rounds: samples of each.
        patience: a call whose samples have taken more seconds than this is not sampled again.
        always: calls that are sampled in every turn, however long they take.
        label: is printed.
    """
    if label:
        print(f"timing: {label}", file=sys.stderr)
    times: Samples = {name: [] for name in calls}
    order, shuffle = list(calls), Random(0).shuffle
    for number in range(rounds + 1):
        for name in order:
            if sum(times[name]) < patience or name in always:
                start = time.perf_counter()
                calls[name]()
                if number:  # the first turn builds what is kept, and allocates
                    times[name].append(time.perf_counter() - start)
        shuffle(order)
    return times


def ratio(samples: Sequence[float], reference: Sequence[float]) -> float:
    """Return the median ratio of samples of the same turn: a machine that is slow for a while is so for both."""
    return median(sample / other for sample, other in zip(samples, reference, strict=False))


def flops(call: Call) -> int:
    """Return the floating point operations of all products, by torch's counter; it leaves out factorisations."""
    with FlopCounterMode(display=False) as counter:
        call()
    return counter.get_total_flops()


class _Counter(TorchDispatchMode):
    """Counts operations, and the bytes of the results of all but views."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = self.written = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.calls += 1
        if not func.is_view:
            self.written += sum(leaf.nbytes for leaf in tree_leaves(result) if isinstance(leaf, Tensor))
        return result


def _counted(call: Call) -> _Counter:
    with _Counter() as counter:
        call()
    return counter


def aten_calls(call: Call) -> int:
    """Return the number of operations that torch dispatches."""
    return _counted(call).calls


def written_bytes(call: Call) -> int:
    """Return the bytes of the results of all these operations but views."""
    return _counted(call).written


def saved_bytes(forward: Call) -> int:
    """Return the bytes that autograd keeps between forward and backward, each storage once."""
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = forward()
    del result
    return sum(kept.values())


class _Live(TorchDispatchMode):
    """Follows the bytes of all storages that are alive, of those that it has seen."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = self.peak = 0
        self._alive: dict[int, weakref.ref[Any]] = {}

    def see(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key not in self._alive:
            self._alive[key] = weakref.ref(storage, lambda _: self._gone(key, size))
            self.bytes += size
            self.peak = max(self.peak, self.bytes)

    def _gone(self, key: int, size: int) -> None:
        del self._alive[key]
        self.bytes -= size

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self.see(leaf)
        return result


def peak_live_bytes(call: Call, alive: Iterable[Tensor] = ()) -> int:
    """Return the most bytes that tensors hold at once during a call, on any device and whatever the allocator does.

    What an operation allocates for itself and gives back does not count.

    Args:
        call: what to look at.
        alive: tensors that are there before.
    """
    with _Live() as live:
        for tensor in alive:
            live.see(tensor)
        call()
    return live.peak


def weight_of(layer: Any, size: int) -> tuple[Tensor, ...]:
    """Return what a layer multiplies a map of that size with: its weight, or its response in the Fourier domain."""
    if not hasattr(layer, "response"):
        return (layer.weight,)
    made = layer.response(tuple(size // s for s in layer.stride))
    return made if isinstance(made, tuple) else (made,)


def weight_gradient(layer: nn.Module, size: int = 16) -> Call:
    """Return a call that builds the weight of a layer and takes its gradient, and nothing else."""
    directions = [torch.randn_like(part) for part in weight_of(layer, size)]
    return lambda: torch.autograd.backward(weight_of(layer, size), directions)


def exponent(x: Sequence[float], y: Sequence[float]) -> float:
    """Return the ``p`` of the power ``y ~ x ** p`` that fits best on logarithmic scales."""
    return linear_regression([math.log(value) for value in x], [math.log(value) for value in y]).slope


class ChildError(RuntimeError):
    """A child process did not give a result."""


def in_child(module: str, arguments: Sequence[Any], limit: float) -> dict[str, Any]:
    """Run a module in a fresh interpreter and return the JSON on the last line of its output.

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
    """Return the most memory that this process has held so far.

    On Linux not ``ru_maxrss``: a child starts with the one of the process that started it.
    """
    held = system_field("/proc/self/status", "VmHWM")
    if held is not None:
        return int(held.removesuffix("kB")) * 1024
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024


@contextmanager
def limited_memory(gigabytes: float | None = None) -> Iterator[None]:
    """Let allocations of this process fail beyond that much, before the system kills somebody for it.

    Args:
        gigabytes: 70 % of the memory of the machine unless given.

    Raises:
        MemoryError: if they do.
    """
    gigabytes = round(0.7 * memory_gigabytes(), 1) if gigabytes is None else gigabytes
    before = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (int(gigabytes * 1e9), before[1]))
    try:
        yield
    except Exception as error:
        if not isinstance(error, MemoryError) and "allocate memory" not in str(error):
            raise
        raise MemoryError(f"needs more than {gigabytes:g} GB of memory") from error
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)
