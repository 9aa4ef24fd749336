"""Ways to an orthonormal matrix: time and precision.

Times are those of forward and backward of matrices near an orthonormal one, where an adaptive iteration ends early; in
training they stay near, except with Cayley and the exponential. Precision is the largest |σ - 1| of a 128 x 128 result
in float32, as the free matrix gets worse conditioned. orthogonium's exponential is a series of twelve terms of a matrix
that it divides by its norm, so that large rotations are out of its reach.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

import trysquare as ts
from benchmarks import peers
from benchmarks.measure import interleaved
from benchmarks.report import Figure, Part, Plot, Table, milliseconds

PEERS = {f"orthogonium {way}": way for way in peers.ORTHOGONALIZERS}
PEER = """\
orthogonium's QR takes 17 ms for a matrix of 512 x 512, ours 20 ms; on the smaller matrices ours is as fast or faster.
Its Cholesky takes about as long as ours, but is off by 0.05 at condition number 100, where ours
switches to another way and stays exact. Its exponential and its QR are exact at every condition number."""
SHAPES = ((1, 64, 64), (1, 128, 512), (4, 128, 256), (1, 512, 512))
CONDITIONS = tuple(10.0**power for power in range(9))
SIZE = 128
# Power iteration goes on from call to call, as in training.
_WARM = 10


def ways(shape: tuple[int, ...]) -> dict[str, Callable[[Tensor], Tensor]]:
    """Return ours, and the peer's for matrices of this shape if it is installed."""
    found: dict[str, Callable[[Tensor], Tensor]] = {n: e.apply for n, e in ts.linalg.ORTHOGONALIZERS.items()}
    if peers.installed():
        found |= {name: peers.Orthogonalizer(way, shape) for name, way in PEERS.items()}
    return found


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    return {
        "times": [_times(shape) for shape in (SHAPES[:3] if arguments.quick else SHAPES)],
        "errors": {name: errors(way) for name, way in ways((1, SIZE, SIZE)).items()},
    }


def _times(shape: tuple[int, ...]) -> dict[str, Any]:
    start = nn.init.orthogonal_(torch.empty(shape[-2:])).expand(shape) + 0.01 * torch.randn(shape)
    matrix, direction = start.requires_grad_(), torch.randn(shape)
    calls = {name: lambda way=way: way(matrix).backward(direction, inputs=matrix) for name, way in ways(shape).items()}
    return {"shape": list(shape), "seconds": interleaved(calls, 15, label=f"times of {shape}")}


def with_condition(condition: float, size: int = SIZE) -> Tensor:
    """Return a matrix of norm 1 whose singular values fall evenly, on a logarithmic scale, to ``1 / condition``."""
    generator = torch.Generator().manual_seed(0)
    left, right = (torch.linalg.qr(torch.randn(size, size, generator=generator, dtype=torch.float64)).Q for _ in "lr")
    values = torch.logspace(0, -torch.tensor(condition).log10(), size, dtype=torch.float64)
    return ((left * values) @ right).float().unsqueeze(0)


def errors(way: Callable[[Tensor], Tensor]) -> list[float | str]:
    """Return the largest ``|σ - 1|`` at each condition number, or what happens instead."""
    return [_error(way, with_condition(condition)) for condition in CONDITIONS]


@torch.no_grad()
def _error(way: Callable[[Tensor], Tensor], matrix: Tensor) -> float | str:
    try:
        for _ in range(_WARM):
            result = way(matrix).double()
    except (ArithmeticError, torch.linalg.LinAlgError):
        return "refuses"
    if not result.isfinite().all():
        return "not finite"
    return float((torch.linalg.svdvals(result) - 1).abs().max())


def describe(data: dict[str, Any]) -> list[Part]:
    shown = [CONDITIONS.index(10.0**power) for power in (0, 2, 4, 8)]
    rows = []
    for name, found in data["errors"].items():
        taken = [milliseconds(median(entry["seconds"][name])) for entry in data["times"]]
        rows.append([name, *taken, *(e if isinstance(e := found[i], str) else f"{e:.0e}" for i in shown)])
    shapes = [f"ms, {' x '.join(map(str, entry['shape']))}" for entry in data["times"]]
    return [Table(["orthogonalizer", *shapes, *(f"error at {CONDITIONS[i]:.0e}" for i in shown)], rows)]


def draw(data: dict[str, Any]) -> Figure:
    series = {
        name: {c: max(e, 1e-8) for c, e in zip(CONDITIONS, row, strict=True) if not isinstance(e, str)}
        for name, row in data["errors"].items()
    }
    return Figure(Plot(series, "condition number of the free matrix", "largest |σ - 1|", "xy"))
