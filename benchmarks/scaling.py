"""How the cost of a kernel grows with channels, kernel size, groups and depth, and how the overhead of a step falls.

Each row of numbers is fitted by a power, least squares on logarithmic scales: time ~ channels ** exponent; "none" where
that explains less than 90 % of the variance, as where times jump. The overhead is what a training step of ResNet-18
takes longer than with ``nn.Conv2d``, as a share of that; its power is fitted where it is more than noise, 2 %. On Linux
a map of 32 MiB or more, as at batch 128, is memory that the C library asks for anew each time: apart from this run, of
the 3.3 to 3.8 s of a plain step there 1.7 to 1.9 were the system's, and it took 2.3 to 2.7 s with the environment
``MALLOC_MMAP_MAX_=0 MALLOC_TRIM_THRESHOLD_=17179869184``.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

from torch import nn

import trysquare as ts
from benchmarks import peers
from benchmarks.measure import Samples, fit_power, interleaved, ratio, weight_gradient
from benchmarks.networks import REFERENCE, build
from benchmarks.options import count
from benchmarks.report import NOISE, Part, Plot, Table, better_peer, milliseconds
from benchmarks.steps import images, train_step

KINDS = ("channels", "kernel size", "groups", "depth")
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
# Seconds after which a kind of layer is sampled no more.
PATIENCE = 15.0
# Share of the variance that a power must explain to be one.
EXPLAINED = 0.9


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of this command."""
    parser.add_argument("--rounds", type=count, help="samples of each time; 9 (--quick: 2)")


def layers(kind: str, value: int) -> dict[str, list[nn.Module]]:
    """Layers whose kernels are built, of each library."""
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


def plan(arguments: argparse.Namespace) -> dict[str, Any]:
    """Samples of building kernels, and of training steps."""
    values, steps = (QUICK, QUICK_STEPS) if arguments.quick else (FULL, STEPS)
    rounds = arguments.rounds or (2 if arguments.quick else 9)
    return {
        "kernels": {kind: [partial(_kernel, kind, value, rounds) for value in values[kind]] for kind in KINDS},
        "overhead": {kind: [partial(_step, *shape, rounds) for shape in shapes] for kind, shapes in steps.items()},
    }


def _kernel(kind: str, value: int, rounds: int) -> dict[str, Any]:
    calls = {name: _builds(made) for name, made in layers(kind, value).items()}
    return {"value": value, "seconds": interleaved(calls, rounds, patience=PATIENCE, label=f"{kind} {value}")}


def _step(batch: int, size: int, rounds: int) -> dict[str, Any]:
    names = peers.that_run((REFERENCE, *TRAINED))
    x, labels = images(batch, size)
    label = f"steps of {batch} x {size} x {size}"
    calls = {name: train_step(build("resnet18", size, name), x, labels) for name in names}
    return {"batch": batch, "image size": size, "seconds": interleaved(calls, rounds, patience=PATIENCE, label=label)}


def describe(data: dict[str, Any]) -> list[Part]:
    """A table and a plot for each way to grow."""
    parts: list[Part] = []
    for kind, entries in data["kernels"].items():
        parts += _growth(kind, entries)
    for kind, entries in data["overhead"].items():
        parts += _overhead(kind, entries)
    return parts


def _fitted(x: list[float], y: list[float]) -> str:
    if len(x) < 3:
        return "too few"
    power = fit_power(x, y)
    exponent = f"{power.exponent:.2f}" if power.explained >= EXPLAINED else "none"
    return f"{exponent} (R² {power.explained:.2f})"


def _growth(kind: str, entries: list[dict[str, Any]]) -> list[Part]:
    x = [float(entry["value"]) for entry in entries]
    rows, series = [], {}
    for name in entries[0]["seconds"]:
        y = [median(entry["seconds"][name]) for entry in entries]
        rows.append([name, *map(milliseconds, y), _fitted(x, y), _fitted(x[-3:], y[-3:])])
        series[name] = (x, [1e3 * value for value in y])
    heads = [f"{value:g}" for value in x]
    title = f"Kernel and gradient in ms, by {kind} ({FIXED[kind]})"
    table = Table([kind, *heads, "exponent", "of the last three"], rows, title)
    return [table, Plot(f"scaling-{kind.replace(' ', '-')}", title, series, kind, "ms", log="xy")]


def _overhead(kind: str, entries: list[dict[str, Any]]) -> list[Part]:
    x = [float(entry[kind]) for entry in entries]
    base = [median(entry["seconds"][REFERENCE]) for entry in entries]
    rows = [[REFERENCE, *(f"{milliseconds(b)} ms" for b in base), ""]]
    series = {}
    for name in TRAINED:
        if name not in entries[0]["seconds"]:
            continue
        extra = [ratio(entry["seconds"][name], entry["seconds"][REFERENCE]) - 1 for entry in entries]
        clear = [(v, e) for v, e in zip(x, extra, strict=True) if e > NOISE - 1]
        exponent = _fitted([v for v, _ in clear], [e for _, e in clear])
        rows.append([name, *(f"+{e:.0%}" if e >= 0 else f"{e:.0%}" for e in extra), exponent])
        series[name] = ([v for v, _ in clear], [100 * e for _, e in clear])
    other = "image size" if kind == "batch" else "batch"
    title = f"Time added to a training step of ResNet-18, by {kind} ({other} {entries[0][other]})"
    table = Table([kind, *(f"{value:g}" for value in x), "exponent"], rows, title)
    return [table, Plot(f"scaling-overhead-{kind.replace(' ', '-')}", title, series, kind, "% added", log="xy")]


def peer_wins(data: dict[str, Any]) -> list[str]:
    """Kernels and steps at which orthogonium is faster."""
    found = []
    for kind, entries in data["kernels"].items():
        for entry in entries:
            found += _win(f"kernel, {kind} {entry['value']}", entry["seconds"], "trysquare", "orthogonium")
    for entries in data["overhead"].values():
        for entry in entries:
            what = f"step of ResNet-18, batch {entry['batch']}, images of {entry['image size']}"
            found += _win(what, entry["seconds"], *TRAINED)
    return found


def _win(what: str, seconds: Samples, ours: str, theirs: str) -> list[str]:
    return better_peer(what, "AOC", "ms", 1e3, seconds[ours], seconds[theirs]) if theirs in seconds else []
