"""What is spelled in several calls and is known as one: its constant is below the product of its parts.

``recognised`` returns the calls of a graph with these replaced:

* ``where(a > b, a, b)`` is the larger of the two.
* The larger and the smaller of one pair, or along one axis, are numbers in order; ``relu(x)`` and ``relu(-x)`` are the
  two sides of ``x``. The first of the two calls then has the results of both.
* ``x`` less its mean is a projection; ``x`` less ``tanh(x)``, and ``x`` divided by ``c + |x|``, are softened steps.
* The root of a sum of squares is a Euclidean norm (``roots``).
* A linear map, an activation and another linear map, with or without a shortcut, are one block (``blocks``), bounded by
  the theorems of ``nn.linalg.lattice``.

Each is recognised from the labels and constants of the calls, and never from names of modules.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import torch
from torch import Tensor

from trysquare.verify.lipschitz.blocks import as_block
from trysquare.verify.lipschitz.graph import Calls, Node, Value
from trysquare.verify.lipschitz.roots import as_root

# Calls of which two make a pair, and the call that has the results of both.
_PAIRS = {
    "maximum": ("minimum", "max_min"), "minimum": ("maximum", "max_min"), "relu": ("relu", "two_sides"),
    "max": ("min", "aminmax"), "min": ("max", "aminmax"), "amax": ("amin", "aminmax"), "amin": ("amax", "aminmax"),
}  # fmt: skip


def recognised(nodes: list[Node], blocks: bool = True) -> tuple[list[Node], dict[int, int]]:
    """Return the same calls with patterns replaced, and for each call, by its ``id``, where it went.

    Args:
        nodes: in the order in which they ran.
        blocks: whether to look for what is bounded as a whole, and not as its parts are.
    """
    calls = Calls(nodes)
    made: list[Node] = []
    position: dict[int, int] = {}
    firsts: dict[tuple[str, int], list[int]] = {}  # first calls of possible pairs, by name and first label
    for original in nodes:
        node = _as_extremum(original, calls) if original.op == "where" else original
        node = _as_less(node, calls) if node.op == "sub" and blocks else node
        node = _as_softsign(node, calls) if node.op == "div" else node
        node = as_root(node, calls) if node.op in ("sqrt", "pow") else node
        node = as_block(node, calls) if blocks else node
        other, both = _PAIRS.get(node.op, ("", ""))
        if other:
            partner = next((i for i in firsts.get((other, _key(node)), ()) if _are_pair(made[i], node)), None)
            if partner is not None:
                first = made[partner]
                outputs, floating = first.outputs + node.outputs, first.floating + node.floating
                made[partner] = replace(first, op=both, outputs=outputs, floating=floating)
                position[id(original)] = partner
                continue
            firsts.setdefault((node.op, _key(node)), []).append(len(made))
        position[id(original)] = len(made)
        made.append(node)
    return made, position


def _key(node: Node) -> int:
    """Return the same number for two calls that may be a pair."""
    return min(int(v.labels.flatten()[0].abs()) if v.labels.numel() else 0 for v in node.values)


def _are_pair(first: Node, second: Node) -> bool:
    if first.outputs[0][1] != second.outputs[0][1] or first.op not in _PAIRS:
        return False
    if first.op == "relu":
        return torch.equal(first.args["self"].labels, -second.args["self"].labels)
    if first.op in ("maximum", "minimum"):
        (a, b), (c, d) = ((node.args["self"], node.args["other"]) for node in (first, second))
        shape = first.outputs[0][1]
        return any(_alike(a, p, shape) and _alike(b, q, shape) for p, q in ((c, d), (d, c)))
    axes = [node.args.get("dim") for node in (first, second)]
    return axes[0] == axes[1] and torch.equal(first.args["self"].labels, second.args["self"].labels)


def _as_extremum(node: Node, calls: Calls) -> Node:
    """Return the larger or the smaller of two, if that is what a choice by comparison makes."""
    condition, a, b = node.args["condition"], node.args["self"], node.args["other"]
    compared = calls.whole(condition.labels)
    if (
        compared is None
        or compared.op not in ("gt", "ge", "lt", "le")
        or condition.labels.shape != compared.outputs[0][1]
    ):
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


def _as_less(node: Node, calls: Calls) -> Node:
    """Return a projection if numbers have their mean subtracted, and a ``tanhshrink`` if it is their tanh."""
    value, other = node.args["self"], node.args["other"]
    if not isinstance(value, Value) or not isinstance(other, Value) or node.args.get("alpha", 1) != 1:
        return node
    made, shape = calls.whole(other.labels), value.labels.shape
    if (
        made is None
        or made.op not in ("mean", "tanh")
        or shape != node.outputs[0][1]
        or other.labels.ndim != len(shape)
    ):
        return node
    if not torch.equal(made.values[0].labels, value.labels):
        return node
    both = replace(node, op="tanhshrink", args={"self": value}, inner=[made, node], inner_labels=[node.labels()])
    if made.op == "tanh":
        return both
    axes = [axis for axis, size in enumerate(other.labels.shape) if size == 1 and shape[axis] > 1]
    # The mean over these axes, and each of them where it belongs.
    dims = made.args.get("dim")
    over = sorted(d % len(shape) for d in dims) if dims else list(range(len(shape)))
    if sorted(axis for axis in over if shape[axis] > 1) != axes:
        return node
    return replace(both, op="centering", args={"self": value, "dim": axes})


def _as_softsign(node: Node, calls: Calls) -> Node:
    """Return a ``softsign`` if numbers are divided by a positive constant plus their absolute values."""
    value, divisor = node.args["self"], node.args["other"]
    if not isinstance(value, Value) or not isinstance(divisor, Value) or node.args.get("rounding_mode") is not None:
        return node
    shift = calls.whole(divisor.labels)
    if shift is None or shift.op != "add" or len(shift.values) != 1 or shift.args.get("alpha", 1) != 1:
        return node
    size = calls.whole(shift.values[0].labels)
    shapes = {value.labels.shape, divisor.labels.shape, shift.values[0].labels.shape, torch.Size(node.outputs[0][1])}
    if (
        size is None
        or size.op != "abs"
        or len(shapes) > 1
        or not torch.equal(size.values[0].labels.abs(), value.labels.abs())
    ):
        return node
    constant = next(shift.args[name] for name in ("self", "other") if not isinstance(shift.args[name], Value))
    return replace(node, op="softsign", args={"self": value, "constant": constant})


def _alike(first: Value | Tensor | float, second: Value | Tensor | float, shape: Iterable[int]) -> bool:
    """Whether two arguments are the same numbers."""
    size = tuple(shape)
    if isinstance(first, Value) and isinstance(second, Value):
        # The first label already tells most pairs apart.
        one, two = (value.labels.expand(size) for value in (first, second))
        return torch.equal(one.flatten()[:1], two.flatten()[:1]) and torch.equal(one, two) and bool((one != 0).all())
    if isinstance(first, Value) or isinstance(second, Value):
        return False
    one, two = (_as_tensor(value).expand(size) for value in (first, second))
    return torch.equal(one, two)


def _as_tensor(value: Tensor | float) -> Tensor:
    return torch.as_tensor(value, dtype=torch.float64)
