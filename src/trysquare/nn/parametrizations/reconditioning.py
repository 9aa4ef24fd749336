"""Reconditioning: degenerate free tensors are replaced by others that give the same weight.

Torch calls a hook after every step of every optimizer in the process. That happens at the same time on all ranks of a
distributed run, and never while a graph is alive, so free tensors are looked at then, once in so many steps.
"""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary, WeakSet

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

# Steps of an optimizer between two looks at the condition of the free tensors.
RECONDITION_EVERY = 64

parametrizations: WeakSet[Any] = WeakSet()
"""Those whose ``recondition(trained)`` is called."""

_steps: WeakKeyDictionary[Optimizer, int] = WeakKeyDictionary()


def _after_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    steps = _steps[optimizer] = _steps.get(optimizer, 0) + 1
    if steps % RECONDITION_EVERY == 0:
        trained = {id(tensor) for group in optimizer.param_groups for tensor in group["params"]}
        for parametrization in list(parametrizations):
            parametrization.recondition(trained)


register_optimizer_step_post_hook(_after_step)


def steps_taken(optimizer: Optimizer) -> int:
    """Return how many steps of this optimizer were seen."""
    return _steps.get(optimizer, 0)


def continue_from(optimizer: Optimizer, steps: int) -> None:
    """Count on from ``steps``, so that a resumed run reconditions when an uninterrupted one would have."""
    _steps[optimizer] = steps
