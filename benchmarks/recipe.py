"""The network of a recipe with our layers and with orthogonium's, trained by the recipe for the same time, certified.

Data, augmentation, loss, margin and optimizer are those of the recipe; only the classes of the orthogonal layers are
exchanged: for orthogonium's with its default, 12 steps of Björck, which take long for the large matrices of dense
layers, and for those with its QR. The recipe was chosen for our layers (docs/results.md says how), and each has one
run. They take turns of a minute, so that a machine that is slower for a while is so for all. The time of evaluations is
not counted.
"""

from __future__ import annotations

import argparse
import copy
import math
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn

import trysquare as ts
from benchmarks import peers
from benchmarks.measure import Call
from benchmarks.networks import exchange
from benchmarks.options import amount, cifar10
from benchmarks.report import CERTIFIED, Part, Plot, absent, accuracy_table, better_trained, failures
from benchmarks.training import Task, certificate
from trysquare.lab.training import build
from trysquare.lab.training.distribution import World
from trysquare.lab.training.recipe import Recipe
from trysquare.lab.training.step import Gradients
from trysquare.progress import track

LIBRARIES: dict[str, Callable[[nn.Module], nn.Module]] = {
    "trysquare": lambda model: model,
    "orthogonium": lambda model: exchange(model, peers.aoc, peers.linear),
    "orthogonium, QR": lambda model: exchange(model, peers.aoc_by("QR"), peers.linear_by("QR")),
}
TURN = 60.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of this command."""
    parser.add_argument("--data", type=cifar10, help="folder of CIFAR-10; without it the recipe for digits")
    parser.add_argument("--budget", type=amount, help="seconds of training with each library; 1800 (--quick: 15)")
    parser.add_argument("--only", nargs="+", choices=LIBRARIES, metavar="NAME", help="; ".join(LIBRARIES))


def plan(arguments: argparse.Namespace) -> Call:
    """Steps, and accuracy by the time spent, of each kind of layers: one part, since they take turns.

    Raises:
        ValueError: if layers of the peer are asked for, which is not installed.
        ImportError: if what a recipe needs is not installed.
    """
    name = "cifar10-cpu" if arguments.data else "digits"
    recipe = ts.training.read_recipe(name, {"data.root": arguments.data} if arguments.data else None)
    chosen = peers.that_run(arguments.only or LIBRARIES, "--only", arguments.only)
    budget = arguments.budget or (15.0 if arguments.quick else 1800.0)
    task = Task(arguments.data, recipe.train.batch_size, test_images=200 if arguments.quick else None)
    return partial(_measure, name, recipe, chosen, task, budget)


def _measure(name: str, recipe: Recipe, chosen: list[str], task: Task, budget: float) -> dict[str, Any]:
    turns = max(3, round(budget / TURN))
    runs = {library: _Run(recipe, LIBRARIES[library]) for library in chosen}
    for turn in track(range(turns), "training in turns", turns):
        for run in runs.values():
            run.train(budget * (turn + 1) / turns)
            if turn + 1 in _evaluated(turns):
                run.evaluate(task)
    rows = {library: run.row() for library, run in runs.items()}
    return {"recipe": name, "budget": budget, "batch": recipe.train.batch_size, "rows": rows}


def _evaluated(turns: int, times: int = 6) -> set[int]:
    """After which turns to evaluate: a few, evenly spaced, and the last."""
    return {max(1, round(turns * (i + 1) / times)) for i in range(times)}


class _Run:
    """A training under way that can be paused."""

    def __init__(self, recipe: Recipe, change: Callable[[nn.Module], nn.Module]) -> None:
        images = build.load_images(recipe, "train")
        self.model: Any = build.build_model(recipe, images)
        # The margin is that of the model with our layers, whose constant is known.
        loss = build.build_loss(recipe, self.model, build.model_arguments(recipe, images)["input_shape"])
        change(self.model)
        loader = build.training_batches(recipe, images, World(torch.device("cpu")))
        self.stepper = build.build_stepper(recipe, self.model, recipe.train.epochs * len(loader))
        self.gradients = Gradients(self.model, loss)
        self.batches: Iterator[tuple[Tensor, Tensor]] = (batch for epoch in count() for batch in loader.epoch(epoch))
        self.seconds, self.steps, self.error = 0.0, 0, ""
        self.evaluated: list[tuple[float, dict[str, Any]]] = []

    def train(self, until: float) -> None:
        """Go on until so many seconds were spent in all, or the loss is not finite."""
        self.model.train()
        while self.seconds < until and not self.error:
            begin = time.perf_counter()
            self.stepper.optimizer.zero_grad(set_to_none=True)
            loss, *_ = self.gradients(*next(self.batches)).tolist()
            if not math.isfinite(loss):
                self.error = f"the loss of step {self.steps + 1} is {loss}"
            self.stepper.step(self.steps)
            self.seconds += time.perf_counter() - begin
            self.steps += 1

    def evaluate(self, task: Task) -> None:
        """Certify the weights that the optimizer evaluates with."""
        if not self.error:
            with self.stepper.evaluation_weights():
                self.evaluated.append((self.seconds, certificate(copy.deepcopy(self.model).eval(), task)))

    def row(self) -> dict[str, Any]:
        """For the results."""
        if self.error:
            return {"error": self.error}
        parameters = sum(p.numel() for p in self.model.parameters() if p.requires_grad)
        seconds, results = zip(*self.evaluated, strict=True)
        return {"steps": self.steps, "parameters": parameters, "seconds": seconds, "results": results}


def describe(data: dict[str, Any]) -> list[Part]:
    """The end of each run, and the way there."""
    works = {library: row for library, row in data["rows"].items() if "error" not in row}
    ends = {library: {**row, **row["results"][-1]} for library, row in works.items()}
    title = f"recipe {data['recipe']}, batches of {data['batch']}, {data['budget']:g} s of training each"
    series = {
        library: ([s / 60 for s in row["seconds"]], [found["certified"][0] for found in row["results"]])
        for library, row in works.items()
    }
    plot = Plot("recipe", title, series, "minutes of training", CERTIFIED)
    table = accuracy_table("layers", title, ends)
    return [table, *failures(data["rows"]), *absent(LIBRARIES, data["rows"]), plot]


def peer_wins(data: dict[str, Any]) -> list[str]:
    """Where the network with orthogonium's layers ends up better."""
    ends = {library: row if "error" in row else row["results"][-1] for library, row in data["rows"].items()}
    when = f"trained for the same time by the recipe {data['recipe']}"
    return better_trained(when, ends, dict.fromkeys(filter(peers.is_peer, LIBRARIES), "trysquare"))
