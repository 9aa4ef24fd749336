"""What each call does at most to a change of its inputs: the table that every bound is made of.

A rule turns weights ``w`` on the outputs of a call into weights ``v`` on its inputs, such that for all inputs

    Σ w_i Δout_i²  <=  Σ v_j Δin_j².

Started with 1 at the outputs of a network and applied from its last call to its first, the rules end with weights ``v``
at the network's inputs, and ``sqrt(max v)`` is its Lipschitz constant, or more. Numbers that depend on different inputs
never meet, so that the parts of a tensor which was split and put together again have the largest of their constants.

An entry of the table says besides why its constant may be above 1 and what to do, whether some input attains it, and
how far its result in float64 may be from the exact one. Norms are certified in ``trysquare.spectrum``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from trysquare.nn.linalg.bounds import SingularValueRange, normalized, rescaled_up, singular_value_range
from trysquare.nn.linalg.precision import at_least_float32
from trysquare.nn.linalg.spectrum import UNIT_ROUNDOFF
from trysquare.torch_internals import tree_leaves, tree_map
from trysquare.verify.lipschitz.graph import ANY, Arguments, Node, NoRuleError, Value, class_name
from trysquare.verify.operators import Axis, LinearOperator, checked_weight
from trysquare.verify.spectrum import norm_range

# Labels of an input, and the weights on them.
Weights = list[tuple[Tensor, Tensor]]
T = TypeVar("T")
_UP = 1 + 2.0**-48
_TINY = 2.0**-1022
_SMOOTH_THRESHOLD = 20
_LARGEST_JUMP = 1e-7


@dataclass(frozen=True)
class Rule:
    """An entry of the table.

    Attributes:
        weights: from a node and the weights on each of its outputs to those on its inputs.
        terms: the inputs whose changes add up, each with a bound of its own factor; empty for all other calls.
        remark: why the constant may be above 1 and what to do; may hold ``{bound}``.
        attained: whether some input is amplified by as much as the rule says.
        isometric: whether it keeps lengths.
        monotone: of a function of each number, whether it never decreases: its slopes are between 0 and its constant.
        rounding: from the arguments and results in float64 to a bound on the norm of their rounding errors; none if
            results are exact.
        jumps: the same for what does not grow with the unit roundoff of the dtype, such as jumps of the function.
    """

    weights: Callable[[Node, list[Tensor]], Weights]
    remark: str = ""
    attained: bool = False
    isometric: bool = False
    monotone: Callable[[Node], bool] | None = None
    terms: Callable[[Node], list[tuple[Value, float]]] | None = None
    rounding: Callable[[Arguments, list[Tensor]], float] | None = None
    jumps: Callable[[Arguments, list[Tensor]], float] | None = None


RULES: dict[str, Rule] = {}


def _on(names: str, **about: Any) -> Callable[[Callable[..., Weights]], Callable[..., Weights]]:
    """Enter a rule into the table: a decorator."""

    def enter(weights: Callable[..., Weights]) -> Callable[..., Weights]:
        RULES.update(dict.fromkeys(names.split(), Rule(weights, **about)))
        return weights

    return enter


# -- arithmetic of weights: rounded up, and never to zero


def scaled(weights: Tensor, factor: Tensor | float) -> Tensor:
    """``weights * factor²``: at least the smallest normal number where neither is 0, and 0 where one of them is."""
    size = torch.as_tensor(factor, dtype=torch.float64).abs()
    made = weights * size * size * _UP
    nothing = (weights == 0) | (size == 0)
    return torch.where(nothing, 0.0, made.nan_to_num(math.inf, math.inf).clamp_min(_TINY))


def readings(value: Tensor | float, dtype: torch.dtype) -> Tensor:
    """Absolute values of a constant as it is and as arithmetic in ``dtype`` may round it, in float64."""
    return signed_readings(value, dtype).abs()


def signed_readings(value: Tensor | float, dtype: torch.dtype) -> Tensor:
    """Return a constant as it is and as arithmetic in ``dtype`` may round it, in float64."""
    exact = value.detach().cpu().double() if isinstance(value, Tensor) else torch.tensor(value, dtype=torch.float64)
    if not bool(exact.isfinite().all()):
        raise ValueError("a constant is not finite: the network has no Lipschitz constant")
    rounded = [exact.to(short).double() for short in {dtype, at_least_float32(dtype)}]
    return torch.stack([exact, *(torch.where(r.isfinite(), r, exact) for r in rounded)])


def largest(value: Tensor | float, dtype: torch.dtype) -> Tensor:
    """Entry by entry the larger reading of a constant factor."""
    return readings(value, dtype).amax(0)


def _each(value: int | Sequence[int], dims: int) -> tuple[int, ...]:
    values = tuple(value) if isinstance(value, list | tuple) else (value,)
    return values * dims if len(values) == 1 else values


def _spread(value: Value, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Return labels of an input that broadcasting copied to the shape of the weights."""
    return value.labels.expand(weights.shape), weights


def _only_first(weights: list[Tensor]) -> Tensor:
    if any(bool((w > 0).any()) for w in weights[1:]):
        raise NoRuleError("only its first result has a Lipschitz constant; positions and statistics jump")
    return weights[0]


def _constant_only(node: Node, *names: str) -> None:
    """Refuse arguments that depend on the input besides those that the rule is about."""
    for name in names:
        if isinstance(node.args.get(name), Value):
            raise NoRuleError(f"its argument {name!r} depends on the input, which is not Lipschitz")


# -- rounding errors in float64


def size_of(tensor: Tensor) -> float:
    """Euclidean norm of all numbers, in the order of memory where there is one."""
    flat = _flat(tensor)
    square = float(torch.dot(flat, flat)) if flat is not None else float(tensor.norm()) ** 2
    if 1e-200 < square < 1e200:
        return math.sqrt(square)
    # Squares of these numbers vanish or overflow.
    largest = float(tensor.abs().max()) if tensor.numel() else 0.0
    return largest * float((tensor / largest).norm()) * (1 + 1e-12) if 0 < largest < math.inf else largest


def _flat(tensor: Tensor) -> Tensor | None:
    """Return the numbers in the order of memory, without a copy; ``None`` if there is no such order."""
    if tensor.is_contiguous():
        return tensor.reshape(-1)
    if tensor.ndim == 4 and tensor.is_contiguous(memory_format=torch.channels_last):
        return tensor.permute(0, 2, 3, 1).reshape(-1)
    return None


# -- functions of each number

_STEEP = "slope up to {bound}: use a 1-Lipschitz one"


def _function_rounding(args: Arguments, out: list[Tensor]) -> float:
    """Functions of one number are right to a few units in the last place of argument and result."""
    sizes = [size_of(t) for t in (*out[:1], *args.values()) if isinstance(t, Tensor) and t.is_floating_point()]
    return 16 * UNIT_ROUNDOFF * (sum(sizes) + math.sqrt(out[0].numel()))


def _slope(names: str, slope: float, remark: str = "", **about: Any) -> None:
    """Functions whose derivative is at most ``slope`` everywhere, whatever their other arguments."""

    def weights(node: Node, given: list[Tensor]) -> Weights:
        (value,) = node.values
        return [_spread(value, scaled(_only_first(given), slope))]

    RULES.update(dict.fromkeys(names.split(), Rule(weights, remark, attained=True, **about)))


def _rises(node: Node) -> bool:
    return True


_slope("relu hardtanh relu6", 1.0, monotone=_rises)
_slope("abs", 1.0, isometric=True)
_slope("tanhshrink", 1.0)  # found among calls (``patterns``)
_slope("tanh atan asinh log_sigmoid_forward softshrink", 1.0, monotone=_rises, rounding=_function_rounding)
_slope("sin cos", 1.0, rounding=_function_rounding)
_slope("sigmoid", 0.25, monotone=_rises, rounding=_function_rounding)
_slope("hardsigmoid", 0.16666668, monotone=_rises, rounding=_function_rounding)  # torch has 1/6 in float32
_slope("erf", 1.12838, _STEEP, monotone=_rises, rounding=_function_rounding)
# Both forms of GELU.
_slope("gelu", 1.1291, _STEEP, rounding=_function_rounding)
_slope("silu", 1.0999, _STEEP, rounding=_function_rounding)
_slope("mish", 1.0885, _STEEP, rounding=_function_rounding)
_slope("hardswish", 1.5, _STEEP, rounding=_function_rounding)


@_on("clamp clamp_min clamp_max", attained=True, monotone=_rises)
def clamp(node: Node, given: list[Tensor]) -> Weights:
    """Slopes 0 and 1 between constants, to which the input is broadcast."""
    _constant_only(node, "min", "max")
    return [_spread(node.args["self"], given[0])]


@_on(
    "leaky_relu", remark=_STEEP, attained=True, rounding=_function_rounding,
    monotone=lambda node: node.args.get("negative_slope", 0.01) >= 0,
)  # fmt: skip
def leaky(node: Node, given: list[Tensor]) -> Weights:
    """The larger slope. A randomized one is the mean of two in eval mode, as which it is traced."""
    slope = float(largest(node.args.get("negative_slope", 0.01), node.dtype))
    return [_spread(node.args["self"], scaled(given[0], max(1.0, slope)))]


@_on("_prelu_kernel prelu", remark=_STEEP, attained=True, rounding=_function_rounding)
def prelu(node: Node, given: list[Tensor]) -> Weights:
    """The larger slope of each channel."""
    _constant_only(node, "weight")
    return [_spread(node.args["self"], scaled(given[0], largest(node.args["weight"], node.dtype).clamp_min(1.0)))]


@_on(
    "elu celu", remark=_STEEP, attained=True, rounding=_function_rounding,
    monotone=lambda node: min(node.args.get(name, 1) for name in ("alpha", "scale", "input_scale")) > 0,
)  # fmt: skip
def elu(node: Node, given: list[Tensor]) -> Weights:
    """``scale`` on the right of zero, ``scale alpha exp(input_scale x)`` times ``input_scale`` on the left."""
    alpha, scale, inner = (node.args.get(name, 1.0) for name in ("alpha", "scale", "input_scale"))
    if node.op == "celu":
        inner = 1 / alpha if alpha else 0.0
    if not inner > 0:
        raise NoRuleError(f"alpha={alpha} makes it grow like an exponential; it is Lipschitz for alpha > 0")
    slopes = [float(largest(number, node.dtype)) for number in (scale, scale * alpha * inner)]
    return [_spread(node.args["self"], scaled(given[0], max(slopes)))]


def _softplus_jump(beta: float, threshold: float) -> float:
    return math.exp(-threshold) / abs(beta) if beta else math.inf


def _softplus_jumps(args: Arguments, out: list[Tensor]) -> float:
    """Each number may jump at both points that are compared."""
    jump = _softplus_jump(args.get("beta", 1), args.get("threshold", _SMOOTH_THRESHOLD))
    return 4 * jump * math.sqrt(out[0].numel())


@_on("softplus", rounding=_function_rounding, jumps=_softplus_jumps, monotone=_rises)
def softplus(node: Node, given: list[Tensor]) -> Weights:
    """Slopes between 0 and 1, and a jump of ``log(1 + exp(-threshold)) / beta`` at the threshold."""
    beta, threshold = node.args.get("beta", 1), node.args.get("threshold", _SMOOTH_THRESHOLD)
    if threshold < _SMOOTH_THRESHOLD or _softplus_jump(beta, threshold) > _LARGEST_JUMP:
        raise NoRuleError(
            f"beta={beta} and threshold={threshold} make it jump where it becomes a line; from "
            f"threshold={_SMOOTH_THRESHOLD} on, with a beta of ordinary size, that is below rounding in float32"
        )
    return [_spread(node.args["self"], given[0])]


@_on("threshold", attained=True)
def threshold(node: Node, given: list[Tensor]) -> Weights:
    """The identity above a number, and that number below it."""
    if node.args["threshold"] != node.args["value"]:
        raise NoRuleError("it jumps where the threshold is not the value below it")
    return [_spread(node.args["self"], given[0])]


# -- sums and products


def _terms_of_sum(node: Node) -> list[tuple[Value, float]]:
    alpha = float(largest(node.args.get("alpha", 1), node.dtype))
    factors = {"self": 1.0, "other": alpha} if node.op != "rsub" else {"self": alpha, "other": 1.0}
    return [(node.args[name], c) for name, c in factors.items() if isinstance(node.args[name], Value)]


def _sum_rounding(args: Arguments, out: list[Tensor]) -> float:
    """Return one rounding of the sum, and one of each term that is multiplied."""
    error = 4 * UNIT_ROUNDOFF * size_of(out[0])
    if args.get("alpha", 1) == 1 and "weight" not in args:
        return error
    terms = [size_of(t) * math.sqrt(out[0].numel() / max(1, t.numel())) for t in _tensors(args)]
    return error + 2 * UNIT_ROUNDOFF * (abs(args.get("alpha", 1)) + 1) * sum(terms)


def _tensors(args: Arguments) -> list[Tensor]:
    return [value for value in args.values() if isinstance(value, Tensor)]


@_on(
    "add sub rsub", terms=_terms_of_sum, rounding=_sum_rounding,
    remark="branches add up to at most {bound} times the larger: weight them so that the weights sum to 1",
)  # fmt: skip
def add(node: Node, given: list[Tensor]) -> Weights:
    """``(Σ a_k)² <= Σ s_k a_k²`` for all ``s`` with ``Σ 1 / s_k <= 1``; the same number twice adds up exactly."""
    terms, (weights,) = _terms_of_sum(node), given
    if len(terms) == 1:
        ((value, factor),) = terms
        return [_spread(value, scaled(weights, factor))]
    (a, left), (b, right) = terms
    la, lb = (value.labels.expand(weights.shape) for value in (a, b))
    alphas = signed_readings(node.args.get("alpha", 1), node.dtype) * (1.0 if node.op == "add" else -1.0)
    same = (la.abs() == lb.abs()) & (la != 0)
    both = (la != 0) & (lb != 0) & ~same
    shares = [torch.where(both, share, 1.0) for share in split_of_terms(node, terms)]
    equal, opposite = (float((1 + side * alphas).abs().max()) for side in (1, -1))
    twice = torch.where(la * lb > 0, equal, opposite)
    on_a = torch.where(same, scaled(weights, twice), scaled(weights * shares[0], left))
    return [(la, on_a), (lb, torch.where(same, 0.0, scaled(weights * shares[1], right)))]


def split_of_terms(node: Node, terms: list[tuple[Value, float]]) -> list[float]:
    """Factors ``s_k`` with ``Σ 1 / s_k = 1``, the best for terms that change by ``L_k`` at most.

    Of terms that read the same inputs these are ``Σ L_j / L_k``, and the changes add up; of terms that read different
    inputs they are ``Σ L_j² / L_k²``, and only their squares do.
    """
    sizes = [factor * node.changes.get(id(value), 1.0) for value, factor in terms]
    most = max(sizes)
    if not 0 < most < math.inf:
        sizes, most = [1.0] * len(sizes), 1.0
    # What hardly changes gets a small share, and not none: its rounding errors count by the factor.
    sizes = [max((size / most) ** (2 if node.apart else 1), 1e-7) for size in sizes]
    return [sum(sizes) / size * _UP for size in sizes]


def _product_rounding(args: Arguments, out: list[Tensor]) -> float:
    """Return one rounding of the result, and for a softsign one of the divisor."""
    return 4 * UNIT_ROUNDOFF * size_of(out[0]) + math.sqrt(out[0].numel()) * _TINY


_SCALING = "a scaling by up to {bound}: part of the constant"


@_on("mul", remark=_SCALING, attained=True, rounding=_product_rounding)
def multiply(node: Node, given: list[Tensor]) -> Weights:
    """A constant factor for each number."""
    value, factor = node.args["self"], node.args["other"]
    if isinstance(value, Value) and isinstance(factor, Value):
        raise NoRuleError(
            "two values that depend on the input are multiplied with each other, which has no rule: it is Lipschitz "
            "only where both are bounded"
        )
    if isinstance(factor, Value):
        value, factor = factor, value
    return [_spread(value, scaled(given[0], largest(factor, node.dtype)))]


@_on("div", remark=_SCALING, attained=True, rounding=_product_rounding)
def divide(node: Node, given: list[Tensor]) -> Weights:
    """A constant divisor for each number, before it is rounded to zero."""
    if isinstance(node.args["other"], Value):
        raise NoRuleError(
            "the divisor depends on the input, which has no rule: it is Lipschitz only where the divisor is kept from "
            "0 and the quotient is bounded"
        )
    if node.args.get("rounding_mode") is not None:
        raise NoRuleError("rounding jumps")
    sizes = readings(node.args["other"], node.dtype)
    sizes = torch.where(sizes > 0, sizes, sizes[0]).amin(0)
    if bool((sizes == 0).any()):
        raise ValueError("a constant divisor has a zero: the network is not Lipschitz")
    return [_spread(node.args["self"], scaled(given[0], 1 / sizes * _UP))]


@_on("softsign", remark=_STEEP, attained=True)
def softsign(node: Node, given: list[Tensor]) -> Weights:
    """``x / (c + |x|)`` has the derivative ``c / (c + |x|)²``."""
    constant = signed_readings(node.args["constant"], node.dtype).amin(0)
    if not bool((constant > 0).all()):
        raise NoRuleError("its divisor can be 0")
    return [_spread(node.args["self"], scaled(given[0], 1 / constant * _UP))]


def _inverse(number: float) -> float:
    return 1 / number if number > 0 else math.inf


def _power_slope(node: Node, low: float, high: float) -> float:
    if isinstance(node.args["exponent"], Value):  # of a number to the power of the input: log(b) b^x
        bases = signed_readings(node.args["self"], node.dtype).flatten().tolist()
        return max(abs(math.log(b)) * max(b**low, b**high) for b in bases)
    slopes = []
    for p in signed_readings(node.args["exponent"], node.dtype).tolist():
        if p != round(p) and not low > 0:
            return math.inf
        slopes.append(abs(p) * (max(-low, high) ** (p - 1) if p >= 1 else _inverse(max(low, -high)) ** (1 - p)))
    return max(slopes)


# Slopes of functions between two numbers.
STEEP: dict[str, Callable[[Node, float, float], float]] = {
    "exp": lambda _, low, high: math.exp(high), "expm1": lambda _, low, high: math.exp(high),
    "exp2": lambda _, low, high: math.log(2) * 2.0**high, "log": lambda _, low, high: _inverse(low),
    "log2": lambda _, low, high: _inverse(low) / math.log(2), "log1p": lambda _, low, high: _inverse(1 + low),
    "log10": lambda _, low, high: _inverse(low) / math.log(10), "sqrt": lambda _, low, high: 0.5 * _inverse(low) ** 0.5,
    "rsqrt": lambda _, low, high: 0.5 * _inverse(low) ** 1.5, "pow": _power_slope,
    "reciprocal": lambda _, low, high: _inverse(max(low, -high)) ** 2,
    "sinh": lambda _, low, high: math.cosh(max(-low, high)), "cosh": lambda _, low, high: math.sinh(max(-low, high)),
}  # fmt: skip


def slope_between(node: Node, low: float, high: float) -> float:
    """The largest slope of one of these functions between two numbers; infinite for all others."""
    try:
        return STEEP[node.op](node, low, high) * (1 + 2.0**-40)
    except (ArithmeticError, LookupError, TypeError, ValueError):
        return math.inf


@_on(" ".join(STEEP), remark=_STEEP, rounding=_function_rounding)
def steep(node: Node, given: list[Tensor]) -> Weights:
    """The largest slope between the numbers that the argument can be."""
    value, *others = node.values
    low, high = node.between(value)
    slope = math.inf if others else slope_between(node, low, high)
    if not slope < math.inf:
        where = "over all inputs" if (low, high) == ANY else f"between {low:.4g} and {high:.4g}, where its input is"
        raise NoRuleError(f"its slope has no bound {where}; clamp its input first, or take a function of bounded slope")
    return [_spread(value, scaled(given[0], slope))]


def _terms_of_lerp(node: Node) -> list[tuple[Value, float]]:
    t = torch.as_tensor(node.args["weight"], dtype=torch.float64) if not isinstance(node.args["weight"], Value) else 1.0
    factors = {"self": float((1 - torch.as_tensor(t)).abs().max()), "end": float(torch.as_tensor(t).abs().max())}
    return [(node.args[name], c) for name, c in factors.items() if isinstance(node.args[name], Value)]


@_on("lerp", terms=_terms_of_lerp, rounding=_sum_rounding)
def lerp(node: Node, given: list[Tensor]) -> Weights:
    """``(1 - t) a + t b`` with a constant ``t``."""
    _constant_only(node, "weight")
    terms = _terms_of_lerp(node)
    shares = split_of_terms(node, terms) if len(terms) > 1 else [1.0]
    t = signed_readings(node.args["weight"], node.dtype)
    factors = {id(node.args["self"]): (1 - t).abs().amax(0), id(node.args["end"]): t.abs().amax(0)}
    return [
        _spread(value, scaled(given[0] * share, factors[id(value)]))
        for (value, _), share in zip(terms, shares, strict=True)
    ]


# -- the larger and the smaller of two, and sorting

_SHARED = "the parts may depend on the same input, up to as many times as there are: divide by the root of their number"


@_on("maximum minimum fmax fmin", remark=_SHARED)
def extremum(node: Node, given: list[Tensor]) -> Weights:
    """Changes by no more than the larger change of the two, and so by no more than both side by side."""
    return sorted_pair(node, [given[0], torch.zeros_like(given[0])])


@_on("max_min", isometric=True)
def sorted_pair(node: Node, given: list[Tensor]) -> Weights:
    """The larger and the smaller of one pair are that pair in order. Of ``x`` and ``-x`` the larger is ``|x|``."""
    weights = torch.maximum(given[0], given[1])
    a, b = node.args["self"], node.args["other"]
    if not isinstance(a, Value) or not isinstance(b, Value):
        return [_spread(value, weights) for value in (a, b) if isinstance(value, Value)]
    la, lb = (value.labels.expand(weights.shape) for value in (a, b))
    # Of one number with two signs both are functions of slope 1, and one of them alone counts once.
    same = (la.abs() == lb.abs()) & (la != 0)
    on_a = torch.where(same, given[0] + given[1], weights)
    return [(la, on_a), (lb, torch.where(same, 0.0, weights))]


@_on("two_sides", isometric=True)
def two_sides(node: Node, given: list[Tensor]) -> Weights:
    """``relu(x)`` and ``relu(-x)`` change by two amounts of the same sign, which add up to the change of ``x``."""
    return [(node.args["self"].labels, torch.maximum(*given))]


@_on("hypot logaddexp logaddexp2", rounding=_function_rounding)
def smooth_extremum(node: Node, given: list[Tensor]) -> Weights:
    """The gradient has norm 1 at most: a unit vector for the norm of a pair, and a softmax for the logarithm."""
    return [_spread(value, given[0]) for value in node.values]


@_on("sort msort topk kthvalue median", isometric=True)
def ordering(node: Node, given: list[Tensor]) -> Weights:
    """Numbers in order are a permutation of them, and change by no more: the largest weight, on all that are sorted."""
    return _reduced(node, _only_first(given), in_order=True)


@_on("amax amin max min aminmax")
def reduced_extremum(node: Node, given: list[Tensor]) -> Weights:
    """The largest or smallest along axes changes by no more than all of them."""
    if node.op == "aminmax":  # the ends of one order, or the same number twice
        first, second = (w for w, floating in zip(given, node.floating, strict=True) if floating)
        alone = node.values[0].labels.numel() == first.numel()
        return _reduced(node, first + second if alone else torch.maximum(first, second))
    weights = _only_first(given)
    return _reduced(node, weights)


def _logsumexp_rounding(args: Arguments, out: list[Tensor]) -> float:
    """As a function of one number, and the roundings of the sum, which are relative to it."""
    length = next(t for t in args.values() if isinstance(t, Tensor)).numel() / max(1, out[0].numel())
    return _function_rounding(args, out) + 4 * (length + 8) * UNIT_ROUNDOFF * math.sqrt(out[0].numel())


@_on("logsumexp", rounding=_logsumexp_rounding)
def logsumexp(node: Node, given: list[Tensor]) -> Weights:
    """The gradient is a softmax, of norm at most 1."""
    return _reduced(node, given[0])


def _length_rounding(args: Arguments, out: list[Tensor]) -> float:
    value = next(t for t in args.values() if isinstance(t, Tensor))
    length = value.numel() / max(1, out[0].numel())
    # Squares of a norm that are below 2^-1022 vanish, and large ones overflow.
    vanished = 2.0**-500 * math.sqrt(value.numel())
    sizes = size_of(value) * math.sqrt(max(1.0, length)) + size_of(out[0])
    return (length + 16) * UNIT_ROUNDOFF * 2 * sizes + vanished


@_on("linalg_vector_norm norm", rounding=_length_rounding)
def vector_norm(node: Node, given: list[Tensor]) -> Weights:
    """The Euclidean norm is 1-Lipschitz, and so is the largest entry.

    So are all norms between them, but powers of small numbers vanish, and they jump where torch computes them.
    """
    order = node.args.get("ord", node.args.get("p", 2))
    if order not in (None, 2, math.inf):
        raise NoRuleError(f"a norm of order {order} has no rule; those of order 2 and infinity have")
    return _reduced(node, given[0])


@_on("mean", rounding=_length_rounding, attained=True)
def mean(node: Node, given: list[Tensor]) -> Weights:
    """``n`` numbers to their mean: ``Δmean² <= Σ Δ² / n``."""
    number = node.values[0].labels.numel() / max(1, given[0].numel())
    return _reduced(node, scaled(given[0], 1 / math.sqrt(number) if number else 0.0))


@_on(
    "sum", rounding=_length_rounding, attained=True,
    remark="it adds up many numbers: divide by {bound}, or take the mean",
)  # fmt: skip
def total(node: Node, given: list[Tensor]) -> Weights:
    """``n`` numbers to their sum: ``Δsum² <= n Σ Δ²``."""
    number = node.values[0].labels.numel() / max(1, given[0].numel())
    return _reduced(node, scaled(given[0], math.sqrt(number)))


def _running_rounding(args: Arguments, out: list[Tensor]) -> float:
    """Each of ``n`` sums has fewer than ``n`` roundings of sums of absolute values."""
    value = args["self"]
    length = value.shape[args["dim"]] if value.ndim else 1
    return 2 * UNIT_ROUNDOFF * (length * length * size_of(value) + size_of(out[0]))


@_on("cumsum", remark="it adds up many numbers: divide by {bound}", attained=True,
     rounding=_running_rounding)  # fmt: skip
def running_total(node: Node, given: list[Tensor]) -> Weights:
    """The matrix of ones on and below the diagonal has the inverse ``D`` of differences, and ``D Dᵀ`` is tridiagonal.

    Its smallest eigenvalue is ``4 sin²(π / (4 n + 2))``.
    """
    labels, weights = node.args["self"].labels, given[0]
    if not labels.ndim:
        return [(labels, weights)]
    axis = node.args["dim"]
    norm = 1 / (2 * math.sin(math.pi / (4 * labels.shape[axis] + 2))) * _UP
    return [(labels, scaled(weights.amax(axis, keepdim=True), norm).expand(labels.shape))]


# Of each call that adds numbers to others at constant positions: the arguments that it adds up.
_ADDED = {"index_add": "source", "scatter_add": "src", "index_put": "values"}


def _number_of_terms(op: str, args: Arguments, parts: dict[str, Tensor]) -> Tensor:
    """Return the same call on other numbers: on ones and zeros, how many of the ones are added up at each position."""
    numbers: Arguments = {name: value for name, value in args.items() if name != "alpha"}
    if op == "scatter_add":  # an index may be shorter than what it adds, of which autograd wants to know nothing
        parts = parts | {"src": parts["src"][tuple(map(slice, args["index"].shape))]}
    return getattr(torch.ops.aten, op)(
        **tree_map(lambda leaf: leaf.cpu() if isinstance(leaf, Tensor) else leaf, numbers) | parts
    )


def _added_rounding(args: Arguments, out: list[Tensor]) -> float:
    """Return a rounding for each number that is added at a position."""
    op, source = next((op, name) for op, name in _ADDED.items() if name in args)
    ones = {name: torch.ones(args[name].shape, dtype=torch.float64) for name in ("self", source)}
    terms = float(_number_of_terms(op, args, ones).max()) if out[0].numel() else 0.0
    # What is added may be broadcast: to as many positions as there are at most.
    copies = math.sqrt(terms * max(1.0, out[0].numel() / max(1, args[source].numel())))
    sizes = size_of(args["self"]) + (1 + abs(args.get("alpha", 1))) * size_of(args[source]) * copies + size_of(out[0])
    return 4 * UNIT_ROUNDOFF * (terms + 2) * math.sqrt(terms + 1) * sizes


@_on(" ".join(_ADDED), remark="numbers are added up: divide by the root of how many", attained=True,
     rounding=_added_rounding)  # fmt: skip
def added(node: Node, given: list[Tensor]) -> Weights:
    """``(Σ a_k)² <= n Σ a_k²`` where ``n`` numbers meet; weights go back to them by the transpose of the call."""
    source = _ADDED[node.op]
    if any(isinstance(leaf, Value) for name in ("index", "indices") for leaf in tree_leaves(node.args.get(name))):
        raise NoRuleError("an index depends on the input: where it adds a number jumps")
    with torch.enable_grad():
        parts = {
            name: torch.full(shape, float(isinstance(node.args[name], Value)), dtype=torch.float64, requires_grad=True)
            for name in ("self", source)
            for shape in [_shape(node.args[name])]
        }
        terms = _number_of_terms(node.op, node.args, parts)
        back = torch.autograd.grad(terms, list(parts.values()), scaled(given[0], terms.detach().sqrt() * _UP))
    factors: Arguments = {"self": 1.0, source: largest(node.args.get("alpha", 1), node.dtype)}
    return [
        (node.args[name].labels, scaled(weights, factors[name] * _UP))
        for name, weights in zip(parts, back, strict=True)
        if isinstance(node.args[name], Value)
    ]


def _shape(argument: Value | Tensor) -> torch.Size:
    return argument.labels.shape if isinstance(argument, Value) else argument.shape


def _reduced(node: Node, weights: Tensor, *, in_order: bool = False) -> Weights:
    """Return weights of a result for each of the numbers along the axes that it is made from, or puts in order."""
    value = node.values[0]
    ndim = value.labels.ndim
    dims = node.args.get("dim", -1 if node.op in ("sort", "topk", "kthvalue") else None)
    dims = 0 if node.op == "msort" else dims
    axes = tuple(range(ndim)) if dims is None or dims == [] else tuple(d % max(1, ndim) for d in _each(dims, 1))
    if weights.ndim != ndim:  # keepdim was false
        for axis in sorted(axes):
            weights = weights.unsqueeze(axis) if ndim else weights
    if ndim and in_order:
        weights = weights.amax(axes, keepdim=True)
    return [_spread(value, weights.expand(value.labels.shape))]


@_on("centering")
def centering(node: Node, given: list[Tensor]) -> Weights:
    """Numbers less their mean: a projection."""
    axes = tuple(node.args["dim"])
    weights = given[0].amax(axes, keepdim=True).expand(given[0].shape) if axes else given[0]
    return [(node.args["self"].labels, weights)]


def _softmax_rounding(args: Arguments, out: list[Tensor]) -> float:
    value = next(t for t in args.values() if isinstance(t, Tensor))
    length = value.shape[args["dim"]] + 32
    spread = 1 + float(value.abs().max()) if value.numel() else 1.0
    return 4 * length * UNIT_ROUNDOFF * spread * (size_of(out[0]) + math.sqrt(out[0].numel()))


@_on("_softmax softmax", rounding=_softmax_rounding)
def softmax(node: Node, given: list[Tensor]) -> Weights:
    """``diag(p) - p pᵀ`` has norm at most ``max 2 p (1 - p) <= 1/2`` (Gershgorin)."""
    axis = node.args["dim"]
    return [(node.values[0].labels, scaled(given[0].amax(axis, keepdim=True), 0.5).expand(given[0].shape))]


@_on(
    "_log_softmax log_softmax", attained=True, rounding=_softmax_rounding,
    remark="its norm is the root of the number of classes: leave it to the loss",
)  # fmt: skip
def log_softmax(node: Node, given: list[Tensor]) -> Weights:
    """``I - 1 pᵀ`` is convex in ``p``, and has norm ``sqrt(n)`` at the corners of the simplex."""
    axis = node.args["dim"]
    root = math.sqrt(given[0].shape[axis])
    return [(node.values[0].labels, scaled(given[0].amax(axis, keepdim=True), root).expand(given[0].shape))]


# -- linear maps with constant weights

_MATRIX = "the constant matrix has norm {bound}: divide by it"


def matrix_norm(matrix: Tensor) -> float:
    """Certified spectral norm of a matrix."""
    exact, exponent = normalized(checked_weight(matrix, "the constant matrix"))
    return rescaled_up(singular_value_range([exact[None]], lowest=False)[1], exponent)


def _once(node: Node, key: Tensor, compute: Callable[[], T]) -> T:
    """Return a certified norm, computed once for each profile of weights."""
    name = key.numpy().tobytes()
    if name not in node.norms:
        node.norms[name] = compute()
    return node.norms[name]


def _through_matrix(node: Node, matrix: Tensor, rows: Tensor, number: int = 0) -> Tensor:
    """Return weights ``(rows, m)`` on ``x @ matrix`` to one for each row of ``x``: the norm with weighted columns.

    Each row is bounded by its largest weight; what columns have less of that in every row makes them shorter.
    """
    tops = rows.amax(1)
    finite = torch.where(tops.isfinite() & (tops > 0), tops, 1.0)
    profile = torch.where(rows > 0, (rows / finite[:, None]).nan_to_num(1.0, 1.0).clamp(_TINY, 1.0), 0.0).amax(0)
    key = torch.cat([profile, torch.tensor([float(number)], dtype=torch.float64)])
    weighted = 1.0 if bool((profile == 1).all()) else profile.sqrt() * _UP
    return scaled(tops, _once(node, key, lambda: matrix_norm(matrix.detach().cpu().double() * weighted)))


def _product_weights(node: Node, a: Value | Tensor, b: Value | Tensor, weights: Tensor) -> Weights:
    """``a @ b`` where one of the two is constant; ``(batch, n, k)`` and ``(batch, k, m)``."""
    if isinstance(b, Value):
        if isinstance(a, Value):
            raise NoRuleError("two values that depend on the input are multiplied with each other, as attention does")
        flipped = Value(b.labels.mT)
        return [(labels.mT, w.mT) for labels, w in _product_weights(node, flipped, a.mT, weights.mT)]
    assert isinstance(a, Value)
    constant, labels = b, a.labels
    if labels.ndim == 2:
        return [(labels, _through_matrix(node, constant, weights)[:, None].expand(labels.shape))]
    same = bool((constant == constant[:1]).all())
    if same:
        flat = _through_matrix(node, constant[0], weights.flatten(0, 1)).view(weights.shape[:2])
    else:
        pairs = enumerate(zip(constant, weights, strict=True))
        flat = torch.stack([_through_matrix(node, matrix, rows, i) for i, (matrix, rows) in pairs])
    return [(labels, flat[..., None].expand(labels.shape))]


# Of each kind of product: its two factors, and what is added to them.
_FACTORS = {
    "mm": ("self", "mat2", None), "bmm": ("self", "mat2", None), "addmm": ("mat1", "mat2", "self"),
    "baddbmm": ("batch1", "batch2", "self"), "mv": ("self", "vec", None), "addmv": ("mat", "vec", "self"),
    "dot": ("self", "tensor", None),
}  # fmt: skip


def _product_rounding_of(args: Arguments, out: list[Tensor]) -> float:
    """``γ_k |A| |B|``, and the bias."""
    # The names of the factors tell what kind of product it is.
    first, second, added = next(names for names in reversed(_FACTORS.values()) if {*names} - {None} <= args.keys())
    a, b = args[first], args[second]
    size = size_of(a) * size_of(b) * abs(args.get("alpha", 1))
    bias = 0.0
    if added is not None:
        bias = size_of(args[added]) * math.sqrt(out[0].numel() / max(1, args[added].numel()))
        bias *= abs(args.get("beta", 1))
    return 4 * UNIT_ROUNDOFF * ((a.shape[-1] + 4) * size + bias + size_of(out[0]))


@_on(" ".join(_FACTORS), remark=_MATRIX, attained=True, rounding=_product_rounding_of)
def product(node: Node, given: list[Tensor]) -> Weights:
    """A product with a constant matrix or vector, and what is added to it."""
    first, second, added = _FACTORS[node.op]
    alpha, beta = (largest(node.args.get(name, 1), node.dtype) for name in ("alpha", "beta"))
    a, b, bias = node.args[first], node.args[second], None if added is None else node.args[added]
    weights, sums = given[0], list[tuple[Tensor, Tensor]]()
    if isinstance(bias, Value):
        moves = isinstance(a, Value) or isinstance(b, Value)
        # Any pair of shares that add up will do; half and half.
        weights = scaled(weights, math.sqrt(2)) if moves else weights
        sums = [_spread(bias, scaled(weights, beta))]
        if not moves:
            return sums
    weights = scaled(weights, alpha)
    if node.op in ("mv", "addmv", "dot"):  # a vector is a matrix of one column, or one row
        weights = weights.reshape(-1, 1)
        a = _unsqueezed(a, 0) if node.op == "dot" else a
        b = _unsqueezed(b, 1)
    return [*_product_weights(node, a, b, weights), *sums]


def _unsqueezed(factor: Value | Tensor, axis: int) -> Value | Tensor:
    return Value(factor.labels.unsqueeze(axis)) if isinstance(factor, Value) else factor.unsqueeze(axis)


@_on("embedding", attained=True, remark="its table has norm {bound} with respect to one-hot vectors: divide by it")
def embedding(node: Node, given: list[Tensor]) -> Weights:
    """Tokens as one-hot vectors: the spectral norm of the table."""
    _constant_only(node, "weight")
    rows = given[0].flatten(0, -2)
    return [(node.args["indices"].labels, _through_matrix(node, node.args["weight"], rows).view(given[0].shape[:-1]))]


def _convolution_rounding(args: Arguments, out: list[Tensor]) -> float:
    """``γ_k |W| |x|`` with the norm of ``|W|`` by its row and column sums, and the bias."""
    kernel = args["weight"].abs().unflatten(0, (args["groups"], -1)).flatten(3)  # (groups, a, b, taps)
    rows, columns = (float(kernel.sum(axes).max()) for axes in ((2, 3), (1, 3)))
    length = max(kernel.shape[1:3]) * kernel.shape[3] + 4
    bias = 0.0 if args.get("bias") is None else float(args["bias"].norm()) * math.sqrt(out[0].numel() / out[0].shape[1])
    size = math.sqrt(rows * columns) * size_of(args["input"])
    return 2 * UNIT_ROUNDOFF * (length * size + bias + size_of(out[0]))


@_on("convolution", remark="the kernel has a norm of at most {bound}: divide by it", rounding=_convolution_rounding)
def convolution(node: Node, given: list[Tensor]) -> Weights:
    """The norm of the convolution with a constant kernel, whose outputs are weighted channel by channel."""
    _constant_only(node, "weight", "bias")
    weights, groups = given[0], node.args["groups"]
    if not weights.numel() or not node.args["input"].labels.numel():
        return []
    tops = weights.flatten(1).amax(1)
    finite = torch.where(tops.isfinite() & (tops > 0), tops, 1.0).view(-1, *(1,) * (weights.ndim - 1))
    profile = torch.where(weights > 0, (weights / finite).nan_to_num(1.0, 1.0).clamp(_TINY, 1.0), 0.0)
    profile = profile.transpose(0, 1).flatten(1).amax(1)
    kernel = checked_weight(node.args["weight"], "the convolution")
    if bool((profile < 1).any()):
        factors = profile.sqrt() * _UP
        if node.args["transposed"]:  # (in, out / groups, ...)
            factors = factors.view(groups, 1, -1).expand(-1, len(kernel) // groups, -1).flatten(0, 1)
        else:  # (out, in / groups, ...)
            factors = factors[:, None]
        kernel = kernel * factors.view(*factors.shape, *(1,) * (kernel.ndim - 2))
    # Outputs at the ends of an axis that nobody uses are as good as cut off.
    ends = [constant_border(weights, axis) for axis in range(2, weights.ndim)]
    key = torch.cat([profile, torch.tensor(ends, dtype=torch.float64).flatten()])
    labels, norm = _once(
        node,
        key,
        lambda: _transposed_norm(node, kernel, ends) if node.args["transposed"] else _plain_norm(node, kernel),
    )
    if isinstance(norm, SingularValueRange):
        node.range = norm if bool((profile == 1).all()) else node.range
        norm = norm.high
    return [(labels, scaled(tops, norm).view(-1, *(1,) * (labels.ndim - 1)).expand(labels.shape))]


def _numbers(node: Node, dims: int) -> list[tuple[int, ...]]:
    return [_each(node.args[name], dims) for name in ("stride", "padding", "dilation", "output_padding")]


def _plain_norm(node: Node, kernel: Tensor) -> tuple[Tensor, float | SingularValueRange]:
    """Return labels that a convolution reads, and its certified norm as a function of them.

    Zeros around the input and a circular extension of it, made by steps of their own, are part of the convolution: as a
    function of the input without them it has zero padding, or circular padding, of another size. Both are read off the
    labels. Constants at the ends of an axis change nothing, so that they are as good as zeros; and an axis whose labels
    repeat after ``n`` positions is a circle of ``n`` that was extended.
    """
    labels, dims, groups = node.args["input"].labels, kernel.ndim - 2, node.args["groups"]
    stride, padding, dilation, _ = _numbers(node, dims)
    extent = tuple(d * (k - 1) + 1 for d, k in zip(dilation, kernel.shape[2:], strict=True))
    zeros = [constant_border(labels, axis) for axis in range(2, labels.ndim)]
    if any(map(any, zeros)) or any(padding):
        mode, pads = "zeros", [(p + a, p + b) for p, (a, b) in zip(padding, zeros, strict=True)]
        sizes = [size - a - b for size, (a, b) in zip(labels.shape[2:], zeros, strict=True)]
        starts = [a for a, _ in zeros]
    else:
        mode, sizes = "circular", [period(labels, axis) for axis in range(2, labels.ndim)]
        pads = [(0, whole - size) for whole, size in zip(labels.shape[2:], sizes, strict=True)]
        starts = [0] * dims
        mode = mode if any(map(any, pads)) else "zeros"
    axes = []
    for n, e, s, pad in zip(sizes, extent, stride, pads, strict=True):
        axes.append(Axis(n, (n + sum(pad) - e) // s + 1, e, s, pad, mode))
    base = labels
    for axis, (start, size) in enumerate(zip(starts, sizes, strict=True), start=2):
        base = base.narrow(axis, start, size)
    return _folded_norm(LinearOperator(kernel, dilation, groups, tuple(axes)), base)


def _transposed_norm(node: Node, kernel: Tensor, ends: list[tuple[int, int]]) -> tuple[Tensor, float]:
    """Return the same for a transposed convolution: the adjoint of the one from its output to its input.

    ``cut`` positions are left out at each end of its full output, by ``padding`` and because nobody uses them. The full
    output at ``t`` adds up what the inputs ``i`` with ``s i <= t < s i + e`` send there. If ``e - s`` positions or more
    are cut at both ends, every input that would reach what is left is there. So if the input is a circle of ``n`` that
    was extended, what is left is the transposed convolution on that circle, ``n s`` positions around, repeated as often
    as it is longer; the norm grows by the root of that number at most.
    """
    labels, dims, groups = node.args["input"].labels, kernel.ndim - 2, node.args["groups"]
    stride, padding, dilation, extra = _numbers(node, dims)
    periods = [period(labels, axis) for axis in range(2, labels.ndim)]
    wraps = any(period < size for period, size in zip(periods, labels.shape[2:], strict=True))
    axes, circles, repeats, base = [], [], 1, labels
    for axis, (n, d, k, s, p, x, (before, after)) in enumerate(
        zip(periods, dilation, kernel.shape[2:], stride, padding, extra, ends, strict=True), start=2
    ):
        size, e = labels.shape[axis], d * (k - 1) + 1
        cut = p + before, p - x + after
        out = (size - 1) * s + e - sum(cut)
        axes.append(Axis(out, size, e, s, cut, "zeros"))
        wraps = wraps and min(cut) >= e - s
        circles.append(Axis(n * s, n, e, s, (0, max(0, e - s)), "circular"))
        repeats *= -(-out // (n * s))
        base = base.narrow(axis, 0, n)
    if not wraps:
        return labels, norm_range(LinearOperator(kernel, dilation, groups, tuple(axes), True), lowest=False)[1]
    norm = norm_range(LinearOperator(kernel, dilation, groups, tuple(circles), True), lowest=False)[1]
    return base, norm * math.sqrt(repeats) * _UP


def constant_border(labels: Tensor, axis: int) -> tuple[int, int]:
    """Return how many slices at both ends of an axis are constants."""
    moving = (labels != 0).movedim(axis, 0).flatten(1).any(1).nonzero().flatten()
    if not len(moving):
        return 0, 0
    return int(moving[0]), labels.shape[axis] - 1 - int(moving[-1])


def without_border(labels: Tensor) -> Tensor:
    """Return what is between the constants at the ends of all axes but the first two."""
    for axis in range(2, labels.ndim):
        before, after = constant_border(labels, axis)
        labels = labels.narrow(axis, before, labels.shape[axis] - before - after)
    return labels


def period(labels: Tensor, axis: int) -> int:
    """Return the smallest shift along an axis that keeps the labels; the size of the axis if there is none."""
    size = labels.shape[axis]
    if not labels.numel():
        return size
    first = labels.movedim(axis, 0).flatten(1)[:, 0]
    for shift in (first[1:] == first[0]).nonzero().flatten().tolist() if float(first[0]) else ():
        if torch.equal(labels.narrow(axis, shift + 1, size - shift - 1), labels.narrow(axis, 0, size - shift - 1)):
            return int(shift) + 1
    return size


# Entries of a dense matrix whose columns are added up where they read the same number.
_FOLDED_ENTRIES = 1 << 22
_FOLDED_SIDE = 1024


def _folded_norm(operator: LinearOperator, labels: Tensor) -> tuple[Tensor, float | SingularValueRange]:
    """Return the norm of a convolution that may read numbers several times; exact for small ones, whatever they are."""
    one = labels[0].flatten()
    read, inverse = one.abs().unique(return_inverse=True)
    once = len(read) == len(one)
    rows, columns = math.prod(operator.image), len(read)
    if once or operator.groups > 1 or rows * len(one) > _FOLDED_ENTRIES or min(rows, columns) > _FOLDED_SIDE:
        return labels, norm_range(operator, lowest=False)
    for sample in labels[1:]:
        # All samples must repeat the same positions with the same signs.
        same = torch.equal(sample.flatten().abs().unique(return_inverse=True)[1], inverse)
        if not same or not torch.equal(sample.flatten().sign(), one.sign()):
            return labels, norm_range(operator, lowest=False)
    kernel, exponent = normalized(operator.kernel)
    dense = LinearOperator(kernel, operator.dilation, 1, operator.axes).dense()[0] * one.sign()
    folded = dense.new_zeros(rows, columns).index_add_(1, inverse, dense)
    rounding = (
        2
        * (len(one) // columns + 2 + kernel[0, 0].numel())
        * UNIT_ROUNDOFF
        * float(dense.abs().norm())
        * len(one)
        / columns
    )
    norm = singular_value_range([folded[None]], rounding * 1.01, lowest=False)[1]
    positions = torch.zeros(columns, dtype=torch.long).scatter_(0, inverse, torch.arange(len(one)))
    return labels.flatten(1)[:, positions], rescaled_up(norm, exponent)


def _normalisation_rounding(args: Arguments, out: list[Tensor]) -> float:
    value, scales = args["input"], batch_norm_scales(args)
    copies = math.sqrt(value.numel() / value.shape[1])
    bias = 0.0 if args.get("bias") is None else float(args["bias"].norm())
    shift = float((args["running_mean"].abs() * scales).norm()) + bias
    return 16 * UNIT_ROUNDOFF * (float(scales.max()) * size_of(value) + copies * shift + size_of(out[0]))


@_on(
    "native_batch_norm cudnn_batch_norm miopen_batch_norm _native_batch_norm_legit_no_training batch_norm",
    remark="|weight| / sqrt(running_var + eps) is {bound} at some channel: shrink its weight", attained=True,
    rounding=_normalisation_rounding,
)  # fmt: skip
def batch_norm(node: Node, given: list[Tensor]) -> Weights:
    """In eval mode a scaling by ``weight / sqrt(running_var + eps)`` of each channel."""
    _constant_only(node, "weight", "bias", "running_mean", "running_var")
    weights, scales = _only_first(given), batch_norm_scales(node.args)
    return [(node.args["input"].labels, scaled(weights, scales.view(-1, *(1,) * (weights.ndim - 2))))]


def batch_norm_scales(args: Arguments) -> Tensor:
    """Absolute scale of each channel of a normalisation by constants."""
    if args.get("training") or args.get("running_var") is None:
        raise NoRuleError(
            "a normalisation without running statistics divides by the deviation of its input, which is not Lipschitz; "
            "use track_running_stats=True, or BatchCentering"
        )
    variance = checked_weight(args["running_var"], "the normalisation")
    weight = args.get("weight")
    weight = torch.ones_like(variance) if weight is None else checked_weight(weight, "the normalisation")
    eps = args["eps"] if "eps" in args else args["epsilon"]
    eps = min(eps, float(torch.tensor(eps, dtype=torch.float32)))
    if float(variance.min()) + eps <= 0:
        raise ValueError(f"a normalisation has a variance of {float(variance.min())}: it must be positive")
    return weight.abs() / (variance + eps).sqrt() * _UP


# -- windows

_OVERLAP = "windows overlap: use kernel_size = stride"


def _maps(node: Node, given: Tensor, norm: float) -> Weights:
    """Return a function of each channel's positions: its largest weight, times the norm."""
    labels = node.values[0].labels
    dims = given.ndim - (labels.ndim - len(_spatial(node)))
    tops = given.flatten(given.ndim - dims).amax(-1)
    return [(labels, scaled(tops, norm).view(*tops.shape, *(1,) * dims).expand(labels.shape))]


def _spatial(node: Node) -> tuple[int, ...]:
    """Sizes of the axes that windows move along: as many as the digit in the name of the call."""
    dims = int(next(letter for letter in reversed(node.op.removesuffix("_with_indices")) if letter.isdigit()))
    return tuple(node.values[0].labels.shape[-dims:])


def most_windows(kernel: int, stride: int, padding: int, dilation: int, size: int) -> int:
    """Largest number of windows that read the same position (windows that start past the padded end do not exist)."""
    positions = torch.arange(size).unsqueeze(1) + padding
    taps = positions - dilation * torch.arange(kernel)
    starts = (taps >= 0) & (taps % stride == 0) & (taps < size + 2 * padding)
    return max(1, int(starts.sum(1).max()))


@_on("max_pool2d_with_indices max_pool3d_with_indices", remark=_OVERLAP)
def max_pool(node: Node, given: list[Tensor]) -> Weights:
    """A maximum changes by no more than its window; a position counts for each window that holds it."""
    sizes = _spatial(node)
    dims = len(sizes)
    kernel = _each(node.args["kernel_size"], dims)
    stride = _each(node.args.get("stride") or kernel, dims)
    padding, dilation = (
        _each(node.args.get(name, default), dims) for name, default in (("padding", 0), ("dilation", 1))
    )
    windows = math.prod(most_windows(*axis) for axis in zip(kernel, stride, padding, dilation, sizes, strict=True))
    return _maps(node, _only_first(given), math.sqrt(windows) * _UP)


@_on("adaptive_max_pool2d adaptive_max_pool3d", remark=_OVERLAP)
def adaptive_max_pool(node: Node, given: list[Tensor]) -> Weights:
    """As for windows of one size."""
    sizes = _spatial(node)
    most = 1
    for out, size in zip(_each(node.args["output_size"], len(sizes)), sizes, strict=True):
        matrix = _axis_matrix(partial(F.adaptive_avg_pool1d, output_size=out), size)
        most *= int((matrix > 0).sum(0).max())
    return _maps(node, _only_first(given), math.sqrt(most) * _UP)


def _axis_matrix(resample: Callable[[Tensor], Tensor], size: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """Matrix ``(out, size)`` of a linear function of one axis, applied to ``(batch, 1, size)``, in float64."""
    return resample(torch.eye(size, dtype=dtype).unsqueeze(1)).squeeze(1).T.to(torch.float64)


def axis_norm(resample: Callable[[Tensor], Tensor], size: int, dtype: torch.dtype = torch.float64) -> float:
    """Certified norm of a linear function of one axis; the larger where ``dtype`` computes it differently."""
    dtypes = {torch.float64, at_least_float32(dtype), dtype}
    return max(matrix_norm(_axis_matrix(resample, size, each)) for each in dtypes) * _UP


_AVERAGES = "its windows weigh a position by more than 1 in all: use kernel_size = stride and no divisor"


def _window_rounding(args: Arguments, out: list[Tensor]) -> float:
    """Sums over at most all positions of one map."""
    value = next(t for t in args.values() if isinstance(t, Tensor))
    length = value[0, 0].numel() if value.ndim > 2 else value.numel()
    return 4 * (length + 16) * UNIT_ROUNDOFF * (size_of(value) * math.sqrt(length) + size_of(out[0]))


@_on("avg_pool2d avg_pool3d", remark=_AVERAGES, attained=True, rounding=_window_rounding)
def avg_pool(node: Node, given: list[Tensor]) -> Weights:
    """Averages along one axis at a time: the product of the norms of their matrices."""
    sizes, args = _spatial(node), node.args
    dims = len(sizes)
    kernel = _each(args["kernel_size"], dims)
    stride, padding = _each(args.get("stride") or kernel, dims), _each(args.get("padding", 0), dims)
    ceil, inside = args.get("ceil_mode", False), args.get("count_include_pad", True)
    average = partial(F.avg_pool1d, ceil_mode=ceil, count_include_pad=inside)
    norm = 1.0
    for k, s, p, size in zip(kernel, stride, padding, sizes, strict=True):
        norm *= axis_norm(partial(average, kernel_size=k, stride=s, padding=p), size)
    divisor = args.get("divisor_override")
    if divisor is not None:
        if ceil or any(padding):
            raise NoRuleError("divisor_override together with padding or ceil_mode has no rule")
        norm *= math.prod(kernel) / abs(divisor) * _UP
    return _maps(node, given[0], norm)


def _overlap_rounding(args: Arguments, out: list[Tensor]) -> float:
    terms = math.prod(_each(args["kernel_size"], 2))
    return (terms + 16) * UNIT_ROUNDOFF * 2 * (size_of(args["self"]) * math.sqrt(terms) + size_of(out[0]))


@_on("col2im", remark="its windows overlap: divide by how many hold a position", attained=True,
     rounding=_overlap_rounding)  # fmt: skip
def overlap_add(node: Node, given: list[Tensor]) -> Weights:
    """Windows that are added up where they overlap: a position is a sum of as many numbers as windows hold it."""
    windows = [_each(node.args[name], 2) for name in ("kernel_size", "dilation", "padding", "stride")]
    labels, weights = node.values[0].labels, given[0]
    held = F.fold(torch.ones_like(labels), weights.shape[-2:], *windows)
    return [(labels, F.unfold(scaled(weights, held.sqrt() * _UP), *windows))]


@_on("_adaptive_avg_pool2d _adaptive_avg_pool3d", remark=_AVERAGES, attained=True, rounding=_window_rounding)
def adaptive_avg_pool(node: Node, given: list[Tensor]) -> Weights:
    """Averages along one axis at a time."""
    sizes = _spatial(node)
    norm = 1.0
    for out, size in zip(_each(node.args["output_size"], len(sizes)), sizes, strict=True):
        norm *= axis_norm(partial(F.adaptive_avg_pool1d, output_size=out), size)
    return _maps(node, given[0], norm)


@_on(
    "upsample_linear1d upsample_bilinear2d upsample_trilinear3d", attained=True, rounding=_window_rounding,
    remark="it copies numbers: divide by {bound}",
)  # fmt: skip
def interpolation(node: Node, given: list[Tensor]) -> Weights:
    """Interpolation along one axis at a time, with coefficients as float64 and the network's dtype have them."""
    sizes = _spatial(node)
    factors = [node.args.get(name) for name in ("scales", "scales_d", "scales_h", "scales_w") if name in node.args]
    factors = [None] * (len(sizes) - len(factors)) + factors if len(factors) <= len(sizes) else factors[-len(sizes) :]
    norm = 1.0
    for size, out, factor in zip(sizes, given[0].shape[-len(sizes) :], factors, strict=True):

        def resample(x: Tensor, out: int = out, factor: Any = factor) -> Tensor:
            return torch.ops.aten.upsample_linear1d(x, [out], bool(node.args["align_corners"]), factor)

        norm *= axis_norm(resample, size, node.dtype)
    return _maps(node, given[0], norm)


# -- what has no rule, and why

_DIVIDES = "it divides by the deviation or norm of its input: its only Lipschitz constant is near 1 / sqrt(eps)"
_JUMPS = "it jumps, and a function that jumps is not Lipschitz"
_GROWS = "its slope has no bound over all inputs; clamp its input first, or take a function of bounded slope"
_ATTENTION = "softmax attention multiplies its inputs with each other, which is not Lipschitz"
_SQUARES = "a variance grows with the square of its input"
_GATES = "it multiplies gates and states, which both depend on the input; OrthoRNN and loops over RNNCell have bounds"
_MATRICES = "it has no rule; write it as a product with a matrix"
REASONS = {
    **dict.fromkeys(["native_layer_norm", "native_group_norm", "_fused_rms_norm"], _DIVIDES),
    **dict.fromkeys(["var", "var_mean", "std_mean"], _SQUARES),
    "std": "it has no rule; write it as the norm of x - x.mean(), divided by the root of their number less one",
    **dict.fromkeys("hardshrink sign round floor ceil trunc frac remainder fmod argmax argmin argsort".split(), _JUMPS),
    **dict.fromkeys("heaviside bucketize searchsorted one_hot".split(), _JUMPS),
    **dict.fromkeys("tan prod cumprod".split(), _GROWS),
    **dict.fromkeys(["addcmul", "addcdiv", "glu"], "it multiplies or divides values by each other"),
    **dict.fromkeys(["upsample_bicubic2d", "grid_sampler_2d"], "this interpolation has no rule; bilinear has"),
    **dict.fromkeys(["fft_r2c", "_fft_r2c", "_fft_c2c"], _MATRICES),
    **dict.fromkeys(["mkldnn_rnn_layer", "lstm", "lstm_cell", "_thnn_fused_lstm_cell"], _GATES),
    **dict.fromkeys(["gru", "gru_cell", "_thnn_fused_gru_cell"], _GATES),
}  # fmt: skip
REASONS |= {
    f"_scaled_dot_product_{kind}": _ATTENTION
    for kind in (
        "flash_attention_for_cpu",
        "flash_attention",
        "efficient_attention",
        "cudnn_attention",
        "attention_math",
    )
}
REASONS |= {"_native_multi_head_attention": _ATTENTION, "_transformer_encoder_layer_fwd": _ATTENTION}
REASONS["where"] = (
    "a choice between values by a condition that depends on the input jumps, unless it is the larger or the smaller of "
    "the two that are compared; write it with torch.maximum, torch.minimum or clamp"
)
_COMPARISONS = frozenset(["gt", "ge", "lt", "le", "eq", "ne", "logical_and", "logical_or", "logical_not", "isnan"])


def no_rule(node: Node) -> NoRuleError:
    """Return the error for a call without a rule."""
    reason = _JUMPS if node.op in _COMPARISONS else REASONS.get(node.op, "its Lipschitz constant is not known")
    return NoRuleError(f"no Lipschitz rule for {node.where()}: {reason}. {way_out(node)}")


def way_out(node: Node) -> str:
    """Return how to register a rule for the module that makes a call."""
    own = next(
        (f.module for f in reversed(node.path) if not type(f.module).__module__.startswith("torch.nn.modules.cont")),
        None,
    )
    return (
        f"If you can prove a bound of the module, register it: @trysquare.lipschitz.rule({class_name(own)}) on a "
        "function (layer, input_shape) -> float"
    )
