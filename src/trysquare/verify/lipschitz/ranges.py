"""Between which numbers values are, for functions whose slope depends on that, such as ``log(x.clamp_min(1))``.

A range holds for all inputs of the network, and also if the results of calls before are off by their rounding.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from trysquare.verify.lipschitz.graph import ANY, Calls, Node, Range, Value
from trysquare.verify.lipschitz.rules import RULES, signed_readings, slope_between

# More than the rounding of any call here, relative to its arguments and results.
_ROUNDING = 2.0**-30
_KNOWN = {"sin": (-1.0, 1.0), "cos": (-1.0, 1.0), "_softmax": (0.0, 1.0), "linalg_vector_norm": (0.0, math.inf)}
# Calls whose results are among their arguments, or between them.
_CHOICES = frozenset("max min amax amin sort mean where max_pool2d_with_indices".split())


class Ranges:
    """The ranges of the results of calls, found when somebody asks.

    Args:
        nodes: calls in the order in which they ran.
    """

    def __init__(self, nodes: list[Node]) -> None:
        self._calls, self._left = Calls(nodes), [node for node in reversed(nodes) if node.size]
        self._known: dict[int, Range] = {}  # of first results, by their first label

    def of(self, argument: Any) -> Range:
        """Between which numbers an argument of a call is."""
        if not isinstance(argument, Value):
            return _ends(signed_readings(argument, torch.float32))
        labels = argument.labels.flatten()
        while labels.numel() and self._left and self._left[-1].start <= float(labels.abs().max()):
            node = self._left.pop()
            low, high = self._of_call(node)
            self._known[node.start] = (low, high) if low <= high else ANY  # and not nan
        makers = self._calls.makers(labels)
        # Nothing is known about the network's inputs, and about constants that were put beside values.
        if not makers or bool((labels == 0).any()):
            return ANY
        found = []
        for node in makers:
            here = labels[(labels.abs() >= node.start) & (labels.abs() < node.start + node.size)]
            first = float(here.abs().max()) < node.start + math.prod(node.outputs[0][1])
            low, high = self._known[node.start] if first else ANY
            found += [(low, high)] * bool((here > 0).any()) + [(-high, -low)] * bool((here < 0).any())
        return _hull(found)

    def _of_call(self, node: Node) -> Range:
        op, args = node.op, node.args
        try:
            if op in ("add", "sub", "rsub", "mul", "maximum", "minimum", "where"):
                given = [self.of(args["self"]), self.of(args["other"])]
            else:
                given = [self.of(value) for value in node.values]
            low, high = self._computed(node, given)
        except (ArithmeticError, RuntimeError, TypeError, ValueError):
            return ANY
        sizes = [abs(end) for ends in (*given, (low, high)) for end in ends if math.isfinite(end)]
        return low - _ROUNDING * max(sizes, default=0.0), high + _ROUNDING * max(sizes, default=0.0)

    def _computed(self, node: Node, given: list[Range]) -> Range:
        (low, high), op, rule = given[0], node.op, RULES.get(node.op)
        if op in _KNOWN:
            return _KNOWN[op]
        if op in ("maximum", "minimum"):
            pick = max if op == "maximum" else min
            return pick(low, given[1][0]), pick(high, given[1][1])
        if op in _CHOICES:
            return _hull(given)
        if op in ("add", "sub", "rsub") and node.args.get("alpha", 1) == 1:
            (a, b), (c, d) = given if op != "rsub" else reversed(given)
            return (a + c, b + d) if op == "add" else (a - d, b - c)
        if op == "mul":
            products = [a * b if a and b else 0.0 for a in given[0] for b in given[1]]
            return min(products), max(products)
        if len(node.values) > 1:
            return ANY
        if op == "abs":
            return max(low, -high, 0.0), max(-low, high)
        rises = rule is not None and rule.monotone is not None and rule.monotone(node)
        ends = [low, high] if rises or low * high >= 0 else [low, 0.0, high]
        if rises or slope_between(node, low, high) < math.inf:
            return _hull([_ends(_at(node, end)) for end in ends])
        return ANY


def _ends(numbers: Tensor) -> Range:
    return float(numbers.min()), float(numbers.max())


def _hull(ranges: list[Range]) -> Range:
    return min(low for low, _ in ranges), max(high for _, high in ranges)


def _at(node: Node, number: float) -> Tensor:
    """A function of each number at one number, in float64."""
    args = {name: v.cpu().double() if isinstance(v, Tensor) else v for name, v in node.args.items()}
    name = next(name for name, value in args.items() if isinstance(value, Value))
    result = getattr(torch.ops.aten, node.op)(**args | {name: torch.tensor(number, dtype=torch.float64)})
    return result[0] if isinstance(result, tuple) else result
