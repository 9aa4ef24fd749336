"""A traced program evaluated in float64, with a bound on the rounding errors of that.

What is evaluated are the steps of the trace, with the constants of the trace: the very function that was bounded.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from trysquare.torch_internals import tree_leaves, tree_map
from trysquare.verify.lipschitz.graph import Arguments, Graph, Inputs, Node
from trysquare.verify.lipschitz.record import NOT_NUMBERS, Slot, Step
from trysquare.verify.lipschitz.rules import RULES

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
        graph: the calls of a network.
        gains: of each call, by its ``id``, on what the network returns.
    """

    def __init__(self, graph: Graph, gains: dict[int, float]) -> None:
        self.graph, self.gains = graph, gains
        self.jumps = 0.0  # of the error of the last batch, what jumps of functions add
        self._constants: dict[int, Tensor] = {}
        last = {slot: number for number, step in enumerate(graph.steps) for slot in (*step.results, *step.slots)}
        for leaf in tree_leaves(graph.returned):
            last.pop(leaf, None)
        self._done: list[list[Slot]] = [[] for _ in graph.steps]  # values that nobody needs behind a step
        for slot, number in last.items():
            self._done[number].append(slot)

    def __call__(self, inputs: Tensor | Inputs) -> tuple[object, float]:
        """Results of a batch in float64, and how far they are from the exact ones at most (l2, all together).

        Args:
            inputs: one tensor, a list or a dictionary of them.

        Raises:
            ValueError: if the batch has another size than what was traced.
        """
        given = [tensor.detach().cpu() for tensor in tree_leaves(inputs)]
        if len(given[0]) != self.graph.batch:
            raise ValueError(f"a batch of {len(given[0])} must be of {self.graph.batch}, the size that was traced")
        numbers = [tensor.double() if tensor.is_floating_point() else tensor for tensor in given]
        known: dict[Slot, Tensor] = {Slot(number): tensor for number, tensor in enumerate(numbers)}
        error, self.jumps = 0.0, 0.0
        for step, done in zip(self.graph.steps, self._done, strict=True):
            args, results = self._carried_out(step, known)
            known.update(zip(step.results, results, strict=True))
            if step.node is not None:
                error += self._contribution(step.node, args, results)
            for slot in done:
                del known[slot]
        return tree_map(lambda leaf: known[leaf] if isinstance(leaf, Slot) else leaf, self.graph.returned), error * (
            1 + 1e-9
        )

    def in_short(self, error: float, dtype: torch.dtype) -> float:
        """Return what the error of the last batch would be in a shorter dtype."""
        return (error - self.jumps) * torch.finfo(dtype).eps / torch.finfo(torch.float64).eps + self.jumps

    def _carried_out(self, step: Step, known: dict[Slot, Tensor]) -> tuple[Arguments, list[Tensor]]:
        """Arguments of a step by name, and its results."""
        if step.op == "leaf":
            result, *inputs = (known[slot] for slot in step.args)
            return {str(number): value for number, value in enumerate(inputs)}, [result]

        def payload(leaf: Slot | Tensor) -> Tensor:
            return known[leaf] if isinstance(leaf, Slot) else self._in_float64(leaf)

        if step.node is None:
            return {}, tree_leaves(step.move(payload, lambda number: number))

        def longer(name: str, leaf: object) -> object:
            if isinstance(leaf, Tensor) and name in NOT_NUMBERS:
                return leaf.cpu()
            if isinstance(leaf, Slot | Tensor):
                return payload(leaf)
            return torch.float64 if isinstance(leaf, torch.dtype) and leaf.is_floating_point else leaf

        args, kwargs = step.arguments(longer)
        if step.op == "convolution" and args[0].ndim == 4 and args[0].shape[1] >= 32:
            # Twice as fast in float64 on a processor, where torch unfolds the input.
            args[0] = args[0].contiguous(memory_format=torch.channels_last)
        results = [leaf for leaf in tree_leaves(step.func(*args, **kwargs)) if isinstance(leaf, Tensor)]
        return dict(zip(step.names, args, strict=False)) | kwargs, results

    def _in_float64(self, constant: Tensor) -> Tensor:
        if id(constant) not in self._constants:
            longest = torch.complex128 if constant.is_complex() else torch.float64
            self._constants[id(constant)] = constant.to("cpu", torch.bool if constant.dtype == torch.bool else longest)
        return self._constants[id(constant)]

    def _contribution(self, node: Node, args: Arguments, out: list[Tensor]) -> float:
        """Return what the rounding of one call adds to the error of the results: infinite where that is not known."""
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
