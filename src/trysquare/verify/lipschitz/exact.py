"""A model evaluated in float64, with a bound on the rounding errors of that.

The model runs as it is, under the same watch as when it is traced, and each call that computes is carried out in
float64. So the calls are those of the trace, one by one, and their gains say what an error of each does to the result.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from trysquare.verify.lipschitz.leaves import is_leaf
from trysquare.verify.lipschitz.rules import RULES
from trysquare.verify.lipschitz.shadow import (
    NoRuleError,
    Place,
    Shadow,
    Step,
    Traced,
    address,
    class_name,
    input_like,
    laid_out,
    leaves_of,
    mapped,
    paired,
    plain_structure,
    run,
    same_numbers,
    user_line,
)
from trysquare.verify.lipschitz.trace import Graph, Node


class Evaluator(Shadow):
    """Evaluates a model in float64, whatever its dtype: the payload is numbers.

    Each step must be that of the trace: the same call, on values from the same memory, with the same constants. So
    what is evaluated is the very function that was traced, whatever the model does between two passes.

    Weights are those that the model uses, rounded as it rounds them; values are not rounded to anything but float64.

    Args:
        model: what to evaluate.
        dtype: of its inputs.
        graph: its trace, at the same size of the batch.
        kept: constants of the trace by their ``id``, in float64 from the first pass on.
        observe: gets each call that computes, and each leaf after what it computes inside, as the ``Tracer`` sees
            them: name, arguments and results in float64.
    """

    def __init__(
        self, model: nn.Module, dtype: torch.dtype, graph: Graph, kept: dict[int, Tensor | None],
        observe: Callable[[dict[str, Any], list[Tensor]], None],
    ) -> None:  # fmt: skip
        super().__init__(model, dtype, is_leaf)
        self.observe, self.kept, self.graph = observe, kept, graph
        self.left, self.left_shapes = iter(graph.steps), iter(graph.shapes)

    def evaluate(self, inputs: Any) -> Any:
        """What the model returns for one input tensor, a list or a dictionary of them, in float64."""

        def made(tensor: Tensor) -> Traced:
            values = tensor.detach().cpu()
            values = values.to(torch.float64, copy=True) if values.is_floating_point() else values.clone()
            return self.noted(Traced(values.contiguous(), tensor.dtype, tensor.device))

        named = isinstance(inputs, dict)
        args = [] if named else [made(tensor) for tensor in ([inputs] if isinstance(inputs, Tensor) else inputs)]
        kwargs = {name: made(tensor) for name, tensor in inputs.items()} if named else {}

        def value(leaf: Any) -> Any:
            return leaf if (payload := self.payload(leaf)) is None else payload

        result = self.step("return", plain_structure(run(self, args, kwargs)))
        return tree_map(value, result)

    def step(self, name: str, args: Any) -> Any:
        """See that a step is that of the trace; returns its arguments with the constants of the trace."""
        expected = next(self.left, Step("end", None, "the end of the pass"))
        same_call = expected.name == name
        if not same_call or (different := self._difference(args, expected.args)):
            what = different if same_call else f"it calls {name.split('.')[0]}"
            raise NoRuleError(
                f"{class_name(self.model)} does not do the same for every batch of {self.graph.batch}: {what} "
                f"({user_line()}); it did {expected.base} ({expected.line}) when it was traced"
            )
        return self._with_constants(args, expected.args)

    def _difference(self, args: Any, expected: Any) -> str:
        """How arguments differ from those of the trace, if they do."""
        if isinstance(args, list | tuple) and isinstance(expected, list | tuple) and type(expected) is not Place:
            if len(args) != len(expected):
                return "arguments are others"
            return next(filter(None, map(self._difference, args, expected)), "")
        if isinstance(args, dict) and isinstance(expected, dict):
            return (
                "arguments are others"
                if args.keys() != expected.keys()
                else self._difference(list(args.values()), [expected[name] for name in args])
            )
        if (payload := self.payload(args)) is not None:
            same = isinstance(expected, Place) and self.place(payload, args.dtype) == expected
            return "" if same else "it takes values from somewhere else"
        if isinstance(args, Tensor):
            same = isinstance(expected, Tensor) and same_numbers(args.detach(), expected)
        else:
            same = type(args) is type(expected) and repr(args) == repr(expected)  # also where nan is not nan
        return "" if same else "a constant is another one"

    def _with_constants(self, args: Any, expected: Any) -> Any:
        if isinstance(args, list | tuple):
            return type(args)([self._with_constants(*pair) for pair in zip(args, expected, strict=True)])
        if isinstance(args, dict):
            return {name: self._with_constants(value, expected[name]) for name, value in args.items()}
        return expected if isinstance(args, Tensor) and isinstance(expected, Tensor) else args

    def shapes(self, func: Any, args: Any, kwargs: Any) -> Any:
        """What the trace knows."""
        return next(self.left_shapes)

    def lifted(self, constant: Tensor) -> Tensor:
        """A constant in float64; those of the trace are kept for other batches."""
        if (known := self.kept.get(id(constant))) is not None:
            return known
        lifted = constant.to("cpu", torch.bool if constant.dtype == torch.bool else torch.float64)
        if id(constant) in self.kept:
            self.kept[id(constant)] = lifted
        return lifted

    def number(self, value: Any) -> Any:
        """The number itself."""
        return value

    def call_module(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Call a module, and observe it if it is a leaf."""
        if not self.keeps_whole(module, args, kwargs):
            return super().call_module(module, args, kwargs)
        self.step("module", [self.path[-1].name, *args])
        inputs = [part for arg in args if (part := self.payload(arg)) is not None]
        self.inside += 1
        result = super().call_module(module, args, kwargs)
        self.inside -= 1
        made = self.payload(result)
        if made is None or address(made) in {address(part) for part in inputs}:
            return result
        self.step("end of module", [result])
        self.observe({str(i): part for i, part in enumerate(inputs)}, [made])
        copied = torch.empty_strided(made.shape, made.stride(), dtype=made.dtype).copy_(made)
        return self.noted(Traced(copied, result.dtype, result.device))

    def _check_cast(self, value: Tensor, dtype: torch.dtype) -> None:
        """The trace has seen all casts."""

    def compute(self, op: str, func: Any, args: Any, kwargs: Any, like: Any) -> Any:
        """Compute in float64."""

        def longer(value: Any) -> Any:
            if isinstance(value, Tensor):
                return self._moved(value)
            return torch.float64 if isinstance(value, torch.dtype) and value.is_floating_point else value

        exact, options = mapped(longer, tuple(args)), mapped(longer, kwargs)
        if op == "convolution" and exact[0].ndim == 4 and exact[0].shape[1] >= 32:
            # Twice as fast in float64 on a processor, where torch unfolds the input.
            exact = (exact[0].contiguous(memory_format=torch.channels_last), *exact[1:])
        result = func(*exact, **options)
        names = [argument.name for argument in func._schema.arguments]
        tensors = [leaf for leaf in leaves_of(result) if isinstance(leaf, Tensor)]
        self.observe(dict(zip(names, exact, strict=False)) | options, tensors)
        return paired(laid_out, result, like)


def all_calls(nodes: list[Node]) -> list[Node]:
    """The calls of a graph in the order in which they end: a leaf after what it computes inside."""
    calls = [node for node in nodes if not node.moves]
    return [call for node in calls for call in (*all_calls(node.inner), node)]


# What a leaf that is not made of calls with rules may be off by in float64, relative to its input and output: assumed.
_LEAF_ERROR = 1e-12
# Calls that have a rule only as a part of another.
_ROOTS = {"sqrt": "root", "pow": "root"}
# Products below 2^-1022 lose their digits; a result is a sum of at most 2^22 of them.
_UNDERFLOW = 2.0**-1000


class ExactEvaluation:
    """Evaluates a network in float64, and bounds the rounding error of that.

    If ``ṽ`` are the results of a call in float64 for the arguments that it really got, and ``δ`` their distance from
    the exact results for the same arguments, then the network's results are off by at most the sum over all calls of
    ``gain · |δ|``: replace the calls by exact ones, from the last to the first. The gains are those of the analysis,
    the distances the standard bounds of each kind of call, with the norms of this batch.

    Args:
        model: the network.
        graph: its calls.
        gains: of each call, by its ``id``, on what the network returns.
    """

    def __init__(self, model: nn.Module, graph: Graph, gains: dict[int, float]) -> None:
        self.model, self.graph, self.gains = model, graph, gains
        self.calls = all_calls(graph.nodes)
        self.dtype = input_like(model).dtype
        constants = (leaf for step in graph.steps for leaf in leaves_of(step.args) if isinstance(leaf, Tensor))
        self.kept: dict[int, Tensor | None] = dict.fromkeys(map(id, constants))
        self.jumps = 0.0  # of the error of the last batch, what jumps of functions add

    def __call__(self, inputs: Tensor) -> tuple[Any, float]:
        """Results of a batch in float64, and how far they are from the exact ones at most (l2, all together).

        Raises:
            NoRuleError: if the model does something else than it was analysed for.
            ValueError: if the batch has another size than what was analysed.
        """
        batch = len(next(iter(tree_leaves(inputs))))
        if batch != self.graph.batch:
            raise ValueError(f"a batch of {batch} must be of {self.graph.batch}, the size that the model was traced at")
        left = iter(self.calls)
        error, self.jumps = 0.0, 0.0

        def observe(args: dict[str, Any], out: list[Tensor]) -> None:
            nonlocal error
            error += self._contribution(next(left), args, out)

        result = Evaluator(self.model, self.dtype, self.graph, self.kept, observe).evaluate(inputs)
        return result, error * (1 + 1e-9)

    def _contribution(self, node: Node, args: dict[str, Any], out: list[Tensor]) -> float:
        """What the rounding of one call adds to the error of the results: infinite where that is not known."""
        gain = self.gains.get(id(node), 0.0)
        if not gain:
            return 0.0
        if node.op == "leaf":
            if any(id(inner) in self.gains for inner in node.inner):
                return 0.0
            size = sum(c * float(part.norm()) for c, part in zip(node.constants or [], args.values(), strict=False))
            local = _LEAF_ERROR * (float(out[0].norm()) + size)
        elif (rule := RULES.get(_ROOTS.get(node.op, node.op))) is not None and rule.rounding is not None:
            local = rule.rounding(args, out)
            if rule.jumps is not None:
                jump = rule.jumps(args, out)
                local, self.jumps = local + jump, self.jumps + gain * jump
        else:  # what has no rule of its own is a comparison, or a choice by one: these are exact
            return 0.0
        error = gain * (local + _UNDERFLOW * math.sqrt(out[0].numel()))
        return math.inf if math.isnan(error) else error
