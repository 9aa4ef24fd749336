"""All weights of a model built as one job: ``with ts.built(model)``.

Without a block every use of a weight builds it anew, and every backward pass crosses its construction. Inside of one

* weights are built once: those of layers that are alike in one batch, when the block is entered, and all others (of
  Fourier layers, whose weight depends on the image, and of methods that do not batch) at their first use;
* the graph of a forward pass ends at the built weights, where the gradients of all backward passes gather;
* leaving the block takes the sums from there to the free tensors, once.

``with ts.built(model, group)`` shares this job between processes: each builds its share of the weights and hands it to
the others, and takes the mean of their gradients back to the free tensors.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from threading import RLock
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge, saved_tensors_hooks
from torch.nn.parallel import DistributedDataParallel

from trysquare import torch_internals
from trysquare.nn.linalg.precision import (
    apply_function,
    at_least_float32,
    differentiated_once,
    exactly,
    full_precision,
)
from trysquare.nn.parametrizations.base import (
    Caching,
    Parametrization,
    Slots,
    Sources,
    WeightCache,
    parameters_of,
    plainly_laid_out,
)
from trysquare.nn.sharing import Elsewhere, Ranks, average_gradients, managed_by_fsdp, refuse_other_owners, shares

__all__ = ["built"]

# On a processor large layers keep both cores busy one by one, and a batch of them only moves memory.
_LARGEST_IN_A_BATCH = 128


@contextmanager
def built(model: nn.Module, group: Any = None, *, owner_only: bool = False) -> Iterator[None]:
    """Build the weights of all layers of a model once, for all passes in this context.

    Weights and gradients are what they are without it, to rounding. Leaving the context adds the gradients to those of
    the free tensors, so clip and step after it, and call ``zero_grad`` before it. If an exception leaves it, the
    gradients that gathered are dropped. A context for a model within another one for it does nothing of its own.

    A loss may be differentiated after the context too; its gradients then go to the free tensors directly, and build
    the weight again. So do gradients of free tensors that ``torch.autograd.grad`` asks for, and those with
    ``create_graph=True``, unless torch.distributed is initialised or the free tensors have hooks, which a pass without
    a gradient would call: then they raise, and ``backward(inputs=...)`` finds no gradients of free tensors. A pass that
    runs through ``torch.utils.checkpoint`` without reentry must be differentiated on the side of the exit where it ran.

    Compiled parts of a model build their weights in their own graph, as they do without a context.

    With a ``group`` this is a whole step of data-parallel training, without ``DistributedDataParallel``. At its first
    context for a model the group starts from the parameters and buffers of its rank 0. Then each context shares the
    construction: every rank builds some of the layers (methods that are not built at once are built by each), and all
    have the same weights, bit for bit. At the exit all gradients of the model are averaged, and every rank has those of
    all parameters; ``None`` where no rank has one. All ranks must enter and leave together. Without gradients
    (``torch.no_grad()``) and for frozen layers nothing is shared. ``DistributedDataParallel`` around the model does no
    harm (``no_sync`` included, without ``find_unused_parameters`` and ``static_graph``), but sends gradients once more.

    Args:
        model: any module that holds layers of this library.
        group: processes that share the construction, such as ``torch.distributed.group.WORLD``, which is ``None`` where
            ``torch.distributed`` is not initialised; ``None`` is this process alone.
        owner_only: leave gradients of free tensors at the rank of the group that built their weight, so that there is
            no optimizer state for them elsewhere. Call ``ts.synchronize`` before the model is evaluated or saved, and
            clip by ``ts.gradient_norm``.

    Raises:
        TypeError: if ``model`` is no module, or ``group`` no process group.
        ValueError: if the processes have different models, or this model's gradients are exchanged by something that
            cannot work within the context.
        RuntimeError: if a free tensor is changed in place, moved or replaced within the context, at its next use or at
            the exit (writes through ``.data``, which torch does not count, are not noticed); if a weight is written to;
            or if processes cannot share what happens here, with the reason.

    >>> model = nn.Sequential(OrthoConv2d(3, 8, 3), ts.MaxMin(), nn.Flatten(), OrthoLinear(8 * 64, 10))
    >>> images, labels = torch.randn(8, 3, 8, 8), torch.arange(8)
    >>> with ts.built(model):
    ...     for part, classes in zip(images.chunk(4), labels.chunk(4)):
    ...         nn.functional.cross_entropy(model(part), classes).backward()
    >>> model[0].free_tensors[0].grad is not None
    True
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, not {type(model).__name__}")
    ranks = None if group is None else Ranks(group)
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        _check_wrappers(model, owner_only)
    block = _Block(model, ranks, owner_only)
    try:
        yield
        block.close()
        block.deliver()
    finally:
        block.close()
        block.forget()


def _check_wrappers(model: nn.Module, owner_only: bool) -> None:
    """Refuse what ``DistributedDataParallel`` cannot do for gradients that arrive when the block is left."""
    for wrapper in model.modules():
        if isinstance(wrapper, DistributedDataParallel):
            if owner_only:
                raise ValueError(
                    "DistributedDataParallel wants gradients on all ranks: give its .module, or not owner_only"
                )
            for option in ("find_unused_parameters", "static_graph"):
                if getattr(wrapper, option):
                    raise ValueError(
                        f"DistributedDataParallel({option}=True) looks for free tensors in the graph of a pass, where "
                        "they are not, because gradients reach them when the block is left: wrap without it, or use "
                        "ts.built(model, group) instead of it"
                    )


class _Block:
    """The weights that one ``with ts.built(model)`` hands out.

    Args:
        model: the module that holds the layers.
        ranks: who share the construction; ``None`` for this process alone.
        owner_only: whether gradients of free tensors stay with the rank that built their weight.
    """

    def __init__(self, model: nn.Module, ranks: Ranks | None, owner_only: bool) -> None:
        self.lock = RLock()
        self.open = True
        self.anchor = torch.zeros((), requires_grad=True)  # makes autograd record what reaches no free tensor
        self.weights: dict[tuple[WeightCache, Hashable], _Weight] = {}
        # Where backward through the construction of what was built at once begins, and the weights that it consists of.
        self.batches: list[tuple[GradientEdge, list[_Weight]]] = []
        self.model, self.ranks, self.owner_only = model, ranks, owner_only
        self.differentiable = torch.is_grad_enabled()
        self.distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
        self.stand_ins: dict[Tensor, Tensor] = {}  # of free tensors, in the graphs of what this rank builds for all
        managed = managed_by_fsdp(model)
        if managed and ranks is not None:
            raise ValueError("fully_shard exchanges gradients by itself: use it without ts.built(model, group)")
        if ranks is not None:
            open_ones = (part.block for part in model.modules() if isinstance(part, Caching))
            if any(isinstance(block, _Block) and block.ranks is None for block in open_ones):
                raise RuntimeError("ts.built(model) without a group is open for parts of this model: leave it first")
            ranks.meet(model)
        self.parts = [
            part
            for part in model.modules()
            if isinstance(part, Caching) and part not in managed and isinstance(part.block, Elsewhere | None)
        ]
        groups = batches([part for part in self.parts if isinstance(part, Parametrization)])
        self.owners: dict[Parametrization, int] = {}
        if ranks is not None:
            kinds = [(part, number) for number, group in enumerate(groups) for part in group]
            self.owners = shares([pair for pair in kinds if _wanted(list(pair[0].slots.values()))], ranks.size)
        refuse_other_owners(self.parts, self.owners, self.owner_only)
        # If its gradient is differentiated in turn, each weight is built again by itself.
        with _as_for_training(self.differentiable), differentiated_once():
            for group in groups:
                if own := [part for part in group if ranks is None or self.owners.get(part, ranks.rank) == ranks.rank]:
                    self._build(own)
        if self.owners:
            self._exchange()
        for each in self.parts:
            if isinstance(each.block, Elsewhere):
                each.block.end(each)
            each.block = self

    def _build(self, alike: Sequence[Parametrization]) -> None:
        """Build weights of which none has been built yet, as one batch."""
        frees: list[list[Any]] = [list(part.slots.values()) for part in alike]
        wanted, shared = _wanted(frees[0]), alike[0] in self.owners
        # Hooks of free tensors are for the mean that arrives in the end, not for what this rank finds on the way.
        sources = [[self._stand_in(tensor) for tensor in free] for free in frees] if shared else frees
        made = _built_together(alike, sources)
        rounded = made.detach().to(alike[0].dtype_from(frees[0]))
        exact = rounded.unbind() if len(alike) > 1 else [rounded]
        if not wanted:
            for part, weight in zip(alike, exact, strict=True):
                part.cache.store(weight, part.slots, part.slots)
            return
        weights = []
        for part, free, weight in zip(alike, frees, exact, strict=True):
            weights.append(_Weight(self, weight, part.slots, list(part.slots), partial(part.built, free)))
            self.weights[part.cache, None] = weights[-1]
        self.batches.append((get_gradient_edge(made), weights))

    def _stand_in(self, tensor: Tensor) -> Tensor:
        if tensor not in self.stand_ins:
            self.stand_ins[tensor] = tensor.detach().requires_grad_(tensor.requires_grad)
        return self.stand_ins[tensor]

    def _exchange(self) -> None:
        """Hand the weights that this rank has built to the others, and take theirs."""
        held = [self.weights.get((part.cache, None)) for part in self.owners]
        with _as_for_training(False):
            mine = [
                part.like.new_empty(part.weight_shape) if weight is None else weight.exact
                for part, weight in zip(self.owners, held, strict=True)
            ]
            assert self.ranks is not None
            all_of_them = self.ranks.broadcast(mine, list(self.owners.values()))
        for part, weight, given in zip(self.owners, held, all_of_them, strict=True):
            if weight is None:
                free = list(part.slots.values())
                build = partial(part.built, free)
                self.weights[part.cache, None] = _Weight(self, given, part.slots, list(part.slots), build)

    def weight(
        self, build: Callable[[], Tensor], cache: WeightCache, slots: Slots, names: Sequence[str], key: Hashable
    ) -> Tensor:
        """Return a weight: the one of this block if somebody may want its gradient, otherwise that of the cache."""
        free = parameters_of(slots, names)
        with self.lock:
            weight = self.weights.get((cache, key)) if self.open else None
            if weight is None:
                if not _wanted(free):
                    return cache.get(build, slots, names, key)
                if torch_internals.transforms_are_active() or not self.open:
                    return build()
                # Inside of a checkpoint the hooks would keep this graph for a pass in which it is not built again.
                with _as_for_training(True), saved_tensors_hooks(_same, _same):
                    made = build()
                    if made.dtype == torch.float16:  # in which the sum of many gradients would be infinite
                        return made
                    weight = self.weights[cache, key] = _Weight(self, made.detach(), slots, names, build)
                self.batches.append((get_gradient_edge(made), [weight]))
            weight.check()
            if not _wanted(free):
                return weight.exact.data
            if [tensor.requires_grad for tensor in free] != weight.trains:
                return build()  # some are frozen for this pass only, whose gradients go their own way
            return weight.handed

    def close(self) -> None:
        """Hand out no more."""
        with self.lock:
            if not self.open:
                return
            self.open = False
            for weight in self.weights.values():
                del weight.exact, weight.handed
            for part in self.parts:
                if part.block is self:
                    part.block = None
            if self.ranks is not None and self.owner_only:
                for part, owner in self.owners.items():
                    if part.block is None:
                        Elsewhere(part, self.ranks, owner)

    def deliver(self) -> None:
        """Take the gradients that gathered to the free tensors."""
        shared = {self.weights[part.cache, None]: owner for part, owner in self.owners.items()}
        for weight in self.weights.values():
            weight.check()
        for part in self.parts:
            if isinstance(part, Parametrization):
                part.refuse_writes()
        met = [weight for weight in self.weights.values() if weight.gathered is not None and weight not in shared]
        if met and self.ranks is not None and not self.differentiable:
            raise RuntimeError(
                "ts.built(model, group) was entered without gradients, so that nothing was shared, but backward passes "
                "ran in it: enter it with gradients enabled"
            )
        inputs = list(dict.fromkeys(tensor for weight in met for tensor in weight.trained))
        if met:
            # Only to the free tensors of these: of a batch, others would get zeros where they have None.
            edges, grads = self._gradients_of_batches({weight: weight.total() for weight in met})
            with _unfrozen(inputs), full_precision(inputs[0]):
                torch.autograd.backward(edges, grads, inputs=inputs)
        if self.ranks is not None and self.differentiable:
            found = average_gradients(self.ranks, self.model, shared, self.owner_only, self._crossed)
            if found:
                with _unfrozen(found):
                    torch.autograd.backward(list(found), list(found.values()))  # calls the hooks of the free tensors

    def _gradients_of_batches(self, totals: dict[_Weight, Tensor]) -> tuple[list[GradientEdge], list[Tensor]]:
        """Return what was built at once that includes these weights, and its gradients."""
        edges, grads = [], []
        for edge, weights in self.batches:
            if any(weight in totals for weight in weights):
                each = [totals[weight] if weight in totals else weight.total() for weight in weights]
                edges.append(edge)
                grads.append(torch.stack(each) if len(each) > 1 else each[0])
        return edges, grads

    def _crossed(self, totals: dict[_Weight, Tensor]) -> dict[Tensor, Tensor]:
        """Return the gradients of free tensors from those of weights that this rank has built."""
        targets = {tensor: self.stand_ins[tensor] for weight in totals for tensor in weight.trained}
        edges, grads = self._gradients_of_batches(totals)
        with full_precision(grads[0]):
            found = torch.autograd.grad(edges, list(targets.values()), grads, materialize_grads=True)
        return dict(zip(targets, found, strict=True))

    def forget(self) -> None:
        """Let go of the gradients: passes that were not differentiated hold on to what hands weights out."""
        with self.lock:
            for weight in self.weights.values():
                del weight.gathered
            self.weights.clear()
            self.batches.clear()
            self.stand_ins.clear()


class _Weight:
    """A weight of an open block.

    Args:
        block: which hands it out.
        exact: the weight.
        slots: what holds the free tensors that it was built from.
        names: of these.
        build: builds it again.
    """

    def __init__(
        self, block: _Block, exact: Tensor, slots: Slots, names: Sequence[str], build: Callable[[], Tensor]
    ) -> None:
        self.block, self.exact, self.shape, self.build = block, exact, exact.shape, build
        self.sources = Sources(slots, names)
        self.free = self.sources.tensors
        self.trains = [tensor.requires_grad for tensor in self.free]
        self.gathered: Tensor | None = None
        # A pass runs the hooks of all leaves that it reaches, also without a gradient: those of users, and DDP's.
        hooked = any(tensor._backward_hooks or tensor._post_accumulate_grad_hooks for tensor in self.free)
        self.reached = [] if hooked or block.distributed else self.free
        self.handed: Tensor = apply_function(_HandOut, self, block.anchor, *self.reached)

    def check(self) -> None:
        """Refuse to go on if a free tensor was changed since the weight was built.

        Raises:
            RuntimeError: if one was.
        """
        if not self.sources.unchanged():
            shapes = ", ".join(str(tuple(tensor.shape)) for tensor in self.free)
            raise RuntimeError(
                f"a free tensor (of shape {shapes}) was changed in place inside of `with ts.built(model)`, moved or "
                "replaced, so that the weight that was built from it is out of date: step the optimizer, load, move "
                "and initialise outside of the block"
            )

    @property
    def trained(self) -> list[Tensor]:
        """The free tensors whose gradients were wanted when the weight was built."""
        return [tensor for tensor, trains in zip(self.free, self.trains, strict=True) if trains]

    def total(self) -> Tensor:
        """Return the sum of the gradients that gathered, which may be none."""
        if self.gathered is not None:
            return self.gathered
        like = self.free[0]
        return torch.zeros(self.shape, dtype=at_least_float32(like.dtype), device=like.device)

    def gradients(self, grad: Tensor | None, leaves: Sequence[Any]) -> tuple[Tensor | None, ...]:
        """Gather a gradient, or return those of the free tensors where they are wanted at once.

        Args:
            grad: of the weight.
            leaves: of ``reached``, the nodes of autograd where their gradients would arrive; ``None`` for frozen ones.
        """
        if grad is None:
            return (None,) * len(leaves)
        differentiated = torch.is_grad_enabled()
        with self.block.lock:
            if self.block.open and not differentiated and _all_run(leaves):
                wide = grad.float() if grad.element_size() < 4 else grad  # the sum of many
                self.gathered = wide if self.gathered is None else self.gathered + wide
                return (None,) * len(leaves)
        if not self.reached:
            raise RuntimeError(
                "a gradient with create_graph=True, or after the end of `with ts.built(model)`, cannot reach the free "
                "tensors, because torch.distributed is initialised or they have hooks: compute it without the block"
            )
        self.check()
        wanted = [tensor for tensor, leaf in zip(self.reached, leaves, strict=True) if leaf is not None]
        with torch.enable_grad():
            exact = self.build()
        found = iter(torch.autograd.grad(exact, wanted, grad, create_graph=differentiated, allow_unused=True))
        return tuple(None if leaf is None else next(found) for leaf in leaves)


def _all_run(leaves: Sequence[Any]) -> bool:
    """Whether the pass that runs brings gradients to all of these leaves, as plain ``backward`` does."""
    try:
        return all(torch_internals.will_run(leaf) for leaf in leaves if leaf is not None)
    except RuntimeError:  # torch.autograd.grad, where torch does not answer for leaves
        return False


@contextmanager
def _unfrozen(tensors: Iterable[Tensor]) -> Iterator[None]:
    """Let tensors that were frozen after some passes take the gradients of these."""
    frozen = [tensor.requires_grad_() for tensor in tensors if not tensor.requires_grad]
    try:
        yield
    finally:
        for tensor in frozen:
            tensor.requires_grad_(False)


class _HandOut(torch.autograd.Function):
    """The built weight as the start of the graphs of all passes."""

    @staticmethod
    def forward(ctx: Any, weight: _Weight, anchor: Tensor, *free: Tensor) -> Tensor:
        ctx.weight = weight
        ctx.set_materialize_grads(False)
        return weight.exact.data  # which counts writes by itself: one is none into the others of its batch

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, ...]:
        return None, None, *ctx.weight.gradients(grad, [node for node, _ in ctx.next_functions[1:]])


def batches(parts: Sequence[Parametrization]) -> list[list[Parametrization]]:
    """Return those parametrizations that are built at once, with those of one batch side by side."""
    groups: defaultdict[Any, list[Parametrization]] = defaultdict(list)
    for part in parts:
        free = list(part.slots.values())
        alike = part.alike
        if alike is None or not free or any(type(tensor) is not nn.Parameter for tensor in free):
            continue
        wanted = _wanted(free)
        if wanted or not part.cache.fresh():
            groups[alike, wanted, part.like.dtype, *((tensor.dtype, tensor.device) for tensor in free)].append(part)
    found: list[list[Parametrization]] = []
    for group in groups.values():
        found += [[part] for part in group] if _keeps_all_cores_busy(group[0]) else [group]
    return found


def _keeps_all_cores_busy(part: Parametrization) -> bool:
    free = list(part.slots.values())
    return free[0].device.type == "cpu" and max(min(tensor.shape[-2:]) for tensor in free) > _LARGEST_IN_A_BATCH


def _built_together(alike: Sequence[Parametrization], frees: Sequence[Sequence[Tensor]]) -> Tensor:
    """Return the weights of parametrizations in full precision, stacked unless it is only one."""
    if len(alike) == 1:
        build, free = alike[0].build, frees[0]
    else:
        build, free = alike[0].build_together, [apply_function(_Stack, *each) for each in zip(*frees, strict=True)]
    return plainly_laid_out(exactly(build, [tensor.to(at_least_float32(tensor.dtype)) for tensor in free]))


class _Stack(torch.autograd.Function):
    """``torch.stack``, with a gradient that is taken apart in one call, and parts that leaves keep without a copy."""

    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> Tensor:
        return torch.stack(tensors)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
        return grad.contiguous().unbind()


def _wanted(free: Sequence[Tensor]) -> bool:
    """Whether somebody may want the gradients of free tensors of what runs now."""
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in free)


@contextmanager
def _as_for_training(grad: bool) -> Iterator[None]:
    # Not an inference tensor even in inference mode: a later pass of the block may want gradients.
    with torch.inference_mode(False), torch.set_grad_enabled(grad):
        yield


def _same(tensor: Tensor) -> Tensor:
    return tensor
