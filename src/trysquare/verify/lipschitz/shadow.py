"""Runs a model as it is, with something else in the place of every value that depends on its input.

Hooks, overrides, wrappers and all take part, because they run; nothing reads the source of a model. Its input is a
``Traced`` tensor, which holds no numbers, so that no value can leave unseen (``.item()``, ``if x > 0``, ``.numpy()``
raise). What it carries instead, its *payload*, is for subclasses of ``Shadow`` to say: labels that tell where a number
came from (``trace``), or the number itself in float64 (``exact``). Everything
that does not depend on the input, such as a weight that ``forward`` computes, is computed by torch as always: it is a
constant.

What only moves numbers (views, slices, ``cat``, padding, writes into a part) is carried out on the payloads by the very
same call of torch. So aliasing, broadcasting and every padding with every sign are exact by construction.
"""

from __future__ import annotations

import copy
import linecache
import random
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache
from itertools import zip_longest
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch._prims_common import suggest_memory_format
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.parameter import is_lazy
from torch.nn.utils import parametrize
from torch.nn.utils.parametrizations import _SpectralNorm
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from trysquare.nn.layers.centering import BatchCentering
from trysquare.nn.linalg.precision import at_least_float32, autocast_dtype
from trysquare.nn.parametrizations.base import ParametrizedWeight
from trysquare.nn.sharing import refuse_sharded
from trysquare.verify.operators import misfit

Shape = tuple[int, ...]

# Samples of a batch that is traced: two tell whether the samples of a batch mix.
BATCH = 2

# Calls that move numbers, leave some out, repeat them or put constants beside them, and compute nothing.
MOVES = frozenset(
    """
    alias channel_shuffle clone cat constant_pad_nd contiguous copy detach diag_embed diagonal expand fill flip
    gather im2col index index_put index_select lift_fresh masked_fill masked_scatter masked_select narrow neg
    permute pixel_shuffle pixel_unshuffle reflection_pad1d reflection_pad2d reflection_pad3d repeat
    replication_pad1d replication_pad2d replication_pad3d roll rot90 scatter select select_scatter slice
    slice_scatter split split_with_sizes squeeze stack t take transpose tril triu unbind unfold unsafe_split
    unsqueeze upsample_nearest1d upsample_nearest2d upsample_nearest3d view where zero _unsafe_index _unsafe_view
    _upsample_nearest_exact1d _upsample_nearest_exact2d _upsample_nearest_exact3d _reshape_alias
    """.split()
)
# Calls that make a constant with the shape or dtype of a value.
FACTS = frozenset(
    """
    empty_like full_like new_empty new_empty_strided new_full new_ones new_zeros ones_like zeros_like
    """.split()
)
_LOOKS = frozenset(["_local_scalar_dense", "equal", "is_nonzero", "nonzero", "unique_dim", "_unique2", "allclose"])
# Ways from a tensor to its memory that do not pass torch's dispatcher.
_ESCAPES = frozenset(
    [
        Tensor.numpy, Tensor.tolist, Tensor.__array__, Tensor.data_ptr, Tensor.storage, Tensor.untyped_storage,
        Tensor.__dlpack__, Tensor.__reduce_ex__, Tensor.share_memory_, Tensor.set_, Tensor.apply_, Tensor.map_,
        Tensor.map2_, Tensor.__repr__,
    ]
)  # fmt: skip


class NoRuleError(ValueError):
    """A model, module or call whose Lipschitz constant is not known."""


class Traced(Tensor):
    """A tensor that depends on the input of the model that is traced: shape and dtype, but no numbers.

    Attributes:
        payload: float64, with the same shape and memory layout: labels, or values (see ``Shadow``).
    """

    payload: Tensor

    @staticmethod
    def __new__(cls, payload: Tensor, dtype: torch.dtype, device: torch.device) -> Traced:
        """Wrap labels or values."""
        made = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, payload.shape, strides=payload.stride(), storage_offset=payload.storage_offset(), dtype=dtype,
            device=device,
        )  # fmt: skip
        made.payload = payload
        return made  # type: ignore[no-any-return]

    def __repr__(self) -> str:  # type: ignore[override]
        shadow: Shadow | None = getattr(_ACTIVE, "shadow", None)
        if shadow is not None and not shadow.looking:
            raise NoRuleError(f"it prints values that depend on the input ({user_line()}), which cannot be followed")
        return f"Traced({tuple(self.shape)}, {self.dtype})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        own = [kind.__name__ for kind in types if not issubclass(kind, Traced)]
        raise NoRuleError(
            f"{func} was called on a value of a trace outside of it, or made it a tensor of another class "
            f"({', '.join(own) or 'Traced'}); such a model cannot be followed"
        )


class Frame(NamedTuple):
    """A module that is running: its name in the model, the module, and the number of this call of it."""

    name: str
    module: nn.Module
    call: int


def class_name(module: nn.Module | None) -> str:
    """Name of a module's class, without what torch puts in front of parametrized ones."""
    return type(module).__name__.removeprefix("Parametrized")


def leaves_of(*values: Any) -> Iterator[Any]:
    """What is in arguments of ATen, which are nested in nothing but lists, tuples and dictionaries."""
    for value in values:
        kind = type(value)
        if kind is list or kind is tuple:
            yield from leaves_of(*value)
        elif kind is dict:
            yield from leaves_of(*value.values())
        elif isinstance(value, list | tuple) and kind is not Place:  # what torch returns with names
            yield from leaves_of(*value)
        else:
            yield value


def mapped(change: Callable[[Any], Any], value: Any) -> Any:
    """Such arguments with each leaf changed."""
    if isinstance(value, list | tuple):
        return type(value)([mapped(change, part) for part in value])
    if isinstance(value, dict):
        return {name: mapped(change, part) for name, part in value.items()}
    return change(value)


class Place(NamedTuple):
    """Where a value lies: two passes that compute the same have the same places.

    Attributes:
        storage: number of its memory, in the order in which a pass made it.
    """

    storage: int
    offset: int
    shape: Shape
    stride: Shape
    dtype: torch.dtype

    @property
    def layout(self) -> tuple[int, Shape, list[int]]:
        """What a run of the model itself has in common with one that is followed."""
        return self.offset, self.shape, [step for step, size in zip(self.stride, self.shape, strict=True) if size > 1]


class Step(NamedTuple):
    """A call on values, or another event of a pass.

    Attributes:
        name: of ATen's function with its overload, or of the event.
        args: its arguments: of what depends on the input its ``Place``, everything else as it was.
        line: file, line and source of the code that made it.
    """

    name: str
    args: Any
    line: str

    @property
    def base(self) -> str:
        """Name without the overload."""
        return self.name.split(".")[0]


class _Memory:
    """The payload of plain tensors that the model made and then wrote values into that depend on its input."""

    def __init__(self, flat: Tensor, owner: Tensor) -> None:
        self.flat = flat
        self.owner = owner  # keeps the memory alive, so that its address stays its own
        storage = owner.untyped_storage()
        self.start, self.end = storage.data_ptr(), storage.data_ptr() + storage.nbytes()

    def window(self, tensor: Tensor) -> Tensor:
        return self.flat.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


class _NoEscape(TorchFunctionMode):
    """Refuses to hand out the memory of tensors whose real contents the trace does not know."""

    def __init__(self, shadow: Shadow) -> None:
        super().__init__()
        self.shadow = shadow

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # The shadow itself looks at the memory of tensors.
        if func in _ESCAPES and args and not self.shadow.looking and isinstance(args[0], Tensor):
            self.shadow.give_away(args[0])
        if func in _ESCAPES and args and not self.shadow.looking and self.shadow.payload(args[0]) is not None:
            raise NoRuleError(
                f"{func.__name__}() reads values that depend on the input past torch, where they cannot be followed "
                f"({user_line()})"
            )
        if getattr(func, "__name__", "") == "__set__" and any(self.shadow.payload(arg) is not None for arg in args):
            raise NoRuleError(f"it replaces what a tensor holds ({user_line()}), which cannot be followed; use copy_")
        return func(*args, **(kwargs or {}))


class Shadow(TorchDispatchMode):
    """Runs a model with a payload in the place of every value that depends on its input.

    Subclasses say what the payload is: labels (``Tracer``), or numbers in float64 (``exact``).

    Args:
        dtype: of the model's input: what is coarser would be a cast that jumps.
        names: of the model's modules and tensors, for errors.
    """

    def __init__(self, model: nn.Module, dtype: torch.dtype, is_leaf: Callable[[nn.Module], bool]) -> None:
        super().__init__()
        self.dtype, self.is_leaf = dtype, is_leaf
        self.names = {id(module): name for name, module in model.named_modules(remove_duplicate=False)}
        self.model = model
        self.path: list[Frame] = []
        self.calls = 0  # of modules, so far
        self.given: list[Shape] = []  # shapes of the inputs of the last of them
        self.looking = False
        self.inside = 0  # of how many leaves
        self.writes = False  # whether any call writes to where a value is
        self._places: dict[int, tuple[int, Tensor]] = {}  # numbers of the memory of payloads, which stays alive
        # Torch's own casts are seen where autocast is off again already.
        self.around = autocast_dtype(input_like(model))
        self.autocast = self.around is not None
        self._created: dict[int, StorageWeakRef] = {}
        self._written: dict[int, _Memory] = {}
        self._raw: set[int] = set()  # memory that holds whatever was there before
        self._given_away: dict[int, StorageWeakRef] = {}  # memory that is known under other names than torch's

    # What subclasses say.

    def lifted(self, constant: Tensor) -> Tensor:
        """The payload of a constant."""
        raise NotImplementedError

    def compute(self, op: str, func: Any, args: Any, kwargs: Any, like: Any) -> Any:
        """Carry out a call that computes; returns payloads in the structure and layout of ``like``."""
        raise NotImplementedError

    def step(self, name: str, args: Any) -> Any:
        """Take note of a step, or see that it is the expected one; returns the arguments to take it with."""
        raise NotImplementedError

    def shapes(self, func: Any, args: Any, kwargs: Any) -> Any:
        """What a call returns, without numbers."""
        raise NotImplementedError

    def number(self, value: Any) -> Any:
        """What is written in the place of a number that fills a tensor."""
        raise NotImplementedError

    def call_module(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Call a module; its name is on ``path`` already."""
        return _call(module, *args, **kwargs)

    def keeps_whole(self, module: nn.Module, args: Any, kwargs: Any) -> bool:
        """Whether a call of a module is one that its rule is about.

        Not where autocast, or a mode that changes what torch's functions do, is on around this call alone.
        """
        if kwargs or not args or not all(self.payload(arg) is not None for arg in args) or not self.is_leaf(module):
            return False
        return autocast_dtype(args[0]) == self.around and torch._C._len_torch_function_stack() == 1

    # What they share.

    def payload(self, value: Any) -> Tensor | None:
        """The payload of a tensor that depends on the input; ``None`` for everything else."""
        if isinstance(value, Traced):
            return value.payload
        if not self._written or not isinstance(value, Tensor):
            return None
        before, self.looking = self.looking, True
        try:
            if not has_memory(value):
                return None
            if (memory := self._written.get(address(value))) is not None:
                return memory.window(value)
            if (place := value.untyped_storage().data_ptr()) and any(
                known.start <= place < known.end for known in self._written.values()
            ):
                raise NoRuleError(
                    f"it reads memory that values were written into under another name, past torch ({user_line()}), "
                    "where they cannot be followed"
                )
            return None
        finally:
            self.looking = before

    def place(self, payload: Tensor, dtype: torch.dtype) -> Place:
        """Where a payload lies."""
        storage = address(payload)
        if storage not in self._places:
            self._places[storage] = len(self._places), payload
        number = self._places[storage][0]
        return Place(number, int(payload.storage_offset()), tuple(payload.shape), payload.stride(), dtype)

    def noted(self, made: Any) -> Any:
        """Results of a step, whose memory gets its numbers now."""
        for leaf in leaves_of(made):
            if (payload := self.payload(leaf)) is not None:
                self.place(payload, leaf.dtype)
        return made

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before, self.looking = self.looking, True
        try:
            return self._called(func, args, kwargs or {})
        finally:
            self.looking = before

    def _called(self, func: Any, args: Any, kwargs: Any) -> Any:
        tensors = [leaf for leaf in leaves_of(args, kwargs) if isinstance(leaf, Tensor)]
        base, is_composite = _about(func)
        if is_composite:
            # Seen whole in inference mode; its parts are what has rules.
            with self:
                parts = func.decompose(*args, **kwargs)
            if parts is not NotImplemented:
                return parts
        written = [] if _nothing_drawn(func, args) else _written_arguments(func, args, kwargs)
        if not any(self.payload(tensor) is not None for tensor in tensors):
            return self._constant(func, args, kwargs, written)
        foreign = [type(t) for t in tensors if type(t) is not Traced and type(t).__torch_dispatch__ is not _DISABLED]
        if foreign:
            raise NoRuleError(
                f"a weight is a {foreign[0].__name__}, which decides by itself what torch computes with it "
                f"({user_line()}); make it a plain tensor first"
            )
        if any(t.layout != torch.strided for t in tensors):
            raise NoRuleError(f"it computes with a sparse tensor ({func}, {user_line()}); make it dense: to_dense()")
        if any(t.is_meta and type(t) is not Traced for t in tensors):
            raise NoRuleError(f"it computes with a tensor that holds no numbers ({func}, {user_line()})")
        if "attention" not in base:
            self._refuse_chance(func, args)
        if base in _LOOKS:
            raise NoRuleError(
                f"it decides by a value that depends on the input ({base.strip('_')}, {user_line()}): what it computes "
                "may jump there; write it with torch.where, torch.maximum or clamp"
            )
        in_place = bool(written) and base.endswith("_") and not base.startswith("__")
        op = base[:-1] if in_place else base
        if written and op not in FACTS and (not in_place or len(written) > 1 or written[0] is not args[0]):
            raise NoRuleError(f"{func} writes into out=..., which has no rule ({user_line()}); leave out= away")
        if in_place and self.payload(args[0]) is None:
            self._place(args[0])
        if _nothing_drawn(func, args):  # the noise is memory that nothing was written into
            args = (args[0], torch.zeros_like(args[1]), *args[2:])
        args, kwargs = self.step(f"{base}.{func._overloadname}", (args, kwargs))
        if op in FACTS:
            return self._fact(func, args, kwargs)
        return self.noted(self._write(op, func, args, kwargs) if in_place else self._fresh(op, func, args, kwargs))

    def _constant(self, func: Any, args: Any, kwargs: Any, written: list[Tensor]) -> Any:
        """A call that has nothing to do with the input: carried out, unless it is not the same at every pass."""
        for tensor in written:
            if not self._is_new(tensor):
                raise NoRuleError(self._writes_into(tensor))
            self._raw.discard(address(tensor))
        self._refuse_chance(func, args)
        if func._schema.name == "aten::view" and func._overloadname == "dtype":
            self.give_away(args[0])
        result = func(*args, **kwargs)
        known = {address(t) for t in leaves_of(args, kwargs) if isinstance(t, Tensor) and has_memory(t)}
        for tensor in leaves_of(result):
            if isinstance(tensor, Tensor) and has_memory(tensor) and (place := address(tensor)) not in known:
                self._created[place] = StorageWeakRef(tensor.untyped_storage())
                (self._raw.add if "empty" in func._schema.name else self._raw.discard)(place)
        return result

    def give_away(self, tensor: Tensor) -> None:
        """Note that somebody can reach the memory of a plain tensor past torch: no value may be written there."""
        if self.payload(tensor) is None and has_memory(tensor):
            self._given_away[address(tensor)] = StorageWeakRef(tensor.untyped_storage())

    def _refuse_chance(self, func: Any, args: Any) -> None:
        if torch.Tag.nondeterministic_seeded in func.tags and not _nothing_drawn(func, args):
            raise NoRuleError(f"it draws random numbers ({func}, {user_line()}): it is not a fixed function")

    def _is_new(self, tensor: Tensor) -> bool:
        """Whether the model made this memory during this pass."""
        if not has_memory(tensor):
            return False
        reference = self._created.get(address(tensor))
        return reference is not None and not reference.expired()

    def _writes_into(self, tensor: Tensor) -> str:
        found = _name_of(self.model, tensor) if has_memory(tensor) else None
        owner = f"its tensor {found!r}" if found else "a tensor that it did not make in this pass"
        return (
            f"the forward pass writes into {owner} ({user_line()}), so that it is not a fixed function; call "
            "model.eval(), and fix weights that are iterated on: torch.nn.utils.parametrize.remove_parametrizations("
            "module, 'weight')"
        )

    def _fact(self, func: Any, args: Any, kwargs: Any) -> Any:
        """A new constant that takes no more than shape, dtype or device from a value."""

        def plain(value: Any) -> Any:
            if self.payload(value) is None:
                return value
            return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)

        if any(self.payload(v) is not None for v in [*args[1:], *kwargs.values()]):
            raise NoRuleError(f"a constant tensor is filled with a value that depends on the input ({user_line()})")
        return self._constant(func, mapped(plain, tuple(args)), kwargs, [])

    def _fresh(self, op: str, func: Any, args: Any, kwargs: Any) -> Any:
        """A call that returns something new, or views."""
        if op == "_to_copy":
            return self._cast(args[0], kwargs)
        if op == "view" and func._overloadname == "dtype":
            raise NoRuleError(f"it reads the same bits as other numbers ({user_line()}), which is not Lipschitz")
        like = self.shapes(func, args, kwargs)
        given = next(t for t in leaves_of(args, kwargs) if self.payload(t) is not None)
        for part in leaves_of(like):
            if isinstance(part, Tensor) and part.is_floating_point() and given.is_floating_point():
                self._check_cast(given, part.dtype)
        if op in MOVES and self._moves(op, func, args):
            made = self.move(func, args, kwargs)
            if "upsample_nearest" in op:
                made = laid_out(made, like)
        else:
            made = self.compute(op, func, args, kwargs, like)
        return paired(lambda payload, meta: Traced(payload, meta.dtype, given.device), made, like)

    def _moves(self, op: str, func: Any, args: Any) -> bool:
        """Whether a call moves numbers, and by constants alone.

        Raises:
            NoRuleError: if what it moves depends on the input, or it adds numbers up on the way.
        """
        if "reduce" in func._overloadname:
            raise NoRuleError(f"{op} with reduce=... has no rule ({user_line()})")
        if op == "where":
            return self.payload(args[0]) is None
        indices = args[1:] if op not in ("cat", "stack", "copy", "slice_scatter", "select_scatter") else ()
        for value in leaves_of(indices):
            if self.payload(value) is not None and not value.is_floating_point():
                raise NoRuleError(f"an index or mask depends on the input ({op}, {user_line()}): what it selects jumps")
        if op == "index_put" and len(args) > 3 and args[3]:
            raise NoRuleError(f"index_put with accumulate=True has no rule ({user_line()})")
        return True

    def move(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Carry out a call on payloads: what does not depend on the input is lifted, indices and masks stay."""
        names = [argument.name for argument in func._schema.arguments]

        def moved(name: str, value: Any) -> Any:
            if name in ("index", "indices", "mask", "condition"):
                return mapped(lambda leaf: leaf.cpu() if isinstance(leaf, Tensor) else leaf, value)
            is_number = name == "value" and not isinstance(value, Tensor)
            return self.number(value) if is_number else self._moved(value)

        if "upsample_nearest" in func._schema.name:
            return self._picked(func, args, kwargs)
        dropped = ("dtype", "device", "layout", "pin_memory")
        options = {name: moved(name, value) for name, value in kwargs.items() if name not in dropped}
        return func(*map(moved, names, args), **options)

    def _picked(self, func: Any, args: Any, kwargs: Any) -> Tensor:
        """Nearest neighbours: which ones torch picks depends on the dtype that it computes positions in."""
        payload = self.payload(args[0])
        assert payload is not None
        sizes = payload.shape[2:]
        positions = torch.arange(sizes.numel(), dtype=at_least_float32(args[0].dtype)).view(1, 1, *sizes)
        picked = func(positions, *args[1:], **kwargs)
        return payload.flatten(2)[..., picked.flatten().long()].unflatten(2, picked.shape[2:])

    def _moved(self, value: Any) -> Any:
        if isinstance(value, list | tuple):
            return type(value)(self._moved(part) for part in value)
        if not isinstance(value, Tensor):
            return value
        payload = self.payload(value)
        if payload is not None:
            return payload
        if value.is_complex():  # inside of a leaf
            return value.to("cpu", torch.complex128)
        return self.lifted(value)

    def _cast(self, value: Tensor, kwargs: Any) -> Tensor:
        """The same numbers in another dtype or on another device."""
        payload = self.payload(value)
        assert payload is not None
        dtype = kwargs.get("dtype") or value.dtype
        if value.dtype != dtype:
            self._check_cast(value, dtype)
        layout = kwargs.get("memory_format") or torch.preserve_format
        return Traced(payload.clone(memory_format=layout), dtype, kwargs.get("device") or value.device)

    def _check_cast(self, value: Tensor, dtype: torch.dtype) -> None:
        """Refuse a cast that jumps by more than the arithmetic of the network does anyway."""
        kind = str(dtype).removeprefix("torch.")
        if self.inside:
            return
        if dtype.is_complex:
            raise NoRuleError(f"it makes complex numbers ({user_line()}); only real networks have rules")
        if value.dtype == torch.bool or not value.is_floating_point():
            if dtype.is_floating_point:
                return  # what uses it is asked for its rule
            raise NoRuleError(f"a value that depends on the input is cast to {kind} ({user_line()}), where it jumps")
        if not dtype.is_floating_point or dtype.itemsize < 2:
            raise NoRuleError(f"it rounds to {kind} ({user_line()}): a value that jumps is not Lipschitz")
        coarser = torch.finfo(dtype).eps > max(torch.finfo(self.dtype).eps, torch.finfo(value.dtype).eps)
        if coarser and not self.autocast:
            network = str(self.dtype).removeprefix("torch.")
            raise NoRuleError(
                f"it rounds to {kind} in a network of {network} ({user_line()}): a value that jumps is not Lipschitz; "
                f"cast the whole model, model.{kind}() or so, switch autocast on around the whole model, or leave the "
                "cast out"
            )

    def _write(self, op: str, func: Any, args: Any, kwargs: Any) -> Any:
        """A call in place: its result, written to where the first argument has its numbers."""
        target = args[0]
        self.writes = True
        if _overlaps_itself(target):
            raise NoRuleError(
                f"it writes into a view that holds some numbers several times ({user_line()}), one after another; "
                "write into a clone()"
            )
        for source in leaves_of(args[1:], kwargs):
            if self.payload(source) is not None and source.is_floating_point() and source.dtype != target.dtype:
                self._check_cast(source, target.dtype)
        if op == "copy":
            made = self._moved(args[1])
        elif op in ("fill", "zero"):
            value = args[1] if op == "fill" else 0.0
            made = self._moved(value if isinstance(value, Tensor) else torch.tensor(float(value), dtype=torch.float64))
        elif op == "as_strided" and _same_place(target, *args[1:]):
            return target  # torch does this to maps of one position
        elif op in ("squeeze", "unsqueeze", "t", "transpose", "resize", "set", "as_strided"):
            raise NoRuleError(
                f"{op}_ changes a shape in place ({user_line()}), which cannot be followed; use {op} (torch's "
                "recurrent layers and vmap do this: write a loop of cells, or calls on the batch)"
            )
        else:
            functional = getattr(getattr(torch.ops.aten, op, None), func._overloadname, None)
            if functional is None:
                raise NoRuleError(f"{func} has no rule ({user_line()})")
            like = self.shapes(func, args, kwargs)
            moves = op in MOVES and self._moves(op, func, args)
            made = self.move(functional, args, kwargs) if moves else self.compute(op, functional, args, kwargs, like)
        place = self.payload(target)
        assert place is not None
        place.copy_(made)
        return target

    def _place(self, target: Tensor) -> None:
        """Give a plain tensor a payload: a value that depends on the input is about to be written there."""
        if not self._is_new(target):
            raise NoRuleError(self._writes_into(target))
        known = self._given_away.get(address(target))
        if known is not None and not known.expired():
            raise NoRuleError(
                f"values that depend on the input are written into memory that numpy, or another dtype, reads as well "
                f"({user_line()}), where they cannot be followed"
            )
        storage = target.untyped_storage()
        whole = torch.empty(0, dtype=target.dtype, device=target.device).set_(storage)  # type: ignore[call-overload]
        raw = address(target) in self._raw
        payload = self._moved(whole if raw else self.step("memory", whole)).clone()
        if raw and payload.is_floating_point():
            payload.fill_(float("nan"))
        self._written[address(target)] = _Memory(payload, whole)
        self.place(payload, target.dtype)
        if whole.is_floating_point():
            whole.fill_(float("nan"))  # nobody may compute with what is no longer true

    def torchs_shapes(self, func: Any, args: Any, kwargs: Any) -> Any:
        """What torch returns, on its meta device: its own error where arguments do not fit."""

        def meta(value: Any) -> Any:
            if isinstance(value, Tensor):
                return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
            return torch.device("meta") if isinstance(value, torch.device) else value

        if func._schema.name in ("aten::index", "aten::masked_select", "aten::index_put", "aten::_unsafe_index"):
            # Their shape depends on the numbers of masks, which are constants.
            def meta(value: Any) -> Any:  # type: ignore[no-redef]
                if isinstance(value, Tensor):
                    return value if self.payload(value) is None else torch.empty(value.shape, dtype=value.dtype)
                return value

        elif func._schema.name.startswith("aten::_fft"):
            # The meta device lays out the result in another way than any other device.
            def meta(value: Any) -> Any:  # type: ignore[no-redef]
                if isinstance(value, Tensor):
                    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
                return value

        result = func(*mapped(meta, tuple(args)), **mapped(meta, kwargs))
        if func._schema.name == "aten::convolution":
            result = result.contiguous(memory_format=convolution_layout(args[0], args[1]))
        if not self.inside and any(isinstance(leaf, Tensor) and leaf.is_complex() for leaf in leaves_of(result)):
            raise NoRuleError(f"it makes complex numbers ({user_line()}); only real networks have rules")
        return result


@cache
def _about(func: Any) -> tuple[str, bool]:
    """The name of a function, and whether it is made of others.

    Rules are about ATen's own functions: one of somebody else's may have any name, and keeps its namespace.
    """
    namespace, base = func._schema.name.split("::")
    composite = torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd")
    return base if namespace == "aten" else func._schema.name, composite


@cache
def _writes(func: Any) -> list[tuple[int, str]]:
    """Positions and names of the arguments that a function writes to."""
    arguments = enumerate(func._schema.arguments)
    return [(i, a.name) for i, a in arguments if a.alias_info is not None and a.alias_info.is_write]


_DISABLED = Tensor.__torch_dispatch__


def _same_place(tensor: Tensor, size: Any, stride: Any, offset: Any = None) -> bool:
    """Whether another size and stride read the same numbers in the same order."""
    strides = zip(tensor.shape, tensor.stride(), stride, strict=False)
    same = list(size) == list(tensor.shape) and all(old == new for n, old, new in strides if n > 1)
    return same and offset in (None, tensor.storage_offset())


def _overlaps_itself(tensor: Tensor) -> bool:
    """Whether two entries of a tensor are the same place in memory."""
    axes = sorted((stride, size) for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size > 1)
    reach = 0
    for stride, size in axes:
        if stride <= reach:
            places = torch.arange(1 + sum(step * (n - 1) for step, n in axes))
            places = places.as_strided(tensor.shape, tensor.stride())
            return len(places.unique()) < tensor.numel()
        reach += stride * (size - 1)
    return False


def convolution_layout(x: Tensor, weight: Tensor) -> torch.memory_format:
    """How torch lays out the result of a convolution, which its meta device does not say: by input and weight."""
    last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(x.ndim)
    known = last is not None and last in (suggest_memory_format(x), suggest_memory_format(weight))
    return last if known else torch.contiguous_format  # type: ignore[return-value]


def same_numbers(one: Tensor, two: Tensor) -> bool:
    """Whether two tensors are the same, bit by bit but for zeros' signs; nan is the same as nan."""
    if one.shape != two.shape or one.dtype != two.dtype or one.device != two.device or one.layout != two.layout:
        return False
    if one.is_complex():
        one, two = one.resolve_conj(), two.resolve_conj()
    floating = one.is_floating_point() or one.is_complex()
    return torch.equal(one, two) or (floating and torch.allclose(one, two, rtol=0.0, atol=0.0, equal_nan=True))


def has_memory(tensor: Tensor) -> bool:
    """Whether a tensor is a plain one, with numbers of its own."""
    return type(tensor) is not Traced and tensor.layout == torch.strided and not tensor.is_meta


def address(tensor: Tensor) -> int:
    """What tells memory apart, while it lives."""
    return tensor.untyped_storage()._cdata


def _nothing_drawn(func: Any, args: Any) -> bool:
    """Randomized slopes in eval mode, which are their mean."""
    return func._schema.name in ("aten::rrelu_with_noise", "aten::rrelu_with_noise_") and not (
        len(args) > 4 and args[4]
    )


def _written_arguments(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    given = (args[position] if position < len(args) else kwargs.get(name) for position, name in _writes(func))
    return [leaf for leaf in leaves_of(*given) if isinstance(leaf, Tensor)]


def _name_of(model: nn.Module, tensor: Tensor) -> str | None:
    for path, module in model.named_modules():
        for name, value in {**module.__dict__, **module._buffers, **module._parameters}.items():
            if isinstance(value, Tensor) and has_memory(value) and address(value) == address(tensor):
                return f"{path}.{name}" if path else name
    return None


def laid_out(payload: Tensor, like: Tensor) -> Tensor:
    """A payload in memory of its own, with the strides of a tensor: views and copies depend on these."""
    if payload.stride() == like.stride():
        return payload
    return torch.empty_strided(like.shape, like.stride(), dtype=payload.dtype).copy_(payload)


def paired(wrap: Callable[[Tensor, Tensor], Any], made: Any, like: Any) -> Any:
    """Results in the structure of ``like``, each made from a part of ``made`` and the tensor that it is like."""
    if isinstance(like, Tensor):
        return wrap(made, like)
    if isinstance(like, list | tuple):
        return type(like)(paired(wrap, *pair) for pair in zip(made, like, strict=True))
    return like


def user_line() -> str:
    """File, line and source of the innermost code of the model that is neither torch's nor ours."""
    frame: Any = sys._getframe(1)
    while frame is not None and frame.f_code is not run.__code__:
        if frame.f_globals.get("__name__", "").split(".")[0] not in ("torch", "trysquare"):
            name, number = frame.f_code.co_filename, frame.f_lineno
            source = linecache.getline(name, number).strip()
            return f"{name.rsplit('/', 1)[-1]}:{number}" + (f": {source}" if source else "")
        frame = frame.f_back
    return "inside of torch"


# The modules that a model calls are seen by a wrapper around ``nn.Module.__call__``, which is there only while
# something is traced and does nothing in other threads.
_TORCHS_CALL = nn.Module.__call__
_call = _TORCHS_CALL
_ACTIVE = threading.local()
_LOCK = threading.Lock()
_running = 0


def _watched_call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    shadow: Shadow | None = getattr(_ACTIVE, "shadow", None)
    if shadow is None:
        return _call(module, *args, **kwargs)
    # Left in place by an exception, so that the error can name the module.
    shadow.calls += 1
    shadow.given = [tuple(arg.shape[1:]) for arg in args if isinstance(arg, Tensor)]
    shadow.path.append(Frame(shadow.names.get(id(module), type(module).__name__) or "model", module, shadow.calls))
    result = shadow.call_module(module, args, kwargs)
    shadow.path.pop()
    return result


def calls_are_torchs_own() -> bool:
    """Whether nobody else has put something around the calls of all modules."""
    return _call is _TORCHS_CALL and nn.Module.__call__ in (_TORCHS_CALL, _watched_call)


@contextmanager
def _watching(shadow: Shadow) -> Iterator[None]:
    global _running, _call
    with _LOCK:
        if not _running:
            _call = nn.Module.__call__
        _running += 1
        nn.Module.__call__ = _watched_call  # type: ignore[method-assign]
    before = getattr(_ACTIVE, "shadow", None)
    _ACTIVE.shadow = shadow
    try:
        yield
    finally:
        _ACTIVE.shadow = before
        with _LOCK:
            _running -= 1
            if not _running:
                nn.Module.__call__ = _call  # type: ignore[method-assign]


def run(shadow: Shadow, args: Any, kwargs: Any) -> Any:
    """Run the model of ``shadow``; compiled parts run as the Python code that they are made of.

    Raises:
        NoRuleError: if it does something that cannot be followed.
        ValueError: if the model does not accept its inputs.
    """
    with ExitStack() as stack:
        if "torch._dynamo" in sys.modules:  # nothing is compiled before that is imported, which takes seconds
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        for context in (torch.no_grad(), _watching(shadow), _NoEscape(shadow)):
            stack.enter_context(context)
        try:
            with shadow:
                return shadow.model(*args, **kwargs)
        except (NoRuleError, TakesTokens):
            raise
        except Exception as error:
            name, module, _ = shadow.path[-1] if shadow.path else Frame("model", shadow.model, 0)
            shapes = ", ".join(map(str, shadow.given))
            wrong = misfit(module, shadow.given)
            how = f"does not accept an input of shape {shapes} (without the batch): {wrong}"
            raise ValueError(
                f"{class_name(module)} at {name!r} "
                + (how if wrong else f"fails on an input of shape {shapes} (without the batch): {error!r}")
            ) from error


class CopiesAndWrites(TorchDispatchMode):
    """Notes the calls that copy values or write to where they are, in a run of the model itself.

    Attributes:
        found: names of these calls and layouts of the values among their arguments.

    Args:
        inputs: what the model is called with.
    """

    def __init__(self, inputs: Sequence[Tensor]) -> None:
        super().__init__()
        self.found: list[tuple[str, Any]] = []
        self._values = {address(tensor): tensor for tensor in inputs}  # kept alive, so that addresses are their own

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, _about(func)[0]
        tensors = [t for t in leaves_of(args, kwargs) if isinstance(t, Tensor) and has_memory(t)]
        values = [t for t in tensors if address(t) in self._values]
        if not values:
            return func(*args, **kwargs)
        written = _written_arguments(func, args, kwargs)
        if _copies_or_writes(name):
            places = [
                Place(0, int(t.storage_offset()), tuple(t.shape), t.stride(), t.dtype).layout
                for t in tensors
                if address(t) in self._values or any(t is target for target in written)
            ]
            self.found.append((name, places))
        result = func(*args, **kwargs)
        for tensor in (*leaves_of(result), *written):
            if isinstance(tensor, Tensor) and has_memory(tensor):
                self._values[address(tensor)] = tensor
        return result

    def first_difference(self, steps: Sequence[Step]) -> str | None:
        """Where the copies and writes of a trace first differ from those of this run; ``None`` if they do not."""
        noted = [step for step in steps if _copies_or_writes(step.base)]
        for step, ran in zip_longest(noted, self.found):
            if step is None:
                return f"{ran[0]}, inside of torch"
            places = [leaf.layout for leaf in leaves_of(step.args) if isinstance(leaf, Place)]
            if (step.base, places) != ran:
                return f"{step.base}, {step.line}"
        return None


def _copies_or_writes(name: str) -> bool:
    if name == "as_strided_":  # writes nothing: torch's pooling calls it on what it made for itself
        return False
    return name in ("clone", "_to_copy") or (name.endswith("_") and not name.startswith("_"))


class TakesTokens(Exception):  # noqa: N818
    """The model looks its input up in a table, or casts it to integers: it takes tokens."""


def plain_structure(result: Any) -> Any:
    """Named tuples, data classes and the like of a model as dictionaries and lists that ``tree_map`` knows."""
    if isinstance(result, Tensor) or result is None:
        return result
    if isinstance(result, dict) or hasattr(result, "items"):
        return {str(name): plain_structure(part) for name, part in result.items()}
    if isinstance(result, list | tuple):
        return [plain_structure(part) for part in result]
    if hasattr(result, "__dataclass_fields__"):
        return {name: plain_structure(getattr(result, name)) for name in result.__dataclass_fields__}
    if isinstance(result, int | float | bool | str):
        return result
    raise NoRuleError(f"the model returns a {type(result).__name__}, in which tensors cannot be found; return tensors")


def input_like(model: nn.Module) -> Tensor:
    """A tensor of the dtype and device that the model's inputs should have: those of its first weight.

    Free tensors of our layers may be longer than the weight that is made of them, so they are asked last.
    """
    weights = (_own_weight(module) for module in model.modules())
    others = (t for t in (*model.parameters(), *model.buffers()))
    floats = (t for group in (weights, others) for t in group if t is not None and t.is_floating_point())
    return next(floats, torch.empty(0))


def _own_weight(module: nn.Module) -> Tensor | None:
    if isinstance(module, ParametrizedWeight) and parametrize.is_parametrized(module, "weight"):
        return module.parametrization.like
    return module._parameters.get("weight")


def require_dense(name: str, tensor: Tensor) -> None:
    """Refuse a tensor whose numbers are not there to be read.

    Raises:
        ValueError: if it is on the meta device, sparse, nested or in a layout of its own.
    """
    if tensor.is_nested:
        raise ValueError(f"{name}: found a nested tensor, which has no shape; stack its parts, or pad them")
    if tensor.layout != torch.strided:
        raise ValueError(f"{name}: found a tensor of layout {tensor.layout}; give a dense one, {name}.to_dense()")
    if tensor.is_meta:
        raise ValueError(f"{name}: found a tensor on the meta device, which holds no numbers; give one that does")


def require_plain_module(model: Any) -> None:
    """Refuse what cannot be followed call by call.

    Raises:
        TypeError: if it is no module, or a part of it is a program of TorchScript.
        ValueError: if its weights are on the meta device.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, not {type(model).__name__}: put a function in a module")
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            where = f"{name!r} of the model" if name else "the model"
            raise TypeError(
                f"{where} is scripted or traced by torch.jit, which cannot be followed: give the module itself"
            )
    for name, weight in (*model.named_parameters(), *model.named_buffers()):
        if weight.is_meta:
            raise ValueError(
                f"{name!r} of the model is on the meta device, which holds no numbers: load the weights first"
            )


def refuse_unreadable(model: nn.Module) -> None:
    """Refuse tensors without numbers, and training mode where it makes a difference.

    Raises:
        NoRuleError: naming the module, and what to do.
        ValueError: if the model is spread over processes.
    """
    refuse_sharded(model)
    for name, module in model.named_modules():
        where = f"{class_name(module)} at {name or 'model'!r}"
        if isinstance(module, torch.jit.ScriptModule):
            raise NoRuleError(f"{where} is TorchScript, whose calls cannot be watched; pass the module that it is from")
        for own, tensor in {**module.__dict__, **module._buffers, **module._parameters}.items():
            if not isinstance(tensor, Tensor):
                continue
            if is_lazy(tensor):
                raise NoRuleError(f"{own!r} of {where} has no shape yet: run the model on an input once")
            if tensor.is_meta:
                raise NoRuleError(f"{own!r} of {where} is on the meta device, which holds no numbers; load the weights")
        iterates = any(isinstance(hook, SpectralNorm) for hook in module._forward_pre_hooks.values())
        if module.training and (iterates or isinstance(module, _DIFFERENT_IN_TRAINING)):
            raise NoRuleError(
                f"{where} is in training mode, where it draws random numbers, uses and changes statistics of the "
                "batch, or changes its weight at every pass; call model.eval()"
            )


_DIFFERENT_IN_TRAINING = (_DropoutNd, nn.RReLU, _NormBase, BatchCentering, _SpectralNorm)


@contextmanager
def unchanged(model: nn.Module) -> Iterator[None]:
    """Context in which a model may run: its attributes and the states of random generators are put back afterwards.

    Raises:
        NoRuleError: if random numbers were drawn: by Python's or numpy's generators, which no dispatch mode sees.
    """
    attributes = [(module.__dict__, dict(module.__dict__)) for module in model.modules()]
    held = [(part, copy.copy(part)) for _, kept in attributes for part in kept.values() if _is_container(part)]
    chance = torch.get_rng_state(), random.getstate(), np.random.get_state()
    try:
        yield
        after = random.getstate(), np.random.get_state()
        if (
            after[0] != chance[1]
            or repr(after[1]) != repr(chance[2])
            or not torch.equal(torch.get_rng_state(), chance[0])
        ):
            raise NoRuleError(
                f"the forward pass of {class_name(model)} draws random numbers: it is not a fixed function"
            )
    finally:
        for current, kept in attributes:
            current.clear()
            current.update(kept)
        for part, kept in held:
            part.clear()
            part.extend(kept) if isinstance(part, list) else part.update(kept)
        torch.set_rng_state(chance[0])
        random.setstate(chance[1])
        np.random.set_state(chance[2])


def _is_container(value: Any) -> bool:
    return type(value) in (list, dict, set)
