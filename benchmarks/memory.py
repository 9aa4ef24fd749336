"""Peak memory of a training step of ResNet-34 at 224 x 224, with kernels that are built one by one and together.

`with ts.built(model)` holds the gradients of all weights until it is left; without it, each is taken to the free
tensors at once. Bytes are those of all tensors that are alive, counted at every operation: they do not depend on the
machine, the allocator, or what else runs. What a block adds does not grow with the batch.
"""

from __future__ import annotations

import argparse
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn

import trysquare as ts
from benchmarks.measure import peak_live_bytes
from benchmarks.report import Part, Table, megabytes

# The meta device stands for an accelerator: the calls are made there, and nothing is computed.
DEVICES = {"cpu": "a processor", "meta": "an accelerator"}
STEPS = (("cpu", 8), ("cpu", 16), ("cpu", 32), ("meta", 8), ("meta", 16), ("meta", 32), ("meta", 128))


def run(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    return [measure(*step) for step in STEPS if not arguments.quick or step[0] == "meta"]


def measure(device: str, batch: int) -> dict[str, Any]:
    """Count the bytes that tensors hold at the peak of a step, without a block and in one."""
    peaks = {}
    for way in ("one by one", "together"):
        with torch.device(device):
            model = ts.models.build("resnet34", (3, 224, 224), 1000)
            images, labels = torch.randn(batch, 3, 224, 224), torch.zeros(batch, dtype=torch.long)

        def step(model: nn.Module = model, images: Any = images, labels: Any = labels, way: str = way) -> None:
            with ts.built(model) if way == "together" else nullcontext():
                nn.functional.cross_entropy(model(images), labels).backward()

        peaks[way] = peak_live_bytes(step, [*model.parameters(), *model.buffers(), images, labels])
    return {"device": device, "batch": batch, "peaks": peaks}


def describe(data: list[dict[str, Any]]) -> list[Part]:
    """Return a table of peaks."""
    rows = []
    for entry in data:
        peaks = entry["peaks"]
        growth = f"{100 * (peaks['together'] / peaks['one by one'] - 1):.1f} %"
        name = f"{DEVICES[entry['device']]}, batch {entry['batch']}"
        rows.append([name, *(f"{megabytes(peaks[way])} MB" for way in ("one by one", "together")), growth])
    return [Table(["step on", "one by one", "together", "growth"], rows)]
