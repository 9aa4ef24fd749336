"""Building a square orthogonal kernel and its gradient, side by side with ``orthogonium``.

FLOPs, calls and bytes do not depend on the machine; times do, so look at their ratio. orthogonium has its default, 12
Björck steps. FLOPs are those of products; factorisations, which Björck does without, show in the calls and the times. A
kernel is grown tap by tap. Backward needs the intermediate kernels: a layer with many channels builds them again
instead of keeping them, which halves the saved memory for a few percent of time.
"""

from __future__ import annotations

import argparse
import math
from contextlib import nullcontext
from functools import partial
from statistics import median
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

import trysquare as ts
from benchmarks import peers
from benchmarks.measure import (
    Call,
    aten_calls,
    flops,
    interleaved,
    ratio,
    saved_bytes,
    weight_gradient,
)
from benchmarks.report import Figure, Part, Plot, Table, megabytes, milliseconds, times
from trysquare.nn.linalg import projectors

PEER = """\
Nowhere among these kernels with its default. With its Cholesky, orthogonium is as fast as ours on a matrix that is
nearly orthonormal, but less exact: see the orthogonalizers below."""
SQUARE = ((64, 3), (128, 3), (128, 5), (256, 3), (512, 3))
KEPT = (64, 128, 256, 512)
EVALUATED = ((64, 32), (128, 16), (256, 14))
BATCH = 8
# Layers that are alike, and their channels.
TOGETHER = ((8, 16), (8, 32), (6, 64), (6, 128), (10, 256), (4, 512))
# The number of channels from which backward rebuilds the intermediate kernels.
WAYS = {"kept": math.inf, "not kept": 0}


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    square, kept = (SQUARE[:3], KEPT[:2]) if arguments.quick else (SQUARE, KEPT)
    return {
        "square": [_square(*shape) for shape in square],
        "kept": [_kept(channels) for channels in kept],
        "groups": {
            str(groups): aten_calls(weight_gradient(ts.OrthoConv2d(2 * groups, 2 * groups, 3, groups=groups)))
            for groups in (1, 256)
        },
        "eval": [_evaluated(*shape) for shape in EVALUATED],
        "together": [_together(*shape) for shape in (TOGETHER[:3] if arguments.quick else TOGETHER)],
        "accelerator": _on_an_accelerator(),
    }


def _square(channels: int, size: int) -> dict[str, Any]:
    layers: dict[str, nn.Module] = {"trysquare": ts.OrthoConv2d(channels, channels, size, bias=False)}
    if peers.installed():
        layers["orthogonium"] = peers.aoc(channels, channels, size, 1, 1, bias=False)
    calls = {name: weight_gradient(layer) for name, layer in layers.items()}
    seconds = interleaved(calls, 15 if channels > 256 else 40, label=f"kernel of {channels} channels")
    rows = {
        name: {
            "flops": flops(calls[name]),
            "calls": aten_calls(calls[name]),
            "saved": saved_bytes(lambda layer=layer: layer.weight) / (layer.weight.numel() * 4),
            "seconds": seconds[name],
        }
        for name, layer in layers.items()
    }
    return {"channels": channels, "size": size, "rows": rows}


def _kept(channels: int) -> dict[str, Any]:
    """Measure a layer whose backward keeps the intermediate kernels, and one whose backward rebuilds them."""
    layer = ts.OrthoConv2d(channels, channels, 3, bias=False)
    build = weight_gradient(layer)
    calls = {way: partial(_from_channels, least, build) for way, least in WAYS.items()}
    seconds = interleaved(calls, 15 if channels > 256 else 40)
    saved = {way: saved_bytes(partial(_from_channels, least, lambda: layer.weight)) for way, least in WAYS.items()}
    return {"channels": channels, "seconds": seconds, "saved": saved}


def _from_channels(least: float, call: Call) -> Any:
    with patch.object(projectors, "MANY_CHANNELS", least):
        return call()


def _evaluated(channels: int, size: int) -> dict[str, Any]:
    layer = ts.OrthoConv2d(channels, channels, 3).eval()
    plain = ts.to_torch(layer)
    x = torch.randn(BATCH, channels, size, size)
    with torch.no_grad():
        seconds = interleaved({"trysquare": lambda: layer(x), "nn.Conv2d": lambda: plain(x)}, 100)
    return {"shape": [BATCH, channels, size, size], "seconds": seconds}


def _weights_and_gradients(layers: nn.ModuleList, together: bool) -> None:
    """Build all weights and take a gradient back from them, as a training step does: by one backward pass."""
    with ts.built(layers) if together else nullcontext():
        # As a pass asks for them: a weight that somebody reads is watched for writes besides, which is no part of this.
        weights = [layer._current_weight() for layer in layers]
        torch.autograd.backward(weights, [torch.empty_like(weight) for weight in weights])


def _together(count: int, channels: int) -> dict[str, Any]:
    """Measure layers that are built one by one, and in a block."""
    layers = nn.ModuleList(ts.OrthoConv2d(channels, channels, 3, bias=False) for _ in range(count))
    ways = {way: partial(_weights_and_gradients, layers, way == "together") for way in ("one by one", "together")}
    seconds = interleaved(ways, 10 if channels > 128 else 30, label=f"{count} kernels of {channels} channels")
    return {
        "count": count, "channels": channels, "seconds": seconds,
        "calls": {way: aten_calls(call) for way, call in ways.items()},
    }  # fmt: skip


def _on_an_accelerator() -> dict[str, Any]:
    """Count what an accelerator would be given, on the meta device: for one kernel, and for all of ResNet-34."""
    with torch.device("meta"):
        whole = ts.models.build("resnet34", (3, 224, 224), 1000)
        kernels = [module for module in whole.modules() if isinstance(module, ts.OrthoConv2d)]
        cases = {
            "a 3x3 kernel of 64 channels": [ts.OrthoConv2d(64, 64, 3)],
            "8 such kernels": [ts.OrthoConv2d(64, 64, 3) for _ in range(8)],
            f"the {len(kernels)} kernels of ResNet-34": kernels,
        }
        return {
            name: {
                way: aten_calls(partial(_weights_and_gradients, nn.ModuleList(layers), way == "together"))
                for way in ("one by one", "together")
            }
            for name, layers in cases.items()
        }


def describe(data: dict[str, Any]) -> list[Part]:
    """Return a table of square kernels, and what else was measured in sentences."""
    rows = []
    for entry in data["square"]:
        ours = entry["rows"]["trysquare"]["seconds"]
        for name, row in entry["rows"].items():
            shape = f"{entry['channels']}, {entry['size']} x {entry['size']}"
            counted = [f"{row['flops'] / entry['channels'] ** 3:.1f}", str(row["calls"]), f"{row['saved']:.2f}"]
            rows.append(
                [shape, name, *counted, milliseconds(median(row["seconds"])), times(ratio(row["seconds"], ours))]
            )
    columns = ["square kernel", "library", "FLOPs / c³", "aten calls", "saved / weight", "ms", "ratio"]
    one, many = data["groups"].values()
    slower = sorted(ratio(entry["seconds"]["not kept"], entry["seconds"]["kept"]) for entry in data["kept"])
    evals = sorted(ratio(entry["seconds"]["trysquare"], entry["seconds"]["nn.Conv2d"]) for entry in data["eval"])
    most = data["kept"][-1]
    kept, rebuilt = (megabytes(most["saved"][way]) for way in WAYS)
    together = [
        [
            f"{entry['count']} of {entry['channels']}", *(str(calls) for calls in entry["calls"].values()),
            *(milliseconds(median(seconds)) for seconds in entry["seconds"].values()),
            times(ratio(entry["seconds"]["one by one"], entry["seconds"]["together"])),
        ]
        for entry in data["together"]
    ]  # fmt: skip
    blind = [[name, *(str(calls) for calls in row.values())] for name, row in data["accelerator"].items()]
    return [
        Table(columns, rows),
        "All kernels of a model can be built as one job, `with ts.built(model)`; layers that are alike in one batch, "
        "on a processor up to 128 channels, from where both cores are busy with one kernel:",
        Table(["3x3 kernels", "calls one by one", "together", "ms one by one", "together", "times as fast"], together),
        "On an accelerator time goes by calls, and the host looks at no value there. So many calls, none in float64, "
        "counted on the meta device:",
        Table(["kernels", "one by one", "together"], blind),
        f"Groups are built as one batch: a kernel takes {one} calls, and one of 256 groups {many}. Building the "
        f"intermediate kernels again takes {times(slower[0])} to {times(slower[-1])} the time of keeping them, and "
        f"saves {rebuilt} MB in place of {kept} MB for {most['channels']} channels. In eval mode the kernel is kept: a "
        f"layer takes {evals[0]:.3f} to {evals[-1]:.3f} times as long as `nn.Conv2d`.",
    ]


def draw(data: dict[str, Any]) -> Figure:
    series: dict[str, dict[str, float]] = {}
    for entry in data["square"]:
        for name, row in entry["rows"].items():
            shape = f"{entry['channels']} channels, {entry['size']} x {entry['size']}"
            series.setdefault(name, {})[shape] = 1e3 * median(row["seconds"])
    return Figure(Plot(series, "kernel and gradient, ms", log="x"))
