"""Block convolution: full convolution against products of taps, and a chain one by one against a tree."""

from __future__ import annotations

import argparse
from functools import partial, reduce
from statistics import median
from typing import Any

import torch
from torch import Tensor

from benchmarks.measure import interleaved, ratio
from benchmarks.report import Part, Table, milliseconds, times
from trysquare.nn.linalg import compose
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
CHAINS = ((16, 4), (16, 8), (64, 4), (64, 8), (128, 4))
WAYS = {"full convolution": compose_by_convolution, "products of taps": compose_by_taps}


def tree(kernels: list[Tensor]) -> Tensor:
    """Compose neighbours in one batch until one kernel is left (an associative scan)."""
    while len(kernels) > 1:
        dims = kernels[0].ndim - 2
        pairs = compose(torch.stack(kernels[0:-1:2]), torch.stack(kernels[1::2]), dims=dims)
        kernels = [*pairs.unbind(), *kernels[len(kernels) - len(kernels) % 2 :]]
    return kernels[0]


def plan(arguments: argparse.Namespace) -> dict[str, Any]:
    """Samples of forward and backward of both comparisons."""
    shapes, chains = (SHAPES[:6], CHAINS[:3]) if arguments.quick else (SHAPES, CHAINS)
    return {
        "kernels": [partial(_pair, *shape) for shape in shapes],
        "chains": [partial(_chain, *chain) for chain in chains],
    }


def _pair(channels: int, k: tuple[int, ...], size: tuple[int, ...]) -> dict[str, Any]:
    after = torch.randn(1, channels, channels, *k, requires_grad=True)
    before = torch.randn(1, channels, channels, *size, requires_grad=True)
    calls = {name: lambda way=way: way(after, before).sum().backward() for name, way in WAYS.items()}
    return {"name": f"{channels} channels, {k} after {size}", "seconds": interleaved(calls, 20)}


def _chain(channels: int, count: int) -> dict[str, Any]:
    kernels = [torch.randn(channels, channels, 2, 2, requires_grad=True) for _ in range(count)]
    calls = {
        "one by one": lambda: reduce(compose, kernels).sum().backward(),
        "tree": lambda: tree(kernels).sum().backward(),
    }
    return {"name": f"{count} of {channels} channels, 2 x 2", "seconds": interleaved(calls, 10)}


def describe(data: dict[str, Any]) -> list[Part]:
    """A table for each comparison."""
    return [_table(title, data[key]) for key, title in (("kernels", "two kernels"), ("chains", "chain"))]


def _table(title: str, entries: list[dict[str, Any]]) -> Table:
    ways = list(entries[0]["seconds"])
    rows = []
    for entry in entries:
        first, second = (entry["seconds"][way] for way in ways)
        cells = (milliseconds(median(first)), milliseconds(median(second)), times(ratio(second, first)))
        rows.append([entry["name"], *cells])
    return Table([title, *(f"{way} ms" for way in ways), "ratio"], rows)
