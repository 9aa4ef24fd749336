"""One forward pass as a list of the computations that really happened, and of where every number came from.

A model runs as it is, with hooks, overrides, wrappers and all; nothing reads its source. Its input is a ``Traced``
tensor, which holds no numbers, so that no value can leave the trace unseen (``.item()``, ``if x > 0``, ``.numpy()``
raise). Everything that does not depend on the input, such as a weight that ``forward`` computes, is computed by torch
as always: it is a constant.

Each number that depends on the input is a *variable* with a number of its own, its *label*. A traced tensor carries the
labels of its entries; a negative label is the negative of a variable, 0 is a constant. Torch itself moves the labels:
what only moves numbers (views, slices, ``cat``, padding, writes into a part) is carried out on the labels by the very
same call. So aliasing, broadcasting and every padding with every sign are exact by construction. All other calls become
a ``Node``, which makes new variables from old ones.
"""

from __future__ import annotations

import copy
import linecache
import random
import sys
import threading
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cache
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
from torch.utils._pytree import tree_leaves, tree_map

from trysquare.layers.base import ParametrizedWeight
from trysquare.layers.centering import BatchCentering
from trysquare.linalg.precision import at_least_float32, autocast_dtype
from trysquare.operators import misfit

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
_REPEATING = frozenset(
    """
    cat expand gather im2col index index_select reflection_pad1d reflection_pad2d reflection_pad3d repeat
    replication_pad1d replication_pad2d replication_pad3d stack upsample_nearest1d upsample_nearest2d
    upsample_nearest3d _upsample_nearest_exact1d _upsample_nearest_exact2d _upsample_nearest_exact3d
    """.split()
)
_LOOKS = frozenset(["_local_scalar_dense", "equal", "is_nonzero", "nonzero", "unique_dim", "_unique2", "allclose"])
# Ways from a tensor to its memory that do not pass torch's dispatcher.
_ESCAPES = frozenset(
    [
        Tensor.numpy, Tensor.tolist, Tensor.__array__, Tensor.data_ptr, Tensor.storage, Tensor.untyped_storage,
        Tensor.__dlpack__, Tensor.__reduce_ex__, Tensor.share_memory_, Tensor.set_, Tensor.apply_, Tensor.map_,
        Tensor.map2_,
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


@dataclass
class Value:
    """An argument of a node that depends on the input.

    Attributes:
        labels: of its entries, at the time of the call.
    """

    labels: Tensor


class Frame(NamedTuple):
    """A module that is running: its name in the model, the module, and the number of this call of it."""

    name: str
    module: nn.Module
    call: int


@dataclass(eq=False)
class Node:
    """A call that computes.

    Attributes:
        op: its name: that of ATen's function without the overload, or ``"leaf"`` for a module that has a rule.
        args: arguments by name; those that depend on the input are ``Value``, all others are what they were.
        outputs: first label and shape of each tensor that it returned.
        floating: whether each of these holds real numbers that can change continuously.
        dtype: of the first of them.
        path: the modules that were running, outermost first.
        line: file, line and source of the code that made the call.
        inner: what a leaf computes inside.
        inner_labels: of what it returned there.
        changes: bounds of the arguments whose changes add up, by their ``id``: how the sum is best shared out.
        constants: of a leaf, one for each input, once they are known.
        norms: certified norms that are known already, by what the outputs are weighted with.
        range: of the singular values of a convolution, if that was met on the way.
        moves: whether it is none that computes, but a note of a call that moved numbers and may have repeated some.
    """

    op: str
    args: dict[str, Any]
    outputs: list[tuple[int, Shape]]
    floating: list[bool]
    dtype: torch.dtype
    path: tuple[Frame, ...]
    line: str
    inner: list[Node] = field(default_factory=list)
    inner_labels: list[Tensor] = field(default_factory=list)
    changes: dict[int, float] = field(default_factory=dict)
    constants: list[float] | None = None
    moves: bool = False
    norms: dict[bytes, Any] = field(default_factory=dict)
    range: Any = None

    @property
    def module(self) -> nn.Module | None:
        """The innermost module that was running."""
        return self.path[-1].module if self.path else None

    @property
    def name(self) -> str:
        """Path of that module."""
        return self.path[-1].name if self.path else ""

    @property
    def values(self) -> list[Value]:
        """The arguments that depend on the input."""
        return [leaf for leaf in tree_leaves(list(self.args.values())) if isinstance(leaf, Value)]

    @property
    def size(self) -> int:
        """Number of variables."""
        return sum(_numel(shape) for _, shape in self.outputs)

    @property
    def start(self) -> int:
        """First label."""
        return self.outputs[0][0]

    def where(self) -> str:
        """What an error calls it."""
        inside = f" of {class_name(self.module)} at {self.name!r}" if self.module is not None else ""
        return f"{self.op}{inside} ({self.line})"


def class_name(module: nn.Module | None) -> str:
    """Name of a module's class, without what torch puts in front of parametrized ones."""
    return type(module).__name__.removeprefix("Parametrized")


def _numel(shape: Sequence[int]) -> int:
    number = 1
    for size in shape:
        number *= size
    return number


def leaves_of(*values: Any) -> Iterator[Any]:
    """What is in arguments of ATen, which are nested in nothing but lists, tuples and dictionaries."""
    for value in values:
        kind = type(value)
        if kind is list or kind is tuple:
            yield from leaves_of(*value)
        elif kind is dict:
            yield from leaves_of(*value.values())
        elif isinstance(value, list | tuple):  # what torch returns with names
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

    Subclasses say what the payload is: labels (``Tracer``), or numbers in float64 (``trysquare.lipschitz.exact``).

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
        self.sequence: list[tuple[str, int]] = []  # all calls on values, and how many numbers they return
        self.writes = False  # whether any of them writes to where a value is
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

    def compute(self, op: str, func: Any, args: Any, kwargs: Any) -> Any:
        """Carry out a call that computes; returns payloads in the structure of the result."""
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
            if not _has_memory(value):
                return None
            if (memory := self._written.get(_address(value))) is not None:
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
        if op in FACTS:
            self.sequence.append((base, 0))
            return self._fact(func, args, kwargs)
        if written and (not in_place or len(written) > 1 or written[0] is not args[0]):
            raise NoRuleError(f"{func} writes into out=..., which has no rule ({user_line()}); leave out= away")
        made = self._write(op, func, args, kwargs) if in_place else self._fresh(op, func, args, kwargs)
        counted = made[0] if isinstance(made, tuple) else made  # the others are positions and statistics
        self.sequence.append((base, sum(leaf.numel() for leaf in leaves_of(counted) if isinstance(leaf, Tensor))))
        return made

    def _constant(self, func: Any, args: Any, kwargs: Any, written: list[Tensor]) -> Any:
        """A call that has nothing to do with the input: carried out, unless it is not the same at every pass."""
        for tensor in written:
            if not self._is_new(tensor):
                raise NoRuleError(self._writes_into(tensor))
            self._raw.discard(_address(tensor))
        self._refuse_chance(func, args)
        if func._schema.name == "aten::view" and func._overloadname == "dtype":
            self.give_away(args[0])
        result = func(*args, **kwargs)
        known = {_address(t) for t in leaves_of(args, kwargs) if isinstance(t, Tensor) and _has_memory(t)}
        for tensor in leaves_of(result):
            if isinstance(tensor, Tensor) and _has_memory(tensor) and (address := _address(tensor)) not in known:
                self._created[address] = StorageWeakRef(tensor.untyped_storage())
                (self._raw.add if "empty" in func._schema.name else self._raw.discard)(address)
        return result

    def give_away(self, tensor: Tensor) -> None:
        """Note that somebody can reach the memory of a plain tensor past torch: no value may be written there."""
        if self.payload(tensor) is None and _has_memory(tensor):
            self._given_away[_address(tensor)] = StorageWeakRef(tensor.untyped_storage())

    def _refuse_chance(self, func: Any, args: Any) -> None:
        if torch.Tag.nondeterministic_seeded in func.tags and not _nothing_drawn(func, args):
            raise NoRuleError(f"it draws random numbers ({func}, {user_line()}): it is not a fixed function")

    def _is_new(self, tensor: Tensor) -> bool:
        """Whether the model made this memory during this pass."""
        if not _has_memory(tensor):
            return False
        reference = self._created.get(_address(tensor))
        return reference is not None and not reference.expired()

    def _writes_into(self, tensor: Tensor) -> str:
        found = _name_of(self.model, tensor) if _has_memory(tensor) else None
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
        like = self._shapes(func, args, kwargs)
        given = next(t for t in leaves_of(args, kwargs) if self.payload(t) is not None)
        for part in leaves_of(like):
            if isinstance(part, Tensor) and part.is_floating_point() and given.is_floating_point():
                self._check_cast(given, part.dtype)
        if op in MOVES and self._moves(op, func, args):
            made = self.move(func, args, kwargs)
        else:
            made = self.compute(op, func, args, kwargs)
        return _paired(lambda payload, meta: Traced(payload, meta.dtype, given.device), made, like)

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
        self.writes = self.writes or isinstance(target, Traced)
        if _overlaps_itself(target):
            raise NoRuleError(
                f"it writes into a view that holds some numbers several times ({user_line()}), one after another; "
                "write into a clone()"
            )
        if not isinstance(target, Traced) and not self._is_new(target):
            raise NoRuleError(self._writes_into(target))
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
            self._shapes(func, args, kwargs)
            moves = op in MOVES and self._moves(op, func, args)
            made = self.move(functional, args, kwargs) if moves else self.compute(op, functional, args, kwargs)
        self._place(target).copy_(made)
        return target

    def _place(self, target: Tensor) -> Tensor:
        """Payload to write to; a plain tensor has one from its first value that depends on the input on."""
        if (payload := self.payload(target)) is not None:
            return payload
        known = self._given_away.get(_address(target))
        if known is not None and not known.expired():
            raise NoRuleError(
                f"values that depend on the input are written into memory that numpy, or another dtype, reads as well "
                f"({user_line()}), where they cannot be followed"
            )
        storage = target.untyped_storage()
        whole = torch.empty(0, dtype=target.dtype, device=target.device).set_(storage)  # type: ignore[call-overload]
        payload = self._moved(whole)
        payload = payload.clone() if payload.data_ptr() == whole.data_ptr() else payload
        if _address(target) in self._raw and payload.is_floating_point():
            payload.fill_(float("nan"))
        self._written[_address(target)] = memory = _Memory(payload, whole)
        if whole.is_floating_point():
            whole.fill_(float("nan"))  # nobody may compute with what is no longer true
        return memory.window(target)

    def _shapes(self, func: Any, args: Any, kwargs: Any) -> Any:
        """What a call returns, without numbers: the error of torch's own where arguments do not fit."""

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
    if x.ndim == 4 and torch.channels_last in (suggest_memory_format(x), suggest_memory_format(weight)):
        return torch.channels_last
    return torch.contiguous_format


def _has_memory(tensor: Tensor) -> bool:
    return type(tensor) is not Traced and tensor.layout == torch.strided and not tensor.is_meta


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _nothing_drawn(func: Any, args: Any) -> bool:
    """Randomized slopes in eval mode, which are their mean."""
    return func._schema.name == "aten::rrelu_with_noise" and not (len(args) > 4 and args[4])


def _written_arguments(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    given = (args[position] if position < len(args) else kwargs.get(name) for position, name in _writes(func))
    return [leaf for leaf in leaves_of(*given) if isinstance(leaf, Tensor)]


def _name_of(model: nn.Module, tensor: Tensor) -> str | None:
    for path, module in model.named_modules():
        for name, value in {**module.__dict__, **module._buffers, **module._parameters}.items():
            if isinstance(value, Tensor) and _has_memory(value) and _address(value) == _address(tensor):
                return f"{path}.{name}" if path else name
    return None


def _paired(wrap: Callable[[Tensor, Tensor], Any], made: Any, like: Any) -> Any:
    if isinstance(like, Tensor):
        return wrap(made, like)
    if isinstance(like, list | tuple):
        return type(like)(_paired(wrap, *pair) for pair in zip(made, like, strict=True))
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
    """Notes which calls copy values or write to where they are, in a run of the model itself.

    Attributes:
        names: of these calls; ``of`` has them of a trace.

    Args:
        inputs: what the model is called with.
    """

    def __init__(self, inputs: Sequence[Tensor]) -> None:
        super().__init__()
        self.names: list[str] = []
        self._values = {_address(tensor): tensor for tensor in inputs}  # kept alive, so that addresses are their own

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        given = (t for t in leaves_of(args, kwargs) if isinstance(t, Tensor) and _has_memory(t))
        if any(_address(tensor) in self._values for tensor in given):
            made = [t for t in leaves_of(result) if isinstance(t, Tensor)]
            for tensor in (*made, *_written_arguments(func, args, kwargs)):
                if _has_memory(tensor):
                    self._values[_address(tensor)] = tensor
            self.names += self.of([(_about(func)[0], 0)])
        return result

    @staticmethod
    def of(sequence: Sequence[tuple[str, int]]) -> list[str]:
        """Names of the copies and writes among calls."""
        names = (name for name, _ in sequence)
        return [name for name in names if name == "clone" or (name.endswith("_") and not name.startswith("_"))]


class TakesTokens(Exception):  # noqa: N818
    """The model looks its input up in a table, or casts it to integers: it takes tokens."""


@dataclass(eq=False)
class Graph:
    """What a forward pass computed.

    Attributes:
        nodes: in the order in which they ran.
        inputs: first label and shape of each input.
        result: what the model returned, with a ``Value`` for each tensor that depends on the input.
        tokens: whether the input is integers, which count as one-hot vectors.
        modules: first input and output of modules that take and return a tensor, by the number of the call.
        sequence: names of all calls on values, those that move numbers too, and how many numbers each returned.
        writes: whether any of them writes to where a value is: what such a write reaches depends on whether the calls
            before it copied, or not.
    """

    nodes: list[Node]
    inputs: list[tuple[int, Shape]]
    result: Any = None
    tokens: bool = False
    modules: dict[int, tuple[Value, Value]] = field(default_factory=dict)
    sequence: list[tuple[str, int]] = field(default_factory=list)
    writes: bool = False

    @property
    def outputs(self) -> list[Tensor]:
        """Labels of all that the model returned and depends on the input."""
        return [leaf.labels for leaf in tree_leaves(self.result) if isinstance(leaf, Value)]

    @property
    def tensors(self) -> list[Tensor]:
        """Everything that the model returned, constants too; of what depends on the input its labels."""
        values = (leaf.labels if isinstance(leaf, Value) else leaf for leaf in tree_leaves(self.result))
        return [value for value in values if isinstance(value, Tensor)]


class Calls:
    """Which call made a value.

    Args:
        nodes: calls, in the order in which they ran.
    """

    def __init__(self, nodes: list[Node]) -> None:
        blocks = sorted(((node.start, node) for node in nodes if node.size), key=lambda block: block[0])
        self._starts, self._nodes = [start for start, _ in blocks], [node for _, node in blocks]

    def maker(self, label: float) -> Node | None:
        """The call whose results have a label among them; ``None`` for an input, or a constant."""
        at = bisect_right(self._starts, abs(label)) - 1
        node = self._nodes[at] if at >= 0 else None
        return node if node is not None and abs(label) < node.start + node.size else None

    def makers(self, labels: Tensor) -> list[Node] | None:
        """The calls that made values; ``None`` if some of these are inputs."""
        left, found = labels[labels != 0].abs(), []
        while left.numel():
            node = self.maker(float(left[0]))
            if node is None:
                return None
            found.append(node)
            left = left[(left < node.start) | (left >= node.start + node.size)]
        return found

    def whole(self, labels: Tensor) -> Node | None:
        """The call whose first result values are: all of it and in its order, in whatever shape."""
        node = self.maker(float(labels.reshape(-1)[0])) if labels.numel() else None
        if node is None or _numel(node.outputs[0][1]) != labels.numel():
            return None
        expected = torch.arange(node.start, node.start + labels.numel(), dtype=torch.float64)
        return node if torch.equal(labels.reshape(-1), expected) else None


class Tracer(Shadow):
    """Makes the graph of a model: the payload is labels.

    Args:
        model: what to trace.
        dtype: of its inputs.
        is_leaf: whether a module is kept as one node.
    """

    def __init__(self, model: nn.Module, dtype: torch.dtype, is_leaf: Callable[[nn.Module], bool]) -> None:
        super().__init__(model, dtype, is_leaf)
        self.nodes: list[Node] = []
        self.modules: dict[int, tuple[Value, Value]] = {}
        self.inputs_end = 0
        self._next = 1

    def trace(self, shapes: Any, device: torch.device, tokens: bool) -> Graph:
        """Run the model on a batch of inputs of these shapes (a list for several, a dictionary for named ones)."""
        inputs: list[tuple[int, Shape]] = []

        def made(shape: Shape) -> Traced:
            labels, start = self._new((BATCH, *shape))
            inputs.append((start, (BATCH, *shape)))
            return Traced(labels, torch.int64 if tokens else self.dtype, device)

        args = [made(shape) for shape in shapes] if isinstance(shapes, list) else []
        kwargs = {name: made(shape) for name, shape in shapes.items()} if isinstance(shapes, dict) else {}
        self.inputs_end = self._next

        result = run(self, args, kwargs)
        values = tree_map(self._value, plain_structure(result))
        return Graph(self.nodes, inputs, values, tokens, self.modules, self.sequence, self.writes)

    def _value(self, leaf: Any) -> Any:
        """A tensor as it is now; everything else as it is."""
        if (payload := self.payload(leaf)) is None:
            # What was made in this pass may be written to later.
            return leaf.clone() if isinstance(leaf, Tensor) and self._is_new(leaf) else leaf
        if bool(payload.isnan().any()):
            raise NoRuleError(
                f"it uses memory that nothing was written into ({user_line()}): it is not a fixed function"
            )
        return Value(payload.clone())

    def lifted(self, constant: Tensor) -> Tensor:
        """Constants have the label 0."""
        return torch.zeros(constant.shape, dtype=torch.float64)

    def number(self, value: Any) -> Any:
        """As any constant."""
        return 0.0

    def _new(self, shape: Shape) -> tuple[Tensor, int]:
        start, self._next = self._next, self._next + _numel(shape)
        return torch.arange(start, self._next, dtype=torch.float64).view(shape), start

    def _is_input(self, labels: Tensor) -> bool:
        sizes = labels.abs()
        return bool(((sizes > 0) & (sizes < self.inputs_end)).all())

    def _check_cast(self, value: Tensor, dtype: torch.dtype) -> None:
        integers = not dtype.is_floating_point and not dtype.is_complex and dtype != torch.bool
        payload = self.payload(value)
        if payload is not None and self._is_input(payload):
            if integers and value.is_floating_point():
                raise TakesTokens
            if integers:
                return
            if not value.is_floating_point():
                raise NoRuleError(
                    f"tokens that do not go to an embedding have no Lipschitz constant ({user_line()}), and numbers "
                    "that are rounded to integers jump"
                )
        super()._check_cast(value, dtype)

    def _fresh(self, op: str, func: Any, args: Any, kwargs: Any) -> Any:
        if op == "embedding" and (indices := self.payload(args[1])) is not None and args[1].is_floating_point():
            if self._is_input(indices):
                raise TakesTokens
            raise NoRuleError(
                f"an embedding takes tokens, not values that were computed ({user_line()}): it jumps from one to the "
                "next, and has a Lipschitz constant only as the first layer"
            )
        return super()._fresh(op, func, args, kwargs)

    def compute(self, op: str, func: Any, args: Any, kwargs: Any) -> Any:
        """A new node."""
        names = [argument.name for argument in func._schema.arguments]
        bound = dict(zip(names, args, strict=False)) | kwargs

        depending = [leaf for leaf in tree_leaves(list(bound.values())) if self.payload(leaf) is not None]
        jumping = any(not leaf.is_floating_point() for leaf in depending)
        if jumping and not self.inside and op not in ("embedding", "where"):
            raise NoRuleError(
                f"{op} of integers or conditions that depend on the input ({user_line()}): they jump. Tokens have a "
                "Lipschitz constant only as what an embedding takes; whether the pieces of a function fit each other "
                "where a condition changes cannot be told from rounded numbers: write it with torch.where of what is "
                "compared, torch.maximum, torch.minimum or clamp, or register its constant with "
                "@trysquare.lipschitz.rule"
            )
        like = self._shapes(func, args, kwargs)
        node = self._node(op, {name: tree_map(self._value, given) for name, given in bound.items()}, like)
        return _paired(lambda part, _: part, self._payloads(node, like), like)

    def _node(self, op: str, args: dict[str, Any], like: Any) -> Node:
        tensors = [leaf for leaf in tree_leaves(like) if isinstance(leaf, Tensor)]
        outputs = []
        for tensor in tensors:
            outputs.append((self._next, tuple(tensor.shape)))
            self._next += tensor.numel()
        floating = [tensor.is_floating_point() for tensor in tensors]
        dtype = tensors[0].dtype if tensors else self.dtype
        node = Node(op, args, outputs, floating, dtype, tuple(self.path), user_line())
        self.nodes.append(node)
        return node

    def move(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Move labels; calls that may repeat some are kept in mind, for those who read an audit."""
        made = super().move(func, args, kwargs)
        op = func._schema.name.split("::")[-1].removesuffix("_")
        if op in _REPEATING and isinstance(made, Tensor):
            first = next(p for leaf in tree_leaves(args) if (p := self.payload(leaf)) is not None)
            self._note_move(op, first, made)
        return made

    def _note_move(self, op: str, before: Tensor, after: Tensor) -> None:
        args = {"input": Value(before.clone()), "output": Value(after.clone())}
        self.nodes.append(Node(op, args, [], [], self.dtype, tuple(self.path), user_line(), moves=True))

    @staticmethod
    def _payloads(node: Node, like: Any) -> Any:
        """Labels of the results, with the strides that torch gives them: views and copies depend on these."""
        made = []
        tensors = (leaf for leaf in leaves_of(like) if isinstance(leaf, Tensor))
        for (start, shape), tensor in zip(node.outputs, tensors, strict=True):
            labels = torch.arange(start, start + _numel(shape), dtype=torch.float64).view(shape)
            made.append(torch.empty_strided(shape, tensor.stride(), dtype=torch.float64).copy_(labels))
        return made[0] if len(made) == 1 else made

    def call_module(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Call a module; one that has a rule becomes a node, with what it computes inside of that."""
        if not self.keeps_whole(module, args, kwargs):
            before, inputs = len(self.nodes), [p.clone() for arg in args[:1] if (p := self.payload(arg)) is not None]
            result = super().call_module(module, args, kwargs)
            made = self.payload(result)
            if inputs and made is not None:
                if before == len(self.nodes):
                    self._note_move("move", inputs[0], made)
                self.modules[self.path[-1].call] = Value(inputs[0]), Value(made.clone())
            return result
        values = [Value(arg_payload.clone()) for arg in args if (arg_payload := self.payload(arg)) is not None]
        outer, self.nodes = self.nodes, []
        self.inside += 1
        result = super().call_module(module, args, kwargs)
        self.inside -= 1
        inner, self.nodes = self.nodes, outer
        if not isinstance(result, Traced):
            raise NoRuleError(
                f"{class_name(module)} has a Lipschitz rule and returns {type(result).__name__}: a rule is about one "
                "tensor that depends on the input"
            )
        shared = {value.untyped_storage()._cdata for arg in args if (value := self.payload(arg)) is not None}
        if result.payload.untyped_storage()._cdata in shared:  # what it returns is a part of what it was given
            self.nodes += inner
            return result
        shapes = [tuple(arg.shape) for arg in args]
        node = self._node("leaf", {"inputs": values, "shapes": shapes, "dtype": args[0].dtype}, result)
        node.inner, node.inner_labels = inner, [result.payload.clone()]
        return Traced(self._payloads(node, result), result.dtype, result.device)


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


def refuse_unreadable(model: nn.Module) -> None:
    """Refuse tensors without numbers, and training mode where it makes a difference.

    Raises:
        NoRuleError: naming the module, and what to do.
    """
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
