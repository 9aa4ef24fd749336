"""What follows an optimizer's step: cached weights are out of date, and degenerate free tensors are replaced.

Torch calls a hook after every step of every optimizer in the process. It sees what version counters do not (fused
optimizers do not count), happens at the same time on all ranks of a distributed run, and never while a graph is alive.
"""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary, WeakSet

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

# Steps between two looks at the condition of the free tensors.
RECONDITION_EVERY = 64

_tended: WeakSet[Any] = WeakSet()
_steps_of: WeakKeyDictionary[Optimizer, int] = WeakKeyDictionary()
_steps_of_all = 0


def tend(parametrization: Any) -> None:
    """Call ``parametrization.keep_well_conditioned(trained)`` every so many steps of an optimizer."""
    _tended.add(parametrization)


def _after_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    global _steps_of_all
    _steps_of_all += 1
    steps = _steps_of[optimizer] = _steps_of.get(optimizer, 0) + 1
    if steps % RECONDITION_EVERY == 0:
        trained = {id(tensor) for group in optimizer.param_groups for tensor in group["params"]}
        for parametrization in list(_tended):
            parametrization.keep_well_conditioned(trained)


register_optimizer_step_post_hook(_after_step)


def steps_taken(optimizer: Optimizer) -> int:
    """How many steps of this optimizer were seen."""
    return _steps_of.get(optimizer, 0)


def continue_from(optimizer: Optimizer, steps: int) -> None:
    """Count on from so many steps, so that a resumed run looks at its free tensors when the first one would have."""
    _steps_of[optimizer] = steps


class WeightCache:
    """One weight, with what it was built from. A copy starts empty.

    The sources are remembered as slots of the module that holds them, so that a tensor that was replaced, moved or
    written to is seen. Holding on to the tensors keeps their memory from being reused, so that equal addresses mean the
    same memory.
    """

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Forget the weight."""
        self.weight: Tensor | None = None
        self._version = self._steps = 0
        self._held: list[Tensor] = []
        self._slots: list[tuple[dict[str, Any], str, Tensor, int, int]] = []

    def store(self, weight: Tensor, slots: dict[str, Any]) -> None:
        """Remember ``weight`` as made from the tensors in ``slots``."""
        self.weight, self._version, self._steps = weight, weight._version, _steps_of_all
        self._slots = [(slots, name, source, source._version, source.data_ptr()) for name, source in slots.items()]
        self._held = [source.detach() for source in slots.values()]

    def fresh(self) -> bool:
        """Whether there is a weight, it was not written to, and everything that it was built from is as it was."""
        if self.weight is None or self._steps != _steps_of_all or self.weight._version != self._version:
            return False
        for slots, name, source, version, address in self._slots:
            if slots[name] is not source or source._version != version:
                return False
            if source.data_ptr() != address:
                return False
        return True

    def __deepcopy__(self, memo: dict[int, Any]) -> WeightCache:
        return WeightCache()


def owned(tensors: Any, slots: dict[str, Any]) -> bool:
    """Whether ``tensors`` are the parameters in ``slots``, not tensors that somebody else put there for one call."""
    return all(
        tensor is slot and type(tensor) is nn.Parameter for tensor, slot in zip(tensors, slots.values(), strict=True)
    )
