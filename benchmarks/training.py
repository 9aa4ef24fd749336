"""A training loop for a fixed number of steps or seconds (recipes count epochs), from public pieces."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

import trysquare as ts
from benchmarks import peers
from benchmarks.measure import limited_memory
from benchmarks.report import RADII
from benchmarks.results import usable_gigabytes
from trysquare.progress import track

LEARNING_RATE = 3e-3
AUGMENT: dict[str, Any] = {"cifar10": {"random_crop": {"padding": 4}, "flip": {}}}
EPSILONS = tuple(radius / 255 for radius in RADII)


@dataclass(frozen=True)
class Task:
    """Training and test images of a data set; those of the package if there is no folder.

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
        """Of the data set."""
        return "cifar10" if self.folder else "digits"

    @property
    def shape(self) -> tuple[int, int, int]:
        """Of an image."""
        return ts.data.DATASETS[self.name].shape

    def batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Training batches without an end, the same for everybody."""
        images = ts.data.load(self.name, self.folder)
        loader = ts.data.Loader(images, self.batch, AUGMENT.get(self.name, {}), shuffle=True, drop_last=True)
        epoch = 0
        while True:
            yield from loader.epoch(epoch)
            epoch += 1

    def test(self) -> tuple[Tensor, Tensor]:
        """Test images and labels."""
        images = ts.data.load(self.name, self.folder, "test")
        rows = torch.arange(min(len(images), self.test_images or len(images)))
        return images.stack(rows).float() / images.white, images.labels[rows]


@dataclass
class Run:
    """What a training run did: seconds and loss after each step."""

    seconds: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)

    def steps(self) -> list[float]:
        """Seconds of each step."""
        return [end - begin for begin, end in zip([0.0, *self.seconds], self.seconds, strict=False)]

    def smoothed(self, window: int = 20) -> tuple[list[float], list[float]]:
        """Steps and means of the loss over windows."""
        ends = list(range(window, len(self.losses) + 1, window))
        return [float(end) for end in ends], [sum(self.losses[end - window : end]) / window for end in ends]


def train(
    model: nn.Module, task: Task, *, steps: int | None = None, seconds: float = math.inf, label: str = "training"
) -> Run:
    """Train with Adam, whose rate falls to 0 like a cosine over the steps or the seconds, and the paper's loss.

    Args:
        model: images to logits.
        task: what to train on.
        steps: how many at most.
        seconds: how long at most; data and optimizer are part of it.
        label: of the progress bar.

    Raises:
        ArithmeticError: if a loss is not finite.
    """
    step = _stepper(model, task)
    run, start = Run(), time.perf_counter()
    ticks = steps if steps is not None else max(1, math.ceil(seconds))
    for tick in track(range(ticks), label, ticks):
        while (share := _share(run, steps, seconds)) < (tick + 1) / ticks:
            loss = step(LEARNING_RATE * (1 + math.cos(math.pi * share)) / 2)
            if not math.isfinite(loss):
                raise ArithmeticError(f"the loss of step {len(run.losses) + 1} is {loss}")
            run.losses.append(loss)
            run.seconds.append(time.perf_counter() - start)
    return run


def _stepper(model: nn.Module, task: Task) -> Callable[[float], float]:
    """A function that takes one step at a given rate and returns the loss."""
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


def _share(run: Run, steps: int | None, seconds: float) -> float:
    """How much of what is allowed was used."""
    by_steps = len(run.losses) / steps if steps else 0.0
    by_clock = run.seconds[-1] / seconds if run.seconds else 0.0
    return min(1.0, max(by_steps, by_clock))


def trained(build: Callable[[], nn.Module], task: Task, **options: Any) -> dict[str, Any]:
    """Seconds, losses and certificate of a network after ``train`` with these options, or why it has none."""
    try:
        with limited_memory(usable_gigabytes()):
            model = build()
            torch.manual_seed(0)
            run = train(model, task, **options)
            parameters = sum(p.numel() for p in model.parameters() if p.requires_grad)
            return {"steps": len(run.losses), "parameters": parameters, **asdict(run), **certificate(model, task)}
    except (ArithmeticError, ValueError, RuntimeError, MemoryError) as error:
        return {"error": f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"}


def certificate(model: nn.Module, task: Task) -> dict[str, Any]:
    """Accuracy, and certified accuracy at the usual radii, on the test images."""
    images, labels = task.test()
    found = ts.certify(peers.with_plain_layers(model), (images, labels), epsilons=EPSILONS, measured_samples=256)
    return {
        "accuracy": found.clean_accuracy,
        "certified": [found.certified_accuracy(epsilon) for epsilon in EPSILONS],
        "lipschitz": found.lipschitz,
        "test_images": len(images),
    }
