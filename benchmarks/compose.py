"""Two ways to compose two kernels: a full convolution, or products of taps, which win while one side has few taps.

The library chooses by this table.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.utils.benchmark import Timer

from benchmarks.report import Figure, Part, Plot, Table, milliseconds, times
from trysquare.nn.linalg.kernels import compose_by_convolution, compose_by_taps

SHAPES = (
    (16, (3, 3), (3, 3)),
    (64, (2, 2), (2, 2)),
    (64, (3, 3), (3, 3)),
    (64, (3,), (3,)),
    (64, (7,), (7,)),
    (32, (2, 2, 2), (2, 2, 2)),
    (64, (5, 5), (5, 5)),
    (256, (2, 2), (2, 2)),
    (256, (3, 3), (3, 3)),
    (256, (2, 2), (5, 5)),
)
WAYS = {"full convolution": compose_by_convolution, "products of taps": compose_by_taps}


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return samples of forward and backward."""
    found = []
    for channels, after, before in SHAPES[:6] if arguments.quick else SHAPES:
        kernels = [torch.randn(1, channels, channels, *size, requires_grad=True) for size in (after, before)]
        ways = {name: lambda way=way, pair=kernels: way(*pair) for name, way in WAYS.items()}
        found.append({"name": f"{channels} channels, {after} after {before}", "seconds": _seconds(ways)})
    return {"kernels": found}


def _seconds(ways: dict[str, Callable[[], Tensor]]) -> dict[str, list[float]]:
    """Time forward and backward; no factorisation is among them, so torch's timer is safe (see ``interleaved``)."""
    threads = torch.get_num_threads()
    return {
        name: Timer("way().sum().backward()", globals={"way": way}, num_threads=threads).blocked_autorange().times
        for name, way in ways.items()
    }


def _ratio(seconds: dict[str, list[float]]) -> float:
    first, second = map(median, seconds.values())
    return second / first


def describe(data: dict[str, Any]) -> list[Part]:
    """Return one table."""
    rows = [
        [entry["name"], *(milliseconds(median(entry["seconds"][way])) for way in WAYS), times(_ratio(entry["seconds"]))]
        for entry in data["kernels"]
    ]
    return [Table(["two kernels", *(f"{way} ms" for way in WAYS), "ratio"], rows)]


def draw(data: dict[str, Any]) -> Figure:
    """Draw the ratio of the two ways."""
    series = {"ratio": {entry["name"]: _ratio(entry["seconds"]) for entry in data["kernels"]}}
    return Figure(Plot(series, "products of taps / full convolution, time", log="x", reference=1))
