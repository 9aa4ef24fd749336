"""Peak memory of one network in a process of its own, as JSON.

python -m benchmarks.memory NETWORK SIZE BATCH VARIANT train|eval THREADS GIGABYTES PARENT
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time

import torch

from benchmarks.measure import Call, limited_memory, peak_bytes, saved_bytes
from benchmarks.networks import build
from benchmarks.steps import evaluation, images, train_step

# The peak rises until the allocator has pieces to reuse for everything; slow networks are not waited for that long.
PASSES = 3
SECONDS = 30.0


def measure(network: str, size: int, batch: int, variant: str, mode: str) -> dict[str, int]:
    """Bytes that the process holds at most, before there is a network and after some passes."""
    start = peak_bytes()
    model = build(network, size, variant)
    x, labels = images(batch, size)
    passes = _repeat(train_step(model, x, labels) if mode == "train" else evaluation(model, x))
    parameters = sum(p.numel() for p in model.parameters())
    found = {"start": start, "peak": peak_bytes(), "passes": passes, "parameters": parameters}
    if mode == "train":
        found["saved"] = saved_bytes(lambda: model(x))
    return found


def _repeat(call: Call) -> int:
    """Make ``PASSES`` calls, fewer if they take longer than ``SECONDS``; returns how many."""
    start, done = time.perf_counter(), 0
    while done < PASSES and time.perf_counter() - start < SECONDS:
        call()
        done += 1
    return done


def end_with_parent(parent: int) -> None:
    """End this process once the one that started it has ended: it would only disturb the next run."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


if __name__ == "__main__":
    network, size, batch, variant, mode, threads, gigabytes, parent = sys.argv[1:]
    end_with_parent(int(parent))
    if int(threads) != torch.get_num_threads():  # setting it has side effects: see linalg.inverse
        torch.set_num_threads(int(threads))
    try:
        with limited_memory(float(gigabytes)):
            print(json.dumps(measure(network, int(size), int(batch), variant, mode)))
    except MemoryError as error:
        sys.exit(str(error))
