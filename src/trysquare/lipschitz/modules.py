"""Lipschitz constants of torch's modules (and of ours that are linear), each for one input without its batch axis."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.instancenorm import _InstanceNorm

from trysquare.layers.conv import _Convolution, _TransposedConvolution
from trysquare.layers.linear import OrthoLinear
from trysquare.lipschitz.factors import (
    ROUND_UP,
    axis_matrix,
    axis_norm,
    constant,
    each,
    factor,
    matrix_norm,
    most_windows,
    own_axis,
    padding_norm,
    rounded_axis_norm,
    sizes_of,
)
from trysquare.lipschitz.registry import NoRuleError, Shape, rule
from trysquare.operators import checked_weight, used_weight
from trysquare.spectrum import spectral_norm_bound

# Softplus is a line past its threshold; from here on it jumps there by less than 2.1e-9 / beta.
_SMOOTH_THRESHOLD = 20

# Largest derivatives, rounded up; those of GELU hold for both of its forms.
_SLOPES: dict[type[nn.Module], float] = {
    nn.ReLU: 1.0, nn.ReLU6: 1.0, nn.Hardtanh: 1.0, nn.Tanh: 1.0, nn.Sigmoid: 0.25, nn.LogSigmoid: 1.0, nn.Softsign: 1.0,
    nn.Tanhshrink: 1.0, nn.Softshrink: 1.0, nn.SELU: 1.7581, nn.GELU: 1.1291, nn.SiLU: 1.0999,
    nn.Mish: 1.0885, nn.Hardswish: 1.5, nn.Hardsigmoid: 0.16666668,  # torch has 1/6 in float32
}  # fmt: skip


for _cls, _slope in _SLOPES.items():
    rule(_cls)(constant(_slope))

# Rearrangements of the numbers of one input.
rule(nn.Identity, nn.Flatten, nn.Unflatten, nn.PixelShuffle, nn.PixelUnshuffle, nn.ChannelShuffle)(constant(1.0))
# Zeros, or constants, around the input.
rule(nn.ZeroPad1d, nn.ZeroPad2d, nn.ZeroPad3d, nn.ConstantPad1d, nn.ConstantPad2d, nn.ConstantPad3d)(constant(1.0))


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


@rule(nn.LeakyReLU)
def leaky(layer: nn.LeakyReLU, shape: Shape) -> float:
    """The larger slope."""
    return max(1.0, factor(layer.negative_slope))


@rule(nn.RReLU)
def randomized_leaky(layer: nn.RReLU, shape: Shape) -> float:
    """The larger slope: in eval mode the mean of both, at most the larger of them."""
    return max(1.0, factor(layer.lower), factor(layer.upper))


@rule(nn.ELU)
def elu(layer: nn.ELU, shape: Shape) -> float:
    """The larger of the slopes at both sides of zero."""
    return max(1.0, factor(layer.alpha))


@rule(nn.CELU)
def celu(layer: nn.CELU, shape: Shape) -> float:
    """``exp(x / alpha)`` on the left of zero: at most 1 for a positive ``alpha``, without a bound for others."""
    if not layer.alpha > 0:
        raise NoRuleError(f"alpha={layer.alpha} makes it grow like an exponential; it is Lipschitz for alpha > 0")
    return 1.0


@rule(nn.Softplus)
def softplus(layer: nn.Softplus, shape: Shape) -> float:
    """Slopes between 0 and 1, and a jump of ``log(1 + exp(-threshold)) / beta`` at the threshold."""
    if layer.beta == 0 or layer.threshold < _SMOOTH_THRESHOLD:
        raise NoRuleError(
            f"beta={layer.beta} and threshold={layer.threshold} make it jump where it becomes a line; from "
            f"threshold={_SMOOTH_THRESHOLD} on that is below rounding, with a beta that is not 0"
        )
    return 1.0


@rule(nn.PReLU)
def prelu(layer: nn.PReLU, shape: Shape) -> float:
    """The larger slope of any channel, as it is or as autocast rounds it on some devices."""
    slopes = torch.stack((checked_weight(layer.weight, "PReLU"), used_weight(layer)))
    return max(1.0, float(slopes.abs().max()))


@rule(nn.Softmax, nn.Softmin)
def softmax(layer: Any, shape: Shape) -> float:
    """``diag(p) - p pᵀ`` has norm at most ``max 2 p (1 - p) <= 1/2`` (Gershgorin)."""
    own_axis(layer.dim, shape)
    return 0.5


@rule(nn.Softmax2d)
def softmax_of_channels(layer: nn.Softmax2d, shape: Shape) -> float:
    """As ``softmax``, over the third axis from the end."""
    own_axis(-3, shape)
    return 0.5


@rule(nn.LogSoftmax)
def log_softmax(layer: nn.LogSoftmax, shape: Shape) -> float:
    """``I - 1 pᵀ`` is convex in ``p``, and has norm ``sqrt(n)`` at the corners of the simplex."""
    return math.sqrt(shape[own_axis(layer.dim, shape)]) * ROUND_UP


# Nothing is dropped in eval mode, and training mode is refused for the whole model.
rule(nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)(constant(1.0))


@rule(
    nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm,
    nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d,
)  # fmt: skip
def batch_norm(layer: Any, shape: Shape) -> float:
    """In eval mode a scaling by ``weight / sqrt(running_var + eps)``: its largest entry."""
    return float(batch_norm_scales(layer).max()) * ROUND_UP


def batch_norm_scales(layer: Any) -> Tensor:
    """Absolute scale of each channel."""
    name = type(layer).__name__
    # What the forward passes test: instance normalisation does not ask for the statistics themselves.
    ignored = isinstance(layer, _InstanceNorm) and not layer.track_running_stats
    if layer.running_var is None or ignored:
        raise NoRuleError(
            f"{name} without running statistics divides by the deviation of its input, which is not Lipschitz; use "
            "track_running_stats=True"
        )
    variance = checked_weight(layer.running_var, name)
    weight = torch.ones_like(variance) if layer.weight is None else checked_weight(layer.weight, name)
    eps = min(layer.eps, float(torch.tensor(layer.eps, dtype=torch.float32)))
    if float(variance.min()) + eps <= 0:
        raise ValueError(f"{name} has a variance of {float(variance.min())}: it must be positive")
    return weight.abs() / (variance + eps).sqrt()


def max_pool(layer: Any, shape: Shape, dims: int) -> float:
    """A maximum is 1-Lipschitz in its window, so the square is the largest number of windows that hold one position."""
    if layer.return_indices:
        raise NoRuleError("return_indices=True returns integers, which are not Lipschitz")
    numbers = zip(*(each(n, dims) for n in _window_numbers(layer)), sizes_of(shape, dims), strict=True)
    return math.sqrt(math.prod(most_windows(*axis) for axis in numbers)) * ROUND_UP


def _window_numbers(layer: Any) -> tuple[Any, ...]:
    return layer.kernel_size, layer.stride, layer.padding, layer.dilation


def adaptive_max_pool(layer: Any, shape: Shape, dims: int) -> float:
    """As for ``max_pool``: the largest number of windows that hold one position."""
    if layer.return_indices:
        raise NoRuleError("return_indices=True returns integers, which are not Lipschitz")
    most = (
        int((axis_matrix(partial(F.adaptive_avg_pool1d, output_size=out), size) > 0).sum(0).max())
        for out, size in _adaptive_axes(layer, shape, dims)
    )
    return math.sqrt(math.prod(most)) * ROUND_UP


def avg_pool(layer: Any, shape: Shape, dims: int) -> float:
    """Averages along one axis at a time: the product of the norms of their matrices."""
    override = getattr(layer, "divisor_override", None)
    numbers = list(zip(*(each(n, dims) for n in (layer.kernel_size, layer.stride, layer.padding)), strict=True))
    average = partial(F.avg_pool1d, ceil_mode=layer.ceil_mode, count_include_pad=layer.count_include_pad)
    norms = (
        axis_norm(partial(average, kernel_size=k, stride=s, padding=p), size)
        for (k, s, p), size in zip(numbers, sizes_of(shape, dims), strict=True)
    )
    if override is None:
        return math.prod(norms)
    if layer.ceil_mode or any(p for _, _, p in numbers):
        raise NoRuleError("divisor_override together with padding or ceil_mode has no rule")
    return math.prod(norms) * math.prod(k for k, _, _ in numbers) / abs(override) * ROUND_UP


def adaptive_avg_pool(layer: Any, shape: Shape, dims: int) -> float:
    """Averages along one axis at a time."""
    axes = _adaptive_axes(layer, shape, dims)
    return math.prod(axis_norm(partial(F.adaptive_avg_pool1d, output_size=out), size) for out, size in axes)


def _adaptive_axes(layer: Any, shape: Shape, dims: int) -> list[tuple[int, int]]:
    wanted = each(layer.output_size, dims)
    return [(size if out is None else out, size) for out, size in zip(wanted, sizes_of(shape, dims), strict=True)]


# Registered with their number of axes, so that no name has to be read for it.
for _dims, _pools in enumerate(
    [
        (nn.MaxPool1d, nn.AdaptiveMaxPool1d, nn.AvgPool1d, nn.AdaptiveAvgPool1d),
        (nn.MaxPool2d, nn.AdaptiveMaxPool2d, nn.AvgPool2d, nn.AdaptiveAvgPool2d),
        (nn.MaxPool3d, nn.AdaptiveMaxPool3d, nn.AvgPool3d, nn.AdaptiveAvgPool3d),
    ],
    start=1,
):
    for _pool, _pool_rule in zip(_pools, (max_pool, adaptive_max_pool, avg_pool, adaptive_avg_pool), strict=True):
        rule(_pool)(partial(_pool_rule, dims=_dims))


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
        return rounded_axis_norm(
            lambda x: F.interpolate(x, out, factor, mode, corners, layer.recompute_scale_factor), size
        )

    numbers = zip(shape[1:], each(layer.size, dims), each(layer.scale_factor, dims), strict=True)
    return math.prod(norm(*axis) for axis in numbers)


def repeating_pad(layer: Any, shape: Shape, mode: str) -> float:
    """The square is how often the position that is repeated most often occurs."""
    return padding_norm(layer.padding, mode, shape)


rule(nn.ReflectionPad1d, nn.ReflectionPad2d, nn.ReflectionPad3d)(partial(repeating_pad, mode="reflect"))
rule(nn.ReplicationPad1d, nn.ReplicationPad2d, nn.ReplicationPad3d)(partial(repeating_pad, mode="replicate"))
rule(nn.CircularPad1d, nn.CircularPad2d, nn.CircularPad3d)(partial(repeating_pad, mode="circular"))


@rule(nn.Unfold)
def unfold(layer: nn.Unfold, shape: Shape) -> float:
    """The square is the largest number of windows that hold one position."""
    numbers = zip(*(each(n, 2) for n in _window_numbers(layer)), sizes_of(shape, 2), strict=True)
    return math.sqrt(math.prod(most_windows(*axis) for axis in numbers)) * ROUND_UP
