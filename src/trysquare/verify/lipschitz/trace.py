"""Runs a model as it is, once, and writes down its calls in functional form (``graph``).

Hooks, overrides, wrappers and all take part, because they run; nothing reads the source of a model. What depends on its
input is a ``Traced`` tensor, which has no memory, so that no number can leave unseen: ``.item()``, ``if x > 0``,
``.numpy()`` raise. Three layers of torch do the work:

* ``Tracer``, a dispatch mode, sees every call of ATen. It refuses those that make the model another function at every
  pass: random numbers, and writes into tensors that the pass did not make.
* Torch's functionalization, which ``torch.compile`` and ``torch.export`` are built on, turns views and writes in place
  into calls without side effects. Where memory is shared, and what a write reaches, is torch's own knowledge. All that a
  pass makes goes through it, constants too, since values may be written there later.
* ``_Recorded`` is what is inside: numbers of a random input, for shapes and strides (whether ``reshape`` copies depends
  on these), and the labels. Each call on it becomes a ``Step``.

What does not depend on the input, such as a weight that ``forward`` computes, is computed by torch as always, and is a
constant. ``torch.export`` itself is not used: importing it takes seconds, it refuses to read constants (``.item()``), and
layers that build their weights take another path under it. The private functions of torch here are those that
``torch._subclasses.functional_tensor`` uses, checked with torch 2.13.
"""

from __future__ import annotations

import linecache
import math
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from trysquare.nn.linalg.precision import autocast_dtype
from trysquare.verify.lipschitz.checks import input_like
from trysquare.verify.lipschitz.graph import (
    MOVES,
    Frame,
    Graph,
    Node,
    NoRuleError,
    Shape,
    Slot,
    Step,
    Value,
    class_name,
)
from trysquare.verify.operators import misfit

# Calls that make a constant with the shape or dtype of a value.
_FACTS = frozenset("empty_like full_like new_empty new_empty_strided new_full new_ones new_zeros".split())
_FACTS |= {"ones_like", "zeros_like"}
_LOOKS = frozenset("nonzero nonzero_static unique_dim _unique2 unique_consecutive".split())
_REPEATING = frozenset(
    """
    cat expand gather im2col index index_select reflection_pad1d reflection_pad2d reflection_pad3d repeat
    replication_pad1d replication_pad2d replication_pad3d stack upsample_nearest1d upsample_nearest2d
    upsample_nearest3d _upsample_nearest_exact1d _upsample_nearest_exact2d _upsample_nearest_exact3d
    """.split()
)
# Ways from a tensor to its memory that do not pass torch's dispatcher.
_ESCAPES = frozenset([
    Tensor.storage, Tensor.untyped_storage, Tensor.data_ptr, Tensor.numpy, Tensor.__array__, Tensor.tolist, Tensor.map2_,
    Tensor.__dlpack__, Tensor.__reduce_ex__, Tensor.share_memory_, Tensor.set_, Tensor.apply_, Tensor.map_,
])  # fmt: skip
_PLAIN = (Tensor, nn.Parameter)
_FUNCTIONALIZE = torch._C.DispatchKey.Functionalize


class TakesTokens(Exception):  # noqa: N818
    """The model looks its input up in a table, or casts it to integers: it takes tokens."""


def _without_memory(cls: type, like: Tensor) -> Any:
    return Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
        cls, like.shape, strides=like.stride(), storage_offset=like.storage_offset(), dtype=like.dtype,
        device=like.device,
    )  # fmt: skip


class Traced(Tensor):
    """What a model gets in the place of everything that a pass makes: shape and dtype, but no memory.

    Attributes:
        functional: torch's functional tensor, with a ``_Recorded`` inside if it depends on the input.
    """

    functional: Tensor

    @staticmethod
    def __new__(cls, functional: Tensor) -> Traced:
        """Wrap a functional tensor."""
        made = _without_memory(cls, functional)
        torch._C._set_throw_on_mutable_data_ptr(made)
        made.functional = functional
        return made  # type: ignore[no-any-return]

    @property
    def recorded(self) -> _Recorded | None:
        """What is inside now, if that depends on the input."""
        torch._sync(self.functional)
        inside = torch._from_functional_tensor(self.functional)
        return inside if isinstance(inside, _Recorded) else None

    def __repr__(self) -> str:  # type: ignore[override]
        raise NoRuleError(f"it prints values ({user_line()}), and what is printed cannot be followed")

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        own = [kind.__name__ for kind in types if not issubclass(kind, Traced)]
        raise NoRuleError(
            f"{func} was called on a value of a trace outside of it, or made it a tensor of another class "
            f"({', '.join(own) or 'Traced'}); such a model cannot be followed"
        )


class _Recorded(Tensor):
    """The inside of a value: numbers that it has for a random input, labels, and its place among the steps."""

    tracer: Tracer
    numbers: Tensor
    labels: Tensor
    slot: Slot

    @staticmethod
    def __new__(cls, tracer: Tracer, numbers: Tensor, labels: Tensor) -> _Recorded:
        """Give a value the next slot."""
        made = _without_memory(cls, numbers)
        made.tracer, made.numbers, made.labels = tracer, numbers, labels
        made.slot, tracer.slots = Slot(tracer.slots), tracer.slots + 1
        return made  # type: ignore[no-any-return]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        first = next(leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, _Recorded))
        return first.tracer.record(func, tuple(args), kwargs or {})


class _NoEscape(TorchFunctionMode):
    """Refuses to hand out or replace the memory of a value, which has none."""

    def __init__(self, tracer: Tracer) -> None:
        super().__init__()
        self.tracer = tracer

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not self.tracer.busy and any(isinstance(leaf, Traced) for leaf in args):
            name = getattr(func, "__name__", "")
            if func in _ESCAPES:
                raise NoRuleError(
                    f"{name}() reads or writes the memory of a value past torch, where it cannot be followed "
                    f"({user_line()})"
                )
            if name == "__set__" and getattr(func, "__self__", None) is not Tensor.requires_grad:
                raise NoRuleError(
                    f"it replaces what a tensor holds ({user_line()}), which cannot be followed; use copy_"
                )
        return func(*args, **(kwargs or {}))


class Tracer(TorchDispatchMode):
    """Makes the graph of a model.

    Args:
        model: what to trace.
        is_leaf: whether a module is kept as one node.
    """

    def __init__(self, model: nn.Module, is_leaf: Callable[[nn.Module], bool]) -> None:
        super().__init__()
        self.model, self.is_leaf, self.dtype = model, is_leaf, input_like(model).dtype
        self.names = {id(module): name for name, module in model.named_modules(remove_duplicate=False)}
        self.path: list[Frame] = []
        self.calls = 0  # of modules, so far
        self.given: list[Shape] = []  # shapes of the inputs of the last of them
        self.inside = 0  # of how many leaves
        self.recording = False
        self.busy = False  # whether what runs is ours, and not the model
        self.around = autocast_dtype(input_like(model))
        self.nodes: list[Node] = []
        self.steps: list[Step] = []
        self.modules: dict[int, tuple[Value, Value]] = {}
        self.slots = 0
        self._next = 1  # label
        self._inputs_end = 0
        self._inputs: frozenset[int] = frozenset()  # addresses, in the first run
        self._made: dict[int, Tensor] = {}  # by address: what a pass made, kept alive
        self._constants: dict[Any, Tensor] = {}

    def trace(self, given: Any, tokens: bool) -> Graph:
        """Run the model on inputs (a list, or a dictionary by name): first as it is, then on values.

        The first run fills all caches with plain tensors, and raises torch's own errors.
        """
        with parametrize.cached():
            inputs = tree_map(torch.clone, given)
            self._made = {_address(tensor): tensor for tensor in tree_leaves(inputs)}
            self._inputs = frozenset(self._made)
            self._run(inputs)
            self.recording, self._made, self.calls = True, {}, 0
            recorded = tree_map(self._input, given)
            self._inputs_end = self._next
            result = self._run(tree_map(lambda leaf: Traced(torch._to_functional_tensor(leaf)), recorded))
        values = tree_map(lambda leaf: leaf.recorded if isinstance(leaf, Traced) and leaf.recorded is not None else leaf,
                          plain_structure(result))  # fmt: skip
        first = [(int(leaf.labels.flatten()[0]), tuple(leaf.shape)) for leaf in tree_leaves(recorded)]
        plain = tree_map(
            lambda leaf: torch._from_functional_tensor(leaf.functional) if isinstance(leaf, Traced) else leaf, values
        )
        labelled = tree_map(lambda leaf: Value(leaf.labels) if isinstance(leaf, _Recorded) else leaf, plain)
        slots = tree_map(lambda leaf: leaf.slot if isinstance(leaf, _Recorded) else leaf, plain)
        return Graph(self.nodes, first, labelled, tokens, self.modules, self.steps, slots)

    def _input(self, numbers: Tensor) -> _Recorded:
        return _Recorded(self, numbers.clone(), self._new_labels(tuple(numbers.shape)))

    def _new_labels(self, shape: Shape) -> Tensor:
        start, self._next = self._next, self._next + math.prod(shape)
        return torch.arange(start, self._next, dtype=torch.float64).view(shape)

    def _run(self, inputs: Any) -> Any:
        with ExitStack() as stack:
            if "torch._dynamo" in sys.modules:  # nothing is compiled before that is imported, which takes seconds
                stack.enter_context(torch.compiler.set_stance("force_eager"))
            for context in (torch.no_grad(), _watching(self), _NoEscape(self)):
                stack.enter_context(context)
            try:
                with self:
                    return self.model(**inputs) if isinstance(inputs, dict) else self.model(*inputs)
            except (NoRuleError, TakesTokens):
                raise
            except Exception as error:
                name, module, _ = self.path[-1] if self.path else Frame("model", self.model, 0)
                where = f"{class_name(module)} at {name!r}"
                if self.recording:
                    raise NoRuleError(
                        f"{where} does something that cannot be followed ({user_line(error)}): {error}"
                    ) from error
                shapes = ", ".join(map(str, self.given))
                wrong = misfit(module, self.given)
                how = f"does not accept an input of shape {shapes} (without the batch): {wrong}"
                raise ValueError(
                    f"{where} "
                    + (how if wrong else f"fails on an input of shape {shapes} (without the batch): {error!r}")
                ) from error

    # -- every call of the pass

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.busy:
            return func(*args, **kwargs)
        self.busy = True
        try:
            return self._called(func, args, kwargs)
        finally:
            self.busy = False

    def _called(self, func: Any, args: Any, kwargs: Any) -> Any:
        op, is_composite, written_names = _about(func)
        if is_composite:  # seen whole in inference mode; its parts are what has rules
            self.busy = False
            with self:
                return func.decompose(*args, **kwargs)
        if op in ("rrelu_with_noise", "rrelu_with_noise_") and not (len(args) > 4 and args[4]):
            mean = ((args[2] if len(args) > 2 else 1 / 8) + (args[3] if len(args) > 3 else 1 / 3)) / 2
            func = torch.ops.aten.leaky_relu_.default if op[-1] == "_" else torch.ops.aten.leaky_relu.default
            return self._called(func, (args[0], mean), {})  # in eval mode torch computes just this
        leaves = tree_leaves((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        values = [tensor for tensor in tensors if isinstance(tensor, Traced)]
        if torch.Tag.nondeterministic_seeded in func.tags and "attention" not in op:
            raise NoRuleError(f"it draws random numbers ({func}, {user_line()}): it is not a fixed function")
        named = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)) | kwargs
        written = [leaf for name in written_names for leaf in tree_leaves(named.get(name)) if isinstance(leaf, Tensor)]
        for tensor in written:
            if not isinstance(tensor, Traced) and _address(tensor) not in self._made:
                raise NoRuleError(self._writes_into(tensor))
        if not self.recording:
            self._refuse_tokens(op, args, kwargs)
        if not values:
            made = func(*args, **kwargs)
            is_view = any(returned.alias_info is not None for returned in func._schema.returns)
            return made if is_view else tree_map(lambda leaf: self._own(op, leaf), made)
        foreign = next((t for t in tensors if type(t) not in (*_PLAIN, Traced) and _dispatches(t)), None)
        if foreign is not None:
            raise NoRuleError(
                f"a weight is a {type(foreign).__name__}, which decides by itself what torch computes with it "
                f"({user_line()}); make it a plain tensor first"
            )
        if written and (len(written) > 1 or written[0] is not args[0] or not op.endswith("_")):
            raise NoRuleError(f"{func} writes into out=..., which has no rule ({user_line()}); leave out= away")
        if torch.Tag.inplace_view in func.tags and not (op == "as_strided_" and _same_place(*args)):
            raise NoRuleError(
                f"{op} changes a shape in place ({user_line()}), which cannot be followed; use {op[:-1]} (torch's "
                "recurrent layers and vmap do this: write a loop of cells, or calls on the batch)"
            )
        if written and written[0].is_floating_point():
            for source in values[1:]:
                self._check_cast(source, written[0].dtype)
        made = _functionalized(func, args, kwargs)
        if not written:
            return tree_map(lambda leaf: Traced(leaf) if isinstance(leaf, Tensor) else leaf, made)
        torch._sync(args[0].functional)
        if _layout(torch._from_functional_tensor(args[0].functional)) != _layout(args[0]):
            raise NoRuleError(
                f"it writes into a value ({op}, {user_line()}) whose layout in memory torch then changes, so that later "
                "writes may reach other values; write into a clone()"
            )
        return args[0]

    def _own(self, op: str, made: Any) -> Any:
        """A new constant: of the first run its address, then a functional tensor that values may be written into."""
        if not isinstance(made, Tensor) or made.layout != torch.strided or made.is_meta:
            return made
        if "empty" in op and made.is_floating_point():
            made.fill_(math.nan)  # nobody may read what nothing was written into
        if self.recording:
            return Traced(torch._to_functional_tensor(made))
        self._made[_address(made)] = made
        return made

    def _writes_into(self, tensor: Tensor) -> str:
        found = next(
            (
                f"{path}.{name}" if path else name
                for path, module in self.model.named_modules()
                for name, value in {**module.__dict__, **module._buffers, **module._parameters}.items()
                if isinstance(value, Tensor) and _address(value) == _address(tensor)
            ),
            None,
        )
        owner = f"its tensor {found!r}" if found else "a tensor that it did not make in this pass"
        return (
            f"the forward pass writes into {owner} ({user_line()}), so that it is not a fixed function; call "
            "model.eval(), and fix weights that are iterated on: torch.nn.utils.parametrize.remove_parametrizations("
            "module, 'weight')"
        )

    def _refuse_tokens(self, op: str, args: Any, kwargs: Any) -> None:
        """Notice in the first run that the input should have been tokens."""
        looked_up = args[1] if op == "embedding" else args[0] if op == "_to_copy" else None
        if not isinstance(looked_up, Tensor) or not looked_up.is_floating_point():
            return
        integers = op == "embedding" or not (kwargs.get("dtype") or looked_up.dtype).is_floating_point
        if integers and kwargs.get("dtype") != torch.bool and _address(looked_up) in self._inputs:
            raise TakesTokens
        if op == "embedding":
            raise NoRuleError(
                f"an embedding takes tokens, not values that were computed ({user_line()}): it jumps from one to the "
                "next, and has a Lipschitz constant only as the first layer"
            )

    # -- calls on values, in functional form

    def record(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Carry out a call on numbers and labels, and note it as a step."""
        op = _about(func)[0]
        before, self.busy = self.busy, True
        try:
            return self._recorded(op, func, args, kwargs)
        finally:
            self.busy = before

    def _recorded(self, op: str, func: Any, args: Any, kwargs: Any) -> Any:
        leaves = tree_leaves((args, kwargs))
        values = [leaf for leaf in leaves if isinstance(leaf, _Recorded)]
        constants = [leaf for leaf in leaves if isinstance(leaf, Tensor) and not isinstance(leaf, _Recorded)]
        if any(t.layout != torch.strided for t in constants):
            raise NoRuleError(f"it computes with a sparse tensor ({func}, {user_line()}); make it dense: to_dense()")
        if any(t.is_meta for t in constants):
            raise NoRuleError(f"it computes with a tensor that holds no numbers ({func}, {user_line()})")
        args, kwargs = tree_map(self._as_now, (args, kwargs))
        numbers = func(*tree_map(_numbers, args), **tree_map(_numbers, kwargs))
        made = [leaf for leaf in tree_leaves(numbers) if isinstance(leaf, Tensor)]
        if not made or op in _LOOKS:
            raise NoRuleError(
                f"it decides by a value that depends on the input ({op.strip('_')}, {user_line()}): what it computes "
                "may jump there; write it with torch.where, torch.maximum or clamp"
            )
        if op in _FACTS:
            if len(values) > 1:
                raise NoRuleError(f"a constant tensor is filled with a value that depends on the input ({user_line()})")
            return numbers.fill_(math.nan) if "empty" in op and numbers.is_floating_point() else numbers
        self._check_results(op, func, values[0], made, kwargs)
        args, kwargs = tree_map(lambda leaf: leaf.slot if isinstance(leaf, _Recorded) else leaf, (args, kwargs))
        step = Step(op, func, args, kwargs, values[0].dtype)
        if op in MOVES and self._only_moves(op, func, tuple(args), leaves, values[0], made[0]):
            known = {value.slot: value.labels for value in values}
            labels = step.move(
                lambda leaf: known[leaf] if isinstance(leaf, Slot) else torch.zeros(leaf.shape).double(), lambda _: 0.0
            )
        else:
            step.node = self._node(op, func, step, values, made)
            labels = [step.node.labels(k) for k in range(len(made))]
        results = [_Recorded(self, *pair) for pair in zip(made, tree_leaves(labels), strict=True)]
        step.results = [result.slot for result in results]
        self.steps.append(step)
        if op in _REPEATING and len(results) == 1:
            self._note_move(op, values[0].labels, results[0].labels)
        left = iter(results)
        return tree_map(lambda leaf: next(left) if isinstance(leaf, Tensor) else leaf, numbers)

    def _as_now(self, leaf: Any) -> Any:
        """A constant as it is now, since it may be written to later; everything else as it is."""
        if not isinstance(leaf, Tensor) or isinstance(leaf, _Recorded):
            return leaf
        plain = leaf.detach()
        key = _address(plain), plain.storage_offset(), plain.dtype, plain.shape, plain.stride()
        if (known := self._constants.get(key)) is None or not same_numbers(known, plain):
            known = self._constants[key] = plain.clone()
        return known

    def _check_results(self, op: str, func: Any, value: _Recorded, made: list[Tensor], kwargs: Any) -> None:
        """Refuse results that jump by more than the arithmetic of the network does anyway."""
        if op == "view" and func._overloadname == "dtype":
            raise NoRuleError(f"it reads the same bits as other numbers ({user_line()}), which is not Lipschitz")
        if any(part.is_complex() for part in made) and not self.inside:
            raise NoRuleError(f"it makes complex numbers ({user_line()}); only real networks have rules")
        for part in made:
            if op == "_to_copy" or (value.is_floating_point() and part.is_floating_point()):
                self._check_cast(value, part.dtype)

    def _check_cast(self, value: Tensor, dtype: torch.dtype) -> None:
        """Refuse a cast that jumps by more than the arithmetic of the network does anyway."""
        if self.inside or value.dtype == dtype:
            return
        kind, line = str(dtype).removeprefix("torch."), user_line()
        integers = not dtype.is_floating_point and dtype != torch.bool
        if isinstance(value, _Recorded) and self._is_input(value.labels) and not value.is_floating_point():
            if integers:
                return
            raise NoRuleError(
                f"tokens that do not go to an embedding have no Lipschitz constant ({line}), and numbers that are "
                "rounded to integers jump"
            )
        if not value.is_floating_point():
            if dtype.is_floating_point:
                return  # what uses it is asked for its rule
            raise NoRuleError(f"a value that depends on the input is cast to {kind} ({line}), where it jumps")
        if not dtype.is_floating_point or dtype.itemsize < 2:
            raise NoRuleError(f"it rounds to {kind} ({line}): a value that jumps is not Lipschitz")
        if torch.finfo(dtype).eps > max(torch.finfo(self.dtype).eps, torch.finfo(value.dtype).eps) and not self.around:
            network = str(self.dtype).removeprefix("torch.")
            raise NoRuleError(
                f"it rounds to {kind} in a network of {network} ({line}): a value that jumps is not Lipschitz; cast the "
                f"whole model, model.{kind}() or so, switch autocast on around the whole model, or leave the cast out"
            )

    def _is_input(self, labels: Tensor) -> bool:
        sizes = labels.abs()
        return bool(((sizes > 0) & (sizes < self._inputs_end)).all())

    @staticmethod
    def _only_moves(op: str, func: Any, args: Any, leaves: list[Any], value: Tensor, made: Tensor) -> bool:
        """Whether a call moves numbers, and by constants alone.

        Raises:
            NoRuleError: if what it moves depends on the input, or it adds numbers up on the way.
        """
        if op == "where":
            return not isinstance(args[0], Slot)
        if op == "as_strided" and not (made.shape == value.shape and _layout(made) == _layout(value)):
            raise NoRuleError(f"as_strided reads memory by its address ({user_line()}), which has no rule; use views")
        if "reduce" in func._overloadname or (op == "index_put" and len(args) > 3 and args[3]):
            raise NoRuleError(f"{op} that adds up has no rule ({user_line()})")
        names = [argument.name for argument in func._schema.arguments]
        moved = dict(zip(names, args, strict=False))
        for name in ("index", "indices", "mask"):
            if any(isinstance(leaf, Slot) for leaf in tree_leaves(moved.get(name))):
                raise NoRuleError(f"an index or mask depends on the input ({op}, {user_line()}): what it selects jumps")
        return True

    def _node(self, op: str, func: Any, step: Step, values: list[_Recorded], made: list[Tensor]) -> Node:
        """A call that computes."""
        if not self.inside and op not in ("embedding", "where") and any(not v.is_floating_point() for v in values):
            raise NoRuleError(
                f"{op} of integers or conditions that depend on the input ({user_line()}): they jump. Tokens have a "
                "Lipschitz constant only as what an embedding takes; whether the pieces of a function fit each other "
                "where a condition changes cannot be told from rounded numbers: write it with torch.where of what is "
                "compared, torch.maximum, torch.minimum or clamp, or register its constant with "
                "@trysquare.lipschitz.rule"
            )
        known = {value.slot: Value(value.labels) for value in values}
        args, kwargs = step.arguments(lambda _, leaf: known.get(leaf, leaf) if isinstance(leaf, Slot) else leaf)
        names = [argument.name for argument in func._schema.arguments]
        return self._new_node(op, dict(zip(names, args, strict=False)) | kwargs, made)

    def _new_node(self, op: str, args: dict[str, Any], made: list[Tensor]) -> Node:
        outputs = []
        for part in made:
            outputs.append((self._next, tuple(part.shape)))
            self._next += part.numel()
        floating = [part.is_floating_point() for part in made]
        self.nodes.append(Node(op, args, outputs, floating, made[0].dtype, tuple(self.path), user_line()))
        return self.nodes[-1]

    def _note_move(self, op: str, before: Tensor, after: Tensor) -> None:
        args = {"input": Value(before), "output": Value(after)}
        self.nodes.append(Node(op, args, [], [], self.dtype, tuple(self.path), user_line(), moves=True))

    # -- modules

    def call_module(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Call a module; one that has a rule becomes a node, with what it computes inside of that."""
        if not self.recording:
            return _call(module, *args, **kwargs)
        inputs = [self._inside_of(arg) for arg in args]
        if not self._keeps_whole(module, inputs, kwargs):
            before = len(self.nodes)
            result = _call(module, *args, **kwargs)
            made = self._inside_of(result)
            if inputs and inputs[0] is not None and made is not None:
                if before == len(self.nodes):
                    self._note_move("move", inputs[0].labels, made.labels)
                self.modules[self.path[-1].call] = Value(inputs[0].labels), Value(made.labels)
            return result
        outer, self.nodes, start = self.nodes, [], self._next
        self.inside += 1
        result = _call(module, *args, **kwargs)
        self.inside -= 1
        inner, self.nodes = self.nodes, outer
        made = self._inside_of(result)
        if made is None:
            raise NoRuleError(
                f"{class_name(module)} has a Lipschitz rule and returns {type(result).__name__}: a rule is about one "
                "tensor that depends on the input"
            )
        self.busy = True
        if bool(((made.labels.abs() < start) & (made.labels != 0)).any()):  # it returns a part of what it was given
            self.nodes += inner
            self.busy = False
            return result
        given = [value for value in inputs if value is not None]
        about = {"inputs": [Value(v.labels) for v in given], "shapes": [tuple(v.shape) for v in given]}
        node = self._new_node("leaf", about | {"dtype": given[0].dtype}, [made])
        node.inner, node.inner_labels = inner, [made.labels]
        whole = _Recorded(self, made.numbers, node.labels())
        step = Step("leaf", None, (made.slot, *(v.slot for v in given)), {}, made.dtype, [whole.slot], node)
        self.steps.append(step)
        self.busy = False
        return Traced(torch._to_functional_tensor(whole))

    def _inside_of(self, value: Any) -> _Recorded | None:
        before, self.busy = self.busy, True
        try:
            return value.recorded if isinstance(value, Traced) else None
        finally:
            self.busy = before

    def _keeps_whole(self, module: nn.Module, inputs: list[Any], kwargs: Any) -> bool:
        """Whether a call of a module is one that its rule is about.

        Not where autocast, or a mode that changes what torch's functions do, is on around this call alone.
        """
        if kwargs or not inputs or any(value is None for value in inputs) or not self.is_leaf(module):
            return False
        return autocast_dtype(inputs[0]) == self.around and torch._C._len_torch_function_stack() == 1


def _functionalized(func: Any, args: Any, kwargs: Any) -> Any:
    """A call on functional tensors, by torch's functionalization."""
    include = torch._C._dispatch_tls_local_include_set() | torch._C.DispatchKeySet(_FUNCTIONALIZE)
    exclude = torch._C._dispatch_tls_local_exclude_set().remove(_FUNCTIONALIZE)
    args, kwargs = tree_map(lambda leaf: leaf.functional if isinstance(leaf, Traced) else leaf, (args, kwargs))
    with torch._C._ForceDispatchKeyGuard(include, exclude):
        views = torch._functionalize_enable_reapply_views(True)  # type: ignore[attr-defined]
        try:
            return func._op_dk(_FUNCTIONALIZE, *args, **kwargs)
        finally:
            torch._functionalize_enable_reapply_views(views)  # type: ignore[attr-defined]


@cache
def _about(func: Any) -> tuple[str, bool, list[str]]:
    """The name of a function, whether it is made of others, and the arguments that it writes to.

    Rules are about ATen's own functions: one of somebody else's may have any name, and keeps its namespace.
    """
    namespace, base = func._schema.name.split("::")
    composite = torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd")
    written = [a.name for a in func._schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    return base if namespace == "aten" else func._schema.name, composite, written


def _numbers(leaf: Any) -> Any:
    return leaf.numbers if isinstance(leaf, _Recorded) else leaf


def _dispatches(tensor: Tensor) -> bool:
    return type(tensor).__torch_dispatch__ is not Tensor.__torch_dispatch__


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr() if tensor.layout == torch.strided and not tensor.is_meta else 0


def _layout(tensor: Tensor) -> list[int]:
    return [step for step, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1]


def _same_place(tensor: Tensor, size: Any, stride: Any, offset: Any = None) -> bool:
    """Whether another size and stride read the same numbers in the same order."""
    strides = zip(tensor.shape, tensor.stride(), stride, strict=False)
    same = list(size) == list(tensor.shape) and all(old == new for n, old, new in strides if n > 1)
    return same and offset in (None, tensor.storage_offset())


def same_numbers(one: Tensor, two: Tensor) -> bool:
    """Whether two tensors are the same, bit by bit but for zeros' signs; nan is the same as nan."""
    if one.shape != two.shape or one.dtype != two.dtype or one.device != two.device or one.layout != two.layout:
        return False
    if one.is_complex():
        one, two = one.resolve_conj(), two.resolve_conj()
    floating = one.is_floating_point() or one.is_complex()
    return torch.equal(one, two) or (floating and torch.allclose(one, two, rtol=0.0, atol=0.0, equal_nan=True))


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


def user_line(error: BaseException | None = None) -> str:
    """File, line and source of the innermost code of the model that is neither torch's nor ours."""
    frames = []
    if error is not None:
        trace = error.__traceback__
        while trace is not None:
            frames.append((trace.tb_frame, trace.tb_lineno))
            trace = trace.tb_next
    else:
        frame: Any = sys._getframe(1)
        while frame is not None and frame.f_code is not Tracer._run.__code__:
            frames.insert(0, (frame, frame.f_lineno))
            frame = frame.f_back
    for frame, number in reversed(frames):
        if frame.f_globals.get("__name__", "").split(".")[0] not in ("torch", "trysquare"):
            name = frame.f_code.co_filename
            source = linecache.getline(name, number).strip()
            return f"{name.rsplit('/', 1)[-1]}:{number}" + (f": {source}" if source else "")
    return "inside of torch"


# The modules that a model calls are seen by a wrapper around ``nn.Module.__call__``, which is there only while
# something is traced and does nothing in other threads.
_TORCHS_CALL = nn.Module.__call__
_call = _TORCHS_CALL
_ACTIVE = threading.local()
_LOCK = threading.Lock()
_running = 0


def _watched_call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    tracer: Tracer | None = getattr(_ACTIVE, "tracer", None)
    if tracer is None:
        return _call(module, *args, **kwargs)
    # Left in place by an exception, so that the error can name the module.
    tracer.calls += 1
    tracer.given = [tuple(arg.shape[1:]) for arg in args if isinstance(arg, Tensor)]
    tracer.path.append(Frame(tracer.names.get(id(module), type(module).__name__) or "model", module, tracer.calls))
    result = tracer.call_module(module, args, kwargs)
    tracer.path.pop()
    return result


def calls_are_torchs_own() -> bool:
    """Whether nobody else has put something around the calls of all modules."""
    return _call is _TORCHS_CALL and nn.Module.__call__ in (_TORCHS_CALL, _watched_call)


@contextmanager
def _watching(tracer: Tracer) -> Iterator[None]:
    global _running, _call
    with _LOCK:
        if not _running:
            _call = nn.Module.__call__
        _running += 1
        nn.Module.__call__ = _watched_call  # type: ignore[method-assign]
    before = getattr(_ACTIVE, "tracer", None)
    _ACTIVE.tracer = tracer
    try:
        yield
    finally:
        _ACTIVE.tracer = before
        with _LOCK:
            _running -= 1
            if not _running:
                nn.Module.__call__ = _call  # type: ignore[method-assign]
