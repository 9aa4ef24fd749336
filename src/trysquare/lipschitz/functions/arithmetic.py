"""Lipschitz constants of functions and tensor methods that a ``forward`` calls.

A rule gets the call with the bound of each argument (how fast it can change with the network's input; 0 for
constants), and returns the bound of the result.
"""

from __future__ import annotations

import inspect
import math
import operator
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trysquare.lipschitz.modules import matrix_norm, padding_norm
from trysquare.lipschitz.registry import NoRuleError, find_rule
from trysquare.operators import LinearOperator, checked_weight, convolution_axes, given_pads
from trysquare.spectrum import norm_range


@dataclass(frozen=True)
class Call:
    """One call of a function or method.

    Attributes:
        args: positional arguments, the tensor first if it is a method.
        kwargs: keyword arguments.
        bounds: same structure as ``args``: the bound of each tensor.
        keyword_bounds: same for ``kwargs``.
        result: what the call returned on a batch of zeros.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    bounds: tuple[Any, ...]
    keyword_bounds: dict[str, Any]
    result: Any

    def argument(self, position: int, name: str, default: Any = None) -> Any:
        """An argument given by position or by name."""
        return self.args[position] if len(self.args) > position else self.kwargs.get(name, default)

    def bound(self, position: int, name: str) -> Any:
        """Its bound."""
        return self.bounds[position] if len(self.bounds) > position else self.keyword_bounds.get(name, 0.0)

    @property
    def first(self) -> float:
        """The bound of the first argument, the only one that may depend on the input."""
        others = flatten_bounds((self.bounds[1:], list(self.keyword_bounds.values())))
        if any(bound > 0 for bound in others):
            raise NoRuleError("an argument besides the first depends on the input")
        return self.bounds[0] if self.bounds else 0.0

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the first argument, with the batch."""
        return tuple(self.args[0].shape)


FunctionRule = Callable[[Call], float]
FUNCTIONS: dict[Any, FunctionRule] = {}


def flatten_bounds(bounds: Any) -> Iterable[float]:
    """All numbers in nested lists, tuples and dictionaries."""
    if isinstance(bounds, dict):
        bounds = list(bounds.values())
    if isinstance(bounds, list | tuple):
        for part in bounds:
            yield from flatten_bounds(part)
    elif isinstance(bounds, float):
        yield bounds


def _on(*targets: Any) -> Callable[[FunctionRule], FunctionRule]:
    def register(function: FunctionRule) -> FunctionRule:
        FUNCTIONS.update(dict.fromkeys(targets, function))
        return function

    return register


def _expansion(shape: Iterable[int], result: Iterable[int]) -> float:
    """Norm of broadcasting one shape to another."""
    return math.sqrt(math.prod(result) / math.prod(shape))


def _shape(value: Any) -> tuple[int, ...]:
    return tuple(value.shape) if isinstance(value, Tensor) else ()


def _largest(value: Any) -> float:
    """Largest absolute entry of a constant."""
    entries = torch.as_tensor(value).detach()
    if not bool(entries.isfinite().all()):
        raise ValueError("a constant factor is not finite: the network has no Lipschitz constant")
    return float(entries.abs().to(torch.float64).max())


@_on("size", "dim", "numel", torch.numel, "is_floating_point", torch.is_floating_point)
def constant(call: Call) -> float:
    """Facts about shapes and types."""
    return 0.0


@_on(getattr)
def attribute(call: Call) -> float:
    """Facts about shapes and types, or a transposed matrix."""
    name = call.args[1]
    if name in ("shape", "ndim", "dtype", "device", "is_cuda"):
        return 0.0
    if name in ("mT", "data"):
        return call.first
    raise NoRuleError(f"attribute {name!r} of a tensor has no rule")


@_on(
    "contiguous", "clone", "detach", "to", "float", "double", "half", "bfloat16", "type_as", "abs", "neg", "relu",
    "relu_", "tanh",
    "clamp", "clamp_min", "clamp_max", "sin", "cos", "flatten", "view", "reshape", "view_as", "reshape_as", "unflatten",
    torch.abs, torch.neg, operator.neg, torch.relu, torch.tanh, torch.clamp, torch.sin, torch.cos, torch.flatten,
    torch.reshape,
    torch.clone, torch.unflatten, F.relu_, torch.relu_, torch.clamp_min, torch.clamp_max,
)  # fmt: skip
def unchanged(call: Call) -> float:
    """1-Lipschitz in each number, or a rearrangement (the follower checks that it keeps samples apart)."""
    return call.first


@_on("sigmoid", torch.sigmoid)
def sigmoid(call: Call) -> float:
    """Slope at most 1/4."""
    return 0.25 * call.first


def _own_dims(call: Call, dims: Any) -> tuple[int, ...]:
    """Axes as non-negative numbers, none of them the batch."""
    ndim = len(call.shape)
    each = (dims,) if isinstance(dims, int) else tuple(dims if dims is not None else range(ndim))
    own = tuple(dim % ndim for dim in each)
    if 0 in own:
        raise NoRuleError(f"dim={dims} mixes the samples of a batch")
    return own


@_on("squeeze", torch.squeeze, "unsqueeze", torch.unsqueeze)
def axis_of_one(call: Call) -> float:
    """An axis of size 1 more or less, after the batch."""
    dim = call.argument(1, "dim", -1)
    _own_dims(call, [part for part in (dim if isinstance(dim, tuple) else [dim]) if part >= 0])
    return call.first


@_on("chunk", torch.chunk, "split", torch.split)
def parts(call: Call) -> float:
    """Parts of the input along an axis other than the batch."""
    _own_dims(call, call.argument(2, "dim", 0))
    return call.first


@_on("unbind", torch.unbind)
def unbind(call: Call) -> float:
    """Slices of the input along an axis other than the batch."""
    _own_dims(call, call.argument(1, "dim", 0))
    return call.first


@_on("permute", torch.permute)
def permute(call: Call) -> float:
    """A rearrangement that keeps the batch in front."""
    dims = call.args[1] if isinstance(call.args[1], list | tuple) else call.args[1:]
    if dims[0] % len(dims):
        raise NoRuleError(f"permute{tuple(dims)} moves the batch axis")
    return call.first


@_on("transpose", torch.transpose, "swapaxes", torch.swapaxes, "flip", torch.flip)
def exchange(call: Call) -> float:
    """A rearrangement of axes other than the batch."""
    dims = [*call.args[1:], *call.kwargs.values()]
    _own_dims(call, [dim for part in dims for dim in (part if isinstance(part, list | tuple) else [part])])
    return call.first


@_on(operator.getitem)
def getitem(call: Call) -> float:
    """A slice: part of the input."""
    if isinstance(call.args[0], tuple | list):
        bounds = call.bounds[0]
        return bounds[call.args[1]] if isinstance(bounds, tuple | list) else bounds
    index = call.args[1] if isinstance(call.args[1], tuple) else (call.args[1],)
    if not all(part is None or part is Ellipsis or isinstance(part, int | slice) for part in index):
        raise NoRuleError("indexing with tensors or lists can repeat positions")
    if index and index[0] is not Ellipsis and index[0] != slice(None):
        raise NoRuleError("indexing picks samples of a batch")
    return call.first


@_on(
    operator.add, operator.sub, operator.iadd, operator.isub, torch.add, torch.sub, torch.subtract, "add", "add_",
    "sub", "sub_",
)  # fmt: skip
def add(call: Call) -> float:
    """Sum or difference: bounds add, each times the norm of its broadcast."""
    other, alpha = call.argument(1, "other"), abs(call.kwargs.get("alpha", 1))
    left = call.bounds[0] * _expansion(_shape(call.args[0]), call.result.shape) if call.bounds[0] else 0.0
    right_bound = call.bound(1, "other")
    right = right_bound * alpha * _expansion(_shape(other), call.result.shape) if right_bound else 0.0
    return left + right


@_on(operator.mul, operator.imul, torch.mul, torch.multiply, "mul", "mul_")
def multiply(call: Call) -> float:
    """A constant factor: its largest entry."""
    factors = [(call.args[0], call.bounds[0]), (call.argument(1, "other"), call.bound(1, "other"))]
    if all(bound > 0 for _, bound in factors):
        raise NoRuleError("two values that depend on the input are multiplied with each other, which is not Lipschitz")
    (value, bound), (scale, _) = sorted(factors, key=lambda factor: -factor[1])
    return bound * _largest(scale) * _expansion(_shape(value), call.result.shape)


@_on(operator.truediv, operator.itruediv, torch.div, torch.divide, torch.true_divide, "div", "div_")
def divide(call: Call) -> float:
    """A constant divisor: its smallest entry."""
    divisor = call.argument(1, "other")
    if call.bound(1, "other") > 0:
        raise NoRuleError("the divisor depends on the input, which is not Lipschitz")
    if call.kwargs.get("rounding_mode") is not None:
        raise NoRuleError("rounding jumps")
    smallest = float(torch.as_tensor(divisor).detach().abs().to(torch.float64).min())
    if not smallest > 0:
        raise ValueError("a constant divisor has a zero or an entry that is not a number: the network is not Lipschitz")
    return call.bounds[0] / smallest * _expansion(_shape(call.args[0]), call.result.shape)


def _joined(call: Call) -> float:
    bounds = list(flatten_bounds(call.bound(0, "tensors")))
    return math.sqrt(sum(bound**2 for bound in bounds))


@_on(torch.cat, torch.concat, torch.stack)
def concatenate(call: Call) -> float:
    """The parts side by side: the root of the sum of squares."""
    dim = call.argument(1, "dim", 0)
    if dim % call.result.ndim == 0:
        raise NoRuleError("concatenation along the batch axis")
    return _joined(call)


@_on(torch.maximum, torch.minimum, "maximum", "minimum")
def extremum(call: Call) -> float:
    """Larger or smaller of two: changes by no more than both together."""
    other = call.argument(1, "other")
    scaled = (
        (call.bounds[0], _shape(call.args[0])),
        (call.bound(1, "other"), _shape(other)),
    )
    return math.sqrt(sum((b * _expansion(shape, call.result.shape)) ** 2 for b, shape in scaled if b))


@_on(torch.max, torch.min, "max", "min")
def extremum_or_reduction(call: Call) -> float:
    """The two-tensor form; reductions return indices too, which are not Lipschitz."""
    if len(call.args) > 1 and isinstance(call.args[1], Tensor):
        return extremum(call)
    raise NoRuleError("max and min along an axis return indices too; use amax or amin")


@_on("amax", "amin", torch.amax, torch.amin)
def reduced_extremum(call: Call) -> float:
    """Largest or smallest along axes: 1-Lipschitz."""
    _own_dims(call, call.argument(1, "dim"))
    return call.first


def _reduced(call: Call) -> int:
    dims = (
        call.args[1:]
        if len(call.args) > 2 and all(isinstance(a, int) for a in call.args[1:])
        else call.argument(1, "dim")
    )
    return math.prod(call.shape[dim] for dim in _own_dims(call, dims))


@_on("mean", torch.mean)
def mean(call: Call) -> float:
    """``n`` numbers to their mean: norm ``1 / sqrt(n)``."""
    return call.first / math.sqrt(_reduced(call))


@_on("sum", torch.sum)
def total(call: Call) -> float:
    """``n`` numbers to their sum: norm ``sqrt(n)``."""
    return call.first * math.sqrt(_reduced(call))


@_on("expand", "expand_as", "repeat", "broadcast_to", torch.broadcast_to, "repeat_interleave", torch.repeat_interleave)
def expand(call: Call) -> float:
    """Copies: the root of their number."""
    return call.first * _expansion(call.shape, call.result.shape)


@_on(operator.matmul, torch.matmul, "matmul", "mm", torch.mm)
def matmul(call: Call) -> float:
    """Product with a constant matrix: its spectral norm."""
    bounds = (call.bounds[0], call.bound(1, "other"))
    if all(bound > 0 for bound in bounds):
        raise NoRuleError("two values that depend on the input are multiplied with each other (as attention does)")
    matrix = call.args[0] if bounds[1] > 0 else call.argument(1, "other")
    if matrix.ndim != 2:
        raise NoRuleError(f"the constant factor of a matrix product has {matrix.ndim} axes; 2 have a rule")
    return max(bounds) * matrix_norm(checked_weight(matrix, "a matrix product"))


@_on(F.linear)
def linear(call: Call) -> float:
    """The spectral norm of the weight."""
    return call.first * matrix_norm(checked_weight(call.argument(1, "weight"), "linear"))


@_on(F.conv1d, F.conv2d, F.conv3d)
def convolution(call: Call) -> float:
    """The certified norm of the convolution with a constant weight."""
    names = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")
    given = {**dict(zip(names, call.args, strict=False)), **call.kwargs}
    kernel = checked_weight(given["weight"], "a convolution")
    dims = kernel.ndim - 2

    def each(name: str) -> tuple[int, ...]:
        value = given.get(name, 1)
        return (value,) * dims if isinstance(value, int) else tuple(value) * (dims // len(value))

    dilation = each("dilation")
    extent = tuple(d * (k - 1) + 1 for d, k in zip(dilation, kernel.shape[2:], strict=True))
    pads = given_pads(given.get("padding", 0), extent)
    axes = convolution_axes(call.shape[2:], extent, each("stride"), pads, "zeros")
    layer = LinearOperator(kernel, dilation, given.get("groups", 1), axes)
    return call.first * norm_range(layer, lowest=False)[1]


@_on(F.pad)
def pad(call: Call) -> float:
    """Constants, or repeated positions."""
    mode = call.argument(2, "mode", "constant")
    shape, padding = call.shape, call.argument(1, "pad")
    if len(padding) >= 2 * len(shape):
        raise NoRuleError("padding of the batch axis")
    return call.first if mode == "constant" else call.first * padding_norm(padding, mode, shape[1:])


_MODULES: dict[Any, Callable[..., nn.Module]] = {
    F.relu: nn.ReLU, F.relu6: nn.ReLU6, F.leaky_relu: nn.LeakyReLU, F.elu: nn.ELU, F.selu: nn.SELU, F.celu: nn.CELU,
    F.gelu: nn.GELU,
    F.silu: nn.SiLU, F.mish: nn.Mish, F.softplus: nn.Softplus, F.softsign: nn.Softsign, F.hardtanh: nn.Hardtanh,
    F.hardswish: nn.Hardswish, F.hardsigmoid: nn.Hardsigmoid, F.logsigmoid: nn.LogSigmoid, F.tanhshrink: nn.Tanhshrink,
    F.softshrink: nn.Softshrink, F.tanh: nn.Tanh, F.sigmoid: nn.Sigmoid, torch.selu: nn.SELU,
    F.max_pool1d: nn.MaxPool1d, F.max_pool2d: nn.MaxPool2d, F.max_pool3d: nn.MaxPool3d,
    F.avg_pool1d: nn.AvgPool1d, F.avg_pool2d: nn.AvgPool2d, F.avg_pool3d: nn.AvgPool3d,
    F.adaptive_avg_pool1d: nn.AdaptiveAvgPool1d, F.adaptive_avg_pool2d: nn.AdaptiveAvgPool2d,
    F.adaptive_avg_pool3d: nn.AdaptiveAvgPool3d, F.adaptive_max_pool1d: nn.AdaptiveMaxPool1d,
    F.adaptive_max_pool2d: nn.AdaptiveMaxPool2d, F.adaptive_max_pool3d: nn.AdaptiveMaxPool3d,
    F.interpolate: nn.Upsample, F.pixel_shuffle: nn.PixelShuffle, F.pixel_unshuffle: nn.PixelUnshuffle,
    F.channel_shuffle: nn.ChannelShuffle, F.unfold: nn.Unfold,
}  # fmt: skip


def _through_module(cls: Callable[..., nn.Module]) -> FunctionRule:
    """The rule of the module that calls the function with the same arguments."""

    def apply(call: Call) -> float:
        if call.kwargs.get("antialias"):
            raise NoRuleError("antialias=True has no rule")
        kwargs = {
            name: value for name, value in call.kwargs.items() if name not in ("inplace", "training", "antialias")
        }
        allowed = inspect.signature(cls).parameters
        positional = call.args[1 : 1 + len(allowed)]
        module = cls(*positional, **kwargs).eval()
        rule = find_rule(module)
        assert rule is not None
        return call.first * float(rule(module, call.shape[1:]))  # type: ignore[arg-type]

    return apply


for _function, _cls in _MODULES.items():
    FUNCTIONS[_function] = _through_module(_cls)


@_on(F.softmax, torch.softmax, "softmax")
def softmax(call: Call) -> float:
    """At most 1/2, see the rule of ``nn.Softmax``."""
    _own_dims(call, call.argument(1, "dim"))
    return 0.5 * call.first


@_on(F.log_softmax, torch.log_softmax, "log_softmax")
def log_softmax(call: Call) -> float:
    """The root of the number of classes, see the rule of ``nn.LogSoftmax``."""
    (dim,) = _own_dims(call, call.argument(1, "dim"))
    return math.sqrt(call.shape[dim]) * call.first


@_on(F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, torch.dropout)
def dropout(call: Call) -> float:
    """Nothing is dropped in eval mode."""
    if call.argument(2, "training", True):
        raise NoRuleError("dropout in training mode; call model.eval() and pass training=self.training")
    return call.first
