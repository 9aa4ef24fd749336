"""Every method and block: cost of a layer against ``nn.Conv2d``, and certified accuracy after the same time.

Cost: building the weight with its gradient (for the methods in the Fourier domain the response at that image size),
forward and backward pass of the layer in training with gradients of input and parameters, the forward pass in eval
mode, and the bytes that autograd keeps. SOC's weight is not part of its passes, which do without it. Accuracy: the
network of Li et al. with each kind of convolution and our dense layers, trained once for the same number of seconds on
CIFAR-10 (``--data``) or the digits of the package, then certified. Blocks that keep the shape stand behind an AOC
convolution that changes it. All are trained alike, by Adam with a rate of 3e-3 that falls to 0, which was not tuned for
any of them, and with the same margin of the loss: it asks networks with a smaller Lipschitz constant, which is the last
column, for larger radii. They are trained one after the other: how long a step takes in the quarters of a run tells a
machine that is slower for a while from a method that is. Of orthogonium's layers those with a kernel take part, which
can be certified as plain ones; its copies of the originals are compared in networks.
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
from benchmarks.measure import Call, Samples, interleaved, saved_bytes, weight_gradient
from benchmarks.networks import REFERENCE, exchange, fourier, odd, ours, plain
from benchmarks.options import amount, cifar10, count
from benchmarks.peers import Make
from benchmarks.report import (
    CERTIFIED,
    Part,
    Plot,
    Table,
    accuracy_table,
    better_peer,
    better_trained,
    failures,
    megabytes,
    milliseconds,
    ratio_plot,
    with_ratios,
)
from benchmarks.steps import evaluation
from benchmarks.training import Run, Task, trained
from trysquare.nn.linalg.fourier import RESPONSES

PEERS = {"orthogonium aoc": peers.aoc, "orthogonium aol": peers.aol}
NETWORK = "bcop-small"
COSTS = {
    "build": ("weight and gradient", "ms", 1e3),
    "step": ("training step", "ms", 1e3),
    "eval": ("evaluation", "ms", 1e3),
    "saved": ("saved for backward", "MB", 1e-6),
}
# As ratios to the reference, which builds nothing.
RATIOS = {kind: what for kind, (what, *_) in COSTS.items() if kind != "build"}


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


BLOCKS: dict[str, Make] = {
    "SLL block": behind(ts.SLLBlock2d),
    "CPL block": behind(ts.CPLBlock2d),
    "SLL-AOC block": alone(ts.SLLAOCBlock2d),
    "Sandwich": alone(ts.SandwichConv2d),
    "Sandwich-AOC": alone(ts.SandwichAOCConv2d),
}


def methods() -> dict[str, Make]:
    """All of ours, then the peer's."""
    made = {name: ours(name) for name in ts.METHODS} | {name: fourier(name) for name in RESPONSES} | BLOCKS
    made["soc"] = odd(made["soc"])
    return {**made, **PEERS}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of this command."""
    for name, value in (("channels", 32), ("size", 16), ("batch", 8)):
        parser.add_argument(f"--{name}", type=count, default=value, help="of the layers whose cost is measured")
    parser.add_argument("--rounds", type=count, help="samples of each time; 7 (--quick: 3)")
    parser.add_argument("--data", type=cifar10, help="folder of CIFAR-10; the digits of the package without it")
    parser.add_argument("--budget", type=amount, help="seconds of training with each method; 600 (--quick: 3)")
    parser.add_argument("--only", nargs="+", choices=methods(), metavar="NAME", help="; ".join(methods()))


def plan(arguments: argparse.Namespace) -> dict[str, Any]:
    """Costs at stride 1 and 2, and the end of each training run.

    Raises:
        ValueError: if a method of the peer is asked for, which is not installed, or a stride does not divide the map.
    """
    if arguments.size % 2:
        raise ValueError(f"--size {arguments.size} must be even: layers with stride 2 are measured too")
    names = peers.that_run(methods(), "--only", arguments.only)
    chosen = {name: make for name, make in methods().items() if name in names and name in (arguments.only or names)}
    rounds = arguments.rounds or (3 if arguments.quick else 7)
    task = Task(arguments.data, batch=128, test_images=200 if arguments.quick else None)
    budget = arguments.budget or (3.0 if arguments.quick else 600.0)
    return {
        "costs": [partial(_costs, chosen, stride, arguments, rounds) for stride in (1, 2)],
        "accuracy": {
            "data": task.name,
            "budget": budget,
            "rows": {name: partial(_trained, name, make, task, budget) for name, make in chosen.items()},
        },
    }


def builds(layers: dict[str, nn.Module], size: int) -> dict[str, Call]:
    """Make what a layer convolves with, and take its gradient, for those that build one weight or response."""
    return {name: weight_gradient(layer, size) for name, layer in layers.items() if _builds_one(layer)}


def _builds_one(layer: nn.Module) -> bool:
    if hasattr(layer, "response") or hasattr(layer, "free_tensors"):
        return True
    return isinstance(layer, nn.Conv2d) and layer.weight.grad_fn is not None


def _costs(chosen: dict[str, Make], stride: int, arguments: argparse.Namespace, rounds: int) -> dict[str, Any]:
    channels, size, batch = arguments.channels, arguments.size, arguments.batch
    shape = (channels, channels * stride, 3, stride, 1)
    layers, errors = _made({REFERENCE: plain, **chosen}, shape)
    x = torch.randn(batch, channels, size, size, requires_grad=True)
    label = f"cost at stride {stride}"
    built = interleaved(builds(layers, size), rounds, label=label)
    steps = interleaved({n: _step(layer, x) for n, layer in layers.items()}, rounds, label=label)
    kept = {name: saved_bytes(lambda layer=layer: layer(x)) for name, layer in layers.items()}
    evals = interleaved({n: evaluation(layer, x) for n, layer in layers.items()}, 3 * rounds, label=label)
    title = f"{batch} x {channels} x {size} x {size}, to {channels * stride} channels, 3 x 3, stride {stride}"
    samples: dict[str, Samples] = {"build": built, "step": steps, "eval": evals}
    return {"title": title, "stride": stride, "seconds": samples, "saved": kept, "errors": errors}


def _made(makes: dict[str, Make], shape: tuple[int, ...]) -> tuple[dict[str, nn.Module], dict[str, Any]]:
    """Layers, and why some of that shape do not exist."""
    layers, errors = {}, {}
    for name, make in makes.items():
        try:
            layers[name] = make(*shape)
        except ValueError as error:
            errors[name] = {"error": str(error)}
    return layers, errors


def _step(layer: nn.Module, x: Tensor) -> Call:
    layer.train()
    return lambda: layer(x).sum().backward()


def _trained(name: str, make: Make, task: Task, budget: float) -> dict[str, Any]:
    def network() -> nn.Module:
        torch.manual_seed(0)
        return exchange(ts.models.build(NETWORK, task.shape, 10, mean=0.5), make)

    return trained(network, task, seconds=budget, label=f"training, {name}")


def describe(data: dict[str, Any]) -> list[Part]:
    """Costs with plots, then the accuracies."""
    parts: list[Part] = []
    for entry in data["costs"]:
        parts += _cost_parts(entry)
    return [*parts, *_accuracy_parts(data["accuracy"])]


def _samples(entry: dict[str, Any]) -> dict[str, Samples]:
    """Seconds and bytes of each layer."""
    found: dict[str, Samples] = {name: {"saved": [saved]} for name, saved in entry["saved"].items()}
    for kind, samples in entry["seconds"].items():
        for name, seconds in samples.items():
            found[name][kind] = seconds
    return found


def _cost_parts(entry: dict[str, Any]) -> list[Part]:
    samples = _samples(entry)
    base = samples[REFERENCE]
    shown = {"step": milliseconds, "eval": milliseconds, "saved": megabytes}
    rows = [
        [name, milliseconds(median(row["build"])) if "build" in row else "", *with_ratios(row, base, shown)]
        for name, row in samples.items()
    ]
    columns = ["layer", "build ms", "step ms", "ratio", "eval ms", "ratio", "saved MB", "ratio"]
    plot = ratio_plot(f"methods-stride-{entry['stride']}", entry["title"], samples, REFERENCE, RATIOS)
    return [Table(columns, rows, entry["title"]), *failures(entry["errors"]), plot]


def _accuracy_parts(accuracy: dict[str, Any]) -> list[Part]:
    works = {name: row for name, row in accuracy["rows"].items() if "error" not in row}
    title = f"{NETWORK} on {accuracy['data']}, {accuracy['budget']:g} s of training each"
    series = {
        "accuracy": (list(range(len(works))), [row["accuracy"] for row in works.values()]),
        CERTIFIED: (list(range(len(works))), [row["certified"][0] for row in works.values()]),
    }
    plot = Plot("methods-accuracy", title, series, "", "share of the test images", ticks=list(works))
    table = accuracy_table("method", title, accuracy["rows"], {"step ms, by quarter": _step_by_quarter})
    return [table, *failures(accuracy["rows"]), *([plot] if works else [])]


def _step_by_quarter(row: dict[str, Any]) -> str:
    """Least and most of the medians in the quarters of a run."""
    steps = Run(row["seconds"], row["losses"]).steps()
    size = -(-len(steps) // 4)
    quarters = [median(steps[start : start + size]) for start in range(0, len(steps), size)]
    return f"{milliseconds(min(quarters))} to {milliseconds(max(quarters))}"


def peer_wins(data: dict[str, Any]) -> list[str]:
    """Where orthogonium's layer of the same method is cheaper, or its network ends up better."""
    pairs = {name: peers.own_name(name) for name in PEERS}
    found = []
    for entry in data["costs"]:
        samples = _samples(entry)
        for peer, own in pairs.items():
            for kind, (what, unit, scale) in COSTS.items():
                if kind in samples.get(peer, {}) and kind in samples.get(own, {}):
                    at = f"layer at stride {entry['stride']}, {what}"
                    found += better_peer(at, own, unit, scale, samples[own][kind], samples[peer][kind])
    return found + better_trained("trained for the same time", data["accuracy"]["rows"], pairs)
