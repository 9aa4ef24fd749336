"""The walk over a graph: every value of two batches, and the Lipschitz bound of it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from trysquare.lipschitz import guards, upward
from trysquare.lipschitz.arguments import SideBySide
from trysquare.lipschitz.functions import FUNCTIONS
from trysquare.lipschitz.memory import Watch, bound_after, shares_memory, tensors
from trysquare.lipschitz.registry import NoRuleError, Shape, asked_for, find_rule, no_rule, way_out
from trysquare.lipschitz.tracing import function_name, is_embedding, node_name, owner_class, shown
from trysquare.operators import misfit
from trysquare.progress import track


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


class Follower(fx.Interpreter):
    """Runs a graph on a batch of random inputs, and the bounds along with it.

    Attributes:
        bounds: of each node's value: ``None`` if it does not depend on the input.
        steps: what the input went through.
        result_bounds: bound of everything that the network returns, side by side, for each batch.
        dependent_results: the tensors among that which depend on the input, for each batch.

    Args:
        graph: what to run.
        dtype: that the network computes in.
    """

    def __init__(self, graph: fx.GraphModule, dtype: torch.dtype) -> None:
        super().__init__(graph)
        self.extra_traceback = False
        self.bounds: dict[fx.Node, float | None] = {}
        self.steps: list[Step] = []
        self.result_bounds: list[float] = []
        self.dependent_results: list[list[Tensor]] = []
        self._batch, self._dtype = 0, dtype
        # Rules of modules do not see the batch, so that the second one need not ask them again.
        self._constants: dict[fx.Node, tuple[list[Shape], list[float]]] = {}
        total = len(graph.graph.nodes)
        self._ticks = iter(track(range(total), "following the network", total))

    def run(self, *args: Any, **options: Any) -> Any:
        """Run a batch, and add to ``result_bounds`` and ``dependent_results``."""
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
        """Run one operation, and find the bound of its value."""
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
        """Run a module with the hooks that set its weight."""
        # A __call__ of its own is in the graph already.
        return nn.Module.__call__(self.fetch_attr(str(target)), *args, **kwargs)

    def _run(self, n: fx.Node, args: Any, kwargs: Any) -> Any:
        if n.op == "call_module" and find_rule(module := self.fetch_attr(str(n.target))) is None:
            raise no_rule(module, shown(n.target))
        if n.op in ("call_module", "call_function") and is_embedding(self.module, n):
            self._refuse_values_as_tokens(n, args)
        try:
            return getattr(self, n.op)(n.target, args, kwargs)
        except Exception as error:
            shapes = [tuple(t.shape[1:]) for t in tensors((args, kwargs))]
            module = self.fetch_attr(str(n.target)) if n.op == "call_module" else None
            raise ValueError(
                f"{node_name(n)} does not accept an input of shape {', '.join(map(str, shapes))} (without the batch): "
                f"{misfit(module, shapes) or error}"
            ) from error

    def _refuse_values_as_tokens(self, n: fx.Node, args: Any) -> None:
        if any(tensor.is_floating_point() for tensor in tensors(args[:1])):
            raise NoRuleError(
                f"{node_name(n)} takes tokens, not values that were computed: an embedding jumps from one to the next, "
                "and has a Lipschitz constant only as the first layer"
            )

    @contextmanager
    def _named(self, n: fx.Node) -> Iterator[None]:
        """Say in errors where they are, and how to register a rule."""
        kind, where = owner_class(n), node_name(n)
        if n.op == "call_module":
            kind = _class_name(self.fetch_attr(str(n.target)))
            where = f"{kind} at {where!r}"
        try:
            yield
        except NoRuleError as error:
            # The way out of an inner module has been named already.
            out = "" if "trysquare.lipschitz.rule" in str(error) else f". {way_out(kind)}"
            raise NoRuleError(f"{where}: {error}{out}") from error
        except (ValueError, TypeError) as error:
            raise type(error)(f"{where}: {error}") from error

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
        if not is_embedding(self.module, n):
            self._refuse_tokens(n)
        guards.refuse_jumps(value)
        guards.refuse_rounding(value, self._dtype)
        guards.refuse_mixing(value, self._batch)
        if math.isnan(made.bound):
            raise ValueError("its Lipschitz bound is not a number")
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
        module = self.fetch_attr(str(n.target))
        guards.refuse_hooks(module)
        others = [bound for value, bound in zip(args, bounds, strict=True) if not isinstance(value, Tensor)]
        if any(True for _ in upward.flatten((others, keyword_bounds))):
            raise NoRuleError("it gets inputs in a list or by keyword; pass them one by one, by position")
        if n.kwargs or any(value is not None and not isinstance(value, Tensor) for value in args):
            raise NoRuleError(
                "it gets arguments besides its inputs, which its rule does not see; set them in the module"
            )
        shapes = [tuple(value.shape[1:]) for value in args if isinstance(value, Tensor)]
        if n not in self._constants or self._constants[n][0] != shapes:
            self._constants[n] = shapes, self._asked(module, shapes, args)
        each = [bound for value, bound in zip(args, bounds, strict=True) if isinstance(value, Tensor)]
        parts = zip(self._constants[n][1], each, strict=True)
        return upward.Combination([(constant, bound) for constant, bound in parts if bound is not None])

    @staticmethod
    def _asked(module: nn.Module, shapes: list[Shape], args: Any) -> list[float]:
        """One constant for each input, by the module's rule."""
        rule = find_rule(module)
        assert rule is not None
        try:
            with asked_for(_dtype(args)):
                answer = rule(module, *shapes)
        except OverflowError:
            answer = math.inf
        constants = [float(c) for c in answer] if isinstance(answer, Sequence) else [float(answer)] * len(shapes)
        if len(constants) != len(shapes) or not all(constant >= 0 for constant in constants):
            raise ValueError(f"its rule gave {constants}, which is not a Lipschitz constant for each input")
        return constants

    @staticmethod
    def _function_rule(
        n: fx.Node, args: Any, kwargs: Any, bounds: Any, keyword_bounds: Any, value: Any
    ) -> upward.Combination | None:
        rule = FUNCTIONS.get(n.target)
        if rule is None:
            raise NoRuleError(f"no Lipschitz rule for {function_name(n)} in the forward pass of {owner_class(n)}")
        call = rule.call(args, kwargs, bounds, keyword_bounds, value)
        try:
            with asked_for(_dtype((args, kwargs))):
                constants = rule(call)
        except OverflowError:
            constants = dict.fromkeys(call.bounds, math.inf)
        except AttributeError as error:
            raise NoRuleError(f"no Lipschitz rule for {function_name(n)} with such arguments ({error})") from error
        if constants is None:
            return None
        apart = isinstance(constants, SideBySide)
        named = constants.constants if isinstance(constants, SideBySide) else constants
        assert isinstance(named, dict)
        if any(constant < 0 for constant in named.values()):
            raise ValueError(f"its rule gave {named}, which are not Lipschitz constants")
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
                    raise NoRuleError(f"it writes into {shown(node.target)!r}: it is not a fixed function")
                old = self.bounds[node]
                after = bound_after(tensor, old, written, bound)
                # Other tensors of a tuple need not have been written into.
                alone = isinstance(value, Tensor)
                self.bounds[node] = after if alone else max((b for b in (after, old) if b is not None), default=None)

    def _record(self, n: fx.Node, args: Any, value: Any, made: upward.Combination) -> None:
        module = self.fetch_attr(str(n.target)) if n.op == "call_module" else None
        shapes = [tuple(t.shape[1:]) for t in tensors(args)]
        results = [tuple(t.shape[1:]) for t in tensors(value)]
        if not results:
            return
        kind = _class_name(module) if module is not None else function_name(n)
        first = shapes[0] if shapes else ()
        self.steps.append(Step(node_name(n), module, kind, first, results[0], made.constant, made.bound))


def _dtype(args: Any) -> torch.dtype:
    return next((t.dtype for t in tensors(args) if t.is_floating_point()), torch.get_default_dtype())


def _class_name(module: nn.Module) -> str:
    return type(module).__name__.removeprefix("Parametrized")
