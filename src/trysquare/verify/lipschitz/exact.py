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
    BATCH,
    NoRuleError,
    Shadow,
    Traced,
    address,
    class_name,
    convolution_layout,
    input_like,
    leaves_of,
    mapped,
    plain_structure,
    run,
)
from trysquare.verify.lipschitz.trace import Graph, Node, Value

# Calls that return as many tensors as sizes say.
_VARIABLE = frozenset(f"aten::{name}" for name in ("split", "split_with_sizes", "unbind", "unsafe_split"))


# Calls that torch makes, or not, by how numbers lie in memory.
_LAYOUT = frozenset(["alias", "clone", "contiguous", "view", "_reshape_alias", "_unsafe_view"])


class Evaluator(Shadow):
    """Evaluates a model in float64, whatever its dtype: the payload is numbers.

    Weights are those that the model uses, rounded as it rounds them; values are not rounded to anything but float64.

    Args:
        model: what to evaluate.
        dtype: of its inputs.
        is_leaf: as for the ``Tracer``.
        observe: gets each call that computes, and each leaf after what it computes inside, as the ``Tracer`` sees
            them: name, arguments and results in float64.
    """

    def __init__(
        self, model: nn.Module, dtype: torch.dtype, is_leaf: Callable[[nn.Module], bool],
        observe: Callable[[str, dict[str, Any], list[Tensor]], None],
    ) -> None:  # fmt: skip
        super().__init__(model, dtype, is_leaf)
        self.observe = observe
        self.kept: dict[Any, tuple[Tensor, Tensor]] = {}  # constants in float64
        self.dtypes: dict[Any, Any] = {}  # of what calls return

    def evaluate(self, inputs: Any) -> Any:
        """What the model returns for one input tensor, a list or a dictionary of them, in float64."""

        def made(tensor: Tensor) -> Traced:
            values = tensor.detach().cpu()
            values = values.to(torch.float64, copy=True) if values.is_floating_point() else values.clone()
            return Traced(values.contiguous(), tensor.dtype, tensor.device)

        named = isinstance(inputs, dict)
        args = [] if named else [made(tensor) for tensor in ([inputs] if isinstance(inputs, Tensor) else inputs)]
        kwargs = {name: made(tensor) for name, tensor in inputs.items()} if named else {}

        def value(leaf: Any) -> Any:
            return leaf if (payload := self.payload(leaf)) is None else payload

        return tree_map(value, plain_structure(run(self, args, kwargs)))

    def lifted(self, constant: Tensor) -> Tensor:
        """A constant in float64, which is kept for other batches unless the model makes it anew at every pass."""
        exact = torch.float64 if constant.dtype != torch.bool else torch.bool
        if constant.is_inference() or self._is_new(constant):
            return constant.detach().to("cpu", exact)
        layout = constant.dtype, constant.shape, constant.stride(), constant.storage_offset()
        key = address(constant), constant._version, layout
        if key not in self.kept:
            self.kept[key] = constant, constant.detach().to("cpu", exact)
        return self.kept[key][1]

    def number(self, value: Any) -> Any:
        """The number itself."""
        return value

    def call_module(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Call a module, and observe it if it is a leaf."""
        leaf = self.keeps_whole(module, args, kwargs)
        inputs = [part for arg in args if (part := self.payload(arg)) is not None] if leaf else []
        self.inside += leaf
        result = super().call_module(module, args, kwargs)
        self.inside -= leaf
        made = self.payload(result) if leaf else None
        shared = {part.untyped_storage()._cdata for part in inputs}
        if made is not None and made.untyped_storage()._cdata not in shared:
            self.observe("leaf", {str(i): part for i, part in enumerate(inputs)}, [made])
        return result

    def _check_cast(self, value: Tensor, dtype: torch.dtype) -> None:
        """The trace has seen all casts."""

    def _shapes(self, func: Any, args: Any, kwargs: Any) -> Any:
        """What a call returns: asked for once, since only dtypes are of interest, which depend on dtypes alone."""
        kinds = tuple((t.dtype, t.ndim == 0) for t in leaves_of(args, kwargs) if isinstance(t, Tensor))
        key = func, kinds, kwargs.get("dtype"), len(args[0]) if isinstance(args[0], list | tuple) else 0
        if func._schema.name in _VARIABLE:
            return super()._shapes(func, args, kwargs)
        if key not in self.dtypes:
            self.dtypes[key] = super()._shapes(func, args, kwargs)
        return self.dtypes[key]

    def compute(self, op: str, func: Any, args: Any, kwargs: Any) -> Any:
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
        if op == "convolution":  # what torch calls next may depend on strides
            layout = convolution_layout(args[0], args[1])
            result = result.contiguous(memory_format=layout)
            if layout is torch.contiguous_format:
                result = result.flatten().view(result.shape)
        names = [argument.name for argument in func._schema.arguments]
        tensors = [leaf for leaf in leaves_of(result) if isinstance(leaf, Tensor)]
        self.observe(op, dict(zip(names, exact, strict=False)) | options, tensors)
        return result


def _check_constants(node: Node, args: dict[str, Any], seen: dict[Any, Any]) -> None:
    """Refuse constants that are others than they were in the trace; what was ``seen`` before is not looked at again."""
    for name, value in args.items():
        if isinstance(value, Tensor) and seen.get((id(node), name)) is value:
            continue
        if node.op == "leaf" or name == "noise" or _same_constant(node.args.get(name), value):
            if isinstance(value, Tensor) and not isinstance(node.args.get(name), Value):
                seen[id(node), name] = value
        else:
            raise NoRuleError(
                f"{node.where()}: its constant {name!r} is not the same at every pass, or depends on the size of the "
                "batch: it is not a fixed function"
            )


def _same_constant(traced: Any, seen: Any) -> bool:
    """Whether an argument that does not depend on the input is the same for a batch of another size."""
    if isinstance(traced, Value) or traced is None or isinstance(seen, str | torch.dtype | torch.device):
        return True
    if isinstance(traced, Tensor) and isinstance(seen, Tensor):
        if traced.ndim and traced.shape != seen.shape and traced.shape[1:] == seen.shape[1:]:
            traced = traced[:1].expand(seen.shape)  # the same for every sample of the batch
        wide = torch.complex128 if traced.is_complex() else torch.float64
        one, two = traced.detach().to("cpu", wide), seen.to("cpu", wide)
        return one.shape == two.shape and torch.equal(one.nan_to_num(), two.nan_to_num())
    if isinstance(traced, list | tuple) and isinstance(seen, list | tuple):
        return len(traced) == len(seen) and all(map(_same_constant, traced, seen))
    return isinstance(traced, Tensor) or isinstance(seen, Tensor) or traced == seen


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
        self.seen: dict[Any, Any] = {}  # constants that are those of the trace
        self.dtype = input_like(model).dtype
        self.kept: dict[Any, Any] = {}
        self.dtypes: dict[Any, Any] = {}
        self.jumps = 0.0  # of the error of the last batch, what jumps of functions add

    def __call__(self, inputs: Tensor) -> tuple[Any, float]:
        """Results of a batch in float64, and how far they are from the exact ones at most (l2, all together).

        Raises:
            NoRuleError: if the model makes other calls than it was analysed for.
        """
        left = iter(self.calls)
        error, self.jumps = 0.0, 0.0

        def observe(op: str, args: dict[str, Any], out: list[Tensor]) -> None:
            nonlocal error
            node = next(left, None)
            if node is None or node.op != op:
                raise NoRuleError(
                    f"{class_name(self.model)} makes other calls for this batch than for one of {BATCH}: it does not "
                    "treat the samples one by one"
                )
            _check_constants(node, args, self.seen)
            error += self._contribution(node, args, out)

        evaluator = Evaluator(self.model, self.dtype, is_leaf, observe)
        evaluator.kept, evaluator.dtypes = self.kept, self.dtypes
        result = evaluator.evaluate(inputs)
        self._check_sequence(evaluator.sequence, len(next(iter(tree_leaves(inputs)))))
        return result, error * (1 + 1e-9)

    def _check_sequence(self, sequence: list[tuple[str, int]], batch: int) -> None:
        """Refuse a batch for which the model moves other numbers than it was analysed for."""
        known = self.graph.sequence
        if not self.graph.writes:  # whether something is copied or shared, by its layout, makes no difference
            known, sequence = ([call for call in calls if call[0] not in _LAYOUT] for calls in (known, sequence))
        same = len(sequence) == len(known)
        for (name, size), (expected, before) in zip(sequence, known, strict=False):
            # What takes a part of the batch may return as many numbers for each.
            same = same and name == expected and (size * BATCH == before * batch or size == before)
        if not same:
            raise NoRuleError(
                f"{class_name(self.model)} copies memory in one pass and shares it in another, by its layout, or makes "
                f"other calls for this batch of {batch} than for one of {BATCH}: it does not treat the samples one by "
                "one, or cannot be followed; write with clone() what is to be a copy"
            )

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
