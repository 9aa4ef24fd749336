"""Caching: in eval mode a built weight is kept until something that it depends on changes."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any, Self
from zlib import crc32

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from trysquare.nn.linalg.functions import is_traced
from trysquare.nn.linalg.precision import host_can_look

# Steps of all optimizers of the process. Fused ones change parameters without raising their version counters.
_steps = 0


def _after_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    global _steps
    _steps += 1


register_optimizer_step_post_hook(_after_step)


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

    def get(self, build: Callable[[], Tensor], slots: dict[str, Any], names: Iterable[str], key: Any = None) -> Tensor:
        """Return the weight for ``key``; if out of date, build it from the tensors of these names in ``slots``."""
        if not self.fresh(key):
            # Not an inference tensor even in inference mode: the next pass may want gradients of its input.
            with torch.inference_mode(False), torch.no_grad():
                self._store(build(), slots, names, key)
        assert self.weight is not None
        return self.weight

    def _store(self, weight: Tensor, slots: dict[str, Any], names: Iterable[str], key: Any) -> None:
        self.weight, self._version, self._steps, self._key = weight, weight._version, _steps, key
        sources = [(name, slots[name]) for name in names]
        self._slots = [(slots, name, source, source._version, source.data_ptr()) for name, source in sources]
        self._held = [source.detach() for _, source in sources]

    def fresh(self, key: Any = None) -> bool:
        """Whether there is a weight for ``key``, not written to, and what it was built from is as it was."""
        if self.weight is None or self._steps != _steps or self.weight._version != self._version:
            return False
        return key == self._key and all(
            slots[name] is source and source._version == version and source.data_ptr() == address
            for slots, name, source, version, address in self._slots
        )

    def __reduce__(self) -> Any:
        return WeightCache, ()


class Caching(nn.Module):
    """A module that builds a tensor from free ones, and in eval mode keeps it while nothing changes."""

    def __init__(self) -> None:
        super().__init__()
        self.cache = WeightCache()

    def cached(
        self,
        build: Callable[[], Tensor],
        free: Iterable[Tensor],
        slots: dict[str, Any],
        names: Iterable[str],
        key: Any = None,
        cache: WeightCache | None = None,
    ) -> Tensor:
        """Return ``build()``, from the cache if the free tensors are the parameters in ``slots`` and need no gradient.

        Tensors that somebody else put there for one call are not kept.
        """
        if self.training or torch.compiler.is_compiling():
            return build()
        grad = torch.is_grad_enabled()
        for tensor, name in zip(free, names, strict=True):
            if tensor is not slots[name] or type(tensor) is not nn.Parameter:
                return build()
            if tensor.is_inference() or (grad and tensor.requires_grad):
                return build()
        return (self.cache if cache is None else cache).get(build, slots, names, key)

    def train(self, mode: bool = True) -> Self:
        """Switch the mode; a change of mode clears the cache."""
        if mode != self.training:
            self.forget()
        return super().train(mode)

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        self.forget()
        return super()._apply(fn, recurse)

    def forget(self) -> None:
        """Clear the cache."""
        self.cache.clear()


@cache
def _empty(dtype: torch.dtype, device: torch.device) -> Tensor:
    with torch.inference_mode(False):  # it serves later passes too
        return torch.empty(0, dtype=dtype, device=device)


# Weights that somebody may hold on to while others are built: those of forward passes, and those that were asked for.
_BUILT, _READ = 4, 64


class WriteGuard:
    """Notices writes into a weight that was returned, which have no effect because the next one is built anew.

    Torch counts writes to a tensor and its views; a tensor without memory shares the counter, and keeps nothing alive.
    It does not count writes through ``.data`` or NumPy, nor in inference mode. So the weight that was asked for last
    is kept, with a checksum, until the next use, if that is on the CPU: ``layer.weight.data.normal_()`` is noticed,
    and only such writes to one that was asked for earlier are not.
    """

    _last: tuple[Tensor, tuple[Any, ...]] | None

    def __init__(self, written: bool = False) -> None:
        self.forget()
        self._written = written
        self.inside = False  # of a forward pass, which asks for a weight and writes nothing into it

    def watch(self, weight: Tensor) -> None:
        """Notice writes to ``weight`` from now on."""
        if type(weight) is not Tensor or is_traced() or torch._C._are_functorch_transforms_active():
            return
        if not weight.is_inference():
            counter = torch.Tensor._make_subclass(Tensor, weight)
            counter.data = _empty(weight.dtype, weight.device)
            (self._built if self.inside else self._read).append((counter, weight._version))
        if not self.inside and host_can_look(weight):
            self._last = weight, _fingerprint(weight)

    def forget(self) -> None:
        """Forget the weights that were returned so far."""
        self._written = False
        self._built: deque[tuple[Tensor, int]] = deque(maxlen=_BUILT)
        self._read: deque[tuple[Tensor, int]] = deque(maxlen=_READ)
        self._last = None

    def found(self) -> bool:
        """Whether somebody has written into a weight since the last call of ``forget``."""
        if self._last is not None:
            (weight, seen), self._last = self._last, None
            self._written = self._written or _fingerprint(weight) != seen
        for counters in (self._built, self._read):
            self._written = self._written or any(counter._version != seen for counter, seen in counters)
        return self._written

    def __reduce__(self) -> Any:
        return WriteGuard, (self.found(),)  # a copy is built from the same free tensors, and must not lose the message


def _fingerprint(weight: Tensor) -> tuple[Any, ...]:
    numbers: Any = weight.detach().contiguous().view(torch.uint8).numpy()
    return weight.shape, weight.dtype, weight.device, crc32(numbers)
