"""A training loop for a fixed number of steps or seconds; recipes, in contrast, count epochs."""

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
from benchmarks.results import usable_gigabytes

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
        """Return the name of the data set."""
        return "cifar10" if self.folder else "digits"

    @property
    def shape(self) -> tuple[int, int, int]:
        """Return the shape of an image."""
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
        """Return test images and labels."""
        images = ts.data.load(self.name, self.folder, "test")
        rows = torch.arange(min(len(images), self.test_images or len(images)))
        return images.stack(rows).float() / images.white, images.labels[rows]


def train(model: nn.Module, task: Task, *, steps: int | None = None, seconds: float = math.inf) -> dict[str, Any]:
    """Train with Adam, whose rate falls to 0 like a cosine over the steps or the seconds, and the paper's loss.

    Args:
        model: images to logits.
        task: what to train on.
        steps: how many at most.
        seconds: how long at most; data and optimizer are part of it.

    Returns:
        Seconds since the start and loss after each step.

    Raises:
        ArithmeticError: if a loss is not finite.
    """
    step = _stepper(model, task)
    ends: list[float] = []
    losses: list[float] = []
    start = time.perf_counter()
    share = 0.0
    while share < 1:
        loss = step(LEARNING_RATE * (1 + math.cos(math.pi * share)) / 2)
        if not math.isfinite(loss):
            raise ArithmeticError(f"the loss of step {len(losses) + 1} is {loss}")
        losses.append(loss)
        ends.append(time.perf_counter() - start)
        share = max(len(losses) / steps if steps else 0.0, ends[-1] / seconds)
    return {"steps": len(losses), "seconds": ends, "losses": losses}


def _stepper(model: nn.Module, task: Task) -> Callable[[float], float]:
    """Return a function that takes one step at a given rate and returns the loss."""
    loss_of, batches = ts.losses.OffsetCrossEntropy(), task.batches()
    optimizer = torch.optim.Adam(model.train().parameters(), lr=LEARNING_RATE)

    def step(rate: float) -> float:
        for group in optimizer.param_groups:
            group["lr"] = rate
        images, labels = next(batches)
        optimizer.zero_grad()
        loss = loss_of(model(images), labels)
        loss.backward()
        optimizer.step()
        return loss.item()

    return step


def trained(build: Callable[[], nn.Module], task: Task, label: str, **options: Any) -> dict[str, Any]:
    """Return the run and the certificate of a network after ``train`` with these options, or why it has none."""
    print(f"training: {label}", file=sys.stderr)
    try:
        with limited_memory(usable_gigabytes()):
            model = build()
            torch.manual_seed(0)
            run = train(model, task, **options)
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
