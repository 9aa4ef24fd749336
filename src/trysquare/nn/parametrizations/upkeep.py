"""What follows an optimizer's step: cached weights are out of date, and degenerate free tensors are replaced.

Torch calls a hook after every step of every optimizer in the process. It sees what version counters do not (fused
optimizers do not count), happens at the same time on all ranks of a distributed run, and never while a graph is alive.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Self
from weakref import WeakKeyDictionary, WeakSet

import torch
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
    """One tensor, with what it was built from, and for which ``key``. A copy starts empty, and so does a pickled one.

    The sources are remembered as slots of the module that holds them, so that a tensor that was replaced, moved or
    written to is seen. Holding on to the tensors keeps their memory from being reused, so that equal addresses mean the
    same memory.
    """

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Forget the weight."""
        self.weight: Tensor | None = None
        self._key: Any = None
        self._version = self._steps = 0
        self._held: list[Tensor] = []
        self._slots: list[tuple[dict[str, Any], str, Tensor, int, int]] = []

    def kept(self, build: Callable[[], Tensor], slots: dict[str, Any], names: Iterable[str], key: Any = None) -> Tensor:
        """The weight for ``key``, built from the tensors in ``slots`` of these names unless it is there already."""
        if not self.fresh(key):
            # Not an inference tensor even in inference mode: the next pass may want gradients of its input.
            with torch.inference_mode(False), torch.no_grad():
                self._store(build(), slots, names, key)
        assert self.weight is not None
        return self.weight

    def _store(self, weight: Tensor, slots: dict[str, Any], names: Iterable[str], key: Any) -> None:
        self.weight, self._version, self._steps, self._key = weight, weight._version, _steps_of_all, key
        sources = [(name, slots[name]) for name in names]
        self._slots = [(slots, name, source, source._version, source.data_ptr()) for name, source in sources]
        self._held = [source.detach() for _, source in sources]

    def fresh(self, key: Any = None) -> bool:
        """Whether there is a weight for ``key``, not written to, and what it was built from is as it was."""
        if self.weight is None or self._steps != _steps_of_all or self.weight._version != self._version:
            return False
        if key != self._key:
            return False
        for slots, name, source, version, address in self._slots:
            if slots[name] is not source or source._version != version:
                return False
            if source.data_ptr() != address:
                return False
        return True

    def __reduce__(self) -> Any:
        return WeightCache, ()


class Caching(nn.Module):
    """A module that builds a tensor from free ones, and in eval mode keeps it while nothing changes."""

    def __init__(self) -> None:
        super().__init__()
        self.cache = WeightCache()

    def may_cache(self, free: Iterable[Tensor], slots: dict[str, Any], names: Iterable[str]) -> bool:
        """Whether what is built from ``free`` may be kept: they are the parameters in ``slots``, and need no gradient.

        Not tensors that somebody else put there for one call.
        """
        if self.training or torch.compiler.is_compiling():
            return False
        grad = torch.is_grad_enabled()
        return all(
            tensor is slots[name]
            and type(tensor) is nn.Parameter
            and not (tensor.is_inference() or (grad and tensor.requires_grad))
            for tensor, name in zip(free, names, strict=True)
        )

    def train(self, mode: bool = True) -> Self:
        """Switch mode; a switch forgets what is kept."""
        if mode != self.training:
            self.forget()
        return super().train(mode)

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        self.forget()
        return super()._apply(fn, recurse)

    def forget(self) -> None:
        """Build anew next time."""
        self.cache.clear()
