"""Runs a model as it is, once, and writes down its calls in functional form.

Hooks, overrides, wrappers and all take part, because they run; nothing reads the source of a model. What a pass makes
is a ``Traced`` tensor, which has no memory, so that no number can leave unseen: ``.item()``, ``if x > 0`` and
``.numpy()`` raise where it depends on the input. Three layers do the work:

* ``Tracer``, a dispatch mode, sees every call of ATen. It refuses those that make the model another function at every
  pass: random numbers, and writes into tensors that the pass did not make.
* Torch's functionalization, which ``torch.compile`` and ``torch.export`` are built on, turns views and writes in place
  into calls without side effects. What shares memory, and what a write reaches, is torch's own knowledge. All that a
  pass makes goes through it, constants too, since values may be written there later.
* ``record.Recorder`` gets these calls.

What does not depend on the input, such as a weight that ``forward`` computes, is computed by torch as always, and is a
constant. ``torch.export`` itself is not used: its import takes seconds, it may not look at constants (``.item()``), and
layers take another way to their weights under it.
"""

from __future__ import annotations

import math
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.overrides import TorchFunctionMode

from trysquare import torch_internals
from trysquare.nn.linalg.precision import autocast_dtype, users_device
from trysquare.torch_internals import Args, Kwargs, Operator, TorchDispatchMode, tree_leaves, tree_map
from trysquare.verify.lipschitz.checks import input_like
from trysquare.verify.lipschitz.graph import Arguments, Frame, Graph, Inputs, NoRuleError, Shape, Value, class_name
from trysquare.verify.lipschitz.record import Recorded, Recorder, layout, name_of, user_line
from trysquare.verify.operators import misfit

# Ways to the memory of a tensor on which torch itself raises nothing.
_ESCAPES = frozenset([Tensor.storage, Tensor.untyped_storage, Tensor.share_memory_, Tensor.__reduce_ex__])

# Views that torch's functionalization takes for copies, and the same as what they are.
_SAFE = {
    "unsafe_split": torch.ops.aten.split.Tensor,
    "unsafe_split_with_sizes": torch.ops.aten.split_with_sizes.default,
}


class TakesTokens(Exception):  # noqa: N818
    """The model looks something up in a table, or casts an input to integers: it takes tokens.

    The arguments are the inputs that may be tokens, and the line, if none of them is looked up as it is.
    """


class Traced(Tensor):
    """What a model gets in place of everything that a pass makes: shape and dtype, but no memory.

    Attributes:
        functional: torch's functional tensor.
        tracer: who made it; a model may use it in another thread.
    """

    functional: Tensor
    tracer: Tracer
    __torch_function__ = torch_internals.no_torch_function  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, inside: Tensor, tracer: Tracer) -> Traced:
        """Wrap a value, a constant, or a functional tensor."""
        functional = inside if torch_internals.is_functional(inside) else torch_internals.to_functional(inside)
        made = torch_internals.without_memory(cls, functional)
        made.functional, made.tracer = functional, tracer
        return made

    @property
    def inside(self) -> Tensor:
        """What is inside now: ``Recorded`` if it depends on the input, and a plain constant otherwise."""
        torch_internals.synchronize(self.functional)
        return torch_internals.from_functional(self.functional)

    def __repr__(self) -> str:  # type: ignore[override]
        raise self._refusal("repr", f"it prints values ({user_line()}), and what is printed cannot be followed")

    def _refusal(self, name: str, reason: str) -> NoRuleError:
        """An error that counts even if the model, or another thread, catches it."""
        error = NoRuleError(reason)
        self.tracer.note_failure(name, error)
        return error

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Operator, types: Sequence[type], args: Args = (), kwargs: Kwargs | None = None
    ) -> object:
        own = [kind.__name__ for kind in types if not issubclass(kind, Traced)]
        value = next(leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Traced))
        raise value._refusal(
            str(func),
            f"{func} was called on a value of a trace outside of it, as in another thread, or made it a tensor of "
            f"another class ({', '.join(own) or 'that of a weight'}), which cannot be followed; make weights plain "
            "tensors first: nn.Parameter(weight.as_subclass(torch.Tensor))",
        )


class _NoEscape(TorchFunctionMode):
    """Refuses to hand out or to replace the memory of what a pass makes, which has none, and notes what failed."""

    def __init__(self, tracer: Tracer) -> None:
        super().__init__()
        self.tracer, self.recorder = tracer, tracer.recorder

    def __torch_function__(
        self, func: Callable[..., object], types: Sequence[type], args: Args = (), kwargs: Kwargs | None = None
    ) -> object:
        try:
            return self._called(func, args, kwargs or {})
        except Exception as error:
            self.tracer.note_failure(getattr(func, "__name__", str(func)), error)
            raise

    def _called(self, func: Callable[..., object], args: Args, kwargs: Kwargs) -> object:
        if not self.recorder.busy:
            replaces = getattr(func, "__self__", None) is Tensor.data and func.__name__ == "__set__"
            if replaces and any(isinstance(leaf, Traced | nn.Parameter) for leaf in args):
                raise NoRuleError(
                    f"it replaces what a tensor holds ({user_line()}), which cannot be followed; use copy_"
                )
            if func in _ESCAPES and isinstance(args[0], Traced):
                raise NoRuleError(
                    f"{func.__name__}() reads the memory of a value past torch ({user_line()}), where it cannot be "
                    "followed"
                )
        return func(*args, **kwargs)


class Tracer(TorchDispatchMode):
    """Makes the graph of a model.

    Args:
        model: what to trace.
        is_leaf: whether a module is kept as one node.
    """

    def __init__(self, model: nn.Module, is_leaf: Callable[[nn.Module], bool]) -> None:
        super().__init__()
        self.model, self.is_leaf = model, is_leaf
        self.around = autocast_dtype(input_like(model))
        self.recorder = Recorder(input_like(model).dtype, self.around is not None)
        self.names = {id(module): name for name, module in model.named_modules(remove_duplicate=False)}
        self.calls = 0  # of modules, so far
        self.given: list[Shape] = []  # shapes of the inputs of the last of them
        self.recording = False
        self._inputs: dict[int, int] = {}  # by address: the inputs that are not known to be tokens, in the first run
        self._made: dict[int, Tensor] = {}  # by address: what the first run made, kept alive
        self._failures: deque[str] = deque()  # names of torch's functions that raised in the first run
        self._refused: Exception | None = None  # the first error that was raised on values only
        self._where: tuple[Exception, Frame] | None = None  # the innermost module that an error came from

    def trace(self, given: Inputs, tokens: frozenset[int] = frozenset()) -> Graph:
        """Run the model on inputs (a list, or a dictionary by name): first as it is, then on values.

        The first run fills all caches with plain tensors, and raises torch's own errors.

        Args:
            given: the inputs.
            tokens: which of them are integers.
        """
        with parametrize.cached():
            inputs = tree_map(torch.clone, given)
            self._made = {_address(tensor): tensor for tensor in tree_leaves(inputs)}
            self._inputs = {address: k for k, address in enumerate(self._made) if k not in tokens}
            self._run(inputs)
            self.recording, self._made, self.calls = True, {}, 0
            result = self._run(tree_map(lambda leaf: Traced(self.recorder.new_input(leaf), self), given))
        if self._refused is not None:  # and the model has caught that
            error = self._refused
            raise (
                error
                if isinstance(error, NoRuleError)
                else NoRuleError(
                    f"{class_name(self.model)} goes on after an error that numbers would not have raised: {error}"
                )
            ) from error
        inside = tree_map(lambda leaf: leaf.inside if isinstance(leaf, Traced) else leaf, plain_structure(result))
        return self.recorder.graph(inside, tokens)

    def note_failure(self, name: str, error: Exception) -> None:
        """Note that a call has raised: on values alone, that is a refusal, which no ``except`` of a model undoes."""
        if not self.recording:
            self._failures.append(name)
        elif self._failures and self._failures[0] == name and not isinstance(error, NoRuleError):
            self._failures.popleft()
        elif self._refused is None:
            self._refused = error

    def note_place(self, error: Exception, frame: Frame) -> None:
        """Note the innermost module that an error comes from, so that the message can name it."""
        if self._where is None or self._where[0] is not error:
            self._where = error, frame

    def _run(self, inputs: Inputs) -> object:
        with ExitStack() as stack:
            if "torch._dynamo" in sys.modules:  # nothing is compiled before that is imported, which takes seconds
                stack.enter_context(torch.compiler.set_stance("force_eager"))
            for context in (torch.no_grad(), users_device(), _watching(self), _NoEscape(self)):
                stack.enter_context(context)
            try:
                with self:
                    return self.model(**inputs) if isinstance(inputs, dict) else self.model(*inputs)
            except (NoRuleError, TakesTokens):
                raise
            except Exception as error:
                known = self._where is not None and self._where[0] is error
                name, module, _ = self._where[1] if self._where and known else Frame("model", self.model, 0)
                where, shapes = f"{class_name(module)} at {name!r}", ", ".join(map(str, self.given))
                if self.recording:
                    raise NoRuleError(f"{where} cannot be followed ({user_line(error)}): {error}") from error
                wrong = misfit(module, self.given)
                how = f"does not accept an input of shape {shapes} (without the batch): {wrong}"
                fails = f"fails on an input of shape {shapes} (without the batch): {error!r}"
                raise ValueError(f"{where} {how if wrong else fails}") from error

    # -- every call of the pass

    def __torch_dispatch__(
        self, func: Operator, types: Sequence[type], args: Args = (), kwargs: Kwargs | None = None
    ) -> object:
        if self.recorder.busy:
            return func(*args, **(kwargs or {}))
        self.recorder.busy = True
        try:
            return self._called(func, args, kwargs or {})
        except NoRuleError as error:  # once more where function modes are switched off
            self.note_failure(name_of(func), error)
            raise
        finally:
            self.recorder.busy = False

    def _called(self, func: Operator, args: Args, kwargs: Kwargs) -> object:
        op, (is_composite, written_names, is_view) = name_of(func), _about(func)
        if is_composite:  # seen whole in inference mode; its parts are what has rules
            self.recorder.busy = False
            with self:
                return func.decompose(*args, **kwargs)
        if op in _SAFE:
            return self._called(_SAFE[op], args, kwargs)
        if op in ("rrelu_with_noise", "rrelu_with_noise_") and not _named(func, args, kwargs).get("training"):
            named = _named(func, args, kwargs)
            mean = (named.get("lower", 1 / 8) + named.get("upper", 1 / 3)) / 2
            func = torch.ops.aten.leaky_relu_.default if op[-1] == "_" else torch.ops.aten.leaky_relu.default
            return self._called(func, (args[0], mean), {})  # in eval mode torch computes just this
        if torch.Tag.nondeterministic_seeded in func.tags and "attention" not in op:
            raise NoRuleError(f"it draws random numbers ({func}, {user_line()}): it is not a fixed function")
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        written: list[Tensor] = []
        if written_names:
            named = _named(func, args, kwargs)
            given = [leaf for name in written_names for leaf in tree_leaves(named.get(name))]
            written = [leaf for leaf in given if isinstance(leaf, Tensor)]
            for tensor in written:
                if not isinstance(tensor, Traced) and _address(tensor) not in self._made:
                    raise NoRuleError(self._writes_into(tensor))
        if self._inputs and not self.recording:
            self._look_for_tokens(op, args, kwargs)
        if not any(isinstance(tensor, Traced) for tensor in tensors):
            known = {_address(tensor) for tensor in tensors if tensor.numel()} - {-1}
            result = func(*args, **kwargs)
            shared = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor) and _address(leaf) in known]
            if shared and not (self.recording or is_view or op == "_unsafe_view"):  # which torch knows to be a view
                raise NoRuleError(
                    f"{func} returns memory of what it is given and does not say so ({user_line()}): what a write "
                    "reaches cannot be followed"
                )
            return tree_map(lambda leaf: self._own(op, leaf, known), result)
        for tensor in tensors:
            if not isinstance(tensor, Traced) and type(tensor).__torch_dispatch__ is not Tensor.__torch_dispatch__:
                raise NoRuleError(
                    f"a weight is a {type(tensor).__name__}, which decides by itself what torch computes with it "
                    f"({user_line()}); make it a plain tensor first"
                )
        if not written:
            return tree_map(
                lambda leaf: Traced(leaf, self) if isinstance(leaf, Tensor) else leaf, _functional(func, args, kwargs)
            )
        return self._written(op, func, args, kwargs, written)

    def _written(self, op: str, func: Operator, args: Args, kwargs: Kwargs, written: list[Tensor]) -> Tensor:
        """Return a call in place."""
        if len(written) > 1 or not args or written[0] is not args[0] or not op.endswith("_"):
            raise NoRuleError(f"{func} writes into out=..., which has no rule ({user_line()}); do without out=")
        if torch.Tag.inplace_view in func.tags and not (op == "as_strided_" and _same_place(*args)):
            raise NoRuleError(
                f"{op} changes a shape in place ({user_line()}), which cannot be followed; use {op[:-1]} (torch's "
                "recurrent layers and vmap do this: write a loop of cells, or calls on the batch)"
            )
        target = written[0]
        assert isinstance(target, Traced)
        for source in tree_leaves((args[1:], kwargs)):
            if isinstance(source, Traced) and source.is_floating_point() and isinstance(source.inside, Recorded):
                self.recorder.check_cast(source, target.dtype)
        _functional(func, args, kwargs)
        if layout(target.inside) != layout(target):
            raise NoRuleError(
                f"it writes into a value ({op}, {user_line()}) in a way that changes its layout in memory here, so "
                "that later writes may reach other values; write into a clone()"
            )
        return target

    def _own(self, op: str, made: object, known: set[int]) -> object:
        """Return a new constant, that values may be written into; other names of what was there stay what they are."""
        if not isinstance(made, Tensor) or _address(made) < 0 or _address(made) in known:
            return made
        if not self.recording:
            self._made[_address(made)] = made
            return made
        if "empty" in op and made.is_floating_point():
            made.fill_(math.nan)  # nobody may read what nothing was written into
        return Traced(made, self)

    def _writes_into(self, tensor: Tensor) -> str:
        owners = (
            f"{path}.{name}" if path else name
            for path, module in self.model.named_modules()
            for name, value in {**module.__dict__, **module._buffers, **module._parameters}.items()
            if isinstance(value, Tensor) and _address(value) == _address(tensor)
        )
        found = next(owners, None)
        owner = f"its tensor {found!r}" if found else "a tensor that it did not make in this pass"
        return (
            f"the forward pass writes into {owner} ({user_line()}), so that it is not a fixed function; call "
            "model.eval(), and fix weights that are iterated on: torch.nn.utils.parametrize.remove_parametrizations("
            "module, 'weight')"
        )

    def _look_for_tokens(self, op: str, args: Args, kwargs: Kwargs) -> None:
        """Notice in the first run that the input should have been tokens."""
        looks_up = "embedding" in op
        looked_up = args[1] if looks_up else args[0] if op == "_to_copy" else None
        if looked_up is None or not looked_up.is_floating_point():
            return
        dtype = kwargs.get("dtype") or looked_up.dtype
        integers = not (dtype.is_floating_point or dtype.is_complex or dtype == torch.bool)
        direct = self._inputs.get(_address(looked_up))
        if looks_up or (integers and direct is not None):
            if direct is not None:
                raise TakesTokens(frozenset([direct]), "")
            raise TakesTokens(frozenset(self._inputs.values()), user_line())

    # -- modules

    def call_module(self, module: nn.Module, args: Args, kwargs: Kwargs) -> object:
        """Call a module; one that has a rule becomes a node, with what it computes inside of that."""
        if not self.recording:
            return _call(module, *args, **kwargs)
        recorder, inputs = self.recorder, [self._value(arg) for arg in args]
        before, start = recorder.nodes, len(recorder.nodes)
        values = [value for value in inputs if value is not None]
        is_whole = not kwargs and bool(values) and len(values) == len(inputs) and self.is_leaf(module)
        # Not where autocast, or a mode that changes what torch's functions do, is on around this call alone.
        is_whole = is_whole and autocast_dtype(args[0]) == self.around and torch_internals.function_modes() == 1
        if not is_whole:
            result = _call(module, *args, **kwargs)
            made = self._value(result)
            if inputs and inputs[0] is not None and made is not None:
                if start == len(recorder.nodes):
                    recorder.note_move("move", inputs[0], made)
                recorder.modules[recorder.path[-1].call] = Value(inputs[0].labels), Value(made.labels)
            return result
        label, recorder.nodes = recorder.next_label, []
        recorder.inside += 1
        try:
            result = _call(module, *args, **kwargs)
        finally:
            recorder.inside -= 1
            inner, recorder.nodes = recorder.nodes, before
        made = self._value(result)
        if made is None:
            raise NoRuleError(
                f"{class_name(module)} has a Lipschitz rule and returns {type(result).__name__}: a rule is about one "
                "tensor that depends on the input"
            )
        recorder.busy = True
        with torch_internals.without_function_modes():
            if bool(((made.labels.abs() < label) & (made.labels != 0)).any()):  # a part of what it was given
                recorder.nodes += inner
            else:
                result = Traced(recorder.leaf(values, made, inner), self)
        recorder.busy = False
        return result

    def _value(self, tensor: object) -> Recorded | None:
        """Return what is inside of an argument or result, if it depends on the input."""
        before, self.recorder.busy = self.recorder.busy, True
        inside = tensor.inside if isinstance(tensor, Traced) else None
        self.recorder.busy = before
        return inside if isinstance(inside, Recorded) else None


def _functional(func: Operator, args: Args, kwargs: Kwargs) -> object:
    """Return a call by torch's functionalization, on functional tensors."""
    inside = tree_map(lambda leaf: leaf.functional if isinstance(leaf, Traced) else leaf, (args, kwargs))
    return torch_internals.functionalized(func, *inside)


@cache
def _about(func: Operator) -> tuple[bool, list[str], bool]:
    """Whether a function is made of others, the arguments that it writes to, and whether it says that it is a view."""
    schema = func._schema
    written = [a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    return torch_internals.is_composite(func), written, any(r.alias_info is not None for r in schema.returns)


def _named(func: Operator, args: Args, kwargs: Kwargs) -> Arguments:
    return dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)) | kwargs


def _address(tensor: Tensor) -> int:
    """Return where the memory of a tensor is; -1 of one that has none, which no pass is known to have made."""
    try:
        return tensor.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):  # sparse ones, and wrappers
        return -1


def _same_place(tensor: Tensor, size: Sequence[int], stride: Sequence[int], offset: int | None = None) -> bool:
    """Whether another size and stride read the same numbers in the same order."""
    strides = zip(tensor.shape, tensor.stride(), stride, strict=False)
    same = list(size) == list(tensor.shape) and all(old == new for n, old, new in strides if n > 1)
    return same and offset in (None, tensor.storage_offset())


def plain_structure(result: object) -> object:
    """Named tuples, data classes and the like of a model as dictionaries and lists that ``tree_map`` knows."""
    if isinstance(result, Tensor | int | float | bool | str) or result is None:
        return result
    if isinstance(result, dict) or hasattr(result, "items"):
        return {str(name): plain_structure(part) for name, part in result.items()}
    if isinstance(result, list | tuple):
        return [plain_structure(part) for part in result]
    if hasattr(result, "__dataclass_fields__"):
        return {name: plain_structure(getattr(result, name)) for name in result.__dataclass_fields__}
    raise NoRuleError(f"the model returns a {type(result).__name__}, in which tensors cannot be found; return tensors")


# The modules that a model calls are seen by a wrapper around ``nn.Module.__call__``, which is there only while
# something is traced and does nothing in other threads.
_TORCHS_CALL = nn.Module.__call__
_call = _TORCHS_CALL
_ACTIVE = threading.local()
_LOCK = threading.Lock()
_running = 0


def _watched_call(module: nn.Module, *args: object, **kwargs: object) -> object:
    tracer: Tracer | None = getattr(_ACTIVE, "tracer", None)
    if tracer is None:
        return _call(module, *args, **kwargs)
    tracer.calls += 1
    tracer.given = [tuple(arg.shape[1:]) for arg in args if isinstance(arg, Tensor)]
    name = tracer.names.get(id(module), type(module).__name__) or "model"
    frame = Frame(name, module, tracer.calls)
    tracer.recorder.path.append(frame)
    try:
        return tracer.call_module(module, args, kwargs)
    except Exception as error:
        tracer.note_place(error, frame)
        raise
    finally:
        tracer.recorder.path.pop()


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
