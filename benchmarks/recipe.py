"""The network of a recipe with our layers and with orthogonium's, trained by the recipe for the same time.

Data, augmentation, loss, margin and optimizer are those of the recipe; only the classes of the orthogonal layers
differ. They train in turns of a minute, so that a machine that is slow for a while is so for all. Each has one run, and
the recipe was chosen for our layers ([results](results.md) says how).
"""

from __future__ import annotations

import argparse
import copy
import math
import sys
import time
from collections.abc import Callable
from itertools import count
from typing import Any

import torch
from torch import nn

import trysquare as ts
from benchmarks import peers
from benchmarks.networks import exchange
from benchmarks.report import CERTIFIED, RADII, Figure, Part, Plot, Table, failures
from benchmarks.training import Task, certificate
from trysquare.lab.training.distribution import World
from trysquare.lab.training.loop import Training
from trysquare.lab.training.recipe import Recipe
from trysquare.lab.training.step import OPTIMIZERS, Gradients

LIBRARIES: dict[str, Callable[[nn.Module], nn.Module]] = {
    "trysquare": lambda model: model,
    "orthogonium": lambda model: exchange(model, peers.aoc, peers.linear),
    "orthogonium, QR": lambda model: exchange(model, peers.aoc_by("QR"), peers.linear_by("QR")),
}
TURN = 60.0
PEER = """\
Not in this run. With its QR, orthogonium takes 5,446 steps where ours takes 7,013, and ends 3.5 points behind in
certified accuracy; with its default, which is slow for the large matrices of dense layers, it takes 1,656."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--data", help="folder of CIFAR-10; without it the recipe for digits")
    parser.add_argument("--budget", type=float, help="seconds of training with each library; 1800 (--quick: 15)")


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return steps, and accuracy by the time spent, of each kind of layers."""
    name = "cifar10-cpu" if arguments.data else "digits"
    recipe = ts.training.read_recipe(name, {"data.root": arguments.data} if arguments.data else None)
    budget = arguments.budget or (15.0 if arguments.quick else 1800.0)
    task = Task(arguments.data, recipe.train.batch_size, test_images=200 if arguments.quick else None)
    turns = max(3, round(budget / TURN))
    runs = {library: _Run(recipe, LIBRARIES[library]) for library in peers.that_run(LIBRARIES)}
    for turn in range(turns):
        print(f"training: turn {turn + 1} of {turns}", file=sys.stderr)
        for one in runs.values():
            one.train(budget * (turn + 1) / turns)
            if (turn + 1) % max(1, turns // 6) == 0 or turn + 1 == turns:
                one.evaluate(task)
    rows = {library: one.row() for library, one in runs.items()}
    return {"recipe": name, "budget": budget, "batch": recipe.train.batch_size, "rows": rows}


class _Run:
    """A training under way that can be paused."""

    def __init__(self, recipe: Recipe, change: Callable[[nn.Module], nn.Module]) -> None:
        # The margin is that of the model with our layers, whose constant is known.
        training = Training(recipe, World(torch.device("cpu")))
        self.model = change(training.model)
        self.stepper = OPTIMIZERS[recipe.optimizer.name](
            self.model.parameters(), training.steps, **recipe.optimizer.options
        )
        self.gradients = Gradients(self.model, training.loss)
        self.batches = (batch for epoch in count() for batch in training.train.epoch(epoch))
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
        if self.error:
            return {"error": self.error}
        parameters = sum(p.numel() for p in self.model.parameters() if p.requires_grad)
        seconds, results = zip(*self.evaluated, strict=True)
        return {"steps": self.steps, "parameters": parameters, "seconds": seconds, "results": results}


def describe(data: dict[str, Any]) -> list[Part]:
    rows = [
        [
            library,
            f"{row['parameters'] / 1e6:.2f} M",
            f"{row['steps']:,}",
            *(f"{share:.1%}" for share in (row["results"][-1]["accuracy"], *row["results"][-1]["certified"])),
        ]
        for library, row in data["rows"].items()
        if "error" not in row
    ]
    columns = ["layers", "parameters", "steps", "accuracy", *(f"certified at {r}/255" for r in RADII)]
    title = f"recipe {data['recipe']}, batches of {data['batch']}, {data['budget']:g} s of training each"
    return [Table(columns, rows, title), *failures(data["rows"])]


def draw(data: dict[str, Any]) -> Figure:
    works = {library: row for library, row in data["rows"].items() if "error" not in row}
    clean, certified = {}, {}
    for library, row in works.items():
        minutes = [seconds / 60 for seconds in row["seconds"]]
        clean[library] = {m: 100 * found["accuracy"] for m, found in zip(minutes, row["results"], strict=True)}
        certified[library] = {m: 100 * found["certified"][0] for m, found in zip(minutes, row["results"], strict=True)}
    minutes_label = "minutes of training"
    return Figure(Plot(clean, minutes_label, "accuracy, %"), Plot(certified, minutes_label, f"{CERTIFIED}, %"))
