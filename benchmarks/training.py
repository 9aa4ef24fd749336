"""A training loop for a fixed number of seconds; recipes, in contrast, count epochs."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import trysquare as ts
from benchmarks import peers
from benchmarks.measure import limited_memory
from benchmarks.report import RADII

LEARNING_RATE = 3e-3
AUGMENT: dict[str, Any] = {"cifar10": {"random_crop": {"padding": 4}, "flip": {}}}
EPSILONS = tuple(radius / 255 for radius in RADII)


@dataclass(frozen=True)
class Task:
    """Training and test images of CIFAR-10, or of the digits in the package if there is no folder.

    Args:
        folder: where CIFAR-10 is.
        batch: images of a step.
        test_images: how many of the test images are used at most.
    """

    folder: str | None
    batch: int
    test_images: int | None = None

    @property
    def name(self) -> str:
        return "cifar10" if self.folder else "digits"

    @property
    def shape(self) -> tuple[int, int, int]:
        return ts.data.DATASETS[self.name].shape

    def batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield training batches without end, the same for every contestant."""
        images = ts.data.load(self.name, self.folder)
        loader = ts.data.Loader(images, self.batch, AUGMENT.get(self.name, {}), shuffle=True, drop_last=True)
        epoch = 0
        while True:
            yield from loader.epoch(epoch)
            epoch += 1

    def test(self) -> tuple[Tensor, Tensor]:
        images = ts.data.load(self.name, self.folder, "test")
        rows = torch.arange(min(len(images), self.test_images or len(images)))
        return images.stack(rows).float() / images.white, images.labels[rows]


def train(model: nn.Module, task: Task, seconds: float) -> dict[str, Any]:
    """Train with Adam, whose rate falls to 0 like a cosine over the seconds, and the paper's loss.

    Args:
        model: images to logits.
        task: what to train on.
        seconds: how long; data and optimizer are part of it.

    Returns:
        Seconds since the start and loss after each step.

    Raises:
        ArithmeticError: if a loss is not finite.
    """
    loss_of, batches = ts.losses.OffsetCrossEntropy(), task.batches()
    optimizer = torch.optim.Adam(model.train().parameters(), lr=LEARNING_RATE)
    ends: list[float] = []
    losses: list[float] = []
    start, spent = time.perf_counter(), 0.0
    while spent < seconds:
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATE * (1 + math.cos(math.pi * spent / seconds)) / 2
        images, labels = next(batches)
        optimizer.zero_grad()
        loss = loss_of(model(images), labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if not math.isfinite(losses[-1]):
            raise ArithmeticError(f"the loss of step {len(losses)} is {losses[-1]}")
        spent = time.perf_counter() - start
        ends.append(spent)
    return {"steps": len(losses), "seconds": ends, "losses": losses}


def trained(build: Callable[[], nn.Module], task: Task, label: str, seconds: float) -> dict[str, Any]:
    """Return the run and the certificate of a network after ``train``, or why it has none."""
    print(f"training: {label}", file=sys.stderr)
    try:
        with limited_memory():
            model = build()
            torch.manual_seed(0)
            run = train(model, task, seconds)
            parameters = sum(p.numel() for p in model.parameters() if p.requires_grad)
            return {"parameters": parameters, **run, **certificate(model, task)}
    except (ArithmeticError, ValueError, RuntimeError, MemoryError) as error:
        return {"error": f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"}


def certificate(model: nn.Module, task: Task) -> dict[str, Any]:
    """Return accuracy, and certified accuracy at the usual radii, on the test images."""
    images, labels = task.test()
    found = ts.certify(peers.with_plain_layers(model), (images, labels), epsilons=EPSILONS, measured_samples=256)
    return {
        "accuracy": found.clean_accuracy,
        "certified": [found.certified_accuracy(epsilon) for epsilon in EPSILONS],
        "lipschitz": found.lipschitz,
        "test_images": len(images),
    }
