"""Every method and block: cost of a layer against ``nn.Conv2d``, and certified accuracy after the same time.

Cost: building the weight with its gradient (for the methods in the Fourier domain the response at that image size), a
training step of the layer, the forward pass in eval mode, and the bytes that autograd keeps. Accuracy: the network of
Li et al. with each kind of convolution, trained for the same number of seconds on CIFAR-10 (``--data``) or the digits
of the package, then certified. Blocks that keep the shape stand behind an AOC convolution that changes it.
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
from benchmarks.measure import Samples, interleaved, saved_bytes
from benchmarks.networks import exchange, fourier, ours, plain
from benchmarks.options import amount, cifar10, count
from benchmarks.peers import Make
from benchmarks.report import (
    Part,
    Plot,
    Table,
    accuracy_table,
    better_peers,
    better_trained,
    failures,
    megabytes,
    milliseconds,
    times,
)
from benchmarks.training import Task, certificate, train
from trysquare.linalg.fourier import RESPONSES

REFERENCE = "nn.Conv2d"
PEERS = {"orthogonium aoc": peers.aoc, "orthogonium aol": peers.aol}
NETWORK = "bcop-small"
RATIOS = {"step": "training step", "eval": "evaluation", "saved": "saved for backward"}


def behind(block: Callable[..., nn.Module]) -> Make:
    """A block that keeps the shape, behind an AOC convolution that changes it."""

    def make(channels: int, outputs: int, kernel_size: int, stride: int, groups: int) -> nn.Module:
        return nn.Sequential(ts.OrthoConv2d(channels, outputs, kernel_size, stride, groups=groups), block(outputs))

    return make


def alone(block: Callable[..., nn.Module]) -> Make:
    """A block that changes channels and size by itself."""

    def make(channels: int, outputs: int, kernel_size: int, stride: int, groups: int) -> nn.Module:
        return block(channels, outputs, kernel_size, stride, groups=groups)

    return make


def odd(convolution: Make) -> Make:
    """The next odd kernel size in the place of an even one, which skew kernels do not have."""
    return lambda channels, outputs, size, stride, groups: convolution(channels, outputs, size | 1, stride, groups)


BLOCKS: dict[str, Make] = {
    "SLL block": behind(ts.SLLBlock2d),
    "CPL block": behind(ts.CPLBlock2d),
    "SLL-AOC block": alone(ts.SLLAOCBlock2d),
    "Sandwich": alone(ts.SandwichConv2d),
    "Sandwich-AOC": alone(ts.SandwichAOCConv2d),
}


def methods() -> dict[str, Make]:
    """All of ours, then the peer's that are installed."""
    made = {name: ours(name) for name in ts.METHODS} | {name: fourier(name) for name in RESPONSES} | BLOCKS
    made["soc"] = odd(made["soc"])
    return {**made, **PEERS} if peers.installed() else made


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of this command."""
    for name, value in (("channels", 32), ("size", 16), ("batch", 8)):
        parser.add_argument(f"--{name}", type=count, default=value, help="of the layers whose cost is measured")
    parser.add_argument("--rounds", type=count, help="samples of each time; 7 (--quick: 3)")
    parser.add_argument("--data", type=cifar10, help="folder of CIFAR-10; the digits of the package without it")
    parser.add_argument("--budget", type=amount, help="seconds of training with each method; 600 (--quick: 3)")
    parser.add_argument("--only", nargs="+", choices=methods(), metavar="NAME", help="; ".join(methods()))


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Costs at stride 1 and 2, and the end of each training run."""
    chosen = {name: make for name, make in methods().items() if name in (arguments.only or methods())}
    rounds = arguments.rounds or (3 if arguments.quick else 7)
    task = Task(arguments.data, batch=128, test_images=200 if arguments.quick else None)
    budget = arguments.budget or (3.0 if arguments.quick else 600.0)
    return {
        "costs": [_costs(chosen, stride, arguments, rounds) for stride in (1, 2)],
        "accuracy": {
            "data": task.name,
            "budget": budget,
            "rows": {name: _trained(name, make, task, budget) for name, make in chosen.items()},
        },
    }


def build(layer: nn.Module, size: int) -> Callable[[], Any]:
    """Make what the layer convolves with, and take its gradient; nothing for layers without one weight."""
    if hasattr(layer, "response"):
        coarse = (size // layer.stride[0], size // layer.stride[1])

        def call() -> None:
            made = layer.response(coarse)
            sum(part.abs().sum() for part in (made if isinstance(made, tuple) else (made,))).backward()

        return call
    if hasattr(layer, "free_tensors") or (isinstance(layer, nn.Conv2d) and layer.weight.grad_fn is not None):
        return lambda: layer.weight.sum().backward()
    return lambda: None


def _costs(chosen: dict[str, Make], stride: int, arguments: argparse.Namespace, rounds: int) -> dict[str, Any]:
    channels, size, batch = arguments.channels, arguments.size, arguments.batch
    shape = (channels, channels * stride, 3, stride, 1)
    layers = {REFERENCE: plain(*shape), **{name: make(*shape) for name, make in chosen.items()}}
    x = torch.randn(batch, channels, size, size)
    label = f"cost at stride {stride}"
    builds = interleaved({n: build(layer, size) for n, layer in layers.items()}, rounds, label=label)
    steps = interleaved({n: _step(layer, x) for n, layer in layers.items()}, rounds, label=label)
    kept = {name: saved_bytes(lambda layer=layer: layer(x)) for name, layer in layers.items()}
    evals = interleaved({n: _eval(layer, x) for n, layer in layers.items()}, 3 * rounds, label=label)
    title = f"{batch} x {channels} x {size} x {size}, to {channels * stride} channels, 3 x 3, stride {stride}"
    samples: dict[str, Samples] = {"build": builds, "step": steps, "eval": evals}
    return {"title": title, "stride": stride, "seconds": samples, "saved": kept}


def _step(layer: nn.Module, x: Tensor) -> Callable[[], Any]:
    layer.train()
    return lambda: layer(x).sum().backward()


def _eval(layer: nn.Module, x: Tensor) -> Callable[[], Any]:
    layer.eval()

    def call() -> None:
        with torch.no_grad():
            layer(x)

    return call


def _trained(name: str, make: Make, task: Task, budget: float) -> dict[str, Any]:
    torch.manual_seed(0)
    try:
        model = exchange(ts.models.build(NETWORK, task.shape, 10, mean=0.5), make)
        run = train(model, task, seconds=budget, label=f"training, {name}")
        found = {"steps": len(run.losses), "seconds": run.seconds, "losses": run.losses}
        found["parameters"] = sum(p.numel() for p in model.parameters() if p.requires_grad)
        return {**found, **certificate(model, task)}
    except Exception as error:
        return {"error": f"{type(error).__name__}: {str(error)[:200]}"}


def describe(data: dict[str, Any]) -> list[Part]:
    """Costs with plots, then the accuracies."""
    parts: list[Part] = []
    for entry in data["costs"]:
        parts += _cost_parts(entry)
    return [*parts, *_accuracy_parts(data["accuracy"])]


def _numbers(entry: dict[str, Any]) -> dict[str, dict[str, float]]:
    found: dict[str, dict[str, float]] = {name: {"saved": saved} for name, saved in entry["saved"].items()}
    for kind, samples in entry["seconds"].items():
        for name, seconds in samples.items():
            found[name][kind] = median(seconds)
    return found


def _cost_parts(entry: dict[str, Any]) -> list[Part]:
    numbers = _numbers(entry)
    base = numbers[REFERENCE]
    shown = {"step": milliseconds, "eval": milliseconds, "saved": megabytes}
    rows = [
        [
            name,
            milliseconds(row["build"]) if row["build"] > 1e-5 else "",
            *(cell for key, show in shown.items() for cell in (show(row[key]), times(row[key] / base[key]))),
        ]
        for name, row in numbers.items()
    ]
    names = [name for name in numbers if name != REFERENCE]
    places = list(range(len(names)))
    series = {label: (places, [numbers[n][key] / base[key] for n in names]) for key, label in RATIOS.items()}
    columns = ["layer", "build ms", "step ms", "", "eval ms", "", "saved MB", ""]
    name = f"methods-stride-{entry['stride']}"
    plot = Plot(name, entry["title"], series, "", f"times {REFERENCE}", ticks=names, log="y", reference=1)
    return [Table(columns, rows, entry["title"]), plot]


def _accuracy_parts(accuracy: dict[str, Any]) -> list[Part]:
    works = {name: row for name, row in accuracy["rows"].items() if "error" not in row}
    title = f"{NETWORK} on {accuracy['data']}, {accuracy['budget']:g} s of training each"
    series = {
        "accuracy": (list(range(len(works))), [row["accuracy"] for row in works.values()]),
        "certified at 36/255": (list(range(len(works))), [row["certified"][0] for row in works.values()]),
    }
    plot = Plot("methods-accuracy", title, series, "", "share of the test images", ticks=list(works))
    table = accuracy_table("method", title, accuracy["rows"])
    return [table, *failures(accuracy["rows"]), *([plot] if works else [])]


def peer_wins(data: dict[str, Any]) -> list[str]:
    """Where orthogonium's layer of the same method is cheaper, or its network ends up better."""
    found = []
    for entry in data["costs"]:
        numbers = _numbers(entry)
        for kind, what in RATIOS.items():
            unit, scale = ("bytes", 1.0) if kind == "saved" else ("ms", 1e3)
            theirs = {n.removeprefix("orthogonium "): scale * numbers[n][kind] for n in PEERS if n in numbers}
            mine = {name: scale * numbers[name][kind] for name in theirs if name in numbers}
            found += better_peers(f"layer at stride {entry['stride']}, {what}", unit, mine, theirs)
    pairs = {name: name.removeprefix("orthogonium ") for name in PEERS}
    return found + better_trained("after the same time", data["accuracy"]["rows"], pairs)
