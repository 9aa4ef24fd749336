"""The construction of a model's weights, shared by the processes of a group: who builds what, and how it travels."""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from math import prod
from typing import Any, Protocol, TypeVar
from weakref import WeakKeyDictionary, WeakSet

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from trysquare.nn.parametrizations.base import Caching, Parametrization

__all__ = ["gradient_norm", "synchronize"]

# What a layer costs besides its products, in the units of these: on one core of a processor a 3x3 layer of 64 channels
# takes twice as long to build as one of 4.
_FIXED = 13 * 64**3


class Ranks:
    """The processes of a group.

    Args:
        group: of ``torch.distributed``.

    Raises:
        TypeError: if it is no process group.
        ValueError: if this process is not in it.
    """

    def __init__(self, group: Any) -> None:
        if not (dist.is_available() and isinstance(group, dist.ProcessGroup)):
            raise TypeError(
                "group must be a process group, such as torch.distributed.group.WORLD after init_process_group(), "
                f"not {type(group).__name__}"
            )
        self.group, self.rank, self.size = group, dist.get_rank(group), dist.get_world_size(group)
        if self.rank < 0:
            raise ValueError("this process is not in the group")

    def meet(self, model: nn.Module) -> None:
        """Start from the parameters and buffers of rank 0, the first time that the group sees this model.

        Raises:
            ValueError: if the processes have different models.
        """
        met = _met.setdefault(model, WeakSet())
        if self.group in met:
            return
        tensors = [*model.named_parameters(), *model.named_buffers()]
        layout = [(name, tuple(t.shape), str(t.dtype), t.requires_grad) for name, t in tensors]
        layouts: list[Any] = [None] * self.size
        dist.all_gather_object(layouts, layout, group=self.group)
        for rank, other in enumerate(layouts):
            if other != layouts[0]:
                pairs = zip(other, layouts[0], strict=False)
                found = next((pair for pair in pairs if pair[0] != pair[1]), (len(other), len(layouts[0])))
                raise ValueError(f"processes must have the same model: rank {rank} has {found[0]}, rank 0 {found[1]}")
        values = [tensor.detach() for _, tensor in tensors]
        with torch.no_grad():
            for value, first in zip(values, self.broadcast(values, [0] * len(values)), strict=True):
                value.copy_(first)
        met.add(self.group)

    def broadcast(self, tensors: Sequence[Tensor], owners: Sequence[int]) -> list[Tensor]:
        """Return each tensor as its owner has it; those of other ranks only say shape and dtype."""
        return self._moved(tensors, owners, dist.broadcast)

    def reduce(self, tensors: Sequence[Tensor], owners: Sequence[int]) -> list[Tensor]:
        """Return the sum of each tensor over all ranks, at its owner; other ranks get no meaningful numbers."""
        return self._moved(tensors, owners, dist.reduce)

    def _moved(self, tensors: Sequence[Tensor], owners: Sequence[int], move: Callable[..., Any]) -> list[Tensor]:
        """Call ``move`` on one buffer for each owner and dtype, all of them under way at once."""
        bundles: defaultdict[Any, list[int]] = defaultdict(list)
        for number, (tensor, owner) in enumerate(zip(tensors, owners, strict=True)):
            bundles[owner, tensor.dtype, tensor.device].append(number)
        under_way = []
        for (owner, _, _), numbers in bundles.items():
            flat = torch.cat([tensors[number].reshape(-1) for number in numbers])
            if not flat.numel():
                continue
            source = dist.get_global_rank(self.group, owner)
            under_way.append((numbers, flat, move(flat, source, group=self.group, async_op=True)))
        moved = list(tensors)
        for numbers, flat, work in under_way:
            work.wait()
            parts = flat.split([tensors[number].numel() for number in numbers])
            for number, part in zip(numbers, parts, strict=True):
                moved[number] = part.view(tensors[number].shape)
        return moved

    def any(self, flags: Sequence[bool], device: torch.device) -> list[bool]:
        """Return for each flag whether some rank has raised it."""
        counts = torch.tensor(flags, dtype=torch.int32, device=device)
        dist.all_reduce(counts, group=self.group)
        return [count > 0 for count in counts.tolist()]

    def average(self, tensors: Sequence[Tensor]) -> None:
        """Replace tensors by their means over all ranks."""
        bundles: defaultdict[Any, list[Tensor]] = defaultdict(list)
        for tensor in tensors:
            bundles[tensor.dtype, tensor.device].append(tensor)
        for same in bundles.values():
            flat = torch.cat([tensor.reshape(-1) for tensor in same])
            dist.all_reduce(flat, group=self.group)
            parts = flat.div_(self.size).split([tensor.numel() for tensor in same])
            for tensor, part in zip(same, parts, strict=True):
                tensor.copy_(part.view(tensor.shape))


# Groups that have met a model, so that all ranks have started from the same parameters.
_met: WeakKeyDictionary[nn.Module, WeakSet[Any]] = WeakKeyDictionary()


def shares(parts: Iterable[tuple[Parametrization, Hashable]], size: int) -> dict[Parametrization, int]:
    """Return the rank that builds each parametrization: the dearest first, to the one that is done first with it.

    So no rank has more to do than the mean and one layer.

    Args:
        parts: with what those have in common that one rank builds in one batch, which is one set of calls.
        size: number of ranks.
    """
    loads, begun = [0] * size, [set[Hashable]() for _ in range(size)]
    owners: dict[Parametrization, int] = {}
    for part, kind in sorted(parts, key=lambda pair: -_products(pair[0])):
        done = [loads[rank] + _products(part) + _FIXED * (kind not in begun[rank]) for rank in range(size)]
        owner = done.index(min(done))
        owners[part], loads[owner] = owner, done[owner]
        begun[owner].add(kind)
    return owners


def _products(part: Parametrization) -> int:
    """Return the products of the construction, in units of about 8 FLOPs forward and backward.

    Free tensors are orthonormalised; where there are several, the weight is composed of them. That fits what is counted
    for layers of 3x3 with and without stride, and matrices, within a third.
    """
    free, weight = list(part.slots.values()), part.weight_shape
    composed = prod(weight) * weight[1] if len(free) > 1 else 0
    return 2 * sum(tensor.numel() * min(tensor.shape[-2:]) for tensor in free) + composed


class GatheredWeight(Protocol):
    """A built weight, at which the gradients of passes have gathered."""

    gathered: Tensor | None

    @property
    def free(self) -> Sequence[Tensor]:
        """The free tensors that it was built from."""

    @property
    def trained(self) -> Sequence[Tensor]:
        """Those of them that want a gradient."""

    def total(self) -> Tensor:
        """Return the sum of the gradients, which may be none."""


W = TypeVar("W", bound=GatheredWeight)


def average_gradients(
    ranks: Ranks,
    model: nn.Module,
    shared: Mapping[W, int],
    owner_only: bool,
    crossed: Callable[[dict[W, Tensor]], dict[Tensor, Tensor]],
) -> dict[Tensor, Tensor]:
    """Average the gradients of a model over all ranks, those of free tensors by way of the owner of their weight.

    Args:
        ranks: the processes.
        model: whose parameters are meant.
        shared: the owner of each weight whose construction is shared.
        owner_only: whether gradients of free tensors stay with the owner.
        crossed: takes mean gradients of weights that this rank has built to their free tensors.

    Returns:
        The mean gradients that are still to be added to the free tensors.

    Raises:
        RuntimeError: with ``owner_only``, if free tensors have gradients on ranks that do not own them.
    """
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not parameters:
        return {}
    owners = {tensor: owner for weight, owner in shared.items() for tensor in weight.free}
    wrapped = isinstance(model, DistributedDataParallel)
    # Of free tensors, what compiled parts have found, and what was there before, which is equal on all ranks.
    others = [p for p in parameters if not wrapped and not (owner_only and p in owners)]
    astray = owner_only and any(tensor.grad is not None and owner != ranks.rank for tensor, owner in owners.items())
    flags = [astray, *(w.gathered is not None for w in shared), *(p.grad is not None for p in others)]
    astray, *flags = ranks.any(flags, parameters[0].device)
    if astray:
        raise RuntimeError(
            "with owner_only=True free tensors have gradients on ranks that do not own them: from an earlier step "
            "(call optimizer.zero_grad() before the block), or from compiled parts of the model, which build their "
            "weights by themselves"
        )
    used = iter(flags)
    pairs = [(weight, owner) for weight, owner in shared.items() if next(used)]
    means = [parameter for parameter in others if next(used)]
    for parameter in means:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    ranks.average([parameter.grad for parameter in means if parameter.grad is not None])

    sums = ranks.reduce([weight.total() for weight, _ in pairs], [owner for _, owner in pairs])
    own = {w: total.div_(ranks.size) for (w, owner), total in zip(pairs, sums, strict=True) if owner == ranks.rank}
    found = crossed(own) if own else {}
    if owner_only:
        return found
    wanted = list(dict.fromkeys((tensor, owner) for weight, owner in pairs for tensor in weight.trained))
    mine = [found[tensor] if owner == ranks.rank else tensor.detach() for tensor, owner in wanted]
    given = ranks.broadcast(mine, [owner for _, owner in wanted])
    found = {}
    for (tensor, _), grad in zip(wanted, given, strict=True):
        found[tensor] = found[tensor] + grad if tensor in found else grad
    return found


class Elsewhere:
    """In the place of a parametrization's block: its free tensors are up to date at their owner only.

    All ranks refuse to use it, so that they stay in step.

    Args:
        part: whose free tensors are meant.
        ranks: where they are.
        owner: who has them.
    """

    def __init__(self, part: Caching, ranks: Ranks, owner: int) -> None:
        self.ranks, self.owner = ranks, owner
        self._on_saving = part.register_state_dict_pre_hook(self.refuse)
        part.block = self

    def weight(self, *_: Any) -> Tensor:
        """Refuse to build.

        Raises:
            RuntimeError: always.
        """
        self.refuse()
        raise AssertionError

    def refuse(self, *_: Any) -> None:
        """Say what to do.

        Raises:
            RuntimeError: always.
        """
        raise RuntimeError(
            f"after `ts.built(model, group, owner_only=True)` the free tensors of this layer are up to date on rank "
            f"{self.owner} of the group only: call ts.synchronize(model) on all ranks before the layer is used or "
            "saved outside of such a block, or is frozen"
        )

    def __reduce__(self) -> Any:
        """Refuse copies of the layer too, which would not know of this."""
        self.refuse()

    def end(self, part: Caching) -> None:
        """Take this off."""
        self._on_saving.remove()
        part.block = None


def refuse_other_owners(parts: Iterable[Caching], owners: Mapping[Parametrization, int], owner_only: bool) -> None:
    """Refuse a context whose owners are not those with whom an earlier one has left the free tensors.

    Raises:
        RuntimeError: if so.
        ValueError: with ``owner_only``, if a free tensor belongs to several parametrizations.
    """
    for part in parts:
        place = part.block
        if isinstance(place, Elsewhere):
            owner = owners.get(part) if isinstance(part, Parametrization) else None
            if owner != place.owner or not owner_only:
                place.refuse()
    owner_of: dict[Tensor, int] = {}
    for part, owner in owners.items() if owner_only else ():
        if any(owner_of.setdefault(tensor, owner) != owner for tensor in part.slots.values()):
            raise ValueError("owner_only=True needs free tensors that belong to one parametrization each")


@torch.no_grad()
def synchronize(model: nn.Module, *optimizers: Optimizer) -> None:
    """Give all ranks the free tensors that ``ts.built(model, group, owner_only=True)`` has left with their owners.

    All ranks of the group must call it: before evaluation and before ``state_dict``. Without such tensors it does
    nothing.

    Args:
        model: the model of the block.
        *optimizers: whose state for these tensors all ranks get too, so that the ``state_dict`` of each is complete and
            can be loaded by any number of processes.

    Raises:
        TypeError: if the arguments are something else.

    >>> ts.synchronize(nn.Sequential(OrthoLinear(4, 4)))
    """
    _check_module(model)
    for optimizer in optimizers:
        if not isinstance(optimizer, Optimizer):
            raise TypeError(f"optimizers must be of torch.optim, not {type(optimizer).__name__}")
    away = [(part, part.block) for part in model.modules() if isinstance(part, Caching)]
    for part, place in away:
        if isinstance(part, Parametrization) and isinstance(place, Elsewhere):
            free = list(part.slots.values())
            sent = [([t.cpu() for t in free], [[_portable(o.state.get(t, {}), t) for t in free] for o in optimizers])]
            dist.broadcast_object_list(
                sent, dist.get_global_rank(place.ranks.group, place.owner), group=place.ranks.group
            )
            if place.ranks.rank != place.owner:
                values, states = sent[0]
                for number, tensor in enumerate(free):
                    tensor.copy_(values[number])
                    for optimizer, state in zip(optimizers, states, strict=True):
                        _take(optimizer, tensor, state[number])
            place.end(part)


@torch.no_grad()
def gradient_norm(model: nn.Module, group: Any = None) -> Tensor:
    """Return the norm of a model's gradient, where ranks hold different parts of it; all ranks must call it.

    After ``ts.built(model, group, owner_only=True)`` torch's ``clip_grad_norm_`` would see a part only:
    ``torch.nn.utils.clip_grads_with_norm_(model.parameters(), 1.0, ts.gradient_norm(model, group))``.

    Args:
        model: the model of the block.
        group: that of the block; ``None`` for this process alone.

    Raises:
        TypeError: if ``model`` is no module, or ``group`` no process group.
        ValueError: if this process is not in the group.

    >>> ts.gradient_norm(OrthoLinear(4, 4))
    tensor(0.)
    """
    _check_module(model)
    ranks = None if group is None else Ranks(group)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    squares = torch.zeros(2, len(parameters), device=parameters[0].device if parameters else None)
    for number, parameter in enumerate(parameters):
        if parameter.grad is not None:
            squares[0, number], squares[1, number] = parameter.grad.float().square().sum(), 1
    if ranks is not None:
        dist.all_reduce(squares, group=ranks.group)
    return (squares[0] / squares[1].clamp_min(1)).sum().sqrt()


def _check_module(model: Any) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, not {type(model).__name__}")


def _portable(state: dict[str, Any], parameter: Tensor) -> dict[str, tuple[Any, bool]]:
    """Return the state with its tensors on the CPU, and which of them belong on the device of the parameter."""
    return {
        key: (value.cpu(), value.device == parameter.device) if isinstance(value, Tensor) else (value, False)
        for key, value in state.items()
    }


def _take(optimizer: Optimizer, parameter: Tensor, state: dict[str, tuple[Any, bool]]) -> None:
    if state:
        optimizer.state[parameter] = {
            key: value.to(parameter.device) if there else value for key, (value, there) in state.items()
        }


# -- models that fully_shard has spread over processes


def managed_by_fsdp(model: nn.Module) -> set[nn.Module]:
    """Return the modules whose parameters ``fully_shard`` gathers for each pass and frees after it."""
    fsdp = sys.modules.get("torch.distributed.fsdp")  # who uses it has imported it, which takes a while
    if fsdp is None or not fsdp.FSDPModule.__subclasses__():  # it makes one for each class of module
        return set()
    roots = [module for module in model.modules() if isinstance(module, fsdp.FSDPModule)]
    return {module for root in roots for module in root.modules()}


def refuse_sharded(model: nn.Module) -> None:
    """Refuse a model of which this process has a part only.

    Raises:
        ValueError: if it is one, saying how to come by the whole.
    """
    if managed_by_fsdp(model):
        raise ValueError(
            "this model's parameters are spread over processes by fully_shard: load them into a plain one, "
            "plain.load_state_dict(get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))) with "
            "both names from torch.distributed.checkpoint.state_dict, called on all ranks, and use that"
        )
