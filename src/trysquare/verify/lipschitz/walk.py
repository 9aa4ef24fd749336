"""From a traced forward pass to its bound: the rules, applied from the last call to the first."""

from __future__ import annotations

import math
import sys
from bisect import bisect_right
from collections.abc import Iterable

import torch
from torch import Tensor

from trysquare.nn.linalg.spectrum import UNIT_ROUNDOFF
from trysquare.progress import track
from trysquare.verify.lipschitz.graph import Graph, Node, NoRuleError, Value
from trysquare.verify.lipschitz.leaves import leaf_terms, leaf_weights
from trysquare.verify.lipschitz.patterns import recognised
from trysquare.verify.lipschitz.ranges import Ranges
from trysquare.verify.lipschitz.rules import RULES, Rule, Weights, no_rule, way_out

_LEAF = Rule(leaf_weights, terms=leaf_terms)
_INPUT = -1
# Patterns whose last call is among their inner ones, and has its gain from there.
_OF_PARTS = frozenset(["block", "centering", "tanhshrink"])
# Calls that infinity is an ordinary argument of.
_BOUNDED_BY = frozenset(["clamp", "clamp_min", "clamp_max", "maximum", "minimum", "fmax", "fmin", "max_min"])


class Walk:
    """The bounds of everything in a graph.

    Attributes:
        nodes: the calls, with patterns recognised (see ``patterns``).
        bounds: of each call's results as a function of the network's inputs, or why there is none.
        in_blocks: ``id`` of the calls inside of blocks.

    Args:
        graph: what a model computed.
        blocks: whether to look for blocks that are bounded as a whole.
    """

    def __init__(self, graph: Graph, *, blocks: bool = True) -> None:
        self.graph = graph
        self.nodes, self._position = recognised(graph.nodes, blocks)
        self.in_blocks = {id(part) for node in self.nodes if node.op == "block" for part in node.inner}
        made = [(start, shape, _INPUT, k) for k, (start, shape) in enumerate(graph.inputs)]
        made += [(*out, i, k) for i, node in enumerate(self.nodes) for k, out in enumerate(node.outputs)]
        self._blocks = sorted(block for block in made if math.prod(block[1]))
        self._starts = [block[0] for block in self._blocks]
        self._roundings = 0.0
        self._reads: list[Tensor] = []  # of each call, which of the network's inputs its results may depend on
        self.bounds: list[float | ValueError] = []

    def forward(self) -> None:
        """Find the bound of each call's results, from the first to the last."""
        ranges = Ranges(self.graph.nodes)
        for node in track(self.nodes, "bounding the network", len(self.nodes)):
            self._reads.append(self._read_by(node.values))
            node.between = ranges.of
            try:
                if node.moves:
                    self.bounds.append(self.bound([node.args["output"].labels]))
                    continue
                if not node.size or not any(value.labels.numel() for value in node.values):
                    self.bounds.append(0.0)
                    continue
                terms = _rule(node).terms
                found = terms(node) if terms is not None else []
                if len(found) > 1:
                    for value, _ in found:
                        whole = value.labels if node.op == "leaf" else value.labels.expand(node.outputs[0][1])
                        node.changes[id(value)] = self.bound([whole])
                    read = [self._read_by([value]) for value, _ in found]
                    node.apart = int(torch.stack(read).sum(dim=0).max()) < 2
                # Other results than the first are positions and statistics, except of what returns a pair.
                both = node.op in ("max_min", "aminmax", "two_sides")
                ones = [
                    torch.full(shape, float(k == 0 or (both and node.floating[k])), dtype=torch.float64)
                    for k, (_, shape) in enumerate(node.outputs)
                ]
                self.bounds.append(self._back_to_one(self._stepped(node, ones)))
            except ValueError as error:  # one only if the network's result depends on it
                self.bounds.append(error)

    def _read_by(self, values: Iterable[Value]) -> Tensor:
        """Return which of the network's inputs some values may depend on."""
        found = torch.zeros(sum(math.prod(shape) for _, shape in self.graph.inputs), dtype=torch.bool)
        for value in values:
            names = value.labels.abs().reshape(-1)
            names = names[names > 0]
            while len(names):
                start, shape, number, _ = self._blocks[bisect_right(self._starts, float(names[0])) - 1]
                here = (names >= start) & (names < start + math.prod(shape))
                if number == _INPUT:
                    found[(names[here] - 1).long()] = True
                else:
                    found |= self._reads[number]
                names = names[~here & (names != names[0])]  # the first may be in no block: ``_push`` refuses that
        return found

    def bound(self, labels: Iterable[Tensor]) -> float:
        """Certified bound of values, side by side, as a function of the network's inputs."""
        return self._back_to_one([(part, torch.ones_like(part)) for part in labels])

    def _back_to_one(self, weights: Weights) -> float:
        """Go back until all that is left depends on the results of one call, whose bound is known.

        This is a short cut: positions among the results of that call are not looked at. ``back`` goes all the way, and
        refuses them.
        """
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
            if node.inner and node.op != "root":
                for key, gain in _inner_gains(node, given[0]).items():
                    gains[key] = gains.get(key, 0.0) + gain
            self._push(waiting, self._stepped(node, given))
        for node in self.graph.nodes:
            place = self._position[id(node)]
            if self.nodes[place].op not in _OF_PARTS:
                gains[id(node)] = gains.get(id(node), 0.0) + found.get(place, 0.0)
        zeros = [torch.zeros(shape, dtype=torch.float64) for _, shape in self.graph.inputs]
        return waiting.get(_INPUT, zeros), gains

    def _stepped(self, node: Node, given: list[Tensor]) -> Weights:
        if not any(w.numel() for w in given) or not any(value.labels.numel() for value in node.values):
            return []  # of no numbers, or from none
        for w, floating in zip(given, node.floating, strict=True):
            if not floating and bool((w > 0).any()):
                raise no_rule(node)
        if node.op not in _BOUNDED_BY:
            for constant in node.args.values():
                if (
                    isinstance(constant, Tensor)
                    and constant.is_floating_point()
                    and not bool(constant.isfinite().all())
                ):
                    raise ValueError(f"{node.where()}: a weight or constant of it is not finite")
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
                if not bool(here.any()):
                    raise NoRuleError(
                        "a value from inside of a module that has a Lipschitz rule is used outside of it: the rule is "
                        "about what the module returns"
                    )
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
        """Return a bound with the rounding errors of adding up weights."""
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
    """Gains of what a leaf or block computes inside, given the weights on its result.

    None where a leaf calls what has no rules: its rounding is bounded as a whole then (``exact``). A block is made of
    calls that have.
    """
    inside = Walk(Graph(node.inner, []), blocks=False)
    try:
        return inside.back(node.inner_labels, [weights])[1]
    except ValueError:
        if node.op != "leaf":
            raise
        return {}
