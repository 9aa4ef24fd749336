"""Every method and block: cost of one layer against ``nn.Conv2d``, and certified accuracy after the same training time.

Cost is that of a 3 x 3 layer: building the weight with its gradient (at that image size, for methods in the Fourier
domain), a training step with gradients of input and parameters, an evaluation, and the bytes that autograd saves. For
accuracy, the small network of Li et al. is trained once with each kind of convolution for the same number of seconds,
then certified. Blocks that keep the shape stand behind an AOC convolution that changes it. All are trained alike, by
Adam at a rate that was tuned for none of them: read the accuracies as "after five minutes on two cores", not as the
best that a method can reach. When this was measured, `soc` took nine terms and a dearer bound; it takes seven now.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import nn

import trysquare as ts
from benchmarks import peers
from benchmarks.measure import Call, interleaved, ratio, saved_bytes, weight_gradient
from benchmarks.networks import REFERENCE, evaluation, exchange, fourier, odd, ours, plain
from benchmarks.peers import Make
from benchmarks.report import CERTIFIED, Figure, Part, Plot, Table, failures, milliseconds, times
from benchmarks.training import Task, trained
from trysquare.nn.linalg.fourier import RESPONSES

PEERS = {"orthogonium aoc": peers.aoc, "orthogonium aol": peers.aol}
NETWORK = "bcop-small"
PEER = """\
orthogonium's AOL ends with more certified images than ours at every radius (34.5 % against 31.9 % at 36/255, 8.6 %
against 3.1 % at 255/255), though with lower accuracy (43.0 % against 47.2 %) and a network whose constant is only 0.25:
the same margin of the loss asks such a network for larger radii. A step of the layer costs more with its AOL, and its
AOC is behind ours in cost and in accuracy."""
CHANNELS, SIZE, BATCH = 32, 16, 8
SHAPE = f"{BATCH} x {CHANNELS} x {SIZE} x {SIZE}"


def behind(block: Callable[..., nn.Module]) -> Make:
    """Put a block that keeps the shape behind an AOC convolution that changes it."""

    def make(channels: int, outputs: int, kernel_size: int, stride: int, groups: int) -> nn.Module:
        return nn.Sequential(ts.OrthoConv2d(channels, outputs, kernel_size, stride, groups=groups), block(outputs))

    return make


def alone(block: Callable[..., nn.Module]) -> Make:
    """Use a block that changes channels and size by itself."""

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
    """Return all of ours, then the peer's."""
    made = {name: ours(name) for name in ts.METHODS} | {name: fourier(name) for name in RESPONSES} | BLOCKS
    made["soc"] = odd(made["soc"])
    return {**made, **PEERS}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--data", help="folder of CIFAR-10; the digits of the package without it")
    parser.add_argument("--budget", type=float, help="seconds of training with each method; 600 (--quick: 3)")


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the cost of each layer, and the end of each training run."""
    chosen = {name: methods()[name] for name in peers.that_run(methods())}
    task = Task(arguments.data, batch=128, test_images=200 if arguments.quick else None)
    task.test()  # a folder without images is an error now
    budget = arguments.budget or (3.0 if arguments.quick else 600.0)
    return {
        "costs": [_costs(chosen, 3 if arguments.quick else 7)],
        "accuracy": {
            "data": task.name,
            "budget": budget,
            "rows": {name: _trained(name, make, task, budget) for name, make in chosen.items()},
        },
    }


def _builds_one(layer: nn.Module) -> bool:
    """Return whether a layer builds one weight or response, which can be timed alone."""
    if hasattr(layer, "response") or hasattr(layer, "free_tensors"):
        return True
    return isinstance(layer, nn.Conv2d) and layer.weight.grad_fn is not None


def _costs(chosen: dict[str, Make], rounds: int) -> dict[str, Any]:
    layers = {name: make(CHANNELS, CHANNELS, 3, 1, 1).train() for name, make in {REFERENCE: plain, **chosen}.items()}
    x = torch.randn(BATCH, CHANNELS, SIZE, SIZE, requires_grad=True)
    builds = {name: weight_gradient(layer, SIZE) for name, layer in layers.items() if _builds_one(layer)}
    forwards: dict[str, Call] = {name: partial(layer, x) for name, layer in layers.items()}
    steps: dict[str, Call] = {name: lambda call=call: call().sum().backward() for name, call in forwards.items()}  # type: ignore[misc]
    seconds = {"build": interleaved(builds, rounds, label="weights"), "step": interleaved(steps, rounds, label="steps")}
    saved = {name: saved_bytes(call) for name, call in forwards.items()}
    evaluations = {name: evaluation(layer, x) for name, layer in layers.items()}
    seconds["eval"] = interleaved(evaluations, 3 * rounds, label="evaluations")
    return {"seconds": seconds, "saved": saved}


def _trained(name: str, make: Make, task: Task, budget: float) -> dict[str, Any]:
    def network() -> nn.Module:
        torch.manual_seed(0)
        return exchange(ts.models.build(NETWORK, task.shape, 10, mean=0.5), make)

    return trained(network, task, name, seconds=budget)


def describe(data: dict[str, Any]) -> list[Part]:
    accuracy, seconds, saved = data["accuracy"], data["costs"][0]["seconds"], data["costs"][0]["saved"]
    rows = []
    for name, row in accuracy["rows"].items():
        cost = [milliseconds(median(seconds["build"][name])) if name in seconds["build"] else ""]
        cost += [times(ratio(seconds[kind][name], seconds[kind][REFERENCE])) for kind in ("step", "eval")]
        cost += [times(saved[name] / saved[REFERENCE])]
        if "error" not in row:
            shares = (row["accuracy"], row["certified"][0], row["certified"][-1])
            cost += [*(f"{share:.1%}" for share in shares), str(row["steps"]), f"{row['lipschitz']:.4f}"]
        rows.append([name, *cost, *[""] * (9 - len(cost))])
    columns = [
        "method",
        "build ms",
        "step",
        "evaluation",
        "saved",
        "accuracy",
        CERTIFIED,
        "at 255/255",
        "steps",
        "Lipschitz",
    ]
    title = (
        f"Cost of a layer ({SHAPE}) as a multiple of {REFERENCE}; {NETWORK} on {accuracy['data']} after "
        f"{accuracy['budget']:g} s of training"
    )
    return [Table(columns, rows, title), *failures(accuracy["rows"])]


def draw(data: dict[str, Any]) -> Figure:
    rows = {name: row for name, row in data["accuracy"]["rows"].items() if "error" not in row}
    shares = {
        "accuracy": {name: 100 * row["accuracy"] for name, row in rows.items()},
        CERTIFIED: {name: 100 * row["certified"][0] for name, row in rows.items()},
    }
    steps = data["costs"][0]["seconds"]["step"]
    cost = {"training step": {name: ratio(steps[name], steps[REFERENCE]) for name in rows}}
    return Figure(Plot(shares, "% of the test images"), Plot(cost, f"step, times {REFERENCE}", log="x", reference=1))
