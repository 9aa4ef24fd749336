"""Ways to an orthonormal matrix: time, precision, and how well a network trains with each.

Times are those of matrices near an orthonormal one, where an adaptive iteration ends early; in training they stay near,
except with Cayley and the exponential. Precision is the largest |σ - 1| of a 128 x 128 result in float32, as the free
matrix gets worse conditioned. Training is that of the small network of Li et al. for a fixed number of steps, once; in
orthogonium's rows all layers are its own. orthogonium's exponential is a series of twelve terms of a matrix that it
divides by its norm, so that large rotations are out of its reach.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

import trysquare as ts
from benchmarks import peers
from benchmarks.measure import interleaved
from benchmarks.networks import exchange, ours
from benchmarks.report import CERTIFIED, Figure, Part, Plot, Table, failures, milliseconds
from benchmarks.training import Task, trained

PEERS = {f"orthogonium {way}": way for way in peers.ORTHOGONALIZERS}
PEER = """\
orthogonium's QR takes 17 ms for a matrix of 512 x 512, ours 20 ms; on the smaller matrices ours is as fast or faster.
Its Cholesky takes about as long as ours, in training too, but is off by 0.05 at condition number 100, where ours
switches to another way and stays exact. Its exponential and its QR are exact at every condition number."""
SHAPES = ((1, 64, 64), (1, 128, 512), (4, 128, 256), (1, 512, 512))
CONDITIONS = tuple(10.0**power for power in range(9))
SIZE = 128
NETWORK = "bcop-small"
# Power iteration goes on from call to call, as in training.
_WARM = 10


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this question."""
    parser.add_argument("--data", help="folder of CIFAR-10; the digits of the package without it")
    parser.add_argument("--steps", type=int, help="training steps with each; 500 (--quick: 10)")
    parser.add_argument("--limit", type=float, default=900.0, help="seconds after which a training run stops early")


def ways(shape: tuple[int, ...]) -> dict[str, Callable[[Tensor], Tensor]]:
    """Return ours, and the peer's for matrices of this shape if it is installed."""
    found: dict[str, Callable[[Tensor], Tensor]] = {n: e.apply for n, e in ts.linalg.ORTHOGONALIZERS.items()}
    if peers.installed():
        found |= {name: peers.Orthogonalizer(way, shape) for name, way in PEERS.items()}
    return found


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return samples of times, errors, and training runs."""
    shapes = SHAPES[:3] if arguments.quick else SHAPES
    steps = arguments.steps or (10 if arguments.quick else 500)
    task = Task(arguments.data, batch=128, test_images=500 if arguments.quick else None)
    task.test()  # a folder without images is an error now
    names = ways((1, SIZE, SIZE))
    runs = {
        name: trained(partial(network, name, task.shape), task, name, steps=steps, seconds=arguments.limit)
        for name in names
    }
    return {
        "times": [_times(shape) for shape in shapes],
        "errors": {name: errors(way) for name, way in names.items()},
        "training": {"data": task.name, "steps": steps, "batch": task.batch, "runs": runs},
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


def network(name: str, shape: tuple[int, int, int]) -> nn.Module:
    """Return the same network with one way or another, from the same seed."""
    torch.manual_seed(0)
    model = ts.models.build(NETWORK, shape, 10, mean=0.5)
    if name in PEERS:
        return exchange(model, peers.aoc_by(PEERS[name]), peers.linear_by(PEERS[name]))
    return exchange(model, ours("aoc", orthogonalizer=name), partial(ts.OrthoLinear, orthogonalizer=name))


def describe(data: dict[str, Any]) -> list[Part]:
    """Return tables of time, precision and training."""
    shapes = [" x ".join(map(str, entry["shape"])) for entry in data["times"]]
    taken = [
        [name, *(milliseconds(median(entry["seconds"][name])) for entry in data["times"])]
        for name in data["times"][0]["seconds"]
    ]
    found = [[name, *(e if isinstance(e, str) else f"{e:.0e}" for e in row)] for name, row in data["errors"].items()]
    training, trainings = data["training"], []
    for name, entry in training["runs"].items():
        if "error" not in entry:
            steps, end, last = len(entry["losses"]), entry["seconds"][-1], entry["losses"][-20:]
            shares = (f"{share:.1%}" for share in (entry["accuracy"], entry["certified"][0]))
            cells = [str(steps), milliseconds(end / steps), f"{sum(last) / len(last):.3f}"]
            trainings.append([name, *cells, *shares])
    title = f"{NETWORK} on {training['data']}, up to {training['steps']} steps of {training['batch']} images"
    columns = ["orthogonalizer", "steps", "mean step ms", "loss of the last 20 steps", "test accuracy", CERTIFIED]
    return [
        Table(["forward and backward, ms", *shapes], taken, "Time"),
        Table(["condition number", *(f"{c:.0e}" for c in CONDITIONS)], found, "Largest error of a singular value"),
        Table(columns, trainings, title),
        *failures(training["runs"]),
    ]


def draw(data: dict[str, Any]) -> Figure:
    """Draw the precision."""
    series = {
        name: {c: max(e, 1e-8) for c, e in zip(CONDITIONS, row, strict=True) if not isinstance(e, str)}
        for name, row in data["errors"].items()
    }
    return Figure(Plot(series, "condition number of the free matrix", "largest |σ - 1|", "xy"))
