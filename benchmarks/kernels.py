"""Cost of building orthogonal kernels, side by side with ``orthogonium`` where that is installed.

Every row is measured in one run with the two libraries in turns. FLOPs, calls and bytes do not depend on the machine;
times do, so look at their ratio to ours. orthogonium has its default, 12 steps of Björck. FLOPs are those of products:
factorisations and triangular solves, which that does without, are seen as calls and in the times. A kernel is grown tap
by tap; backward needs the kernels on the way, and a layer with many channels builds them anew instead of keeping them.
"""

from __future__ import annotations

import argparse
import math
from functools import partial
from statistics import median
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

import trysquare as ts
from benchmarks import peers
from benchmarks.measure import Call, Samples, aten_calls, flops, interleaved, ratio, saved_bytes, weight_gradient
from benchmarks.report import Part, Table, better_peer, megabytes, milliseconds, times
from trysquare.nn.linalg import projectors

SQUARE = ((64, 3), (128, 3), (128, 5), (256, 3), (512, 3))
KEPT = (64, 128, 192, 256, 384, 512)
EVALUATED = ((64, 32), (128, 16), (256, 14))
BATCH = 8
# From how many channels on backward does without the kernels on the way.
WAYS = {"kept": math.inf, "not kept": 0}


def plan(arguments: argparse.Namespace) -> dict[str, Any]:
    """Samples and counts."""
    square, kept = (SQUARE[:3], KEPT[:2]) if arguments.quick else (SQUARE, KEPT)
    return {
        "square": [partial(_square, *shape) for shape in square],
        "kept": [partial(_kept, channels) for channels in kept],
        "groups": {str(groups): partial(_grouped_calls, groups) for groups in (1, 256)},
        "eval": [partial(_evaluated, *shape) for shape in EVALUATED],
    }


def _square(channels: int, size: int) -> dict[str, Any]:
    layers: dict[str, nn.Module] = {"trysquare": ts.OrthoConv2d(channels, channels, size, bias=False)}
    if peers.installed():
        layers["orthogonium"] = peers.aoc(channels, channels, size, 1, 1, bias=False)
    calls = {name: weight_gradient(layer) for name, layer in layers.items()}
    seconds = interleaved(calls, 15 if channels > 256 else 40)
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
    """The same layer with backward that keeps the kernels on the way, and with one that does without."""
    layer = ts.OrthoConv2d(channels, channels, 3, bias=False)
    build = weight_gradient(layer)
    calls = {way: partial(_from_channels, least, build) for way, least in WAYS.items()}
    seconds = interleaved(calls, 15 if channels > 256 else 40)
    saved = {way: saved_bytes(partial(_from_channels, least, lambda: layer.weight)) for way, least in WAYS.items()}
    default = "kept" if channels < projectors.MANY_CHANNELS else "not kept"
    return {"channels": channels, "seconds": seconds, "saved": saved, "default": default}


def _from_channels(least: float, call: Call) -> Any:
    """The call, with backward doing without the kernels from so many channels on."""
    with patch.object(projectors, "MANY_CHANNELS", least):
        return call()


def _grouped_calls(groups: int) -> int:
    return aten_calls(weight_gradient(ts.OrthoConv2d(2 * groups, 2 * groups, 3, groups=groups)))


def _evaluated(channels: int, size: int) -> dict[str, Any]:
    layer = ts.OrthoConv2d(channels, channels, 3).eval()
    plain = ts.to_torch(layer)
    x = torch.randn(BATCH, channels, size, size)
    with torch.no_grad():
        seconds = interleaved({"trysquare": lambda: layer(x), "nn.Conv2d": lambda: plain(x)}, 100)
    return {"shape": [BATCH, channels, size, size], "seconds": seconds}


def describe(data: dict[str, Any]) -> list[Part]:
    """Square kernels, groups, evaluation."""
    rows = []
    for entry in data["square"]:
        ours = entry["rows"]["trysquare"]["seconds"]
        for name, row in entry["rows"].items():
            counted = [f"{row['flops'] / entry['channels'] ** 3:.1f}", str(row["calls"]), f"{row['saved']:.2f}"]
            shape = f"{entry['channels']}, {entry['size']} x {entry['size']}"
            rows.append(
                [shape, name, *counted, milliseconds(median(row["seconds"])), times(ratio(row["seconds"], ours))]
            )
    columns = ["square kernel", "library", "FLOPs / c³", "aten calls", "saved / weight", "ms", "ratio"]
    groups = ", ".join(f"{calls} calls for {g} groups of 2 channels" for g, calls in data["groups"].items())
    return [
        Table(columns, rows, "Kernel and its gradient"),
        _kept_table(data["kept"]),
        f"Groups are one batch: {groups}.",
        _eval_table(data["eval"]),
    ]


def _kept_table(entries: list[dict[str, Any]]) -> Table:
    rows = []
    for entry in entries:
        taken, saved = ([entry[key][way] for way in WAYS] for key in ("seconds", "saved"))
        cells = [*(milliseconds(median(seconds)) for seconds in taken), times(ratio(taken[1], taken[0]))]
        cells += [*map(megabytes, saved), times(saved[1] / saved[0])]
        rows.append([f"{entry['channels']}, 3 x 3", *cells, entry["default"]])
    columns = ["square kernel", "ms, kept", "not kept", "ratio"]
    columns += ["saved MB, kept", "not kept", "ratio", "the layer's choice"]
    return Table(columns, rows, "Kernels on the way to the last one, kept for backward or not")


def _eval_table(entries: list[dict[str, Any]]) -> Table:
    rows = []
    for entry in entries:
        ours, plain = (entry["seconds"][name] for name in ("trysquare", "nn.Conv2d"))
        shape = " x ".join(map(str, entry["shape"]))
        rows.append([shape, milliseconds(median(ours)), milliseconds(median(plain)), f"{ratio(ours, plain):.3f}x"])
    return Table(["eval forward", "trysquare ms", "nn.Conv2d ms", "ratio"], rows, "One layer in eval mode")


def peer_wins(data: dict[str, Any]) -> list[str]:
    """Kernels that orthogonium builds faster or with less."""
    found = []
    for entry in data["square"]:
        if "orthogonium" in entry["rows"]:
            ours, theirs = (_costs(entry["rows"][library]) for library in ("trysquare", "orthogonium"))
            shape = f"kernel of {entry['channels']} channels, {entry['size']} x {entry['size']}"
            for unit, samples in ours.items():
                found += better_peer(shape, "AOC", unit, 1.0, samples, theirs[unit])
    return found


def _costs(row: dict[str, Any]) -> Samples:
    """Of a kernel, by unit."""
    return {"ms": [1e3 * s for s in row["seconds"]], "FLOPs": [row["flops"]], "saved weights": [row["saved"]]}
