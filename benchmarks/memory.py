"""Peak memory of one network in a process of its own, as JSON.

python -m benchmarks.memory NETWORK SIZE BATCH VARIANT train|eval THREADS GIGABYTES
"""

from __future__ import annotations

import json
import sys

import torch

from benchmarks.measure import limited_memory, peak_bytes, saved_bytes
from benchmarks.networks import build
from benchmarks.steps import evaluation, images, train_step

# The peak rises until the allocator has pieces to reuse for everything.
PASSES = 3


def measure(network: str, size: int, batch: int, variant: str, mode: str) -> dict[str, int]:
    """Bytes that the process holds at most, before there is a network and after some passes."""
    start = peak_bytes()
    model = build(network, size, variant)
    x, labels = images(batch, size)
    call = train_step(model, x, labels) if mode == "train" else evaluation(model, x)
    for _ in range(PASSES):
        call()
    found = {"start": start, "peak": peak_bytes(), "parameters": sum(p.numel() for p in model.parameters())}
    if mode == "train":
        found["saved"] = saved_bytes(lambda: model(x))
    return found


if __name__ == "__main__":
    network, size, batch, variant, mode, threads, gigabytes = sys.argv[1:]
    if int(threads) != torch.get_num_threads():  # setting it has side effects: see linalg.inverse
        torch.set_num_threads(int(threads))
    try:
        with limited_memory(float(gigabytes)):
            print(json.dumps(measure(network, int(size), int(batch), variant, mode)))
    except MemoryError as error:
        sys.exit(str(error))
