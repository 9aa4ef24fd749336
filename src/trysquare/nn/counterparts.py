"""The 1-Lipschitz layer that takes the place of a module of torch, and why: the table of ``conversion``."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trysquare.nn.geometry import window_overlap
from trysquare.nn.layers import activations, calls, centering, conv, pooling
from trysquare.nn.layers.convolution import ZERO_PAD
from trysquare.nn.layers.linear import OrthoLinear
from trysquare.nn.parametrizations.base import Factory


def _in_all_dimensions(name: str) -> tuple[Any, ...]:
    return tuple(getattr(nn, f"{name}{dims}d") for dims in (1, 2, 3))


TRANSPOSED = _in_all_dimensions("ConvTranspose")
BATCH_NORM = (*_in_all_dimensions("BatchNorm"), nn.SyncBatchNorm)
DROPOUT = (*_in_all_dimensions("Dropout"), nn.Dropout, nn.AlphaDropout, nn.FeatureAlphaDropout)
_INSTANCE_NORM = _in_all_dimensions("InstanceNorm")
_ORTHOGONAL = "orthogonal, same geometry"
_BOUNDED = "1-Lipschitz as it is"
UNKNOWN = "no 1-Lipschitz counterpart is known"
_MEANS = "scaled to norm 1: means attenuate"
Replacement = tuple[nn.Module | None, str]
"""A module to put in place of another one (``None``: it stays), and why."""


class NotConvertibleError(ValueError):
    """There is no 1-Lipschitz counterpart; the message is the reason."""


@dataclass
class Request:
    """A module to be replaced, where it stands, and what the user asked for.

    Attributes:
        module: the module, of torch.
        given: what it reads, without numbers.
        made: what it returns.
        axis: of the channels.
        options: arguments of ``from_torch``.
    """

    module: Any
    given: Tensor
    made: Tensor
    axis: int
    options: dict[str, str]

    @property
    def sizes(self) -> tuple[int, ...]:
        """Sizes of what it reads, behind the batch and the channels."""
        return tuple(self.given.shape[2:])

    @property
    def dims(self) -> int:
        """Number of these sizes."""
        return self.given.ndim - 2

    @property
    def factory(self) -> Factory:
        """Device and dtype of a new layer."""
        return {"device": self.given.device, "dtype": self.given.dtype}


def counterpart(at: Request, keep: tuple[type[nn.Module], ...]) -> Replacement:
    """Look up what takes the place of a module; classes in ``keep`` stay.

    Raises:
        NotConvertibleError: if there is nothing.
    """
    home = type(at.module).__module__.split(".")[0]
    if isinstance(at.module, keep) or home == "trysquare":
        return None, "kept, with its constant"
    if home == "einops" and type(at.module).__name__ in _EINOPS:
        return _EINOPS[type(at.module).__name__](at)
    for classes, convert in _MODULES:
        if isinstance(at.module, classes):
            return convert(at)
    raise NotConvertibleError(UNKNOWN)


# -- layers with weights


def _linear(at: Request) -> Replacement:
    m = at.module
    new = OrthoLinear(m.in_features, m.out_features, m.bias is not None, **at.factory)
    return new, "orthonormal rows or columns"


def _convolution(at: Request) -> Replacement:
    """Keep the geometry where it has an orthogonal kernel; otherwise take a larger kernel, or AOL."""
    m, dims = at.module, at.module.weight.ndim - 2
    transposed = isinstance(m, TRANSPOSED)
    numbers = {name: getattr(m, name) for name in ("kernel_size", "stride", "padding", "dilation", "groups")}
    layer: Any = getattr(conv, f"OrthoConv{'Transpose' if transposed else ''}{dims}d")
    if transposed:
        numbers["output_padding"] = m.output_padding

    def make(padding_mode: str = "zeros", **changed: Any) -> nn.Module:
        given = {**numbers, **changed, "bias": m.bias is not None, "padding_mode": padding_mode}
        return layer(m.in_channels, m.out_channels, **given, **at.factory)

    border = ""
    if m.padding_mode == "circular" and all(n % s == 0 for n, s in zip(at.sizes, m.stride, strict=True)):
        with contextlib.suppress(ValueError):  # it may drop outputs that an orthogonal layer needs
            return make("circular"), _ORTHOGONAL
    if m.padding_mode != "zeros":
        border = f"; {m.padding_mode} padding, which may amplify, is zeros"
    try:
        return make(), _ORTHOGONAL + border
    except ValueError as error:
        reason = str(error).split(":")[0].replace("nothing", "one channel per group leaves orthogonal kernels nothing")
    taps = tuple(max(k, s) for k, s in zip(m.kernel_size, m.stride, strict=True))
    if at.options["expanding_shortcut"] == "2x2" and not transposed and taps != m.kernel_size:
        pads = (0,) * dims if isinstance(m.padding, str) else m.padding
        axes = zip(at.made.shape[2:], at.sizes, m.stride, taps, m.dilation, pads, strict=True)
        # What the larger kernel reads behind the end of the map, where its size is odd.
        behind = [max(0, (out - 1) * s + d * (k - 1) + 1 - size - 2 * p) for out, size, s, k, d, p in axes]
        with contextlib.suppress(ValueError):
            new = make(kernel_size=taps)
            zeros = ZERO_PAD[dims](tuple(pad for amount in reversed(behind) for pad in (0, amount)))
            why = f"{reason}: a kernel of {'x'.join(map(str, taps))} has one" + border
            return nn.Sequential(zeros, new) if any(behind) else new, why
    return make(method="aol"), f"{reason}: 1-Lipschitz by AOL" + border


# -- normalisation and activations


def _normalisation(at: Request) -> Replacement:
    m, why = at.module, "centering: dividing by a deviation is not Lipschitz"
    if isinstance(m, BATCH_NORM):
        return centering.BatchCentering(m.num_features, m.momentum, m.affine, **at.factory), why
    if isinstance(m, _INSTANCE_NORM):
        return calls.GroupCentering(m.num_features, m.num_features, m.affine, **at.factory), why
    if isinstance(m, nn.GroupNorm):
        return calls.GroupCentering(m.num_groups, m.num_channels, m.affine, **at.factory), why
    if isinstance(m, nn.LayerNorm):
        return calls.LastAxesCentering(m.normalized_shape, m.bias is not None, **at.factory), why
    return nn.Identity(), "removed: it only divides, which is not Lipschitz"


def _slope(module: nn.Module) -> float:
    """Return the Lipschitz constant of an activation of torch, rounded up."""
    return {
        nn.GELU: 1.1291, nn.SiLU: 1.0999, nn.Mish: 1.0886, nn.Hardswish: 1.5001, nn.SELU: 1.7581,
        nn.LeakyReLU: max(1.0, abs(getattr(module, "negative_slope", 1.0))),
        nn.ELU: max(1.0, abs(getattr(module, "alpha", 1.0))),
    }.get(type(module), 1.0)  # fmt: skip


def _activation(at: Request) -> Replacement:
    if at.options["activation"] == "maxmin" or isinstance(at.module, nn.PReLU):
        if at.given.shape[at.axis] % 2:
            return activations.Abs(), f"{at.given.shape[at.axis]} channels make no pairs; isometric"
        return activations.MaxMin(at.axis), "isometric: keeps the norm of gradients"
    slope = _slope(at.module)
    if slope == 1:
        return None, "1-Lipschitz as it is"
    return calls.Divided(at.module, slope), f"slopes up to {slope:.5g}"


def _bounded(at: Request) -> Replacement:
    return None, _BOUNDED


def _moves(at: Request) -> Replacement:
    return None, "moves or drops values"


# -- pooling, resampling and padding


def each_axis(value: Any, dims: int) -> tuple[Any, ...]:
    """Return ``value``, once for each axis if it is a single one."""
    return tuple(value) if isinstance(value, tuple | list) else (value,) * dims


def _max_pool(at: Request) -> Replacement:
    m, dims = at.module, at.dims
    if m.return_indices:
        raise NotConvertibleError("return_indices=True")
    windows = [each_axis(value, dims) for value in (m.kernel_size, m.stride or m.kernel_size, m.dilation)]
    overlap = window_overlap(*windows)
    if overlap == 1:
        return None, "1-Lipschitz as it is: windows do not overlap"
    why = f"up to {overlap} windows share an input"
    if m.ceil_mode:
        return calls.Divided(m, overlap**0.5), why
    return getattr(pooling, f"LipschitzMaxPool{dims}d")(m.kernel_size, m.stride, m.padding, m.dilation), why


def _average_pool(at: Request) -> Replacement:
    m, dims = at.module, at.dims
    if m.ceil_mode or getattr(m, "divisor_override", None) is not None:
        raise NotConvertibleError("ceil_mode and divisor_override have no scaled counterpart")
    layer = getattr(pooling, f"ScaledAvgPool{dims}d")(m.kernel_size, m.stride, m.padding)
    return layer, _MEANS


def _adaptive_pool(at: Request) -> Replacement:
    m, out, dims = at.module, tuple(at.made.shape[2:]), at.dims
    average = isinstance(m, _in_all_dimensions("AdaptiveAvgPool"))
    why = _MEANS if average else "1-Lipschitz"
    if set(out) == {1}:
        return (pooling.GlobalScaledAvgPool() if average else pooling.GlobalMaxPool()), why
    if out == at.sizes:
        return nn.Identity(), "its output has the size of its input"
    if all(size % o == 0 for size, o in zip(at.sizes, out, strict=True)):
        windows = tuple(size // o for size, o in zip(at.sizes, out, strict=True))
        return getattr(pooling, f"{'ScaledAvg' if average else 'LipschitzMax'}Pool{dims}d")(windows), why
    if average:
        norms = [_norm(n, partial(F.adaptive_avg_pool1d, output_size=o)) for n, o in zip(at.sizes, out, strict=True)]
        norm = math.prod(norms)
        return calls.Divided(m, norm), f"norm {norm:.4g} from {at.sizes} to {out}"
    shared = math.prod(_most_windows(size, o) for size, o in zip(at.sizes, out, strict=True))
    return calls.Divided(m, shared**0.5), f"up to {shared} windows share an input"


def _most_windows(size: int, out: int) -> int:
    """Return the largest number of windows of adaptive pooling that read the same input."""
    ends = [(o * size // out, -(-(o + 1) * size // out)) for o in range(out)]
    return max(sum(start <= place < end for start, end in ends) for place in range(size))


def _upsample(at: Request) -> Replacement:
    """Torch interpolates axis by axis, so the norm is the product of those of the axes."""
    m, out = at.module, tuple(at.made.shape[2:])
    names = {"bilinear": "linear", "trilinear": "linear", "bicubic": None, "area": None}
    mode = names.get(m.mode, m.mode)
    if mode is None:
        raise NotConvertibleError(f"mode={m.mode!r}: use nearest, or (bi)linear")
    corners = {} if mode.startswith("nearest") else {"align_corners": m.align_corners}
    scales = each_axis(m.scale_factor if m.scale_factor is not None else None, len(out))

    def along(o: int, scale: float | None) -> Callable[[Tensor], Tensor]:
        size = {"size": o} if scale is None else {"scale_factor": float(scale)}
        return lambda x: F.interpolate(x, mode=mode, recompute_scale_factor=m.recompute_scale_factor, **size, **corners)

    norm = math.prod(_norm(size, along(o, s)) for size, o, s in zip(at.sizes, out, scales, strict=True))
    return calls.Divided(m, norm), f"copies values: norm {norm:.4g}"


def _norm(size: int, resample: Callable[[Tensor], Tensor]) -> float:
    """Return the norm of a linear map along one axis, rounded up."""
    matrix = resample(torch.eye(size, dtype=torch.float64).unsqueeze(0))[0]
    return float(torch.linalg.matrix_norm(matrix, 2)) * (1 + 1e-6)


def _padding(at: Request) -> Replacement:
    return ZERO_PAD[at.dims](at.module.padding), "repeated pixels would amplify"


def _reduction(at: Request) -> Replacement:
    """``einops.layers.torch.Reduce``: each result is made of as many numbers as any other."""
    m = at.module
    if m.reduction in ("max", "min"):
        return None, _BOUNDED
    if m.reduction not in ("mean", "sum"):
        raise NotConvertibleError(f"the reduction {m.reduction!r} is not Lipschitz")
    number = at.given.numel() / at.made.numel()
    return calls.Divided(m, number**0.5 if m.reduction == "sum" else number**-0.5), "scaled to norm 1"


def _recurrent(at: Request) -> Replacement:
    raise NotConvertibleError("it is not 1-Lipschitz: use ts.OrthoRNN")


def _attention(at: Request) -> Replacement:
    raise NotConvertibleError("attention, a product of values that depend on the input, is not Lipschitz")


def _log_softmax(at: Request) -> Replacement:
    count = at.given.shape[at.module.dim]
    return calls.Divided(at.module, count**0.5), f"norm up to the root of {count}"


_EINOPS = {"Rearrange": _moves, "Reduce": _reduction}
# Classes of torch, and what to do with them.
_MODULES: list[tuple[tuple[Any, ...], Callable[[Request], Replacement]]] = [
    ((*_in_all_dimensions("Conv"), *TRANSPOSED), _convolution),
    ((nn.Linear,), _linear),
    ((*BATCH_NORM, *_INSTANCE_NORM, nn.GroupNorm, nn.LayerNorm, nn.RMSNorm), _normalisation),
    ((nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.PReLU, nn.RReLU, nn.ELU, nn.CELU, nn.SELU, nn.GELU, nn.SiLU, nn.Mish,
      nn.Softplus, nn.Hardswish), _activation),
    ((nn.Sigmoid, nn.Tanh, nn.Hardsigmoid, nn.Hardtanh, nn.Softsign, nn.LogSigmoid, nn.Tanhshrink, nn.Softshrink,
      nn.Softmax, nn.Softmax2d, nn.Softmin), _bounded),
    ((nn.LogSoftmax,), _log_softmax),
    ((nn.RNNBase, nn.RNNCellBase), _recurrent),
    ((nn.MultiheadAttention, nn.Transformer, nn.TransformerEncoder, nn.TransformerEncoderLayer, nn.TransformerDecoder,
      nn.TransformerDecoderLayer), _attention),
    (_in_all_dimensions("MaxPool"), _max_pool),
    (_in_all_dimensions("AvgPool"), _average_pool),
    ((*_in_all_dimensions("AdaptiveAvgPool"), *_in_all_dimensions("AdaptiveMaxPool")), _adaptive_pool),
    ((nn.Upsample,), _upsample),
    ((*_in_all_dimensions("ReflectionPad"), *_in_all_dimensions("ReplicationPad"), *_in_all_dimensions("CircularPad")),
     _padding),
    ((*DROPOUT, *_in_all_dimensions("ConstantPad"), *_in_all_dimensions("ZeroPad"), nn.Identity, nn.Flatten,
      nn.Unflatten, nn.PixelShuffle, nn.PixelUnshuffle, nn.ChannelShuffle), _moves),
]  # fmt: skip
