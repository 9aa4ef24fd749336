"""Follow a network's forward pass, and the Lipschitz bound of every value in it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn.utils import parametrize

from trysquare.layers.base import ParametrizedWeight
from trysquare.lipschitz.functions import FUNCTIONS, Call, flatten_bounds
from trysquare.lipschitz.registry import NoRuleError, Shape, asked_for, find_rule, input_dtype, no_rule, way_out
from trysquare.operators import misfit
from trysquare.progress import track

# Samples of the batch that is sent through to learn the shapes: a number that seldom is the size of another axis, so
# that functions which move or mix the batch axis are seen.
_BATCH = 5
# Torch's hooks that set the weight before each pass: the rule is asked after it.
_HARMLESS_HOOKS = ("SpectralNorm", "WeightNorm")


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


class _Tracer(fx.Tracer):
    """Follows Python code down to modules that have a rule, and to torch's own."""

    def __init__(self) -> None:
        super().__init__(param_shapes_constant=True)
        self.path: list[str] = []

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return find_rule(m) is not None or super().is_leaf_module(m, module_qualified_name)

    def call_module(self, m: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        # Left in place by an exception, so that the error can name the module.
        self.path.append(self.path_of_module(m))
        result = super().call_module(m, forward, args, kwargs)
        self.path.pop()
        return result


def follow(model: nn.Module, input_shape: Sequence[int]) -> tuple[float, list[Step]]:
    """Certified bound of a network, and the steps that it is made of.

    Raises:
        NoRuleError: if a module or function has no rule, or the forward pass cannot be followed.
        ValueError: if the shape does not fit, or weights are not finite.
    """
    follower = followed(model, input_shape)
    return follower.result_bound, follower.steps


def followed(model: nn.Module, input_shape: Sequence[int]) -> _Follower:
    """What ``follow`` reads its answer from: the graph, and the bound of each of its nodes."""
    shape = _checked_shape(input_shape)
    model = getattr(model, "_orig_mod", model)
    if find_rule(model) is not None or _is_torch_leaf(model):
        model = nn.Sequential(model)
    follower = _Follower(_traced(model))
    with torch.no_grad():
        result = follower.run(input_like(model).new_zeros(_BATCH, *shape))
    if result is None:
        raise ValueError("the model returns nothing")
    return follower


def follow_part(part: nn.Module, shape: Shape) -> tuple[float, torch.dtype]:
    """Certified bound of a part of the module that a rule is asked about, and the dtype of what it returns.

    Args:
        part: a module that gets an input of ``shape`` and of the dtype that the rule is asked about.
        shape: shape of one input without the batch.
    """
    # In a Sequential, so that hooks of the part are seen.
    follower = _Follower(_traced(nn.Sequential(part)))
    with torch.no_grad():
        result = follower.run(input_like(part).new_zeros(_BATCH, *shape, dtype=input_dtype()))
    if not isinstance(result, Tensor):
        raise NoRuleError(f"{type(part).__name__} must return one tensor, not {type(result).__name__}")
    return follower.result_bound, result.dtype


def _checked_shape(input_shape: Sequence[int]) -> Shape:
    shape = tuple(input_shape)
    if not shape or not all(isinstance(size, int) and size > 0 for size in shape):
        raise ValueError(f"input_shape={input_shape!r} must be positive integers: one input without the batch")
    return shape


def _is_torch_leaf(model: nn.Module) -> bool:
    return type(model).__module__.startswith("torch.nn.modules") and not isinstance(model, nn.Sequential)


def input_like(model: nn.Module) -> Tensor:
    """A tensor of the dtype and device that the model's inputs should have: those of its first weight.

    Free tensors of our layers may be longer than the weight that is made of them, so they are asked last.
    """
    weights = (_own_weight(module) for module in model.modules())
    others = (t for t in (*model.parameters(), *model.buffers()))
    tensors = (t for group in (weights, others) for t in group if t is not None and t.is_floating_point())
    return next(tensors, torch.empty(0))


def _own_weight(module: nn.Module) -> Tensor | None:
    if isinstance(module, ParametrizedWeight) and parametrize.is_parametrized(module, "weight"):
        return module.parametrization.like
    return module._parameters.get("weight")


def _traced(model: nn.Module) -> fx.GraphModule:
    tracer, chance = _Tracer(), torch.get_rng_state()
    try:
        graph = tracer.trace(model)
    except Exception as error:
        where = tracer.path[-1] if tracer.path else ""
        module = model.get_submodule(where)
        raise NoRuleError(
            f"the forward pass of {type(module).__name__} at {where or 'the top'!r} cannot be followed by torch.fx "
            f"({error}). {way_out(type(module).__name__)}"
        ) from error
    if not torch.equal(chance, torch.get_rng_state()):
        raise NoRuleError("the forward pass draws random numbers: the network is not a fixed function")
    return fx.GraphModule(tracer.root, graph)


class _Follower(fx.Interpreter):
    """Runs a graph on a batch of zeros for its shapes, and the bounds along with it."""

    def __init__(self, graph: fx.GraphModule) -> None:
        super().__init__(graph)
        self.extra_traceback = False
        self.bounds: dict[fx.Node, Any] = {}
        self.steps: list[Step] = []
        self.result_bound = 0.0
        total = len(graph.graph.nodes)
        self._ticks = iter(track(range(total), "following the network", total))

    def run(self, *args: Any, **options: Any) -> Any:
        try:
            return super().run(*args, **options)
        finally:
            self._ticks.close()  # type: ignore[attr-defined]

    def run_node(self, n: fx.Node) -> Any:
        next(self._ticks, None)
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        inputs = _tensors((args, kwargs))
        versions = [value._version for value in inputs]
        value = self._run(n, args, kwargs)
        bound = self._bound(n, args, kwargs, value)
        self.bounds[n] = bound
        if isinstance(bound, float):
            self._check_batch(n, value, bound)
        for tensor, version in zip(inputs, versions, strict=True):
            if tensor._version != version:
                self._write_through(tensor, bound)
        return value

    def _run(self, n: fx.Node, args: Any, kwargs: Any) -> Any:
        if n.op == "call_module" and isinstance(self.fetch_attr(str(n.target)), nn.Embedding):
            args = (args[0].long(), *args[1:])
        try:
            return getattr(self, n.op)(n.target, args, kwargs)
        except Exception as error:
            shapes = [tuple(t.shape[1:]) for t in _tensors((args, kwargs))]
            module = self.fetch_attr(str(n.target)) if n.op == "call_module" else None
            raise ValueError(
                f"{_name(n)} does not accept an input of shape {', '.join(map(str, shapes))} (without the batch): "
                f"{misfit(module, shapes) or error}"
            ) from error

    def _bound(self, n: fx.Node, args: Any, kwargs: Any, value: Any) -> Any:
        if n.op == "placeholder":
            return 1.0 if isinstance(value, Tensor) else 0.0
        bounds, keyword_bounds = self._bounds_of(n.args), self._bounds_of(n.kwargs)
        depends = max([0.0, *flatten_bounds((bounds, keyword_bounds))])
        if n.op == "output":
            self.result_bound = math.sqrt(sum(b**2 for b in flatten_bounds(bounds)))
            return self.result_bound
        if n.op == "get_attr" or depends == 0:
            self._refuse_chance(n)
            return 0.0
        if n.op == "call_module":
            bound = self._module_bound(n, args, bounds, keyword_bounds)
        else:
            bound = self._function_bound(n, Call(args, kwargs, bounds, keyword_bounds, value))
        bound = math.nextafter(bound, math.inf) if bound > 0 else bound
        if math.isnan(bound):
            raise ValueError(f"{_name(n)} has no Lipschitz bound: it is not a number")
        self._record(n, args, value, bound, depends)
        return bound

    def _bounds_of(self, arguments: Any) -> Any:
        if isinstance(arguments, fx.Node):
            return self.bounds[arguments]
        if isinstance(arguments, dict):
            return {name: self._bounds_of(value) for name, value in arguments.items()}
        if isinstance(arguments, list | tuple):
            return tuple(self._bounds_of(value) for value in arguments)
        return 0.0

    def _module_bound(self, n: fx.Node, args: Any, bounds: Any, keyword_bounds: Any) -> float:
        module = self.fetch_attr(str(n.target))
        rule = find_rule(module)
        if rule is None:
            raise no_rule(module, str(n.target))
        self._refuse_hooks(module, str(n.target))
        if any(flatten_bounds(keyword_bounds)):
            raise NoRuleError(f"{type(module).__name__} at {n.target!r} gets inputs by keyword; pass them by position")
        shapes = [tuple(value.shape[1:]) for value in args if isinstance(value, Tensor)]
        each = [bound for value, bound in zip(args, bounds, strict=True) if isinstance(value, Tensor)]
        try:
            with asked_for(_dtype(args)):
                constants = rule(module, *shapes)
        except (ValueError, TypeError) as error:
            raise type(error)(f"{type(module).__name__} at {n.target!r}: {error}") from error
        constants = [constants] * len(each) if isinstance(constants, float | int) else list(constants)
        if not all(constant >= 0 for constant in constants):
            raise ValueError(
                f"the rule for {type(module).__name__} at {n.target!r} gave {constants}, "
                "which is not a Lipschitz constant"
            )
        return sum(float(constant) * bound for constant, bound in zip(constants, each, strict=True))

    @staticmethod
    def _refuse_hooks(module: nn.Module, name: str) -> None:
        unknown = [h for h in module._forward_pre_hooks.values() if type(h).__name__ not in _HARMLESS_HOOKS]
        if unknown or module._forward_hooks:
            raise NoRuleError(
                f"{type(module).__name__} at {name!r} has forward hooks, which can change what it computes; "
                "remove them first"
            )

    def _function_bound(self, n: fx.Node, call: Call) -> float:
        rule = FUNCTIONS.get(n.target)
        if rule is None:
            raise NoRuleError(
                f"no Lipschitz rule for {_function_name(n)} in the forward pass of {_owner(n)}. "
                f"{way_out(_owner_class(n))}"
            )
        try:
            return float(rule(call))
        except NoRuleError as error:
            raise NoRuleError(f"{_name(n)}: {error}. {way_out(_owner_class(n))}") from error
        except ValueError as error:
            raise ValueError(f"{_name(n)}: {error}") from error

    @staticmethod
    def _refuse_chance(n: fx.Node) -> None:
        if n.op != "get_attr" and ("rand" in str(n.target) or "bernoulli" in str(n.target)):
            raise NoRuleError(f"{_name(n)} draws random numbers: the network is not a fixed function")

    def _check_batch(self, n: fx.Node, value: Any, bound: float) -> None:
        if bound > 0 and n.op != "output":
            for tensor in _tensors(value):
                if tensor.ndim == 0 or tensor.shape[0] != _BATCH:
                    raise NoRuleError(
                        f"{_name(n)} moves or mixes the samples of a batch: it returns {tuple(tensor.shape)}"
                    )

    def _write_through(self, tensor: Tensor, bound: Any) -> None:
        """An operation in place: every name of that memory now has its bound."""
        memory = tensor.untyped_storage().data_ptr()
        for node, value in self.env.items():
            if isinstance(value, Tensor) and value.untyped_storage().data_ptr() == memory:
                self.bounds[node] = max(self.bounds[node], bound)

    def _record(self, n: fx.Node, args: Any, value: Any, bound: float, before: float) -> None:
        module = self.fetch_attr(str(n.target)) if n.op == "call_module" else None
        shapes = [tuple(t.shape[1:]) for t in _tensors(args)]
        made = [tuple(t.shape[1:]) for t in _tensors(value)]
        if not made:
            return
        kind = type(module).__name__.removeprefix("Parametrized") if module is not None else _function_name(n)
        self.steps.append(Step(_name(n), module, kind, shapes[0] if shapes else (), made[0], bound / before, bound))


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    return [t for part in value for t in _tensors(part)] if isinstance(value, list | tuple) else []


def _dtype(args: Any) -> torch.dtype:
    return next((t.dtype for t in _tensors(args) if t.is_floating_point()), torch.get_default_dtype())


def _function_name(n: fx.Node) -> str:
    return n.target if isinstance(n.target, str) else getattr(n.target, "__name__", str(n.target))


def _owner(n: fx.Node) -> str:
    stack = n.meta.get("nn_module_stack") or {}
    return repr(list(stack.values())[-1][0]) if stack else "the model"


def _owner_class(n: fx.Node) -> str:
    stack = n.meta.get("nn_module_stack") or {}
    if not stack:
        return "TheModel"
    owner = list(stack.values())[-1][1]
    return owner if isinstance(owner, str) else owner.__name__


def _name(n: fx.Node) -> str:
    if n.op == "call_module":
        return str(n.target)
    stack = n.meta.get("nn_module_stack") or {}
    path = list(stack.values())[-1][0] if stack else ""
    return f"{path}.{n.name}" if path else n.name
