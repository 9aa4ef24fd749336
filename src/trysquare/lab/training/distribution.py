"""Training in one process, or in several that torchrun has started."""

from __future__ import annotations

import atexit
import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

T = TypeVar("T")


@dataclass(frozen=True)
class World:
    """The processes of a run, and the rank of this one among them.

    Attributes:
        device: of this process.
        rank: number of this process; number 0 alone writes files.
        size: how many there are.
    """

    device: torch.device
    rank: int = 0
    size: int = 1

    @property
    def is_main(self) -> bool:
        """Whether this process is the one that writes files and shows progress."""
        return self.rank == 0

    def total(self, values: Tensor) -> Tensor:
        """Return the sum over all processes."""
        if dist.is_initialized():
            dist.all_reduce(values)
        return values

    def shared(self, value: T) -> T:
        """Return the value that process 0 has."""
        if not dist.is_initialized():
            return value
        box: list[T] = [value]
        dist.broadcast_object_list(box)
        return box[0]

    @property
    def group(self) -> dist.ProcessGroup | None:
        """All processes, or ``None`` for this one alone."""
        return dist.group.WORLD if dist.is_initialized() else None


def is_main_process() -> bool:
    """Return whether this process is the first that torchrun has started, or the only one."""
    return int(os.environ.get("RANK", 0)) == 0


@cache
def first_to_fail() -> bool:
    """Return whether this process is to say why the run ends: it is, if it asks before all others.

    The others end because it did, or for the same reason. All processes count in the store through which torchrun lets
    them meet, so that it works before they have joined and after one has gone.
    """
    if "WORLD_SIZE" not in os.environ:
        return True
    try:
        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        connect: Any = dist.TCPStore  # type: ignore[attr-defined]
        store = connect(address, port, timeout=timedelta(seconds=5), wait_for_workers=False)
        return bool(store.add("trysquare/failures", 1) == 1)
    except (KeyError, ValueError, RuntimeError):  # nobody to ask
        return is_main_process()


def chosen_device(name: str) -> torch.device:
    """Return a device by name; ``"auto"`` is the GPU of this process if there is one.

    Raises:
        ValueError: if torch does not know it, or cannot use it here.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"train.device={name!r} cannot be used here: {str(error).splitlines()[0]}") from error
    return device


@contextmanager
def joined(device: str = "auto") -> Iterator[World]:
    """Join the processes of torchrun, or run as one. Processes leave together, unless one fails.

    Raises:
        ValueError: as ``chosen_device``.
    """
    chosen = chosen_device(device)
    if "WORLD_SIZE" not in os.environ:
        yield World(chosen)
        return
    if chosen.type == "cuda":
        torch.cuda.set_device(chosen)
    dist.init_process_group("nccl" if chosen.type == "cuda" else "gloo")
    # What holds on to the group in cycles, such as torch's reducer, must go while there is an interpreter: threads of
    # gloo that let go of tensors later abort the process.
    atexit.register(gc.collect)
    try:
        yield World(chosen, dist.get_rank(), dist.get_world_size())
        # A process that ends while a thread of gloo still lets go of the tensors of its last sum is aborted by torch.
        dist.barrier(device_ids=None if chosen.index is None else [chosen.index])
    except BaseException:
        first_to_fail()  # asked before the others lose this process, and fail too
        raise
    finally:
        dist.destroy_process_group()
