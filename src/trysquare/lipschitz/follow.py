"""Follow a network's forward pass, and the Lipschitz bound of every value in it."""

from __future__ import annotations

import math
import operator
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.nn.utils import parametrize

from trysquare.layers.base import ParametrizedWeight
from trysquare.lipschitz import guards, upward
from trysquare.lipschitz.arguments import SideBySide
from trysquare.lipschitz.functions import FUNCTIONS
from trysquare.lipschitz.memory import Watch, bound_after, shares_memory, tensors
from trysquare.lipschitz.registry import NoRuleError, Shape, asked_for, find_rule, input_dtype, no_rule, way_out
from trysquare.progress import track

# Samples of the two batches that are sent through. What is seen with both does not depend on the size of the batch.
_BATCH, _SMALLER_BATCH = 5, 3
# The model is the only part of the module that is traced, so that hooks and overrides of its own are seen.
_ROOT = "model"
# Bounds of both batches agree to the rounding of their arithmetic.
_SAME_BOUND = 1e-9


@dataclass(frozen=True)
class Step:
    """One module or function that the input goes through.

    Attributes:
        name: path of the module, or of the module that calls the function with the function's name.
        module: the module, or ``None`` for a function.
        kind: class or function.
        input_shape: shape of its first input, without the batch.
        output_shape: shape of its output, without the batch.
        constant: its own Lipschitz bound; for sums and concatenations the bound of the result over the largest of the
            inputs'.
        bound: bound of everything up to and including it.
    """

    name: str
    module: nn.Module | None
    kind: str
    input_shape: Shape
    output_shape: Shape
    constant: float
    bound: float


def follow(model: nn.Module, input_shape: Sequence[int]) -> tuple[float, list[Step]]:
    """Certified bound of a network, and the steps that it is made of.

    Raises:
        NoRuleError: if a module or function has no rule, the forward pass cannot be followed, or is not a fixed
            function of each sample on its own.
        ValueError: if the shape does not fit, or weights are not finite.
    """
    shape = _checked_shape(input_shape)
    model = _uncompiled(model)
    guards.refuse_unreadable(model)
    follower, _ = _followed(model, shape, input_like(model))
    return follower.result_bounds[0], follower.steps


def follow_part(part: nn.Module, shape: Shape) -> tuple[float, torch.dtype]:
    """Certified bound of a part of the module that a rule is asked about, and the dtype of what it returns.

    Args:
        part: a module that gets an input of ``shape`` and of the dtype that the rule is asked about.
        shape: shape of one input without the batch.
    """
    guards.refuse_unreadable(part)
    follower, result = _followed(part, shape, input_like(part).to(input_dtype()))
    if not isinstance(result, Tensor):
        raise NoRuleError(f"{type(part).__name__} must return one tensor, not {type(result).__name__}")
    return follower.result_bounds[0], result.dtype


def _checked_shape(input_shape: Sequence[int]) -> Shape:
    shape = tuple(input_shape) if isinstance(input_shape, list | tuple) else ()
    if not shape or not all(isinstance(size, int) and not isinstance(size, bool) and size > 0 for size in shape):
        raise ValueError(f"input_shape={input_shape!r} must be positive integers: one input without the batch")
    return shape


def _uncompiled(model: nn.Module) -> nn.Module:
    """The module behind ``torch.compile``."""
    original = getattr(model, "_orig_mod", None)
    if not isinstance(original, nn.Module):
        return model
    guards.refuse_hooks_around(model)
    return original


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


def _followed(model: nn.Module, shape: Shape, like: Tensor) -> tuple[_Follower, Any]:
    """Follow two batches through the graph, and see that the model does with them what the graph does."""
    owner = type(model).__name__
    with torch.no_grad(), guards.untouched(model), guards.fixed(owner):
        graph = _traced(model)
        x = _random_inputs(graph, shape, like)
        follower = _Follower(graph)
        result = follower.run(x.clone())
        with _works_for_any_batch(owner):
            smaller = follower.again(x[:_SMALLER_BATCH].clone())
        pairs = [(result, model(x.clone())), (smaller, model(x[:_SMALLER_BATCH].clone()))]
    other_values = (
        f"{owner} returns other values than the graph that torch.fx made of its forward pass, which cannot see what "
        f"depends on the type of a value or on anything but the input. {way_out(owner)}"
    )
    for of_graph, of_model in pairs:
        guards.refuse_difference(tensors(of_graph), tensors(of_model), other_values)
    full, part = follower.dependent_results
    guards.refuse_difference(
        part,
        [tensor[:_SMALLER_BATCH] for tensor in full],
        f"the outputs of {owner} depend on the other samples of a batch. {way_out(owner)}",
    )
    if not math.isclose(*follower.result_bounds, rel_tol=_SAME_BOUND):
        raise NoRuleError(f"the Lipschitz bound of {owner} depends on the size of the batch. {way_out(owner)}")
    return follower, result


@contextmanager
def _works_for_any_batch(owner: str) -> Iterator[None]:
    try:
        yield
    except NoRuleError:
        raise
    except ValueError as error:
        raise NoRuleError(
            f"{owner} works for a batch of {_BATCH} and not for one of {_SMALLER_BATCH}: it does not treat the samples "
            f"of a batch one by one ({error}). {way_out(owner)}"
        ) from error


def _random_inputs(graph: fx.GraphModule, shape: Shape, like: Tensor) -> Tensor:
    """A batch of normal noise, or of tokens if an embedding is what takes it."""
    generator = torch.Generator().manual_seed(0)
    (entry,) = (node for node in graph.graph.nodes if node.op == "placeholder")
    words = [_vocabulary(graph, user) for user in entry.users if _is_embedding(graph, user)]
    if words:
        return torch.randint(min(words), (_BATCH, *shape), generator=generator).to(like.device)
    return torch.randn(_BATCH, *shape, generator=generator).to(like)


def _is_embedding(graph: nn.Module, node: fx.Node) -> bool:
    if node.op == "call_module":
        return isinstance(graph.get_submodule(str(node.target)), nn.Embedding)
    return node.target is F.embedding


def _vocabulary(graph: nn.Module, node: fx.Node) -> int:
    if node.op == "call_module":
        return int(graph.get_submodule(str(node.target)).num_embeddings)  # type: ignore[arg-type]
    table = node.args[1] if len(node.args) > 1 else node.kwargs.get("weight")
    known = isinstance(table, fx.Node) and table.op == "get_attr"
    return len(operator.attrgetter(str(table.target))(graph)) if known else 1  # type: ignore[union-attr]


class _Tracer(fx.Tracer):
    """Follows Python code down to modules that have a rule, and to torch's own."""

    def __init__(self) -> None:
        super().__init__(param_shapes_constant=True)
        self.path: list[str] = []
        self._autocast = _autocast()

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return find_rule(m) is not None or super().is_leaf_module(m, module_qualified_name)

    def call_module(self, m: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        # Left in place by an exception, so that the error can name the module.
        self.path.append(self.path_of_module(m))
        result = super().call_module(m, forward, args, kwargs)
        self.path.pop()
        return result

    def create_node(self, *args: Any, **kwargs: Any) -> fx.Node:
        # The graph has no record of contexts, so what they do to its operations would be lost.
        if _autocast() != self._autocast:
            raise NoRuleError("it switches autocast on or off inside; switch it around the whole model")
        return super().create_node(*args, **kwargs)


def _autocast() -> list[tuple[bool, torch.dtype]]:
    return [(torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)) for device in ("cpu", "cuda")]


def _traced(model: nn.Module) -> fx.GraphModule:
    root, tracer = nn.Sequential(OrderedDict({_ROOT: model})), _Tracer()
    try:
        graph = tracer.trace(root)
    except Exception as error:
        where = tracer.path[-1] if tracer.path else _ROOT
        kind = type(root.get_submodule(where)).__name__
        raise NoRuleError(
            f"the forward pass of {kind} at {_shown(where)!r} cannot be followed by torch.fx ({error}). {way_out(kind)}"
        ) from error
    for node in graph.nodes:
        # An attribute becomes a node where it is used: that of a value that is returned, outside of every module.
        node.meta["nn_module_stack"] = node.meta.get("nn_module_stack") or {_ROOT: (_ROOT, type(model))}
    return fx.GraphModule(tracer.root, graph)


class _Follower(fx.Interpreter):
    """Runs a graph on a batch of random inputs, and the bounds along with it.

    Attributes:
        bounds: of each node's value: ``None`` if it does not depend on the input.
        steps: what the input went through.
        result_bounds: bound of everything that the network returns, side by side, for each batch.
        dependent_results: the tensors among that which depend on the input, for each batch.
    """

    def __init__(self, graph: fx.GraphModule) -> None:
        super().__init__(graph)
        self.extra_traceback = False
        self.bounds: dict[fx.Node, float | None] = {}
        self.steps: list[Step] = []
        self.result_bounds: list[float] = []
        self.dependent_results: list[list[Tensor]] = []
        self._batch = 0
        # Rules of modules do not see the batch, so that the second one need not ask them again.
        self._constants: dict[fx.Node, tuple[list[Shape], list[float]]] = {}
        total = len(graph.graph.nodes)
        self._ticks = iter(track(range(total), "following the network", total))

    def run(self, *args: Any, **options: Any) -> Any:
        self._batch = len(args[0])
        try:
            return super().run(*args, **options)
        finally:
            self._ticks.close()  # type: ignore[attr-defined]

    def again(self, x: Tensor) -> Any:
        """Run another batch; the steps stay those of the first."""
        steps, self.steps, self.bounds = self.steps, [], {}
        try:
            return self.run(x)
        finally:
            self.steps = steps

    def run_node(self, n: fx.Node) -> Any:
        next(self._ticks, None)
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        watch = Watch((args, kwargs))
        value = self._run(n, args, kwargs)
        with self._named(n):
            self.bounds[n] = self._bound(n, args, kwargs, value)
            for tensor in watch.written():
                self._write_through(tensor, self.bounds[n])
        return value

    def call_module(self, target: Any, args: Any, kwargs: Any) -> Any:
        # A __call__ of its own is in the graph already.
        return nn.Module.__call__(self.fetch_attr(str(target)), *args, **kwargs)

    def _run(self, n: fx.Node, args: Any, kwargs: Any) -> Any:
        if n.op == "call_module" and find_rule(module := self.fetch_attr(str(n.target))) is None:
            raise no_rule(module, _shown(n.target))
        if n.op in ("call_module", "call_function") and _is_embedding(self.module, n):
            self._refuse_values_as_tokens(n, args)
        try:
            return getattr(self, n.op)(n.target, args, kwargs)
        except Exception as error:
            shapes = ", ".join(str(tuple(t.shape[1:])) for t in tensors((args, kwargs)))
            raise ValueError(
                f"{_name(n)} does not accept an input of shape {shapes} (without the batch): {error}"
            ) from error

    def _refuse_values_as_tokens(self, n: fx.Node, args: Any) -> None:
        if any(tensor.is_floating_point() for tensor in tensors(args[:1])):
            raise NoRuleError(
                f"{_name(n)} takes tokens, not values that were computed: an embedding jumps from one to the next, and "
                "has a Lipschitz constant only as the first layer"
            )

    @contextmanager
    def _named(self, n: fx.Node) -> Iterator[None]:
        """Say in errors of functions where they are, and how to give the module around them a rule."""
        try:
            yield
        except NoRuleError as error:
            if n.op == "call_module":
                raise
            raise NoRuleError(f"{_name(n)}: {error}. {way_out(_owner_class(n))}") from error
        except ValueError as error:
            if n.op == "call_module":
                raise
            raise ValueError(f"{_name(n)}: {error}") from error

    def _bound(self, n: fx.Node, args: Any, kwargs: Any, value: Any) -> float | None:
        if n.op == "placeholder":
            return 1.0
        bounds, keyword_bounds = self._bounds_of(n.args), self._bounds_of(n.kwargs)
        inputs = list(upward.flatten((bounds, keyword_bounds)))
        if n.op == "output":
            self.dependent_results.append(self._dependents(n.args, args))
            self.result_bounds.append(upward.side_by_side(inputs))
            return self.result_bounds[-1]
        if n.op == "get_attr" or not inputs:
            return None
        guards.refuse_complex(value)
        made = (
            self._module_rule(n, args, bounds, keyword_bounds)
            if n.op == "call_module"
            else self._function_rule(n, args, kwargs, bounds, keyword_bounds, value)
        )
        if made is None:
            return None
        if not _is_embedding(self.module, n):
            self._refuse_tokens(n)
        guards.refuse_jumps(value)
        guards.refuse_mixing(value, self._batch)
        if math.isnan(made.bound):
            raise ValueError(f"{_name(n)} has no Lipschitz bound: it is not a number")
        self._record(n, args, value, made)
        return made.bound

    def _bounds_of(self, arguments: Any) -> Any:
        if isinstance(arguments, fx.Node):
            return self.bounds[arguments]
        if isinstance(arguments, dict):
            return {name: self._bounds_of(value) for name, value in arguments.items()}
        if isinstance(arguments, slice):
            return self._bounds_of((arguments.start, arguments.stop, arguments.step))
        if isinstance(arguments, list | tuple):
            return tuple(self._bounds_of(value) for value in arguments)
        return None

    def _dependents(self, arguments: Any, values: Any) -> list[Tensor]:
        if isinstance(arguments, fx.Node):
            return tensors(values) if self.bounds[arguments] is not None else []
        if isinstance(arguments, dict):
            return [t for name, part in arguments.items() for t in self._dependents(part, values[name])]
        if isinstance(arguments, list | tuple):
            return [t for pair in zip(arguments, values, strict=True) for t in self._dependents(*pair)]
        return []

    def _module_rule(self, n: fx.Node, args: Any, bounds: Any, keyword_bounds: Any) -> upward.Combination:
        module, name = self.fetch_attr(str(n.target)), _shown(n.target)
        where = f"{type(module).__name__} at {name!r}"
        guards.refuse_hooks(module, name)
        others = [bound for value, bound in zip(args, bounds, strict=True) if not isinstance(value, Tensor)]
        if any(True for _ in upward.flatten((others, keyword_bounds))):
            raise NoRuleError(f"{where} gets inputs in a list or by keyword; pass them one by one, by position")
        shapes = [tuple(value.shape[1:]) for value in args if isinstance(value, Tensor)]
        if n not in self._constants or self._constants[n][0] != shapes:
            self._constants[n] = shapes, self._asked(module, where, shapes, args)
        each = [bound for value, bound in zip(args, bounds, strict=True) if isinstance(value, Tensor)]
        parts = zip(self._constants[n][1], each, strict=True)
        return upward.Combination([(constant, bound) for constant, bound in parts if bound is not None])

    @staticmethod
    def _asked(module: nn.Module, where: str, shapes: list[Shape], args: Any) -> list[float]:
        """One constant for each input, by the module's rule."""
        rule = find_rule(module)
        assert rule is not None
        try:
            with asked_for(_dtype(args)):
                answer = rule(module, *shapes)
        except OverflowError:
            answer = math.inf
        except (ValueError, TypeError) as error:
            raise type(error)(f"{where}: {error}") from error
        constants = [answer] * len(shapes) if isinstance(answer, float | int) else list(answer)
        if len(constants) != len(shapes) or not all(constant >= 0 for constant in constants):
            raise ValueError(f"the rule for {where} gave {constants}, which is not a Lipschitz constant for each input")
        return [float(constant) for constant in constants]

    @staticmethod
    def _function_rule(
        n: fx.Node, args: Any, kwargs: Any, bounds: Any, keyword_bounds: Any, value: Any
    ) -> upward.Combination | None:
        rule = FUNCTIONS.get(n.target)
        if rule is None:
            raise NoRuleError(f"no Lipschitz rule for {_function_name(n)} in the forward pass of {_owner_class(n)}")
        call = rule.call(args, kwargs, bounds, keyword_bounds, value)
        try:
            with asked_for(_dtype(args)):
                constants = rule(call)
        except OverflowError:
            constants = dict.fromkeys(call.bounds, math.inf)
        if constants is None:
            return None
        apart = isinstance(constants, SideBySide)
        named = constants.constants if isinstance(constants, SideBySide) else constants
        assert isinstance(named, dict)
        parts = [(constant, b) for name, constant in named.items() for b in upward.flatten(call.bounds.get(name))]
        return upward.Combination(parts, apart)

    def _refuse_tokens(self, n: fx.Node) -> None:
        for node in n.all_input_nodes:
            if node.op == "placeholder" and not self.env[node].is_floating_point():
                raise NoRuleError("tokens that do not go to an embedding have no Lipschitz constant")

    def _write_through(self, written: Tensor, bound: float | None) -> None:
        """Every other name of memory that was written into changes with it."""
        for node, value in self.env.items():
            for tensor in tensors(value):
                if not shares_memory(tensor, written):
                    continue
                if node.op == "get_attr":
                    raise NoRuleError(f"it writes into {_shown(node.target)!r}: it is not a fixed function")
                after = bound_after(tensor, self.bounds[node], written, bound)
                self.bounds[node] = after

    def _record(self, n: fx.Node, args: Any, value: Any, made: upward.Combination) -> None:
        module = self.fetch_attr(str(n.target)) if n.op == "call_module" else None
        shapes = [tuple(t.shape[1:]) for t in tensors(args)]
        results = [tuple(t.shape[1:]) for t in tensors(value)]
        if not results:
            return
        kind = type(module).__name__.removeprefix("Parametrized") if module is not None else _function_name(n)
        first = shapes[0] if shapes else ()
        self.steps.append(Step(_name(n), module, kind, first, results[0], made.constant, made.bound))


def _dtype(args: Any) -> torch.dtype:
    return next((t.dtype for t in tensors(args) if t.is_floating_point()), torch.get_default_dtype())


def _function_name(n: fx.Node) -> str:
    return n.target if isinstance(n.target, str) else getattr(n.target, "__name__", str(n.target))


def _shown(target: Any) -> str:
    """Path of a module or tensor as the model knows it; the model itself has the name of the root's only part."""
    return str(target).removeprefix(f"{_ROOT}.")


def _owner(n: fx.Node) -> tuple[str, str]:
    """Path and class of the module whose forward pass calls the function."""
    path, kind = list(n.meta["nn_module_stack"].values())[-1]
    return path, kind if isinstance(kind, str) else kind.__name__


def _owner_class(n: fx.Node) -> str:
    return _owner(n)[1].removeprefix("Parametrized")


def _name(n: fx.Node) -> str:
    if n.op == "call_module":
        return _shown(n.target)
    path = _owner(n)[0]
    return n.name if path == _ROOT else f"{_shown(path)}.{n.name}"
