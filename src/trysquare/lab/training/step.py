"""One step of training: the gradients of a batch with every weight built once, and the optimizers by name."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.optim import Optimizer

from trysquare.lab.models import Classifier
from trysquare.naming import pick
from trysquare.nn.building import built
from trysquare.nn.losses import Loss
from trysquare.nn.optim import Lookahead, MovingAverage, RiemannianAdam, parameter_groups


def loss_of(loss: Loss, model: nn.Module, logits: Tensor, labels: Tensor) -> Tensor:
    """Return the loss, which is given the weight of the classifier's last layer if it takes one."""
    if "head" in inspect.signature(loss.forward).parameters:
        return loss(logits, labels, head=cast("Classifier", model).head.weight)
    return loss(logits, labels)


class Gradients:
    """Computes the gradients of a batch, in parts if it does not fit into memory.

    Weights are built once, by all processes together, and their gradients are taken back to the free tensors once.

    Args:
        model: the classifier.
        loss: of logits and labels.
        parts: in which a batch is computed.
        precision: ``"bfloat16"`` computes everything but weights and loss in it.
        group: processes that compute a part of the batch each; ``None`` for this one alone.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Loss,
        parts: int = 1,
        precision: str = "float32",
        group: dist.ProcessGroup | None = None,
    ) -> None:
        self.model, self.loss, self.parts, self.group = model, loss, parts, group
        self.low_precision = precision == "bfloat16"

    def __call__(self, images: Tensor, labels: Tensor) -> Tensor:
        """Add the gradients of the mean loss, over all processes, to the parameters.

        Returns:
            The sum of the losses, the number of right answers and that of images of this process, ``(3,)``.
        """
        counts = torch.zeros(3, device=images.device)
        with built(self.model, self.group):
            for part, classes in zip(images.chunk(self.parts), labels.chunk(self.parts), strict=True):
                with parametrize.cached():  # a loss that wants the head's weight gets the one of this pass
                    with torch.autocast(images.device.type, torch.bfloat16, enabled=self.low_precision):
                        logits = self.model(part)
                    loss = loss_of(self.loss, self.model, logits, classes)
                (loss * (len(classes) / len(labels))).backward()
                right = (logits.detach().argmax(1) == classes).sum().float()
                counts += torch.stack([loss.detach() * len(classes), right, loss.new_tensor(len(classes))])
        return counts


def clip_layers(model: nn.Module, largest: float) -> None:
    """Scale the gradient of each layer, its free tensors and bias together, to a norm of at most ``largest``.

    >>> from trysquare.lab.training.step import clip_layers
    >>> model = nn.Sequential(nn.Linear(4, 4), OrthoLinear(4, 2))
    >>> (100 * model(torch.ones(1, 4))).sum().backward()
    >>> clip_layers(model, 1.0)
    >>> norms = [float(torch.cat([p.grad.flatten() for p in layer.parameters()]).norm()) for layer in model]
    >>> all(abs(norm - 1) < 1e-3 for norm in norms)
    True
    """
    layers: dict[str, list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            owner = f".{name}".rpartition(".")[0].partition(".parametrizations.")[0]
            layers.setdefault(owner, []).append(parameter)
    for parameters in layers.values():
        nn.utils.clip_grad_norm_(parameters, largest)


def _half_wave(share: float) -> float:
    """From 0 at 0 to 1 at 1."""
    return 0.5 * (1 - math.cos(math.pi * max(share, 0.0)))


Schedule = Callable[[float], float]
"""From the share of the training after warm-up that is done to a factor of the learning rate."""

SCHEDULES: dict[str, Schedule] = {
    "constant": lambda done: 1.0,
    "cosine": lambda done: 0.5 * (1 + math.cos(math.pi * min(done, 1.0))),
    "linear": lambda done: 1 - min(done, 1.0),
    # Up for 30 % of the steps and down again, along half waves (Smith and Topin, 2019).
    "one-cycle": lambda done: (
        0.04 + 0.96 * _half_wave(done / 0.3) if done < 0.3 else _half_wave(min((1 - done) / 0.7, 1.0))
    ),
}


@dataclass(frozen=True, eq=False)
class Stepper:
    """An optimizer whose learning rate is a function of the step, so that a schedule has no state to save.

    Attributes:
        optimizer: of torch or schedule-free.
        rate: learning rate of step ``0, 1, ...``; ``None`` if the optimizer knows it.
        average: of the parameters, if these are evaluated.
    """

    optimizer: Optimizer
    rate: Callable[[int], float] | None = None
    average: MovingAverage | None = None

    def step(self, number: int) -> None:
        """Update the parameters with the learning rate of this step."""
        if self.rate is not None:
            for group in self.optimizer.param_groups:
                group["lr"] = self.rate(number)
        self.optimizer.step()

    @property
    def learning_rate(self) -> float:
        """The learning rate of the last step."""
        group = self.optimizer.param_groups[0]
        return float(group.get("scheduled_lr", group["lr"]))

    @contextmanager
    def evaluation_weights(self) -> Iterator[None]:
        """Switch to the parameters that the optimizer evaluates with, and back to those that it trains, bit for bit.

        Schedule-free optimizers evaluate with an average. Their own way back rounds, so that a run would depend on how
        often it was evaluated.
        """
        optimizer: Any = self.optimizer
        if not hasattr(optimizer, "eval"):
            with nullcontext() if self.average is None else self.average.applied():
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


def _schedule_free(kind: str, parameters: Iterable[nn.Parameter], **options: object) -> Stepper:
    try:
        import schedulefree
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


def _riemannian_adam(parameters: Iterable[Any], **options: Any) -> RiemannianAdam:
    """Take the groups of ``parameter_groups``, or parameters of which none is orthonormal."""
    groups = list(parameters)
    if groups and not isinstance(groups[0], dict):
        groups = [{"params": groups, "orthonormal": False}]
    plain = [
        {**group, "weight_decay": options["weight_decay"]} if group.get("name") == "decayed" else group
        for group in groups
    ]
    return RiemannianAdam(plain, **options)


def _adam(kind: Callable[..., Optimizer]) -> Callable[..., Stepper]:
    """Return the maker of one of the optimizers of this family, which have the same options."""

    def make(
        parameters: Iterable[nn.Parameter],
        steps: int,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0.0,
        warmup_steps: int = 0,
        schedule: str = "cosine",
        lookahead: int = 0,
        average: float = 0.0,
    ) -> Stepper:
        optimizer = kind(parameters, lr=lr, betas=betas, weight_decay=weight_decay)
        return _scheduled(optimizer, learning_rate(lr, steps, warmup_steps, schedule), lookahead, average)

    return make


def sgd(
    parameters: Iterable[nn.Parameter],
    steps: int,
    lr: float = 0.1,
    momentum: float = 0.9,
    nesterov: bool = False,
    weight_decay: float = 0.0,
    warmup_steps: int = 0,
    schedule: str = "cosine",
    lookahead: int = 0,
    average: float = 0.0,
) -> Stepper:
    """Torch's SGD."""
    optimizer = torch.optim.SGD(parameters, lr=lr, momentum=momentum, nesterov=nesterov, weight_decay=weight_decay)
    return _scheduled(optimizer, learning_rate(lr, steps, warmup_steps, schedule), lookahead, average)


def _scheduled(optimizer: Optimizer, rate: Callable[[int], float], lookahead: int, average: float) -> Stepper:
    """Return the stepper of a torch optimizer, with lookahead each so many steps and an average, unless these are 0."""
    if lookahead:
        Lookahead(optimizer, lookahead)
    return Stepper(optimizer, rate, MovingAverage(optimizer, average) if average else None)


def learning_rate(lr: float, steps: int, warmup_steps: int, schedule: str) -> Callable[[int], float]:
    """Return the learning rate as a function of the step: up along a line, then down by the schedule.

    Raises:
        ValueError: if there is no such schedule.

    >>> from trysquare.lab.training.step import learning_rate
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
    "adamw": _adam(torch.optim.AdamW),
    "nadam": _adam(torch.optim.NAdam),
    "riemannian-adam": _adam(_riemannian_adam),
    "sgd": sgd,
}
"""Called with the parameters, the number of steps of the whole training, and options."""


def trained_by(name: str, model: nn.Module) -> Iterable[Any]:
    """Return the parameters of a model for an optimizer of this name, in groups if it wants to know which is which."""
    return parameter_groups(model) if name == "riemannian-adam" else model.parameters()
