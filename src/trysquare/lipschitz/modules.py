"""Lipschitz constants of torch's modules and ours, each for one input without its batch axis."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trysquare.layers.conv import _Convolution, _TransposedConvolution
from trysquare.layers.linear import OrthoLinear
from trysquare.linalg.bounds import normalized, rescaled_up, singular_value_range
from trysquare.lipschitz.registry import NoRuleError, Shape, rule
from trysquare.operators import Axis, checked_weight
from trysquare.spectrum import spectral_norm_bound

_ROUND_UP = 1 + 2.0**-48

# Largest derivatives, rounded up; those of GELU hold for both of its forms.
_SLOPES: dict[type[nn.Module], float] = {
    nn.ReLU: 1.0, nn.ReLU6: 1.0, nn.Hardtanh: 1.0, nn.Tanh: 1.0, nn.Sigmoid: 0.25, nn.LogSigmoid: 1.0, nn.Softplus: 1.0,
    nn.Softsign: 1.0, nn.Tanhshrink: 1.0, nn.Softshrink: 1.0, nn.CELU: 1.0, nn.SELU: 1.7581, nn.GELU: 1.1291,
    nn.SiLU: 1.0999,
    nn.Mish: 1.0885, nn.Hardswish: 1.5, nn.Hardsigmoid: 0.16666668,  # torch has 1/6 in float32
}  # fmt: skip


def _constant(value: float) -> Callable[..., float]:
    return lambda module, shape: value


for _cls, _slope in _SLOPES.items():
    rule(_cls)(_constant(_slope))

# Rearrangements of the numbers of one input.
rule(nn.Identity, nn.Flatten, nn.Unflatten, nn.PixelShuffle, nn.PixelUnshuffle, nn.ChannelShuffle)(_constant(1.0))
# Zeros, or constants, around the input.
rule(nn.ZeroPad1d, nn.ZeroPad2d, nn.ZeroPad3d, nn.ConstantPad1d, nn.ConstantPad2d, nn.ConstantPad3d)(_constant(1.0))


@rule(
    nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d,
    OrthoLinear, _Convolution, _TransposedConvolution,
)  # fmt: skip
def linear_layer(layer: nn.Module, shape: Shape) -> float:
    """The certified spectral norm."""
    return spectral_norm_bound(layer, shape)


@rule(nn.Embedding, nn.EmbeddingBag)
def embedding(layer: nn.Embedding, shape: Shape) -> float:
    """The spectral norm of the table: the constant with respect to one-hot vectors over the vocabulary."""
    if layer.max_norm is not None or isinstance(layer, nn.EmbeddingBag):
        raise NoRuleError("only a plain embedding table has a rule: not max_norm, not bags of words")
    return matrix_norm(checked_weight(layer.weight, type(layer).__name__))


def matrix_norm(matrix: Tensor) -> float:
    """Certified spectral norm of a matrix."""
    scaled, exponent = normalized(matrix)
    return rescaled_up(singular_value_range([scaled[None]], lowest=False)[1], exponent)


@rule(nn.LeakyReLU)
def leaky(layer: nn.LeakyReLU, shape: Shape) -> float:
    """The larger slope."""
    return max(1.0, abs(layer.negative_slope))


@rule(nn.RReLU)
def randomized_leaky(layer: nn.RReLU, shape: Shape) -> float:
    """The larger slope."""
    return max(1.0, abs(layer.lower), abs(layer.upper))


@rule(nn.ELU)
def elu(layer: nn.ELU, shape: Shape) -> float:
    """The larger of the slopes at both sides of zero."""
    return max(1.0, abs(layer.alpha))


@rule(nn.PReLU)
def prelu(layer: nn.PReLU, shape: Shape) -> float:
    """The larger slope of any channel."""
    return max(1.0, float(checked_weight(layer.weight, "PReLU").abs().max()))


@rule(nn.Softmax, nn.Softmin, nn.Softmax2d)
def softmax(layer: nn.Module, shape: Shape) -> float:
    """``diag(p) - p pᵀ`` has norm at most ``max 2 p (1 - p) <= 1/2`` (Gershgorin)."""
    return 0.5


@rule(nn.LogSoftmax)
def log_softmax(layer: nn.LogSoftmax, shape: Shape) -> float:
    """``I - 1 pᵀ`` is convex in ``p``, and has norm ``sqrt(n)`` at the corners of the simplex."""
    return math.sqrt(shape[_own_axis(layer.dim, shape)]) * _ROUND_UP


def _own_axis(dim: int | None, shape: Shape) -> int:
    """Axis of an input without batch for torch's ``dim`` of an input with batch."""
    if dim is None:
        raise NoRuleError("dim=None is ambiguous; give the axis")
    axis = dim if dim < 0 else dim - 1
    if dim == 0 or not -len(shape) <= axis < len(shape):
        raise NoRuleError(f"dim={dim} mixes the samples of a batch")
    return axis


@rule(nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)
def dropout(layer: nn.Dropout, shape: Shape) -> float:
    """Nothing is dropped in eval mode."""
    _must_be_in_eval(layer)
    return 1.0


@rule(
    nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm,
    nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d,
)  # fmt: skip
def batch_norm(layer: Any, shape: Shape) -> float:
    """In eval mode a scaling by ``weight / sqrt(running_var + eps)``: its largest entry."""
    return float(batch_norm_scales(layer).max()) * _ROUND_UP


def batch_norm_scales(layer: Any) -> Tensor:
    """Absolute scale of each channel."""
    _must_be_in_eval(layer)
    name = type(layer).__name__
    if layer.running_var is None:
        raise NoRuleError(
            f"{name} without running statistics divides by the deviation of its input, which is not Lipschitz; use "
            "track_running_stats=True"
        )
    variance = checked_weight(layer.running_var, name)
    weight = torch.ones_like(variance) if layer.weight is None else checked_weight(layer.weight, name)
    if float(variance.min()) + layer.eps <= 0:
        raise ValueError(f"{name} has a variance of {float(variance.min())}: it must be positive")
    return weight.abs() / (variance + layer.eps).sqrt()


def _must_be_in_eval(layer: nn.Module) -> None:
    if layer.training:
        raise NoRuleError(
            f"{type(layer).__name__} is in training mode, where it has no Lipschitz constant; call model.eval()"
        )


@rule(nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d)
def max_pool(layer: Any, shape: Shape) -> float:
    """A maximum is 1-Lipschitz in its window, so the square is the largest number of windows that hold one position."""
    if layer.return_indices:
        raise NoRuleError("return_indices=True returns integers, which are not Lipschitz")
    dims = int(type(layer).__name__[-2])
    numbers = zip(*(_each(n, dims) for n in _window_numbers(layer)), _sizes(shape, dims), strict=True)
    return math.sqrt(math.prod(_most_windows(*axis) for axis in numbers)) * _ROUND_UP


def _window_numbers(layer: Any) -> tuple[Any, ...]:
    return layer.kernel_size, layer.stride, layer.padding, layer.dilation


def _each(value: Any, dims: int) -> tuple[int, ...]:
    return (value,) * dims if isinstance(value, int) else tuple(value)


def _sizes(shape: Shape, dims: int) -> Shape:
    if len(shape) != dims + 1:
        raise ValueError(f"input_shape={shape} must be channels and {dims} sizes, without the batch")
    return shape[-dims:]


def _most_windows(kernel: int, stride: int, padding: int, dilation: int, size: int) -> int:
    """Largest number of windows that read the same position (windows that start past the padded end do not exist)."""
    positions = torch.arange(size).unsqueeze(1) + padding
    taps = positions - dilation * torch.arange(kernel)
    starts = (taps >= 0) & (taps % stride == 0) & (taps < size + 2 * padding)
    return max(1, int(starts.sum(1).max()))


@rule(nn.AdaptiveMaxPool1d, nn.AdaptiveMaxPool2d, nn.AdaptiveMaxPool3d)
def adaptive_max_pool(layer: Any, shape: Shape) -> float:
    """As for ``max_pool``: the largest number of windows that hold one position."""
    if layer.return_indices:
        raise NoRuleError("return_indices=True returns integers, which are not Lipschitz")
    most = (
        int((axis_matrix(partial(F.adaptive_avg_pool1d, output_size=out), size) > 0).sum(0).max())
        for out, size in _adaptive_axes(layer, shape)
    )
    return math.sqrt(math.prod(most)) * _ROUND_UP


@rule(nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d)
def avg_pool(layer: Any, shape: Shape) -> float:
    """Averages along one axis at a time: the product of the norms of their matrices."""
    dims = int(type(layer).__name__[-2])
    override = getattr(layer, "divisor_override", None)
    numbers = list(zip(*(_each(n, dims) for n in (layer.kernel_size, layer.stride, layer.padding)), strict=True))
    average = partial(F.avg_pool1d, ceil_mode=layer.ceil_mode, count_include_pad=layer.count_include_pad)
    norms = (
        axis_norm(partial(average, kernel_size=k, stride=s, padding=p), size)
        for (k, s, p), size in zip(numbers, _sizes(shape, dims), strict=True)
    )
    if override is None:
        return math.prod(norms)
    if layer.ceil_mode or any(p for _, _, p in numbers):
        raise NoRuleError("divisor_override together with padding or ceil_mode has no rule")
    return math.prod(norms) * math.prod(k for k, _, _ in numbers) / override * _ROUND_UP


@rule(nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d)
def adaptive_avg_pool(layer: Any, shape: Shape) -> float:
    """Averages along one axis at a time."""
    axes = _adaptive_axes(layer, shape)
    return math.prod(axis_norm(partial(F.adaptive_avg_pool1d, output_size=out), size) for out, size in axes)


def _adaptive_axes(layer: Any, shape: Shape) -> list[tuple[int, int]]:
    dims = int(type(layer).__name__[-2])
    sizes = _sizes(shape, dims)
    wanted = layer.output_size if isinstance(layer.output_size, tuple | list) else (layer.output_size,) * dims
    return [(size if out is None else out, size) for out, size in zip(wanted, sizes, strict=True)]


def axis_matrix(resample: Callable[[Tensor], Tensor], size: int) -> Tensor:
    """Matrix ``(out, size)`` of a linear function of one axis, applied to ``(batch, 1, size)``."""
    return resample(torch.eye(size, dtype=torch.float64).unsqueeze(1)).squeeze(1).T


def axis_norm(resample: Callable[[Tensor], Tensor], size: int) -> float:
    """Certified norm of a linear function of one axis."""
    return matrix_norm(axis_matrix(resample, size)) * _ROUND_UP


_INTERPOLATION = {
    "nearest": "nearest",
    "nearest-exact": "nearest-exact",
    "linear": "linear",
    "bilinear": "linear",
    "trilinear": "linear",
}


@rule(nn.Upsample, nn.UpsamplingNearest2d, nn.UpsamplingBilinear2d)
def upsample(layer: Any, shape: Shape) -> float:
    """Interpolation along one axis at a time."""
    dims = len(shape) - 1
    if layer.mode not in _INTERPOLATION:
        raise NoRuleError(f"mode={layer.mode!r} has no rule; one of {', '.join(_INTERPOLATION)} has")
    mode = _INTERPOLATION[layer.mode]
    corners = layer.align_corners if mode == "linear" else None

    def norm(size: int, out: Any, factor: Any) -> float:
        return axis_norm(lambda x: F.interpolate(x, out, factor, mode, corners, layer.recompute_scale_factor), size)

    outs = layer.size if isinstance(layer.size, tuple) else (layer.size,) * dims
    factors = layer.scale_factor if isinstance(layer.scale_factor, tuple) else (layer.scale_factor,) * dims
    return math.prod(norm(*axis) for axis in zip(shape[1:], outs, factors, strict=True))


@rule(
    nn.ReflectionPad1d, nn.ReflectionPad2d, nn.ReflectionPad3d, nn.ReplicationPad1d, nn.ReplicationPad2d,
    nn.ReplicationPad3d, nn.CircularPad1d, nn.CircularPad2d, nn.CircularPad3d,
)  # fmt: skip
def repeating_pad(layer: Any, shape: Shape) -> float:
    """The square is how often the position that is repeated most often occurs."""
    mode = {"Refl": "reflect", "Repl": "replicate", "Circ": "circular"}[type(layer).__name__[:4]]
    return padding_norm(layer.padding, mode, shape)


def padding_norm(padding: Any, mode: str, shape: Shape) -> float:
    """Norm of torch's padding (last axis first) by ``mode``."""
    pads = [(padding[i], padding[i + 1]) for i in range(0, len(padding), 2)]
    repeats = 1
    for size, pad in zip(reversed(shape), pads, strict=False):
        windows = size + sum(pad)
        repeats *= int(torch.bincount(Axis(size, windows, 1, 1, pad, mode).sources).max())
    return math.sqrt(repeats) * _ROUND_UP


@rule(nn.Unfold)
def unfold(layer: nn.Unfold, shape: Shape) -> float:
    """The square is the largest number of windows that hold one position."""
    numbers = zip(*(_each(n, 2) for n in _window_numbers(layer)), _sizes(shape, 2), strict=True)
    return math.sqrt(math.prod(_most_windows(*axis) for axis in numbers)) * _ROUND_UP
