"""A linear map, an activation, a linear map: found among the calls of a network, with or without a shortcut.

The maps are convolutions or products with matrices, with scalings and shifts by constants in between. Padding and crops
are read off the labels, so that it does not matter how they are spelled. ``nn.linalg.lattice`` then bounds
the block from its kernels.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from trysquare.nn.geometry import Sizes
from trysquare.nn.linalg.lattice import (
    ROUND_UP,
    LatticeMap,
    circle_around,
    looks_like_sandwich,
    residual_bound,
    sandwich_bound,
)
from trysquare.verify.lipschitz.graph import Calls, Node, Value
from trysquare.verify.lipschitz.rules import RULES, Rule, Weights, period, scaled, signed_readings, without_border
from trysquare.verify.operators import checked_weight

_LINEAR = ("convolution", "mm", "addmm")
# By how much a block must be better than its parts one by one.
_GAIN = 0.999


def as_block(node: Node, calls: Calls) -> Node:
    """Return a node ``block`` with its parts inside, if a call ends a block whose bound is below theirs."""
    if node.op in ("add", "sub"):
        found = _residual(node, calls)
    elif node.op in _LINEAR:
        found = _sandwich(node, calls)
    else:
        return node
    if found is None:
        return node
    source, parts, bound = found
    parts = sorted((*parts, node) if node not in parts else parts, key=lambda part: part.start)
    args = {"input": Value(source)}
    return replace(node, op="block", args=args, inner=parts, inner_labels=[node.labels()], constants=[bound])


def block_weights(node: Node, given: list[Tensor]) -> Weights:
    """Return the largest weight of each sample, or of each row of a product, times the constant."""
    assert node.constants is not None
    labels = node.args["input"].labels
    tops = given[0].reshape(labels.shape[0], -1).amax(1)
    return [(labels, scaled(tops, node.constants[0]).view(-1, *(1,) * (labels.ndim - 1)).expand(labels.shape))]


RULES["block"] = Rule(block_weights, remark="the block has a norm of at most {bound}: divide its last layer by it")


@dataclass
class _Branch:
    """``S σ(T x + b)``: the calls, and what each of the maps is from and to."""

    second: Node
    target: Tensor  # of the second map
    reads: Tensor  # what the second map reads, in terms of the activation's results
    hidden: Tensor  # labels of these
    before: Tensor  # of the activation's arguments, behind scalings and shifts
    first: Node
    factor: float  # behind the second map
    scales: Tensor  # of the hidden channels, those in front of the activation times those behind it and its slope
    parts: list[Node]


@dataclass
class _Placed:
    """A map between two values, or its adjoint."""

    map: LatticeMap
    is_adjoint: bool
    circular: bool  # whether it may be taken as one on the circle of its fine side
    zeros: bool  # or as one on the lattice, with zeros outside
    fine: Sizes
    coarse: Sizes

    def plain(self) -> LatticeMap | None:
        """Return the map from its source to its target, if that is no transposed one with a stride."""
        if not self.is_adjoint:
            return self.map
        return self.map.transposed() if set(self.map.stride) == {1} else None

    def back(self) -> LatticeMap | None:
        """Return the same from its target to its source."""
        if self.is_adjoint:
            return self.map
        return self.map.transposed() if set(self.map.stride) == {1} else None


def _residual(node: Node, calls: Calls) -> tuple[Tensor, list[Node], float] | None:
    a, b = node.args["self"], node.args["other"]
    alpha = node.args.get("alpha", 1)
    shape = torch.Size(node.outputs[0][1])
    if not (isinstance(a, Value) and isinstance(b, Value)) or abs(alpha) != 1:
        return None
    if a.labels.shape != shape or b.labels.shape != shape:
        return None
    sign = alpha if node.op == "add" else -alpha
    for skip, other in ((a.labels, b.labels), (b.labels, a.labels)):
        branch = _branch(other, calls)
        if branch is not None:
            found = _with_shortcut(skip, branch, sign, calls)
            return None if found is None else (found[0], branch.parts + found[1], found[2])
    return None


def _with_shortcut(skip: Tensor, branch: _Branch, sign: float, calls: Calls) -> tuple[Tensor, list[Node], float] | None:
    for source, shortcut, parts in _shortcuts(skip, calls):
        first = _placed(branch.first, source, branch.before)
        second = _placed(branch.second, branch.hidden, branch.target, branch.reads)
        if first is None or second is None:
            continue
        around = _identity(first, source, skip) if shortcut is None else _placed(shortcut, source, skip)
        if around is None:
            continue
        bound = _residual_bound(around, first, second, sign * branch.factor, branch.scales)
        if bound is not None:
            return source, parts, bound
    return None


def _shortcuts(skip: Tensor, calls: Calls) -> list[tuple[Tensor, Node | None, list[Node]]]:
    """Return what a shortcut may be: nothing at all, or a linear map."""
    found: list[tuple[Tensor, Node | None, list[Node]]] = [(skip, None, [])]
    maker = calls.maker(float(skip.reshape(-1)[0])) if skip.numel() else None
    if maker is not None and maker.op in _LINEAR and (labels := _argument(maker)) is not None:
        found.append((_source(maker, labels), maker, [maker]))
    return found


def _source(node: Node, labels: Tensor) -> Tensor:
    """Return what a linear map reads, without zeros around it or its circular extension."""
    if node.op != "convolution":
        return labels
    inside = without_border(labels)
    for axis in range(2, inside.ndim):
        inside = inside.narrow(axis, 0, period(inside, axis))
    return inside


def _identity(first: _Placed, source: Tensor, skip: Tensor) -> _Placed | None:
    if source.numel() != skip.numel() or not torch.equal(source.reshape(-1), skip.reshape(-1)):
        return None
    reads = first.map if not first.is_adjoint else first.plain()
    if reads is None or set(reads.stride) != {1}:
        return None
    sizes = tuple(source.shape[2:]) if first.fine != (1,) or first.coarse != (1,) else (1,)
    return _Placed(reads.identity(), False, True, True, sizes, sizes)


def _residual_bound(around: _Placed, first: _Placed, second: _Placed, factor: float, scales: Tensor) -> float | None:
    """Return the smaller of the bounds of a block and its transpose; ``None`` if the theorem does not apply."""
    parts = around, first, second
    a, t, s = (part.plain() for part in parts)
    bounds = []
    if a is not None and t is not None and s is not None and set(t.stride) == {1}:
        s = _scale_inputs(replace(s, kernel=s.kernel * factor), scales)
        if (circle := _circle(parts, a.stride)) is not None:
            bounds.append(residual_bound(a, t, s, circle))
    # The transpose is Aᵀ + Tᵀ D Sᵀ.
    a, t, s = (part.back() for part in parts)
    if a is not None and t is not None and s is not None and set(s.stride) == {1}:
        s = replace(s, kernel=s.kernel * factor).with_hidden(scales)
        if (circle := _circle(parts, a.stride)) is not None:
            bounds.append(residual_bound(a, s, t, circle))
    known = [bound for bound in bounds if math.isfinite(bound)]
    return min(known) if known else None


def _scale_inputs(given: LatticeMap, scales: Tensor) -> LatticeMap:
    """Input channels multiplied by factors."""
    each = scales.view(given.groups, 1, -1).expand(-1, len(given.kernel) // given.groups, -1).flatten(0, 1)
    return replace(given, kernel=given.kernel * each.view(*each.shape, *(1,) * (given.kernel.ndim - 2)))


def _circle(parts: Sequence[_Placed], stride: Sizes, hidden_is_coarse: bool = False) -> Sizes | None:
    """Return the circle that all maps are on, or one that has the lattice around them as a part.

    Maps with zeros outside are parts of maps on the lattice. Those are taken on a circle that is larger than the widest
    of their values by all extents together. An output then reads a window that is shorter than what was added, so that
    no window holds positions of the values and, across the end of the circle, positions of their other end: what it
    reads outside of the values is zero, as on the lattice.

    Args:
        parts: the maps.
        stride: steps of the fine side of the block to one of its coarse side.
        hidden_is_coarse: whether maps without stride are on the coarse side.
    """

    def steps(sizes: Sizes, taken: Sizes) -> Sizes:
        return tuple(-(-n // s) for n, s in zip(sizes, taken, strict=True))

    sizes = set()
    for part in parts:
        if hidden_is_coarse or part.map.stride == stride:
            sizes |= {part.coarse, steps(part.fine, part.map.stride)}
        else:
            sizes |= {steps(part.coarse, stride), steps(part.fine, stride)}
    if all(part.circular for part in parts) and len(sizes) == 1:
        return sizes.pop()
    if not all(part.zeros for part in parts):
        return None
    widest = tuple(max(each) for each in zip(*sizes, strict=True))
    return circle_around([part.map for part in parts], widest, stride, False)


def _sandwich(node: Node, calls: Calls) -> tuple[Tensor, list[Node], float] | None:
    branch = _branch(node.labels(), calls)
    if branch is None or (reads := _argument(branch.first)) is None:
        return None
    source = _source(branch.first, reads)
    first = _placed(branch.first, source, branch.before)
    second = _placed(branch.second, branch.hidden, branch.target, branch.reads)
    if first is None or second is None:
        return None
    forth, back = first.plain(), second.back()
    if forth is None or back is None:
        return None
    forth = forth.with_hidden(branch.scales)
    if not looks_like_sandwich(forth, back):
        return None
    stride = max(forth.stride, back.stride)
    circle = _circle([first, second], stride, True) if min(forth.stride, back.stride) == (1,) * len(stride) else None
    if circle is None:
        return None
    bound = sandwich_bound(forth, back, circle)
    return (source, branch.parts, bound) if bound < _GAIN * forth.norm(circle) * back.norm(circle) else None


def _branch(labels: Tensor, calls: Calls) -> _Branch | None:
    """Return two maps and the activation between them, of which values are the result."""
    parts: list[Node] = []
    if (behind := _through(labels, calls, parts)) is None:
        return None
    target, factors, second = behind
    if (
        second.op not in _LINEAR
        or (reads := _argument(second)) is None
        or bool((factors != factors.reshape(-1)[0]).any())
    ):
        return None
    if (between := _through(reads, calls, parts)) is None:
        return None
    hidden, after, activation = between
    slope = _slope(activation)
    given = activation.values[0].labels if len(activation.values) == 1 else None
    if slope is None or given is None or given.shape != torch.Size(activation.outputs[0][1]):
        return None
    if (ahead := _through(given, calls, parts)) is None:
        return None
    before, ahead_of, first = ahead
    scales = [_by_channel(after, hidden, second), _by_channel(ahead_of, before, second)]
    alike = first.op in _LINEAR and (first.op == "convolution") == (second.op == "convolution")
    if not alike or scales[0] is None or scales[1] is None or scales[0].shape != scales[1].shape:
        return None
    # Values that the second map reads, in the order in which the activation made them.
    made = activation.labels()
    if not torch.equal(_source_values(hidden), _source_values(made)) or bool((before == 0).any()):
        return None
    total = scales[0] * scales[1] * slope
    parts += [second, activation, first]
    unique = list({id(part): part for part in parts}.values())
    return _Branch(second, target, hidden, made, before, first, float(factors.reshape(-1)[0]), total, unique)


def _source_values(labels: Tensor) -> Tensor:
    return labels[labels != 0].unique()


def _through(labels: Tensor, calls: Calls, parts: list[Node]) -> tuple[Tensor, Tensor, Node] | None:
    """Go back through scalings and shifts by constants.

    Returns:
        Labels of what was scaled, with 0 where there are constants, the factors, and the call that made them.
    """
    factors = torch.ones_like(labels)
    while True:
        names = labels[labels != 0]
        node = calls.maker(float(names[0])) if len(names) else None
        if node is None or bool(((names.abs() < node.start) | (names.abs() >= node.start + node.size)).any()):
            return None
        if node.op not in ("add", "sub", "rsub", "mul", "div") or len(node.values) != 1:
            signs = torch.where(labels == 0, 1.0, labels.sign())
            return labels.abs(), factors * signs, node
        factor = constant_factor(node)
        if factor is None:
            return None
        shape = node.outputs[0][1]
        index = (labels.abs() - node.start).clamp_min(0).long()
        before = node.values[0].labels.expand(shape).reshape(-1)[index] * labels.sign()
        if bool(((before == 0) & (labels != 0)).any()):
            return None
        factors = factors * factor.expand(shape).reshape(-1)[index]
        labels = before
        parts.append(node)


def constant_factor(node: Node) -> Tensor | None:
    """By what a call multiplies the one value that it depends on; ``None`` if that is not certain."""
    if node.op not in ("add", "sub", "rsub", "mul", "div") or len(node.values) != 1:
        return None
    a, b = node.args["self"], node.args["other"]
    if node.op in ("add", "sub", "rsub"):
        plain, sign = ("other" if node.op == "rsub" else "self"), (1.0 if node.op == "add" else -1.0)
        number: Tensor | float = 1.0 if isinstance(node.args[plain], Value) else sign * node.args.get("alpha", 1)
        readings = signed_readings(number, node.dtype)
    elif node.op == "mul":
        readings = signed_readings(b if isinstance(a, Value) else a, node.dtype)
    elif isinstance(a, Value) and node.args.get("rounding_mode") is None:
        readings = 1 / signed_readings(b, node.dtype)
    else:
        return None
    certain = bool((readings == readings[0]).all()) and bool(readings.isfinite().all())
    return readings[0] if certain else None


def _slope(node: Node) -> float | None:
    """Return the largest slope of an activation that never decreases; ``None`` for everything else."""
    rule = RULES.get(node.op)
    if rule is None or rule.monotone is None or not rule.monotone(node):
        return None
    try:
        found = rule.weights(node, [torch.ones(shape, dtype=torch.float64) for _, shape in node.outputs[:1]])
    except ValueError:
        return None
    return math.sqrt(max((float(weights.max()) for _, weights in found if weights.numel()), default=0.0)) * ROUND_UP


def _by_channel(factors: Tensor, labels: Tensor, node: Node) -> Tensor | None:
    """Return one factor for each channel; ``None`` if they differ within a channel."""
    axis = 1 if node.op == "convolution" else -1
    if factors.ndim < 2:
        return None
    each = torch.where(labels != 0, factors, math.nan).movedim(axis, 0).flatten(1)
    low, high = each.nan_to_num(math.inf).amin(1), each.nan_to_num(-math.inf).amax(1)
    return low if torch.equal(low, high) else None


def _argument(node: Node) -> Tensor | None:
    """Return labels of what a linear map with constant weights reads."""
    names = {"convolution": ("input", "weight", "bias"), "mm": ("self", "mat2", ""), "addmm": ("mat1", "mat2", "self")}
    value, *constants = (node.args.get(name) for name in names[node.op])
    plain = node.args.get("alpha", 1) == 1 and not any(isinstance(constant, Value) for constant in constants)
    return value.labels if isinstance(value, Value) and plain else None


def _placed(node: Node, source: Tensor, target: Tensor, reads: Tensor | None = None) -> _Placed | None:
    """Return a linear call as a map from ``source`` to ``target``: parts of what it reads and makes.

    Args:
        node: the call.
        source: labels.
        target: labels of some or all of the results.
        reads: labels of what the call reads, behind scalings.
    """
    reads = _argument(node) if reads is None else reads
    if reads is None:
        return None
    made = node.labels()
    if node.op != "convolution":
        # The same rows, whatever the axes that they are along.
        rows = (_rows(reads), _rows(source)), (_rows(target), _rows(made))
        matrix = checked_weight(node.args["mat2"], "the product").mT
        same = all(torch.equal(one, two) for one, two in rows)
        return _Placed(LatticeMap.of_matrix(matrix), False, True, True, (1,), (1,)) if same else None
    if source.ndim != reads.ndim or target.ndim != made.ndim:
        return None
    inside, outside = _offset(reads, source), _offset(target, made)
    if inside is None or outside is None or outside[1] or not _is_crop(outside[0], target, made):
        return None
    lefts, wraps = inside
    if any(left < 0 or left + n > size for left, n, size in zip(lefts, source.shape[2:], reads.shape[2:], strict=True)):
        return None
    crops = [-left for left in outside[0]]
    stride, padding, dilation = (tuple(node.args[name]) for name in ("stride", "padding", "dilation"))
    kernel = checked_weight(node.args["weight"], "the convolution")
    extent = [d * (k - 1) + 1 for d, k in zip(dilation, kernel.shape[2:], strict=True)]
    sizes, windows = tuple(source.shape[2:]), tuple(target.shape[2:])
    if not node.args["transposed"]:
        start = tuple(s * c - p - left for s, c, p, left in zip(stride, crops, padding, lefts, strict=True))
        around = [n == s * w for n, s, w in zip(sizes, stride, windows, strict=True)]
        if not wraps:  # nothing is read from outside of a circle
            ends = zip(start, extent, stride, windows, sizes, strict=True)
            around += [at >= 0 and at + (w - 1) * s + e <= n for at, e, s, w, n in ends]
        circular = all(around) and not any(padding)
        return _Placed(
            LatticeMap(kernel, stride, dilation, node.args["groups"], start), False, circular, not wraps, sizes, windows
        )
    cuts = [p + c for p, c in zip(padding, crops, strict=True)]
    start = tuple(s * left - cut for s, left, cut in zip(stride, lefts, cuts, strict=True))
    around = [w == s * n for n, s, w in zip(sizes, stride, windows, strict=True)]
    around.append(wraps or reads.shape == source.shape)  # and not zeros around it
    for e, s, cut, size, w in zip(extent, stride, cuts, reads.shape[2:], windows, strict=True):
        around += [cut >= e - s, (size - 1) * s + e - cut - w >= e - s]
    back = LatticeMap(kernel, stride, dilation, node.args["groups"], start)
    return _Placed(back, True, all(around), not wraps, windows, sizes)


def _is_crop(lefts: list[int], part: Tensor, whole: Tensor) -> bool:
    sizes = zip(lefts, part.shape[2:], whole.shape[2:], strict=True)
    return all(left <= 0 and size - left <= n for left, size, n in sizes)


def _rows(labels: Tensor) -> Tensor:
    return labels.reshape(-1, labels.shape[-1])


def _offset(part: Tensor, whole: Tensor) -> tuple[list[int], bool] | None:
    """Return where values are in others: the positions before the first one on each axis, and whether they wrap.

    Negative numbers are cropped positions. Outside of ``whole`` there are constants, or it is extended circularly.
    """
    if part.shape[:2] != whole.shape[:2] or not whole.numel() or not part.numel():
        return None
    found = (part[0, 0] == whole[0, 0].reshape(-1)[0]).nonzero()
    if len(found):
        lefts = found[0].tolist()
    else:
        found = (whole[0, 0] == part[0, 0].reshape(-1)[0]).nonzero()
        if not len(found):
            return None
        lefts = (-found[0]).tolist()
    for wraps in (False, True):
        expected, inside = whole, torch.ones((), dtype=torch.bool)
        for axis, (left, n, size) in enumerate(zip(lefts, whole.shape[2:], part.shape[2:], strict=True), start=2):
            index = torch.arange(size) - left
            here = torch.ones(size, dtype=torch.bool) if wraps else (index >= 0) & (index < n)
            expected = expected.index_select(axis, index % n)
            inside = inside & here.view(-1, *(1,) * (part.ndim - 1 - axis))
        if torch.equal(torch.where(inside, expected, 0.0), part):
            return lefts, wraps
    return None
