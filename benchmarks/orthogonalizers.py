"""The paper's figure on ways to an orthonormal matrix: time, precision and how well a network trains with each.

Times are those of matrices near an orthonormal one, where an adaptive iteration ends early; in training they stay so
but for Cayley and the exponential. orthogonium's exponential is twelve terms of the series, for a matrix that it
divides by its norm: rotations by larger angles are out of its reach. Precision is the largest ``|σ - 1|`` of a 128 x
128 result in float32, for free matrices of growing condition number; "refuses" if there is an error in its place.
Trainability: the network of Li et al. for a fixed number of steps, once, on CIFAR-10 (``--data``) or the digits of the
package; in orthogonium's rows all layers are its own. The last loss is the mean of 20 steps.
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
from benchmarks.options import amount, cifar10, count
from benchmarks.report import CERTIFIED, Part, Plot, Table, better_peer, better_trained, failures, milliseconds
from benchmarks.training import Run, Task, trained

# Ways of orthogonium, and ours by the same idea.
PEERS = {
    f"orthogonium {peers.DEFAULT}": "bjorck",
    "orthogonium Cholesky": "cholesky",
    "orthogonium QR": "qr",
    "orthogonium exponential": "exponential",
}
OURS = "cholesky"
SHAPES = ((1, 64, 64), (1, 128, 512), (4, 128, 256), (1, 512, 512))
CONDITIONS = tuple(10.0**power for power in range(9))
SIZE = 128
# Errors below it are the rounding of float32, by chance more or less.
ROUNDING = 1e-6
NETWORK = "bcop-small"
# Power iteration goes on from call to call, as in training.
_WARM = 10


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of this command."""
    parser.add_argument("--data", type=cifar10, help="folder of CIFAR-10; the digits of the package without it")
    parser.add_argument("--steps", type=count, help="training steps with each; 500 (--quick: 10)")
    parser.add_argument("--limit", type=amount, default=900.0, help="seconds after which a training run stops early")
    parser.add_argument("--batch", type=count, default=128)


def ways(shape: tuple[int, ...]) -> dict[str, Callable[[Tensor], Tensor]]:
    """Ours, and the peer's for matrices of this shape if it is installed."""
    found: dict[str, Callable[[Tensor], Tensor]] = {n: e.apply for n, e in ts.linalg.ORTHOGONALIZERS.items()}
    if peers.installed():
        found |= {name: peers.Orthogonalizer(peers.own_name(name), shape) for name in PEERS}
    return found


def plan(arguments: argparse.Namespace) -> dict[str, Any]:
    """Samples of times, errors, and training runs."""
    shapes = SHAPES[:3] if arguments.quick else SHAPES
    steps = arguments.steps or (10 if arguments.quick else 500)
    task = Task(arguments.data, arguments.batch, test_images=500 if arguments.quick else None)
    return {
        "times": [partial(_times, shape) for shape in shapes],
        "errors": {name: partial(_errors, way) for name, way in ways((1, SIZE, SIZE)).items()},
        "training": {
            "data": task.name,
            "steps": steps,
            "batch": task.batch,
            "runs": {name: partial(_run, name, task, steps, arguments.limit) for name in ways((1, SIZE, SIZE))},
        },
    }


def _times(shape: tuple[int, ...]) -> dict[str, Any]:
    start = nn.init.orthogonal_(torch.empty(shape[-2:])).expand(shape) + 0.01 * torch.randn(shape)
    matrix, direction = start.requires_grad_(), torch.randn(shape)
    calls = {name: lambda way=way: way(matrix).backward(direction, inputs=matrix) for name, way in ways(shape).items()}
    return {"shape": list(shape), "seconds": interleaved(calls, 15, label=f"times of {shape}")}


def with_condition(condition: float, size: int = SIZE) -> Tensor:
    """A matrix of norm 1 with singular values spread evenly, on a logarithmic scale, down to ``1 / condition``."""
    generator = torch.Generator().manual_seed(0)
    left, right = (torch.linalg.qr(torch.randn(size, size, generator=generator, dtype=torch.float64)).Q for _ in "lr")
    values = torch.logspace(0, -torch.tensor(condition).log10(), size, dtype=torch.float64)
    return ((left * values) @ right).float().unsqueeze(0)


def _errors(way: Callable[[Tensor], Tensor]) -> list[float | str]:
    """Largest ``|σ - 1|`` at each condition number, or what happens instead."""
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
    """The same network with one way or another, from the same seed."""
    torch.manual_seed(0)
    model = ts.models.build(NETWORK, shape, 10, mean=0.5)
    if name in PEERS:
        return exchange(model, peers.aoc_by(peers.own_name(name)), peers.linear_by(peers.own_name(name)))
    return exchange(model, ours("aoc", orthogonalizer=name), partial(ts.OrthoLinear, orthogonalizer=name))


def _run(name: str, task: Task, steps: int, limit: float) -> dict[str, Any]:
    return trained(partial(network, name, task.shape), task, steps=steps, seconds=limit, label=f"training, {name}")


def describe(data: dict[str, Any]) -> list[Part]:
    """Three tables and two plots."""
    return [_time_table(data["times"]), *_precision(data["errors"]), *_trainability(data["training"])]


def _time_table(entries: list[dict[str, Any]]) -> Table:
    shapes = [" x ".join(map(str, entry["shape"])) for entry in entries]
    names = list(entries[0]["seconds"])
    rows = [[name, *(milliseconds(median(entry["seconds"][name])) for entry in entries)] for name in names]
    return Table(["forward and backward, ms", *shapes], rows, "Time")


def _precision(errors: dict[str, list[float | str]]) -> list[Part]:
    shown = [[name, *map(_shown, row)] for name, row in errors.items()]
    heads = [f"{condition:.0e}" for condition in CONDITIONS]
    series = {}
    for name, row in errors.items():
        points = [(c, e) for c, e in zip(CONDITIONS, row, strict=True) if not isinstance(e, str)]
        series[name] = ([c for c, _ in points], [max(e, 1e-9) for _, e in points])
    title = "Largest |σ - 1| against the condition number"
    plot = Plot("orthogonalizers-precision", title, series, "condition number", "largest |σ - 1|", log="xy")
    return [Table(["condition number", *heads], shown, title), plot]


def _shown(error: float | str) -> str:
    return error if isinstance(error, str) else f"{error:.0e}"


def _trainability(training: dict[str, Any]) -> list[Part]:
    rows, series = [], {}
    for name, entry in training["runs"].items():
        if "error" in entry:
            continue
        run = Run(entry["seconds"], entry["losses"])
        steps = run.steps()
        last = run.losses[-20:]
        shares = (f"{share:.1%}" for share in (entry["accuracy"], entry["certified"][0]))
        cells = [str(len(steps)), milliseconds(median(steps)), f"{run.seconds[-1]:.0f}"]
        rows.append([name, *cells, f"{sum(last) / len(last):.3f}", *shares])
        series[name] = run.smoothed(max(1, len(run.losses) // 50))
    title = f"{NETWORK} on {training['data']}, up to {training['steps']} steps of {training['batch']} images"
    columns = ["orthogonalizer", "steps", "step ms", "seconds", "last loss", "test accuracy", CERTIFIED]
    plot = Plot("orthogonalizers-training", title, series, "step", "loss")
    return [Table(columns, rows, title), *failures(training["runs"]), plot]


def peer_wins(data: dict[str, Any]) -> list[str]:
    """Where a way of the peer's is faster or more precise than ours by the same idea, or our default trains worse."""
    found = []
    for entry in data["times"]:
        what, seconds = f"matrix {' x '.join(map(str, entry['shape']))}", entry["seconds"]
        for name, own in PEERS.items():
            if name in seconds:
                found += better_peer(what, peers.own_name(name), "ms", 1e3, seconds[own], seconds[name])
    for name, own in PEERS.items():
        found += _more_precise(name, own, data["errors"])
    when = f"trained for up to {data['training']['steps']} steps"
    return found + better_trained(when, data["training"]["runs"], dict.fromkeys(PEERS, OURS))


def _more_precise(peer: str, own: str, errors: dict[str, list[float | str]]) -> list[str]:
    found = []
    for condition, mine, theirs in zip(CONDITIONS, errors[own], errors.get(peer, []), strict=False):
        if not isinstance(theirs, str) and (isinstance(mine, str) or mine > max(2 * theirs, ROUNDING)):
            what = f"largest |σ - 1| at condition number {condition:.0e}"
            found.append(f"{what}: {peer} {_shown(theirs)}, {own} {_shown(mine)}.")
    return found
