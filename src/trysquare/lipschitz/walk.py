"""From a traced forward pass to its bound: the rules, applied from the last call to the first."""

from __future__ import annotations

import math
import sys
from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from trysquare.linalg.spectrum import UNIT_ROUNDOFF
from trysquare.lipschitz.leaves import leaf_terms, leaf_weights
from trysquare.lipschitz.rules import RULES, Rule, Weights, no_rule, way_out
from trysquare.lipschitz.trace import Graph, Node, NoRuleError, Value
from trysquare.progress import track

_LEAF = Rule(leaf_weights, terms=leaf_terms)
_INPUT = -1


class Walk:
    """The bounds of everything in a graph.

    Attributes:
        nodes: the calls, with choices and pairs recognised (see ``_simplified``).
        bounds: of each call's results as a function of the network's inputs, or why there is none.

    Args:
        graph: what a model computed.
    """

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.nodes, self._position = _simplified(graph.nodes)
        blocks = [(start, shape, _INPUT, k) for k, (start, shape) in enumerate(graph.inputs)]
        blocks += [(*out, i, k) for i, node in enumerate(self.nodes) for k, out in enumerate(node.outputs)]
        self._blocks = sorted(blocks)
        self._starts = [block[0] for block in self._blocks]
        self._roundings = 0.0
        self.bounds: list[float | ValueError] = []

    def forward(self) -> None:
        """Find the bound of each call's results, from the first to the last."""
        for node in track(self.nodes, "bounding the network", len(self.nodes)):
            try:
                if node.moves:
                    self.bounds.append(self.bound([node.args["output"].labels]))
                    continue
                terms = _rule(node).terms
                found = terms(node) if terms is not None else []
                if len(found) > 1:
                    for value, _ in found:
                        whole = value.labels if node.op == "leaf" else value.labels.expand(node.outputs[0][1])
                        node.changes[id(value)] = self.bound([whole])
                # Other results than the first are positions and statistics, except of what returns a pair.
                both = node.op in ("max_min", "aminmax")
                ones = [
                    torch.full(shape, float(both or k == 0), dtype=torch.float64)
                    for k, (_, shape) in enumerate(node.outputs)
                ]
                self.bounds.append(self._back_to_one(self._stepped(node, ones)))
            except ValueError as error:  # one only if the network's result depends on it
                self.bounds.append(error)

    def bound(self, labels: Iterable[Tensor]) -> float:
        """Certified bound of values, side by side, as a function of the network's inputs."""
        return self._back_to_one([(part, torch.ones_like(part)) for part in labels])

    def _back_to_one(self, weights: Weights) -> float:
        """Go back until all that is left depends on the results of one call, whose bound is known."""
        waiting: dict[int, list[Tensor]] = {}
        self._push(waiting, weights)
        while waiting:
            last = max(waiting)
            given = waiting.pop(last)
            # What is used only in part may have a smaller bound than the whole.
            if not waiting and (last == _INPUT or all(bool((w > 0).all()) for w in given[:1])):
                known = 1.0 if last == _INPUT else self.bounds[last]
                if isinstance(known, ValueError):
                    raise known
                return _times(known, max((float(w.max()) for w in given if w.numel()), default=0.0))
            self._push(waiting, self._stepped(self.nodes[last], given))
        return 0.0

    def back(self, labels: Iterable[Tensor], weights: Iterable[Tensor]) -> tuple[list[Tensor], dict[int, float]]:
        """Go back all the way.

        Returns:
            Weights on each of the network's inputs, and for each call of the graph, by its ``id``, the root of the
            largest weight on its results: by how much at most a change of these alone changes the values. What a leaf
            computes inside is included where it has rules.
        """
        waiting: dict[int, list[Tensor]] = {}
        found: dict[int, float] = {}
        gains: dict[int, float] = {}
        self._push(waiting, list(zip(labels, weights, strict=True)))
        while waiting and (last := max(waiting)) != _INPUT:
            given, node = waiting.pop(last), self.nodes[last]
            found[last] = math.sqrt(max(float(w.max()) for w in given if w.numel()))
            if node.inner:
                gains |= _inner_gains(node, given[0])
            self._push(waiting, self._stepped(node, given))
        gains |= {id(node): found.get(self._position[id(node)], 0.0) for node in self.graph.nodes}
        zeros = [torch.zeros(shape, dtype=torch.float64) for _, shape in self.graph.inputs]
        return waiting.get(_INPUT, zeros), gains

    def _stepped(self, node: Node, given: list[Tensor]) -> Weights:
        for w, floating in zip(given, node.floating, strict=True):
            if not floating and bool((w > 0).any()):
                raise no_rule(node)
        try:
            made = _rule(node).weights(node, given)
        except NoRuleError as error:
            raise (
                error if node.where() in str(error) else NoRuleError(f"{node.where()}: {error}. {way_out(node)}")
            ) from None
        except ValueError as error:
            raise ValueError(f"{node.where()}: {error}") from error
        for _, w in made:
            if bool(w.isnan().any()):
                raise ValueError(f"{node.where()}: its Lipschitz bound is not a number")
        return made

    def _push(self, waiting: dict[int, list[Tensor]], weights: Weights) -> None:
        """Add weights to the variables that they are about."""
        for labels, w in weights:
            names, sizes = labels.abs().reshape(-1), w.reshape(-1)
            kept = (names > 0) & (sizes > 0)
            if not bool(kept.all()):
                names, sizes = names[kept], sizes[kept]
            while len(names):
                at = bisect_right(self._starts, float(names[0])) - 1
                if at < 0:  # what a leaf reads from outside
                    inside = names >= self._starts[0]
                    names, sizes = names[inside], sizes[inside]
                    continue
                start, shape, number, k = self._blocks[at]
                end = start + math.prod(shape)
                here = (names >= start) & (names < end)
                assert bool(here.any()), "a label that is no variable"
                everything = bool(here.all())
                mine = names if everything else names[here]
                if number not in waiting:
                    outputs = self.graph.inputs if number == _INPUT else self.nodes[number].outputs
                    waiting[number] = [torch.zeros(s, dtype=torch.float64) for _, s in outputs]
                flat = waiting[number][k].view(-1)
                flat.index_add_(0, (mine - start).long(), sizes if everything else sizes[here])
                self._roundings += len(mine) * UNIT_ROUNDOFF
                if everything:
                    break
                names, sizes = names[~here], sizes[~here]

    def rounded_up(self, bound: float) -> float:
        """A bound with the rounding errors of adding up weights."""
        return bound * (1 + 4 * self._roundings) * (1 + 2.0**-40) if bound else bound


def _times(bound: float, weight: float) -> float:
    return 0.0 if not bound or not weight else max(sys.float_info.min, bound * math.sqrt(weight))


def _rule(node: Node) -> Rule:
    if node.op == "leaf":
        return _LEAF
    if node.op not in RULES:
        raise no_rule(node)
    return RULES[node.op]


def _inner_gains(node: Node, weights: Tensor) -> dict[int, float]:
    """Gains of what a leaf computes inside, given the weights on its result; none where that has no rules."""
    inside = Walk(Graph(node.inner, []))
    try:
        return inside.back(node.inner_labels, [weights])[1]
    except ValueError:
        return {}


def _simplified(nodes: list[Node]) -> tuple[list[Node], dict[int, int]]:
    """The same calls, with three things recognised that are spelled in several; and where each call went.

    ``where(a > b, a, b)`` is the larger of the two. ``x`` less its mean is a projection. The larger and the smaller of
    one pair are that pair in order: the first of the two calls then has both results.
    """
    comparisons = {node.start: node for node in nodes if node.op in ("gt", "ge", "lt", "le")}
    means = {node.start: node for node in nodes if node.op == "mean"}
    made: list[Node] = []
    position: dict[int, int] = {}
    for original in nodes:
        node = _as_extremum(original, comparisons) if original.op == "where" else original
        node = _as_centering(node, means) if node.op == "sub" else node
        other = {"maximum": "minimum", "minimum": "maximum"}.get(node.op)
        pairs = [i for i in range(len(made) - 1, -1, -1) if made[i].op == other and _same_pair(made[i], node)]
        if other and pairs:
            first = made[pairs[0]]
            made[pairs[0]] = replace(first, op="max_min", outputs=first.outputs + node.outputs, floating=[True] * 2)
            position[id(original)] = pairs[0]
            continue
        position[id(original)] = len(made)
        made.append(node)
    return made, position


def _as_extremum(node: Node, comparisons: dict[int, Node]) -> Node:
    """The larger or the smaller of two, if that is what a choice by comparison makes."""
    condition, a, b = node.args["condition"], node.args["self"], node.args["other"]
    compared = comparisons.get(int(condition.labels.min())) if condition.labels.numel() else None
    if compared is None or condition.labels.shape != compared.outputs[0][1]:
        return node
    whole = torch.arange(condition.labels.numel(), dtype=torch.float64).view(condition.labels.shape) + compared.start
    if not torch.equal(condition.labels, whole):
        return node
    x, y, shape = compared.args["self"], compared.args["other"], node.outputs[0][1]
    larger = compared.op in ("gt", "ge")
    for op, pair in (("maximum", (x, y)), ("minimum", (y, x))):
        if all(_alike(p, q, shape) for p, q in zip((a, b), pair, strict=True)):
            chosen = op if larger else {"maximum": "minimum", "minimum": "maximum"}[op]
            return replace(node, op=chosen, args={"self": a, "other": b})
    signs = isinstance(a, Value) and isinstance(b, Value) and isinstance(x, Value) and _alike(y, 0.0, shape)
    if signs and torch.equal(a.labels, -b.labels) and torch.equal(*(v.labels.expand(shape).abs() for v in (a, x))):
        return replace(node, op="maximum", args={"self": a, "other": b})  # |x| or -|x|
    return node


def _as_centering(node: Node, means: dict[int, Node]) -> Node:
    """A projection, if what is taken off is the mean of the same numbers."""
    value, mean = node.args["self"], node.args["other"]
    if not isinstance(value, Value) or not isinstance(mean, Value) or node.args.get("alpha", 1) != 1:
        return node
    made = means.get(int(mean.labels.flatten()[0])) if mean.labels.numel() else None
    shape = value.labels.shape
    if made is None or shape != node.outputs[0][1] or mean.labels.ndim != len(shape):
        return node
    axes = [axis for axis, size in enumerate(mean.labels.shape) if size == 1 and shape[axis] > 1]
    # The mean over these axes, and each of them where it belongs.
    expected = torch.arange(made.size, dtype=torch.float64).view(mean.labels.shape) + made.start
    dims = made.args.get("dim")
    over = sorted(d % len(shape) for d in dims) if dims else list(range(len(shape)))
    whole = sorted(axis for axis in over if shape[axis] > 1) == axes and mean.labels.numel() == made.size
    if not whole or not torch.equal(mean.labels, expected) or not torch.equal(made.values[0].labels, value.labels):
        return node
    return replace(node, op="centering", args={"self": value, "dim": axes})


def _same_pair(first: Node, second: Node) -> bool:
    (a, b), (c, d) = ((node.args["self"], node.args["other"]) for node in (first, second))
    shape = first.outputs[0][1]
    if shape != second.outputs[0][1]:
        return False
    return any(_alike(a, p, shape) and _alike(b, q, shape) for p, q in ((c, d), (d, c)))


def _alike(first: Any, second: Any, shape: tuple[int, ...]) -> bool:
    """Whether two arguments are the same numbers."""
    if isinstance(first, Value) != isinstance(second, Value):
        return False
    if isinstance(first, Value):
        # The first label already tells most pairs apart.
        one, two = (value.labels.expand(shape) for value in (first, second))
        return torch.equal(one.flatten()[:1], two.flatten()[:1]) and torch.equal(one, two) and bool((one != 0).all())
    one, two = (torch.as_tensor(value, dtype=torch.float64).expand(shape) for value in (first, second))
    return torch.equal(one, two)
