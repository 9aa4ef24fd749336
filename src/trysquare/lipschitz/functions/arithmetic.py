"""Sums, products with constants, reductions, and functions of each number."""

from __future__ import annotations

import math
import operator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trysquare.lipschitz.arguments import Call, Constants, SideBySide, on, shape_of
from trysquare.lipschitz.factors import copies, each, largest, smallest
from trysquare.lipschitz.functions.rearrangements import own_dims
from trysquare.lipschitz.modules import embedding, linear_layer
from trysquare.lipschitz.registry import NoRuleError

_CONV: dict[int, type[nn.Module]] = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
_CONV_TRANSPOSE: dict[int, type[nn.Module]] = {1: nn.ConvTranspose1d, 2: nn.ConvTranspose2d, 3: nn.ConvTranspose3d}


@on(
    "abs", "abs_", "neg", "neg_", "relu", "relu_", "tanh", "tanh_", "sin", "cos", torch.abs, torch.neg, operator.neg,
    operator.abs, operator.pos, abs, torch.relu, torch.relu_, F.relu_, torch.tanh, torch.sin, torch.cos,
)  # fmt: skip
def slope_of_one(call: Call, input: Tensor) -> Constants:
    """Slopes between -1 and 1."""
    return 1.0


@on("sigmoid", "sigmoid_", torch.sigmoid)
def sigmoid(call: Call, input: Tensor) -> Constants:
    """Slope at most 1/4."""
    return 0.25


@on("clamp", "clamp_", "clip", torch.clamp, torch.clip)
def clamp(call: Call, input: Tensor, min: Any = None, max: Any = None) -> Constants:
    """Slopes 0 and 1 between constants."""
    return 1.0


@on("clamp_min", torch.clamp_min)
def clamp_min(call: Call, input: Tensor, min: Any) -> Constants:
    """Slopes 0 and 1."""
    return 1.0


@on("clamp_max", torch.clamp_max)
def clamp_max(call: Call, input: Tensor, max: Any) -> Constants:
    """Slopes 0 and 1."""
    return 1.0


def _copies(call: Call, value: Any) -> float:
    return copies(shape_of(value), call.result.shape)


@on(
    operator.add, operator.sub, operator.iadd, operator.isub, torch.add, torch.sub, torch.subtract, "add", "add_",
    "sub", "sub_", "subtract",
)  # fmt: skip
def add(call: Call, input: Any, other: Any, *, alpha: Any = 1) -> Constants:
    """Sum or difference: changes add up, each times the norm of its broadcast."""
    return {"input": _copies(call, input), "other": _copies(call, other) * largest(alpha, call.result.dtype)}


@on(torch.rsub, "rsub")
def subtract_from(call: Call, input: Any, other: Any, *, alpha: Any = 1) -> Constants:
    """``other - alpha * input``."""
    return {"input": _copies(call, input) * largest(alpha, call.result.dtype), "other": _copies(call, other)}


@on(operator.mul, operator.imul, torch.mul, torch.multiply, "mul", "mul_", "multiply")
def multiply(call: Call, input: Any, other: Any) -> Constants:
    """A constant factor: its largest entry."""
    if call.depends("input") and call.depends("other"):
        raise NoRuleError("two values that depend on the input are multiplied with each other, which is not Lipschitz")
    name, value, scale = ("input", input, other) if call.depends("input") else ("other", other, input)
    return {name: largest(scale, call.result.dtype) * _copies(call, value)}


@on(operator.truediv, operator.itruediv, torch.div, torch.divide, torch.true_divide, "div", "div_", "divide")
def divide(call: Call, input: Any, other: Any, *, rounding_mode: str | None = None) -> Constants:
    """A constant divisor: its smallest entry."""
    if call.depends("other"):
        raise NoRuleError("the divisor depends on the input, which is not Lipschitz")
    if rounding_mode is not None:
        raise NoRuleError("rounding jumps")
    divisor = smallest(other, call.result.dtype)
    if divisor == 0:
        raise ValueError("a constant divisor has a zero: the network is not Lipschitz")
    return 1 / divisor * _copies(call, input)


@on(torch.maximum, torch.minimum, "maximum", "minimum")
def extremum(call: Call, input: Any, other: Any) -> Constants:
    """Larger or smaller of two: changes by no more than both side by side."""
    return SideBySide({"input": _copies(call, input), "other": _copies(call, other)})


@on(torch.max, torch.min, "max", "min")
def extremum_or_reduction(
    call: Call, input: Any, other: Any = None, keepdim: bool = False, *, dim: Any = None
) -> Constants:
    """The two-tensor form; reductions return indices too, which are not Lipschitz."""
    if isinstance(other, Tensor):
        return extremum(call, input, other)
    raise NoRuleError("max and min along an axis return indices too; use amax or amin")


@on("amax", "amin", torch.amax, torch.amin)
def reduced_extremum(call: Call, input: Tensor, dim: Any = (), keepdim: bool = False) -> Constants:
    """Largest or smallest along axes: 1-Lipschitz."""
    own_dims(input, dim if dim != () else None)
    return 1.0


def _reduced(input: Tensor, dim: Any) -> int:
    return math.prod(input.shape[axis] for axis in own_dims(input, dim if dim != () else None))


@on("mean", torch.mean)
def mean(call: Call, input: Tensor, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Constants:
    """``n`` numbers to their mean: norm ``1 / sqrt(n)``."""
    return 1 / math.sqrt(_reduced(input, dim))


@on("sum", torch.sum)
def total(call: Call, input: Tensor, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Constants:
    """``n`` numbers to their sum: norm ``sqrt(n)``."""
    return math.sqrt(_reduced(input, dim))


def _with_weight(layer: Any, weight: Tensor) -> Any:
    """A layer that was made on the meta device, with its weight: what the function is the forward pass of."""
    layer.weight = nn.Parameter(weight.detach(), requires_grad=False)
    return layer


def _linear(weight: Tensor, shape: tuple[int, ...]) -> float:
    layer = _with_weight(nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta"), weight)
    return float(linear_layer(layer, shape))


@on(F.linear)
def linear(call: Call, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Constants:
    """The spectral norm of the weight."""
    if call.depends("weight"):
        raise NoRuleError("the weight depends on the input, which is not Lipschitz")
    return _linear(weight.reshape(-1, weight.shape[-1]), tuple(input.shape[1:]))


@on(operator.matmul, torch.matmul, "matmul")
def matmul(call: Call, input: Tensor, other: Tensor) -> Constants:
    """Product with a constant matrix or vector: its spectral norm."""
    if call.depends("input") and call.depends("other"):
        raise NoRuleError("two values that depend on the input are multiplied with each other (as attention does)")
    name, matrix = ("other", input) if call.depends("other") else ("input", other)
    if matrix.ndim > 2:
        raise NoRuleError(f"the constant factor of a matrix product has {matrix.ndim} axes; 1 or 2 have a rule")
    if matrix.ndim == 1:
        matrix = matrix.unsqueeze(0)
    return {name: _linear(matrix, (matrix.shape[1],))}


@on(torch.mm, "mm")
def mm(call: Call, input: Tensor, mat2: Tensor) -> Constants:
    """Product with a constant matrix: its spectral norm."""
    if call.depends("mat2"):
        raise NoRuleError("a matrix product from the left mixes the samples of a batch")
    return _linear(mat2, (mat2.shape[1],))


@on(torch.einsum, variadic=True)
def einsum(call: Call, equation: str, operands: Any) -> Constants:
    """Refused: it can multiply values with each other."""
    raise NoRuleError("einsum has no rule; write it as a matrix product with '@'")


@on(F.conv1d, F.conv2d, F.conv3d)
def convolution(
    call: Call,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Constants:
    """The certified norm of the convolution with a constant weight."""
    if call.depends("weight"):
        raise NoRuleError("the weight depends on the input, which is not Lipschitz")
    dims = weight.ndim - 2
    layer = _CONV[dims](
        weight.shape[1] * groups, weight.shape[0], tuple(weight.shape[2:]), each(stride, dims),
        padding if isinstance(padding, str) else each(padding, dims), each(dilation, dims), groups, bias=False,
        device="meta",
    )  # fmt: skip
    return float(linear_layer(_with_weight(layer, weight), tuple(input.shape[1:])))


@on(F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)
def transposed_convolution(
    call: Call,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    output_padding: Any = 0,
    groups: int = 1,
    dilation: Any = 1,
) -> Constants:
    """The certified norm of the transposed convolution with a constant weight."""
    if call.depends("weight"):
        raise NoRuleError("the weight depends on the input, which is not Lipschitz")
    dims = weight.ndim - 2
    layer = _CONV_TRANSPOSE[dims](
        weight.shape[0], weight.shape[1] * groups, tuple(weight.shape[2:]), each(stride, dims), each(padding, dims),
        each(output_padding, dims), groups, False, each(dilation, dims), device="meta",
    )  # fmt: skip
    return float(linear_layer(_with_weight(layer, weight), tuple(input.shape[1:])))


@on(F.embedding, like=F.embedding)
def embedding_table(call: Call, input: Tensor, weight: Tensor, max_norm: Any = None, **options: Any) -> Constants:
    """The norm of the table, see the rule of ``nn.Embedding``."""
    words, features = weight.shape
    layer = _with_weight(nn.Embedding(words, features, max_norm=max_norm, device="meta"), weight)
    return float(embedding(layer, tuple(input.shape[1:])))


@on(F.prelu, torch.prelu, "prelu")
def prelu(call: Call, input: Tensor, weight: Tensor) -> Constants:
    """The larger slope of any channel."""
    return max(1.0, largest(weight, call.result.dtype))
