"""Euclidean norms that are spelled out: roots of weighted sums of squares.

If ``r_k = sqrt(Σ_i M_ki x_i² + c_k)`` with ``M`` and ``c`` not negative, ``r_k`` is the norm of a vector with entries
``√M_ki x_i`` and ``√c_k``, which changes by no more than the vector does. So ``Σ w_k Δr_k² <= Σ_i (Mᵀ w)_i Δx_i²``:
weights on the roots go back to the squares by the transpose of what was done with these.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from trysquare.nn.linalg.spectrum import UNIT_ROUNDOFF
from trysquare.verify.lipschitz.graph import Arguments, Calls, Node, Value
from trysquare.verify.lipschitz.rules import RULES, Rule, Weights, largest, readings, size_of

_UP = 1 + 2.0**-40
_TINY = 2.0**-1022
# Linear in squares, with factors that are not negative; and what leaves numbers that are not negative as they are.
_AVERAGES = ("sum", "mean", "avg_pool2d", "avg_pool3d", "_adaptive_avg_pool2d", "_adaptive_avg_pool3d")
_FACTORS = ("add", "mul", "div")
_NOTHING = ("relu", "abs", "clamp_min")
# Sums of positive numbers of this length have relative errors below 2^-32 in float64.
_LONGEST = 1 << 20
_RELATIVE_ERROR = 2.0**-32
# Squares below 2^-1022 vanish, and factors behind them make that larger: five of these at most to 2^300.
_LARGEST_FACTOR = 2.0**60
_MOST_FACTORS = 5
_VANISHED = 2.0**-340


def as_root(node: Node, calls: Calls) -> Node:
    """Return a node ``root`` with what leads from squares to it inside, if that is what a power or a root is."""
    if node.op == "pow" and not _is_number(node.args.get("exponent"), 0.5):
        return node
    steps: dict[int, Node] = {}
    (value,) = node.values
    if not _leads_to_squares(value.labels, calls, steps):
        return node
    if sum(step.values[0].labels.numel() // max(1, step.size) + 8 for step in steps.values()) > _LONGEST:
        return node
    if sum(step.op in _FACTORS for step in steps.values()) > _MOST_FACTORS:
        return node
    return replace(node, op="root", args={"self": value}, inner=[steps[start] for start in sorted(steps)])


def _is_number(value: object, number: float) -> bool:
    return isinstance(value, int | float) and value == number


def _leads_to_squares(labels: Tensor, calls: Calls, steps: dict[int, Node]) -> bool:
    """Whether values are weighted sums of squares; the calls that make them are put into ``steps``, by first label."""
    makers = calls.makers(labels)
    if makers is None or bool((labels <= 0).any()):  # nothing is known about constants that were put beside values
        return False
    for node in makers:
        if node.start in steps:
            continue
        step = _step(node, calls)
        if step is None:
            return False
        steps[node.start] = step
        if step.op != "square" and not all(_leads_to_squares(v.labels, calls, steps) for v in step.values):
            return False
    return True


def _step(node: Node, calls: Calls) -> Node | None:
    """Return a call as one of few kinds, ``None`` if it is something else."""
    if len(node.outputs) != 1:
        return None
    if node.op == "pow" and _is_number(node.args.get("exponent"), 2) and isinstance(node.args["self"], Value):
        return replace(node, op="square", args={"self": node.args["self"]})
    if node.op == "mul" and len(node.values) == 2:
        a, b = node.values
        if torch.equal(a.labels, b.labels) and bool((a.labels != 0).all()):
            return replace(node, op="square", args={"self": a})
        same = _sign_times_size(a, b, calls)
        return None if same is None else replace(node, op="same", args={"self": same})
    if node.op in _NOTHING:
        return replace(node, op="same", args={"self": node.values[0]}) if len(node.values) == 1 else None
    if node.op in _AVERAGES:
        divisor = node.args.get("divisor_override")
        return node if divisor is None or divisor > 0 else None
    return node if node.op in _FACTORS and _factors_are_positive(node) else None


def _sign_times_size(a: Value, b: Value, calls: Calls) -> Value | None:
    """``x``, if ``a`` is its sign and ``b`` is ``relu(abs(x))``, as torch's own pooling by norms has it."""
    sign, rectified = calls.whole(a.labels), calls.whole(b.labels)
    if sign is None or rectified is None or sign.op != "sign" or rectified.op != "relu":
        return None
    absolute = calls.whole(rectified.values[0].labels)
    if absolute is None or absolute.op != "abs":
        return None
    one, two = sign.values[0], absolute.values[0]
    return one if torch.equal(one.labels, two.labels) else None


def _factors_are_positive(node: Node) -> bool:
    numbers = [node.args.get(name) for name in ("self", "other", "alpha")]
    constants = [torch.as_tensor(c, dtype=torch.float64) for c in numbers if c is not None and not isinstance(c, Value)]
    if node.args.get("rounding_mode") is not None or (node.op == "div" and isinstance(node.args["other"], Value)):
        return False
    least, most = 1 / _LARGEST_FACTOR, _LARGEST_FACTOR
    return all(bool(((c == 0) | ((c >= least) & (c <= most))).all()) for c in constants)


def root_weights(node: Node, given: list[Tensor]) -> Weights:
    """Return weights on the numbers that are squared."""
    waiting = {step.start: torch.zeros(step.outputs[0][1], dtype=torch.float64) for step in node.inner}
    found: Weights = []

    def put(labels: Tensor, weights: Tensor) -> None:
        names, sizes = labels.reshape(-1), weights.expand(labels.shape).reshape(-1)
        sizes = torch.where(sizes > 0, (sizes * _UP).clamp_min(_TINY), 0.0)
        for step in node.inner:
            here = (names >= step.start) & (names < step.start + step.size)
            waiting[step.start].view(-1).index_add_(0, (names[here] - step.start).long(), sizes[here])

    put(node.args["self"].labels, given[0])
    for step in reversed(node.inner):
        weights = waiting[step.start]
        if step.op == "square":
            found.append((step.args["self"].labels.expand(weights.shape), weights))
        elif step.op == "same":
            put(step.args["self"].labels.expand(weights.shape), weights)
        elif step.op in _AVERAGES:
            put(step.values[0].labels, _transposed(step, weights))
        else:
            for value, factor in _factors(step):
                put(value.labels.expand(weights.shape), _times(weights, factor))
    return found


def _times(weights: Tensor, factor: Tensor | float) -> Tensor:
    """Return the product, at least the smallest normal number where neither is 0."""
    size = torch.as_tensor(factor, dtype=torch.float64)
    return torch.where((weights > 0) & (size > 0), (weights * size).clamp_min(_TINY), 0.0)


def _transposed(step: Node, weights: Tensor) -> Tensor:
    """Return the transpose of a sum, mean or average: what autograd makes of it."""
    with torch.enable_grad():
        numbers = torch.zeros(step.values[0].labels.shape, dtype=torch.float64, requires_grad=True)
        options: Arguments = {n: v for n, v in step.args.items() if not isinstance(v, Value) and n != "dtype"}
        result = getattr(torch.ops.aten, step.op)(numbers, **options)
        return torch.autograd.grad(result, numbers, weights)[0]


def _factors(step: Node) -> list[tuple[Value, Tensor | float]]:
    a, b = step.args["self"], step.args["other"]
    if step.op == "add":
        both = (a, 1.0), (b, largest(step.args.get("alpha", 1), step.dtype))
        return [(value, factor) for value, factor in both if isinstance(value, Value)]
    if step.op == "div":
        sizes = readings(b, step.dtype)
        return [(a, 1 / torch.where(sizes > 0, sizes, sizes[0]).amin(0) * _UP)]
    return [(a, largest(b, step.dtype))] if isinstance(a, Value) else [(b, largest(a, step.dtype))]


def _root_rounding(args: Arguments, out: list[Tensor]) -> float:
    """Return the root itself."""
    return 16 * UNIT_ROUNDOFF * size_of(out[0])


def _root_errors(args: Arguments, out: list[Tensor]) -> float:
    """Sums of squares have small relative errors, whatever they add up; squares below 2^-1022 vanish."""
    return _RELATIVE_ERROR * size_of(out[0]) + _VANISHED * math.sqrt(out[0].numel())


RULES["root"] = Rule(root_weights, rounding=_root_rounding, jumps=_root_errors)
