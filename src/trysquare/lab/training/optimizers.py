"""Optimizers by name: schedule-free ones, and torch's with a warm-up and a schedule."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from trysquare.naming import pick

Schedule = Callable[[float], float]
"""From the share of the training after warm-up that is done to a factor of the learning rate."""

SCHEDULES: dict[str, Schedule] = {
    "constant": lambda done: 1.0,
    "cosine": lambda done: 0.5 * (1 + math.cos(math.pi * min(done, 1.0))),
    "linear": lambda done: 1 - min(done, 1.0),
}


@dataclass(frozen=True, eq=False)
class Stepper:
    """An optimizer with its learning rate as a function of the number of the step, so that there is nothing to save.

    Attributes:
        optimizer: of torch or schedule-free.
        rate: learning rate of step ``0, 1, ...``; ``None`` if the optimizer knows it.
    """

    optimizer: Optimizer
    rate: Callable[[int], float] | None = None

    def step(self, number: int) -> None:
        """Change the parameters, with the learning rate of this step."""
        if self.rate is not None:
            for group in self.optimizer.param_groups:
                group["lr"] = self.rate(number)
        self.optimizer.step()

    @property
    def learning_rate(self) -> float:
        """Of the last step."""
        group = self.optimizer.param_groups[0]
        return float(group.get("scheduled_lr", group["lr"]))

    @contextmanager
    def evaluation_weights(self) -> Iterator[None]:
        """The parameters that the optimizer evaluates with; afterwards those that it trains, bit for bit.

        Schedule-free optimizers evaluate with an average. Their own way back rounds, so that a run would depend on how
        often it was evaluated.
        """
        optimizer: Any = self.optimizer
        if not hasattr(optimizer, "eval"):
            yield
            return
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        kept = [parameter.detach().clone() for parameter in parameters]
        optimizer.eval()
        try:
            yield
        finally:
            optimizer.train()
            with torch.no_grad():
                for parameter, value in zip(parameters, kept, strict=True):
                    parameter.copy_(value)


def _schedule_free(kind: str, parameters: Iterable[nn.Parameter], **options: Any) -> Stepper:
    try:
        import schedulefree  # type: ignore[import-untyped, import-not-found]
    except ImportError as error:
        raise ImportError("this optimizer needs schedulefree: pip install 'trysquare[train]'") from error
    optimizer = getattr(schedulefree, kind)(parameters, **options)
    optimizer.train()
    return Stepper(optimizer)


def schedule_free_adamw(
    parameters: Iterable[nn.Parameter],
    steps: int,
    lr: float = 0.0025,
    betas: tuple[float, float] = (0.9, 0.999),
    weight_decay: float = 0.0,
    warmup_steps: int = 0,
) -> Stepper:
    """AdamW without a schedule (Defazio et al., 2024)."""
    return _schedule_free(
        "AdamWScheduleFree", parameters, lr=lr, betas=betas, weight_decay=weight_decay, warmup_steps=warmup_steps
    )


def schedule_free_radam(
    parameters: Iterable[nn.Parameter],
    steps: int,
    lr: float = 0.0025,
    betas: tuple[float, float] = (0.9, 0.999),
    weight_decay: float = 0.0,
) -> Stepper:
    """RAdam without a schedule, which needs no warm-up."""
    return _schedule_free("RAdamScheduleFree", parameters, lr=lr, betas=betas, weight_decay=weight_decay)


def schedule_free_sgd(
    parameters: Iterable[nn.Parameter],
    steps: int,
    lr: float = 1.0,
    momentum: float = 0.9,
    weight_decay: float = 0.0,
    warmup_steps: int = 0,
) -> Stepper:
    """SGD without a schedule."""
    return _schedule_free(
        "SGDScheduleFree", parameters, lr=lr, momentum=momentum, weight_decay=weight_decay, warmup_steps=warmup_steps
    )


def adamw(
    parameters: Iterable[nn.Parameter],
    steps: int,
    lr: float = 1e-3,
    betas: tuple[float, float] = (0.9, 0.999),
    weight_decay: float = 0.0,
    warmup_steps: int = 0,
    schedule: str = "cosine",
) -> Stepper:
    """Torch's AdamW."""
    optimizer = torch.optim.AdamW(parameters, lr=lr, betas=betas, weight_decay=weight_decay)
    return Stepper(optimizer, learning_rate(lr, steps, warmup_steps, schedule))


def nadam(
    parameters: Iterable[nn.Parameter],
    steps: int,
    lr: float = 1e-3,
    betas: tuple[float, float] = (0.9, 0.999),
    weight_decay: float = 0.0,
    warmup_steps: int = 0,
    schedule: str = "cosine",
) -> Stepper:
    """Torch's NAdam."""
    optimizer = torch.optim.NAdam(parameters, lr=lr, betas=betas, weight_decay=weight_decay)
    return Stepper(optimizer, learning_rate(lr, steps, warmup_steps, schedule))


def sgd(
    parameters: Iterable[nn.Parameter],
    steps: int,
    lr: float = 0.1,
    momentum: float = 0.9,
    nesterov: bool = False,
    weight_decay: float = 0.0,
    warmup_steps: int = 0,
    schedule: str = "cosine",
) -> Stepper:
    """Torch's SGD."""
    optimizer = torch.optim.SGD(parameters, lr=lr, momentum=momentum, nesterov=nesterov, weight_decay=weight_decay)
    return Stepper(optimizer, learning_rate(lr, steps, warmup_steps, schedule))


def learning_rate(lr: float, steps: int, warmup_steps: int, schedule: str) -> Callable[[int], float]:
    """Learning rate by the number of the step: up along a line, then down by the schedule.

    Raises:
        ValueError: if there is no such schedule.

    >>> from trysquare.lab.training.optimizers import learning_rate
    >>> [round(learning_rate(1.0, 6, 2, "linear")(step), 2) for step in range(6)]
    [0.5, 1.0, 1.0, 0.75, 0.5, 0.25]
    """
    factor = pick(SCHEDULES, schedule, "schedule")

    def rate(number: int) -> float:
        if number < warmup_steps:
            return lr * (number + 1) / warmup_steps
        return lr * factor((number - warmup_steps) / max(1, steps - warmup_steps))

    return rate


OPTIMIZERS: dict[str, Callable[..., Stepper]] = {
    "schedule-free-adamw": schedule_free_adamw,
    "schedule-free-radam": schedule_free_radam,
    "schedule-free-sgd": schedule_free_sgd,
    "adamw": adamw,
    "nadam": nadam,
    "sgd": sgd,
}
"""Called with the parameters, the number of steps of the whole training, and options."""
