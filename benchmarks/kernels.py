"""Cost of building orthogonal kernels, side by side with ``orthogonium`` where that is installed.

Every row is measured in one run with the two libraries in turns. FLOPs, calls and bytes do not depend on the machine;
times do, so look at their ratio.
"""

from __future__ import annotations

import argparse
from statistics import median
from typing import Any

import torch
from torch import nn

import trysquare as ts
from benchmarks import peers
from benchmarks.measure import aten_calls, flops, interleaved, saved_bytes, weight_gradient
from benchmarks.report import Part, Table, better_peers, milliseconds, times
from trysquare.progress import track

SQUARE = ((64, 3), (128, 3), (128, 5), (256, 3), (512, 3))
EVALUATED = ((64, 32), (128, 16), (256, 14))
BATCH = 8


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of this command: none of its own."""


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Samples and counts."""
    square = SQUARE[:3] if arguments.quick else SQUARE
    return {
        "square": [_square(*shape) for shape in track(square, "square kernels", len(square))],
        "groups": {str(groups): _grouped_calls(groups) for groups in (1, 256)},
        "eval": [_evaluated(*shape) for shape in track(EVALUATED, "eval", len(EVALUATED))],
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
        fastest = median(entry["rows"]["trysquare"]["seconds"])
        for name, row in entry["rows"].items():
            seconds = median(row["seconds"])
            counted = [f"{row['flops'] / entry['channels'] ** 3:.1f}", str(row["calls"]), f"{row['saved']:.2f}"]
            shape = f"{entry['channels']}, {entry['size']} x {entry['size']}"
            rows.append([shape, name, *counted, milliseconds(seconds), times(seconds / fastest)])
    columns = ["square kernel", "library", "FLOPs / c³", "aten calls", "saved / weight", "ms", ""]
    groups = ", ".join(f"{calls} calls for {g} groups of 2 channels" for g, calls in data["groups"].items())
    return [
        Table(columns, rows, "Kernel and its gradient"),
        f"Groups are one batch: {groups}.",
        _eval_table(data["eval"]),
    ]


def _eval_table(entries: list[dict[str, Any]]) -> Table:
    rows = []
    for entry in entries:
        ours, plain = (median(entry["seconds"][name]) for name in ("trysquare", "nn.Conv2d"))
        shape = " x ".join(map(str, entry["shape"]))
        rows.append([shape, milliseconds(ours), milliseconds(plain), f"{ours / plain:.3f}x"])
    return Table(["eval forward", "trysquare ms", "nn.Conv2d ms", ""], rows, "One layer in eval mode")


def peer_wins(data: dict[str, Any]) -> list[str]:
    """Kernels that orthogonium builds faster or with less."""
    found = []
    for entry in data["square"]:
        numbers = {
            library: {"ms": 1e3 * median(row["seconds"]), "FLOPs": row["flops"], "saved weights": row["saved"]}
            for library, row in entry["rows"].items()
        }
        shape = f"kernel of {entry['channels']} channels, {entry['size']} x {entry['size']}"
        for unit, value in numbers["trysquare"].items():
            theirs = {"AOC": numbers["orthogonium"][unit]} if "orthogonium" in numbers else {}
            found += better_peers(shape, unit, {"AOC": value}, theirs)
    return found
