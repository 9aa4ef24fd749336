"""How the cost of a kernel grows with channels, kernel size, groups and depth, and how the overhead of a step falls.

The exponent p is that of the best fit time ~ value ** p to the last three values of a sweep. The overhead is what a
training step of ResNet-18 takes longer than with ``nn.Conv2d``: kernels are built once for a batch, so larger batches
and images hide them.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from statistics import median
from typing import Any

from torch import nn

import trysquare as ts
from benchmarks import peers
from benchmarks.measure import exponent, interleaved, ratio, weight_gradient
from benchmarks.networks import REFERENCE, build, images, train_step
from benchmarks.report import Figure, Part, Plot, Table, milliseconds

PEER = """\
At no point of these sweeps. With 128 groups of 2 channels the two come closest (1.7 against 1.1 ms), and the
overhead of orthogonium's layers shrinks with the batch like ours."""
FIXED = {
    "channels": "3 x 3",
    "kernel size": "64 channels",
    "groups": "256 channels, 3 x 3",
    "depth": "layers of 64 channels, 3 x 3",
}
FULL = {
    "channels": (32, 64, 128, 256, 512, 1024),
    "kernel size": (1, 2, 3, 4, 5, 6, 7, 8, 9),
    "groups": (1, 2, 4, 8, 16, 32, 64, 128),
    "depth": (1, 2, 4, 8, 16, 32),
}
QUICK = {"channels": (32, 64, 128, 256), "kernel size": (1, 3, 5), "groups": (1, 4, 16, 64), "depth": (1, 4, 16)}
# Batch and image size.
STEPS = {
    "batch": ((4, 32), (8, 32), (16, 32), (32, 32), (64, 32), (128, 32)),
    "image size": ((8, 32), (8, 64), (8, 128)),
}
QUICK_STEPS = {"batch": ((4, 32), (16, 32)), "image size": ((4, 32), (4, 64))}
TRAINED = ("AOC", "orthogonium AOC")
# Seconds after which a library is not sampled again.
PATIENCE = 15.0
# An overhead below this share is noise, and not drawn.
NOISE = 0.02


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int, help="samples of each time; 9 (--quick: 2)")


def layers(kind: str, value: int) -> dict[str, list[nn.Module]]:
    """Return the layers whose kernels are built, by library."""
    channels, size, groups, depth = {
        "channels": (value, 3, 1, 1),
        "kernel size": (64, value, 1, 1),
        "groups": (256, 3, value, 1),
        "depth": (64, 3, 1, value),
    }[kind]
    made: dict[str, list[nn.Module]] = {
        "trysquare": [ts.OrthoConv2d(channels, channels, size, groups=groups, bias=False) for _ in range(depth)]
    }
    if peers.installed():
        made["orthogonium"] = [peers.aoc(channels, channels, size, 1, groups, bias=False) for _ in range(depth)]
    return made


def _builds(made: list[nn.Module]) -> Callable[[], None]:
    calls = [weight_gradient(layer) for layer in made]

    def build_all() -> None:
        for call in calls:
            call()

    return build_all


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    values, steps = (QUICK, QUICK_STEPS) if arguments.quick else (FULL, STEPS)
    rounds = arguments.rounds or (2 if arguments.quick else 9)
    return {
        "kernels": {kind: [_kernel(kind, value, rounds) for value in values[kind]] for kind in values},
        "overhead": {kind: [_step(*shape, rounds) for shape in shapes] for kind, shapes in steps.items()},
    }


def _kernel(kind: str, value: int, rounds: int) -> dict[str, Any]:
    calls = {name: _builds(made) for name, made in layers(kind, value).items()}
    return {"value": value, "seconds": interleaved(calls, rounds, patience=PATIENCE, label=f"{kind} {value}")}


def _step(batch: int, size: int, rounds: int) -> dict[str, Any]:
    x, labels = images(batch, size)
    names = peers.that_run((REFERENCE, *TRAINED))
    calls = {name: train_step(build("resnet18", size, name), x, labels) for name in names}
    label = f"steps of {batch} x {size} x {size}"
    return {"batch": batch, "image size": size, "seconds": interleaved(calls, rounds, patience=PATIENCE, label=label)}


def _medians(entries: list[dict[str, Any]]) -> dict[str, dict[int, float]]:
    """Return milliseconds by value, by library."""
    return {
        name: {entry["value"]: 1e3 * median(entry["seconds"][name]) for entry in entries}
        for name in entries[0]["seconds"]
    }


def added(kind: str, entries: list[dict[str, Any]]) -> dict[str, dict[int, float]]:
    """Return the share of a plain step that each library adds, by batch or image size."""
    return {
        name: {e[kind]: ratio(e["seconds"][name], e["seconds"][REFERENCE]) - 1 for e in entries}
        for name in TRAINED
        if name in entries[0]["seconds"]
    }


def describe(data: dict[str, Any]) -> list[Part]:
    """Return a table of the ends of each sweep, and the overhead in words."""
    rows, sentences = [], []
    for kind, entries in data["kernels"].items():
        for name, points in _medians(entries).items():
            x, y = list(points), list(points.values())
            ends = [f"{x[0]} to {x[-1]}", milliseconds(y[0] / 1e3), milliseconds(y[-1] / 1e3)]
            rows.append([f"{kind} ({FIXED[kind]})", name, *ends, f"{exponent(x[-3:], y[-3:]):.2f}"])
    for kind, entries in data["overhead"].items():
        for name, points in added(kind, entries).items():
            first, *_, last = points
            sentences.append(f"{name} {points[first]:+.0%} at {kind} {first} and {points[last]:+.0%} at {last}")
    return [
        Table(["sweep", "library", "values", "ms, first", "ms, last", "exponent"], rows),
        f"Time added to a training step of ResNet-18: {'; '.join(sentences)}.",
    ]


def draw(data: dict[str, Any]) -> Figure:
    plots = [Plot(_medians(entries), kind, "kernel, ms", "xy") for kind, entries in data["kernels"].items()]
    label = {"AOC": "trysquare", "orthogonium AOC": "orthogonium"}
    for kind, entries in data["overhead"].items():
        found = {label[name]: points for name, points in added(kind, entries).items()}
        percent = {name: {x: 100 * e for x, e in points.items() if e > NOISE} for name, points in found.items()}
        plots.append(Plot(percent, kind, "added to a step, %", "xy"))
    return Figure(*plots)
