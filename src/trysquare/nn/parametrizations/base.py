"""A weight as a function of free tensors: the contract of a method, and what all methods and their layers share.

From top to bottom: how a built weight is kept in eval mode (``Caching``), the function itself (``Parametrization``),
how its free tensors stay well conditioned, and the layer that has such a weight (``ParametrizedWeight``).
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Container, Hashable, Iterable, Mapping, Sequence
from itertools import count
from math import prod
from operator import itemgetter
from typing import Any, Protocol, Self, TypedDict, cast
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from trysquare import torch_internals
from trysquare.nn.geometry import positive
from trysquare.nn.linalg.checks import require_dense
from trysquare.nn.linalg.operator import checked_weight
from trysquare.nn.linalg.precision import (
    as_autocast,
    at_least_float32,
    full_precision,
    protected,
)
from trysquare.nn.parametrizations.assignment import free_tensors_for
from trysquare.nn.parametrizations.projection import nearest_free_tensors
from trysquare.nn.parametrizations.writes import WriteGuard
from trysquare.nn.riemannian import RiemannianAdam, forget

Slots = Mapping[str, nn.Parameter | None]
"""Where a module holds its parameters: ``module._parameters``."""


def parameters_of(slots: Slots, names: Iterable[str]) -> list[nn.Parameter]:
    """Return the parameters of these names."""
    return [parameter for name in names if (parameter := slots[name]) is not None]


# -- caching: in eval mode a built weight is kept until something that it depends on changes


class Sources:
    """The tensors of these names in ``slots``, as they were when something was built from them.

    They are remembered as slots of the module that holds them, so that a tensor that was replaced, moved or written to
    is seen. Holding on to their memory keeps it from being reused, so that equal addresses mean the same memory.
    """

    def __init__(self, slots: Slots, names: Collection[str]) -> None:
        self.step = _step
        self.tensors = parameters_of(slots, names)
        self._slots = [
            (slots, name, source, source._version, source.data_ptr())
            for name, source in zip(names, self.tensors, strict=True)
        ]
        self._held = [source.untyped_storage() for source in self.tensors]

    def unchanged(self) -> bool:
        """Whether no tensor was replaced, moved or written to, by an optimizer or in place."""
        return all(
            slots.get(name) is source
            and source._version == version
            and source.data_ptr() == address
            and _stepped.get(id(source), 0) <= self.step
            for slots, name, source, version, address in self._slots
        )


class WeightCache:
    """One tensor, with what it was built from, and for which ``key``. Copies start empty, and pickled ones too."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Forget the weight."""
        self.weight: Tensor | None = None
        self._key: Hashable = None
        self._version = 0
        self._sources = Sources({}, ())

    def get(self, build: Callable[[], Tensor], slots: Slots, names: Collection[str], key: Hashable = None) -> Tensor:
        """Return the weight for ``key``; if out of date, build it from the tensors of these names in ``slots``."""
        if not self.fresh(key):
            # Not an inference tensor even in inference mode: the next pass may want gradients of its input.
            with torch.inference_mode(False), torch.no_grad():
                self.store(build(), slots, names, key)
        assert self.weight is not None
        return self.weight

    def store(self, weight: Tensor, slots: Slots, names: Collection[str], key: Hashable = None) -> None:
        """Keep a weight that was built from the tensors of these names in ``slots``."""
        self.weight, self._version, self._key = weight, weight._version, key
        self._sources = Sources(slots, names)

    def fresh(self, key: Hashable = None) -> bool:
        """Whether there is a weight for ``key``, not written to, and what it was built from is as it was."""
        if self.weight is None or self.weight._version != self._version or key != self._key:
            return False
        return self._sources.step >= _sharded_step and self._sources.unchanged()

    def __reduce__(self) -> tuple[type[WeightCache], tuple[()]]:
        return WeightCache, ()


class OpenBlock(Protocol):
    """What hands out weights between the entry and the exit of ``with ts.built(model)``; see ``nn.building``."""

    def weight(
        self, build: Callable[[], Tensor], cache: WeightCache, slots: Slots, names: Sequence[str], key: Hashable
    ) -> Tensor:
        """Return ``build()``, built once in the block."""


class Caching(nn.Module):
    """A module that builds a tensor from free ones, and keeps it while nothing changes and nobody wants a gradient.

    That is so in eval mode without gradients, and in any mode where all of the free tensors are frozen.
    """

    def __init__(self) -> None:
        super().__init__()
        self.cache = WeightCache()
        self.block: OpenBlock | None = None

    def cached(
        self,
        build: Callable[[], Tensor],
        free: Iterable[Tensor],
        slots: Slots,
        names: Iterable[str],
        key: Hashable = None,
        cache: WeightCache | None = None,
    ) -> Tensor:
        """Return ``build()``, from the open block or the cache if the free tensors are the parameters in ``slots``.

        Tensors that somebody else put there for one call are not kept.
        """
        # ``torch.jit.trace`` takes what is kept from pass to pass for a constant.
        if torch.compiler.is_compiling() or torch_internals.jit_trace() is not None:
            return build()
        names, wanted = tuple(names), False
        for tensor, name in zip(free, names, strict=True):
            if tensor is not slots[name] or type(tensor) is not nn.Parameter or tensor.is_inference():
                return build()
            wanted = wanted or tensor.requires_grad
        kept = self.cache if cache is None else cache
        if (block := self.block) is not None:  # another thread may close it
            return block.weight(build, kept, slots, names, key)
        if wanted and (self.training or torch.is_grad_enabled()):
            return build()
        return kept.get(build, slots, names, key)

    def train(self, mode: bool = True) -> Self:
        """Switch the mode; a change of mode clears the cache."""
        if mode != self.training:
            self.forget()
        return super().train(mode)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        self.forget()
        return super()._apply(fn, recurse)

    def _load_from_state_dict(self, *args: object) -> None:
        self.forget()  # sharded tensors are not those that the weight was built from
        super()._load_from_state_dict(*args)

    def forget(self) -> None:
        """Clear the cache."""
        self.cache.clear()

    def __getstate__(self) -> dict[str, object]:
        return self.__dict__ | {"block": None}  # a copy, or a pickled one, is not in the block


# -- the function


class Parametrization(Caching, ABC):
    """A weight as a function of free tensors, which an optimizer trains instead of it.

    Subclasses say which free tensors there are (``free_shapes``), how they start (``draw``), which weight they give
    (``build``, of the shape ``weight_shape``), and, if there is a closed form, which ones give a wanted weight
    (``solve``). They compute in float32 or float64. This class does the rest: building in the right precision, caching,
    reconditioning and assignment.

    Free tensors stay in float32 when the layer is cast to a shorter dtype: the weight is built from
    them in float32 and rounded once. In eval mode a weight that needs no gradient is built once and
    kept until a free tensor is written to, moved or replaced, an optimizer steps, or the mode
    changes. The exception are writes that torch's version counter does not see: through ``.data``,
    outside of an optimizer, to a free tensor, and from another process.

    Writes into the weight that was returned raise at the next use. Not noticed are writes through
    ``.data`` to a weight on an accelerator, or to one after which the weight was read again, and a
    compiled graph notices nothing.
    """

    like: Tensor

    def __init__(self, dtype: torch.dtype | None = None, device: torch.device | str | None = None) -> None:
        super().__init__()
        self.register_buffer("like", torch.empty(0, dtype=dtype, device=device), persistent=False)
        self.note = ""  # what the layer's ``repr`` says besides the method and its options
        # The free tensors, as parameters of the module that it is attached to.
        self.slots: dict[str, nn.Parameter] = {}
        self._enlist()
        self.writes = WriteGuard()

    @property
    def is_orthogonal(self) -> bool:
        """Whether this weight is orthogonal, up to ``truncation_error`` and rounding."""
        return False

    @property
    def truncation_error(self) -> float:
        """Certified distance of the singular values from 1 that the method itself leaves; 0 if it is exact."""
        return 0.0

    @property
    def orthonormal_count(self) -> int:
        """How many free tensors, from the first on, are orthonormal matrices that ``RiemannianAdam`` keeps so."""
        return 0

    @property
    @abstractmethod
    def weight_shape(self) -> tuple[int, ...]:
        """Shape of the weight."""

    @property
    def free_shapes(self) -> tuple[tuple[int, ...], ...]:
        """Shapes of the free tensors; by default there is one, of the shape of the weight."""
        return (self.weight_shape,)

    @abstractmethod
    def draw(self) -> list[Tensor]:
        """Return fresh free tensors, on the CPU in float64."""

    @abstractmethod
    def build(self, *free: Tensor) -> Tensor:
        """Return the weight, in the dtype of the free tensors."""

    @property
    def alike(self) -> Hashable:
        """What parametrizations have in common whose weights ``build_together`` makes in one batch, or ``None``."""
        return None

    def build_together(self, *free: Tensor) -> Tensor:
        """Return the weights of several parametrizations that are ``alike``, built in one batch.

        Args:
            free: each of the free tensors, stacked: ``(count, *shape)``.

        Returns:
            ``(count, *weight_shape)``.
        """
        raise NotImplementedError

    def reconditioned(self, *free: Tensor) -> Sequence[Tensor]:
        """Return well conditioned free tensors that give the same weight; ``free`` itself if it is well conditioned."""
        return free

    @property
    def solves(self) -> bool:
        """Whether ``solve`` finds free tensors for every weight that has some, so that no search is needed."""
        return False

    def refuse_unreachable(self, weight: Tensor) -> None:
        """Refuse what can be told at once to be the weight of no free tensors.

        Raises:
            ValueError: if so, with the numbers that tell.
        """
        return

    def solve(self, weight: Tensor) -> list[Tensor]:
        """Return free tensors that give ``weight``, or whose weight is near, from which to search for better ones."""
        return self.guess(weight)

    def guess(self, weight: Tensor) -> list[Tensor]:
        """Return random free tensors from which to search for those that give ``weight``."""
        return self.draw()

    def forward(self, *free: Tensor) -> Tensor:
        """Return the weight in the layer's dtype, from the cache where that is right.

        Raises:
            RuntimeError: if somebody has written into the one that was returned before.
        """
        if torch.compiler.is_compiling():
            wanted = self.training or torch.is_grad_enabled()
            if not self.slots or torch.compiler.is_exporting() or (wanted and any(t.requires_grad for t in free)):
                return self.built(free)
            return kept_weight(list(free), self.number, list(self.weight_shape), self.dtype_from(free))
        if torch_internals.jit_trace() is not None:  # which would record the looks at writes
            return self.built(free)
        self.refuse_writes()
        free = tuple(gathered(tensor) for tensor in free)
        weight = self._from_cache(lambda: self.built(free), free, self.cache)
        self.writes.watch(weight)
        return weight

    def refuse_writes(self) -> None:
        """Refuse to go on, once, if somebody has written into a weight that was returned.

        Raises:
            RuntimeError: if somebody has.
        """
        if self.writes.found():
            self.writes.forget()
            self.forget()  # the weight in the cache may be what was written to
            raise RuntimeError(
                "layer.weight was written to in place (by nn.init, copy_, .data or the like), which has no effect: it "
                "is built from the layer's free tensors at every use. Assign it (layer.weight = tensor, an orthogonal "
                "one), draw new ones (layer.reset_parameters()), or write to layer.free_tensors"
            )

    # -- building

    def built(self, free: Sequence[Tensor]) -> Tensor:
        """Return the weight in the layer's dtype, built in full precision."""
        exact = [tensor.to(at_least_float32(tensor.dtype)) for tensor in free]
        return plainly_laid_out(protected(self.build, exact).to(self.dtype_from(free)))

    def dtype_from(self, free: Sequence[Tensor]) -> torch.dtype:
        """Return the dtype of the weight: the layer's, or that in which ``fully_shard`` has a pass computed.

        That is the only one who gives free tensors in less than float32.
        """
        given = free[0].dtype
        return self.like.dtype if given.itemsize >= 4 else given

    # -- caching

    def _from_cache(self, build: Callable[[], Tensor], free: Sequence[Tensor], cache: WeightCache) -> Tensor:
        # As a part of a block, a parametrization is not attached and owns no parameters.
        return self.cached(build, free, self.slots, self.slots, cache=cache) if self.slots else build()

    # -- reconditioning

    @torch.no_grad()
    def recondition(self, trained: Container[int]) -> None:
        """Replace free tensors that degenerate by others of the same weight, if they are among the ``trained``.

        Old and new ones differ by a factor that the weight does not depend on, and so does every mean of them: averages
        that an optimizer takes of positions keep their meaning. Momentum is that of the old ones for a few steps. Each
        tensor has a factor of its own, so that others may be frozen or belong to another optimizer.
        """
        free = list(self.slots.values())
        if not any(id(tensor) in trained and tensor.requires_grad for tensor in free):
            return
        whole = [gathered(tensor) for tensor in free]
        with full_precision(whole[0]):
            for tensor, present, better in zip(free, whole, self.reconditioned(*whole), strict=True):
                if better is not present and id(tensor) in trained and tensor.requires_grad:
                    tensor.copy_(spread_like(better, tensor))

    def __setstate__(self, state: dict[str, object]) -> None:
        super().__setstate__(state)
        self._enlist()  # a deep copy, or a pickled one

    def _enlist(self) -> None:
        self.number = next(_numbers)
        _alive[self.number] = self

    # -- attaching, initial values and assignment

    def attach(self, module: nn.Module, name: str) -> None:
        """Make ``module.name`` this function of freshly drawn free tensors."""
        parametrize.register_parametrization(module, name, self, unsafe=True)
        held = cast("nn.ModuleDict", module.parametrizations)
        self.slots = cast("dict[str, nn.Parameter]", held[name]._parameters)
        self.redraw(list(self.slots.values()))

    @torch.no_grad()
    def redraw(self, free: Sequence[Tensor]) -> None:
        """Write fresh values into the free tensors."""
        self.writes.forget()
        for tensor, fresh in zip(free, self.draw(), strict=True):
            tensor.copy_(fresh)

    def project_(self, weight: Tensor, starts: int = 1, steps: int = 100) -> float:
        """Set the free tensors to those whose weight is nearest to ``weight``; see ``ParametrizedWeight.project_``."""
        free = [require_dense("the free tensor", tensor, meta=False) for tensor in self.slots.values()]
        with torch.inference_mode(False), torch.no_grad():
            nearest, distance = nearest_free_tensors(weight, self, [tensor.detach() for tensor in free], starts, steps)
            self.writes.forget()
            for tensor, new in zip(free, nearest, strict=True):
                tensor.copy_(new)
        return distance

    def right_inverse(self, weight: Tensor) -> Sequence[Tensor]:
        """Return free tensors that give ``weight``; assigning to the layer's weight calls this.

        Torch also calls it to learn the shapes of the free tensors while it registers the parametrization; ``attach``
        writes the initial values afterwards.

        Raises:
            ValueError: if ``weight`` has the wrong shape, or no free tensors were found that give it.
        """
        if not self.slots:
            dtype = at_least_float32(weight.dtype)
            return [weight.new_empty(shape, dtype=dtype) for shape in self.free_shapes]
        with torch.inference_mode(False), torch.no_grad():
            return free_tensors_for(weight, self, [tensor.detach() for tensor in self.slots.values()])


def plainly_laid_out(weight: Tensor) -> Tensor:
    """Return ``weight`` with the strides of a new tensor: others of axes of size 1 torch takes for channels last."""
    step = 1
    for size, stride in zip(reversed(weight.shape), reversed(weight.stride()), strict=True):
        if stride != step:
            return weight.reshape(-1).view(weight.shape)
        step *= size
    return weight


@torch.library.custom_op("trysquare::kept_weight", mutates_args=())
def kept_weight(free: list[Tensor], number: int, shape: list[int], dtype: torch.dtype) -> Tensor:
    """Return a copy of the weight that a parametrization keeps, as one call in a compiled graph.

    Without it, compiled evaluations would build each weight in every pass. It is a copy because a compiler may write
    into what a call has returned.
    """
    part = _alive[number]
    with torch.no_grad():
        return part(*part.slots.values()).clone()


@kept_weight.register_fake
def _(free: list[Tensor], number: int, shape: list[int], dtype: torch.dtype) -> Tensor:
    return free[0].new_empty(shape, dtype=dtype)


# -- reconditioning: degenerate free tensors are replaced by others that give the same weight
#
# Torch calls a hook after every step of every optimizer in the process. That happens at the same time on all ranks of a
# distributed run, and never while a graph is alive, so free tensors are looked at then, once in so many steps.

# Steps of an optimizer between two looks at the condition of the free tensors.
RECONDITION_EVERY = 64

_alive: WeakValueDictionary[int, Parametrization] = WeakValueDictionary()
_numbers = count()
_steps_of: WeakKeyDictionary[Optimizer, int] = WeakKeyDictionary()
# Steps of all optimizers of the process, and the last of them that each tensor was in, by ``id``: some optimizers
# change parameters without raising their version counters (fused ones, and those that write through ``.data``). An
# entry of a tensor that is gone does no harm to the next one of that ``id``, whose weight is built later.
_step = 0
_stepped: dict[int, int] = {}
# The last step that changed sharded tensors: a pass is given whole ones in their place, of which nothing is known.
_sharded_step = 0


def _after_step(optimizer: Optimizer, *_: object) -> None:
    global _step, _sharded_step
    _step += 1
    tensors = [tensor for group in optimizer.param_groups for tensor in group["params"]]
    trained = {id(tensor): place for place, tensor in enumerate(tensors)}
    _stepped.update(dict.fromkeys(trained, _step))
    if not isinstance(optimizer, RiemannianAdam):  # some write without a trace
        for tensor in tensors:
            forget(tensor)
    if any(hasattr(tensor, "full_tensor") for tensor in tensors):
        _sharded_step = _step
    steps = _steps_of[optimizer] = _steps_of.get(optimizer, 0) + 1
    if steps % RECONDITION_EVERY == 0:
        # In the optimizer's order, which is that of all ranks: they gather a sharded tensor together.
        parts = [part for part in list(_alive.values()) if part.slots]
        places = [(min(trained.get(id(t), len(tensors)) for t in part.slots.values()), part) for part in parts]
        for place, part in sorted(places, key=itemgetter(0)):
            if place < len(tensors):
                part.recondition(trained)


register_optimizer_step_post_hook(_after_step)


def gathered(tensor: Tensor) -> Tensor:
    """Return the whole of a tensor that ``fully_shard`` has spread over processes; any other one as it is."""
    whole: Callable[[], Tensor] | None = getattr(tensor, "full_tensor", None)
    return tensor if whole is None else whole()


def spread_like(tensor: Tensor, like: Any) -> Tensor:
    """Return ``tensor``, which is the same in all processes, spread over them as ``like`` is."""
    if not hasattr(like, "full_tensor"):
        return tensor
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(tensor, like.device_mesh, like.placements, src_data_rank=None)


def steps_taken(optimizer: Optimizer) -> int:
    """Return how many steps of this optimizer were seen."""
    return _steps_of.get(optimizer, 0)


def continue_from(optimizer: Optimizer, steps: int) -> None:
    """Count on from ``steps``, so that a resumed run reconditions when an uninterrupted one would have."""
    _steps_of[optimizer] = steps


# -- the layer that has such a weight


class ParametrizedWeight(nn.Module):
    """Mixin for torch layers whose ``weight`` is a function of free tensors.

    The free tensors are ``layer.parametrizations.weight.original0`` and so on, as everywhere in
    ``torch.nn.utils.parametrize``.
    """

    bias: Any  # torch's own layers, which come after this class, declare it in different ways
    weight: Tensor
    parametrizations: nn.ModuleDict
    _cache: WeightCache
    _writes: WriteGuard

    def _parametrize_weight(self, parametrization: Parametrization) -> None:
        parametrization.attach(self, "weight")
        self._cache, self._writes = parametrization.cache, parametrization.writes

    def _lend_weight(self, twin: ParametrizedWeight) -> None:
        """Make the weight of another layer, the adjoint of this one, that of this one: same free tensors and cache."""
        twin._cache, twin._writes = self._cache, self._writes
        twin.parametrizations["weight"] = self.parametrizations["weight"]
        twin.train(self.training)

    def _current_weight(self) -> Tensor:
        """``self.weight`` for a pass, without torch's detour over the parametrization where a block or cache has it."""
        if torch.compiler.is_compiling() or torch_internals.jit_trace() is not None:
            return self.weight
        part = self._made_by()
        if part is not None and not torch.is_grad_enabled() and not self._writes.found() and self._cache.fresh():
            assert self._cache.weight is not None
            return self._cache.weight
        self._writes.inside = True
        try:
            return self.weight if part is None or part.block is None else part(*part.slots.values())
        finally:
            self._writes.inside = False

    def _made_by(self) -> Parametrization | None:
        """Return what makes the weight, unless somebody has taken it off or added another parametrization after it."""
        held = self._modules.get("parametrizations")
        chain = None if held is None else held._modules.get("weight")
        if chain is None or len(chain._modules) != 1:
            return None
        part = chain._modules["0"]
        return part if isinstance(part, Parametrization) and part.cache is self._cache else None

    def used_weight(self) -> Tensor:
        """Return the weight that a forward pass uses, with the casts of autocast."""
        return as_autocast(self.weight)

    @torch.no_grad()
    def exact_weight(self, weight: Tensor | None = None) -> Tensor:
        """Return ``used_weight()``, or another one that stands for it, in float64 on the CPU.

        Raises:
            ValueError: if it holds no numbers, or some that are not finite.
        """
        return checked_weight(self.used_weight() if weight is None else weight, type(self).__name__)

    @property
    def parametrization(self) -> Parametrization:
        """The function that makes the weight."""
        first = self._parametrizations_of_weight[0]
        assert isinstance(first, Parametrization)
        return first

    @property
    def _parametrizations_of_weight(self) -> parametrize.ParametrizationList:
        found = self.parametrizations["weight"]
        assert isinstance(found, parametrize.ParametrizationList)
        return found

    @property
    def free_tensors(self) -> list[Tensor]:
        """The tensors that an optimizer trains instead of the weight."""
        return list(self._parametrizations_of_weight.parameters(recurse=False))

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """Register a parameter as torch does, or assign it as any tensor where the weight is parametrized.

        Raises:
            NotImplementedError: for a plan of tensor parallelism, which takes free tensors for parts of the weight.
        """
        if name.startswith("parametrizations."):
            self._refuse_plan()
        if param is not None and parametrize.is_parametrized(self, name):
            setattr(self, name, param.detach())
        else:
            super().register_parameter(name, param)

    def _refuse_plan(self) -> None:
        raise NotImplementedError(
            f"{self._get_name()} cannot be split by a plan of tensor parallelism: every row of its weight depends "
            "on all of its free tensors; use fully_shard, or ts.built(model, group), which share its construction"
        )

    def _plan_applied(self) -> bool:
        """Refuse a plan before it splits the weight; others who ask are told that there is none."""
        if sys._getframe(1).f_code.co_name == torch_internals.PLANNER:
            self._refuse_plan()
        return False

    def project_(self, weight: Tensor, starts: int = 1, steps: int = 100) -> float:
        """Set the weight to the nearest one that the layer can have, in the Frobenius norm.

        Of matrices that is exactly the polar factor (``cayley`` and ``exponential``, which make rotations only, come
        near to the nearest of these); of kernels, the best that descent on the free tensors finds, which
        starts from the projectors that lose least (methods without such a start from random tensors). The nearest
        orthogonal weight does not depend on the scale of ``weight``.

        Args:
            weight: any tensor or parameter of the shape of the weight, such as that of a pretrained layer of torch.
            starts: descents, of which the nearest counts; all but the first from random tensors.
            steps: steps of L-BFGS in each, at most.

        Returns:
            The distance of the layer's weight from ``weight``, relative to the norm of ``weight``.

        Raises:
            ValueError: if ``weight`` has another shape, values that are not finite, or none but zeros.

        >>> layer, plain = OrthoLinear(6, 4), nn.Linear(6, 4)
        >>> distance = layer.project_(plain.weight)
        >>> left, _, right = torch.linalg.svd(plain.weight.detach(), full_matrices=False)
        >>> bool(torch.allclose(layer.weight, left @ right, atol=1e-5))
        True
        """
        return self.parametrization.project_(weight, positive("starts", starts), positive("steps", steps))

    def reset_parameters(self) -> None:
        """Draw new free tensors and a new bias (uniform, as torch does)."""
        made = parametrize.is_parametrized(self, "weight")
        self._reset(self.parametrization.weight_shape if made else self.weight.shape)

    def _reset(self, shape: Sequence[int]) -> None:
        """Draw new free tensors, and the bias of a layer whose kernel has this shape."""
        if parametrize.is_parametrized(self, "weight"):
            self.parametrization.redraw(self.free_tensors)
        if self.bias is not None:
            bound = prod(shape[1:]) ** -0.5
            nn.init.uniform_(self.bias, -bound, bound)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Move and cast, but keep free tensors in float32 or better: the weight is rounded, not its sources."""
        if not parametrize.is_parametrized(self, "weight"):
            return super()._apply(fn, recurse)
        return super()._apply(keeping_precision(fn, self.free_tensors), recurse)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle by the class that torch made the parametrized one from, which has no name to be found by."""
        if not parametrize.is_parametrized(self):
            return super().__reduce_ex__(protocol)
        return _parametrized, (type(self).__bases__[0], tuple(self.parametrizations)), self.__dict__

    def as_torch(self) -> nn.Module:
        """Return the same function in plain ``torch.nn`` layers, with the present weight."""
        raise NotImplementedError

    def _get_name(self) -> str:
        return next(c for c in type(self).__mro__ if not c.__name__.startswith("Parametrized")).__name__

    def __repr__(self) -> str:
        """Return geometry and method in one line."""
        return f"{self._get_name()}({self.extra_repr()})"


setattr(ParametrizedWeight, torch_internals.PLAN_APPLIED, property(ParametrizedWeight._plan_applied))


def _parametrized(cls: type[nn.Module], names: Sequence[str]) -> nn.Module:
    """Return a layer without its state, of the class that torch makes for one with these parametrized tensors."""
    layer = cls.__new__(cls)
    torch_internals.make_parametrized(layer)
    for name in names:
        torch_internals.make_property(layer, name)
    return layer


def keeping_precision(fn: Callable[[Tensor], Tensor], tensors: Iterable[Tensor]) -> Callable[[Tensor], Tensor]:
    """``fn``, except that it does not cast ``tensors`` and their gradients below float32."""
    keep = {id(t) for tensor in tensors for t in (tensor, tensor.grad) if t is not None}

    def cast(tensor: Tensor) -> Tensor:
        if id(tensor) not in keep:
            return fn(tensor)
        # Shown to `fn` as matrices, so that a memory format for images leaves them alone.
        moved = fn(tensor.view(-1, *tensor.shape[-2:]) if tensor.ndim > 3 else tensor).view(tensor.shape)
        return moved if moved.dtype == at_least_float32(moved.dtype) else tensor.to(moved.device)

    return cast


def copy_weights(plain: nn.Module, weight: Tensor, bias: Tensor | None, training: bool) -> nn.Module:
    """Fill a plain layer made on the meta device with detached copies of the tensors."""
    plain.weight = nn.Parameter(weight.detach().clone(memory_format=torch.contiguous_format), weight.requires_grad)
    if bias is not None:
        plain.bias = nn.Parameter(bias.detach().clone(), bias.requires_grad)
    return plain.train(training)


def check_dtype(dtype: object) -> None:
    """Refuse what a weight cannot have.

    Raises:
        ValueError: if ``dtype`` is given and is not a real floating point type.
    """
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise ValueError(f"dtype={dtype} must be a real floating point type")


Device = torch.device | str | int | None
"""What torch takes for a device."""


class Factory(TypedDict):
    """Keyword arguments of everything that makes tensors."""

    device: torch.device
    dtype: torch.dtype


def factory_of(weight: Tensor) -> Factory:
    """``device`` and ``dtype`` of a tensor, as keyword arguments."""
    return {"device": weight.device, "dtype": weight.dtype}


def factory_for(device: Device, dtype: torch.dtype | None) -> Factory:
    """``device`` and ``dtype`` as keyword arguments, with torch's defaults filled in.

    Raises:
        ValueError: if ``dtype`` is given and is not a real floating point type.
    """
    check_dtype(dtype)
    return factory_of(torch.empty(0, device=device, dtype=dtype))
