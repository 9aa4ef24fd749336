"""Why a layer amplifies, and what to do about it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.nn.utils import parametrize

from trysquare.layers import activations
from trysquare.layers.base import ParametrizedWeight
from trysquare.layers.heads import UnitNormLinear
from trysquare.layers.pooling import _InvertibleDownsampling, _InvertibleUpsampling
from trysquare.layers.scaling import InputScaling
from trysquare.layers.shuffle import ChannelShuffle
from trysquare.lipschitz import Step
from trysquare.operators import Axis, LinearOperator
from trysquare.spectrum import norm_range

# Singular values this near to 1 are those of an orthogonal layer in float32.
TOLERANCE = 2e-5


class _Reason(NamedTuple):
    """What functions and modules of the same kind have in common.

    Attributes:
        kinds: their names in small letters, without the number of dimensions.
        attained: whether some input is amplified by as much as the bound of the function says.
        remark: why the bound is above 1, and what to do; may hold ``{bound}``.
    """

    kinds: str
    attained: bool
    remark: str


_REASONS = [
    _Reason(
        "gelu silu selu mish hardswish elu leakyrelu leaky_relu prelu rrelu",
        True, "slope up to {bound}: use a 1-Lipschitz one",
    ),
    _Reason("logsoftmax log_softmax", True, "its norm is the root of the number of classes: leave it to the loss"),
    _Reason(
        "maxpool adaptivemaxpool max_pool adaptive_max_pool unfold",
        False, "windows overlap: use kernel_size = stride",
    ),
    _Reason(
        "avgpool adaptiveavgpool avg_pool adaptive_avg_pool",
        True, "its windows weigh a position by more than 1 in all: use kernel_size = stride and no divisor",
    ),
    _Reason(
        "reflectionpad replicationpad circularpad pad", True, "the padding repeats positions: use zeros",
    ),
    _Reason(
        "upsample upsamplingnearest upsamplingbilinear interpolate expand expand_as repeat broadcast_to "
        "repeat_interleave", True, "it copies numbers: divide by {bound}",
    ),
    _Reason("sum", True, "it adds up many numbers: divide by {bound}, or take the mean"),
    _Reason(
        "add iadd add_ sub isub sub_ subtract", False,
        "branches add up to at most {bound} times the larger: weight them so that the weights sum to 1",
    ),
    _Reason(
        "cat concat stack maximum minimum max min", False,
        "the parts may depend on the same input, up to as many times as there are: divide by the root of their number",
    ),
    _Reason(
        "mul imul mul_ multiply truediv itruediv div div_ divide true_divide",
        True, "a scaling by up to {bound}: part of the constant",
    ),
    _Reason("linear matmul mm", True, "the constant matrix has norm {bound}: divide by it"),
    _Reason("conv", False, "the kernel has a norm of at most {bound}: divide by it"),
    _Reason("embedding", True, "its table has norm {bound} with respect to one-hot vectors: divide by it"),
]  # fmt: skip
_REASON = {kind: reason for reason in _REASONS for kind in reason.kinds.split()}

_MOVES_NUMBERS = (
    nn.Identity, nn.Flatten, nn.Unflatten, nn.PixelShuffle, nn.PixelUnshuffle, nn.ChannelShuffle, ChannelShuffle,
    _InvertibleDownsampling, _InvertibleUpsampling,
)  # fmt: skip
_MOVING_FUNCTIONS = (
    "flatten", "view", "reshape", "view_as", "reshape_as", "unflatten", "permute", "transpose", "swapaxes", "flip",
    "contiguous", "clone", "squeeze", "unsqueeze", "pixel_shuffle", "pixel_unshuffle", "channel_shuffle", "neg",
)  # fmt: skip
_FOLDS = (
    activations.MaxMin, activations.GroupSort, activations.FullSort, activations.Abs, activations.Householder,
    activations.NActivation,
)  # fmt: skip


def _reason(step: Step) -> _Reason | None:
    """Modules of torch and functions that are known by their name."""
    if step.module is not None and not type(step.module).__module__.startswith("torch."):
        return None
    return _REASON.get(step.kind.lower().rstrip("123d"), _REASON.get(step.kind.lower()))


def is_attained(step: Step) -> bool:
    """Whether the bound of a function, or of an embedding, is known to be its constant."""
    reason = _reason(step)
    if reason is None or not (step.module is None or isinstance(step.module, nn.Embedding)):
        return False
    # A factor with more axes than what it scales is bounded by its largest entry and the number of copies.
    scaled = reason is _REASON["mul"]
    return reason.attained and (step.input_shape == step.output_shape or not scaled)


def isometric(step: Step) -> str:
    """That a step keeps lengths, if it is known to."""
    if isinstance(step.module, _MOVES_NUMBERS) or (step.module is None and step.kind in _MOVING_FUNCTIONS):
        return "isometric: it only moves numbers or changes signs"
    return "isometric: its Jacobian is orthogonal everywhere" if isinstance(step.module, _FOLDS) else ""


def normalisation(scales: Tensor) -> str:
    """Which channel of a normalisation amplifies."""
    return (
        f"|weight| / sqrt(running_var + eps) is {float(scales.max()):.4g} at channel {int(scales.argmax())}: shrink "
        "its weight"
    )


def why_above_one(step: Step, parts: dict[str, float]) -> str:
    """Why the bound of a layer that is not linear is above 1.

    Args:
        step: the layer.
        parts: bounds of the modules inside of it, if it is a block of ours.
    """
    if _is_ours(step.module):
        return _why_ours(step)
    if isinstance(step.module, InputScaling):
        return f"the data are scaled by up to {step.constant:.4g}: part of the constant"
    if parts and max(parts.values()) > 1 + TOLERANCE:
        worst = max(parts, key=lambda name: parts[name])
        return f"its {worst} has the bound {parts[worst]:.4g}: see the rows of its layers"
    if (reason := _reason(step)) is not None:
        return reason.remark.format(bound=f"{step.constant:.4g}")
    if type(step.module).__module__.startswith("trysquare."):
        return f"its factors were rounded, which adds {step.constant - 1:.1e}: keep it in float32"
    return f"its rule gives {step.constant:.4g}"


def _is_ours(module: nn.Module | None) -> bool:
    return isinstance(module, ParametrizedWeight) and parametrize.is_parametrized(module, "weight")


def _why_ours(step: Step) -> str:
    layer: Any = step.module
    above = f"{step.constant - 1:.1e}"
    if layer.parametrization.truncation_error > TOLERANCE:
        return f"its method is truncated, which adds {above}: give it more terms"
    dtype = str(layer.parametrization.like.dtype).removeprefix("torch.")
    return f"its weights were rounded to {dtype}, which adds {above}: keep it in float32"


def linear(step: Step, operator: LinearOperator, largest: float) -> list[str]:
    """Why a linear layer amplifies, or may, and what to do; nothing if it does not.

    Args:
        step: the layer.
        operator: what it computes.
        largest: the largest singular value found.
    """
    if isinstance(step.module, UnitNormLinear):
        return ["each output is 1-Lipschitz, not all together: certify with its certified_radii"]
    bound = step.constant
    if bound <= 1 + TOLERANCE:
        return []
    if _is_ours(step.module):
        return [_why_ours(step)]
    said = _padding_remarks(operator)
    if operator.repeats > 1:
        said += _without_padding(operator)
    elif largest > 1:
        norm = f"{bound:.4g}" if bound <= largest * 1.001 else f"between {largest:.4g} and {bound:.4g}"
        said.append(f"the norm is {norm}: use the trysquare layer of this shape, or divide by it")
    if largest <= 1:
        said.append(f"the bound is {bound:.4g}, and no singular value above 1 was found: divide by it to be certain")
    return said


def _without_padding(operator: LinearOperator) -> list[str]:
    """What would be left to do if the layer padded with zeros."""
    zeros = replace(operator, axes=tuple(replace(axis, mode="zeros") for axis in operator.axes))
    norm = norm_range(zeros, lowest=False).high
    return [f"with zeros the norm is still up to {norm:.4g}: divide by it too"] if norm > 1 + TOLERANCE else []


def _padding_remarks(operator: LinearOperator) -> list[str]:
    """What is wrong with the padding of a convolution, axis by axis, and what to do; equal axes are named once."""
    said = [remark for axis in operator.axes if (remark := _padding_remark(axis))]
    return list(dict.fromkeys(said))


def _padding_remark(axis: Axis) -> str | None:
    if axis.repeats == 1:
        return None
    left, right = axis.pad
    if axis.mode != "circular":
        return (
            f"{axis.mode} padding {max(left, right)} repeats pixels up to {axis.repeats} times: use zeros or circular"
        )
    if left + right >= axis.extent:
        best = max(0, -((axis.stride - axis.extent) // 2))
        return f"circular padding {max(left, right)} repeats outputs: use {best}"
    return (
        f"size {axis.size} is not a multiple of stride {axis.stride}, so circular windows overlap where they wrap: "
        f"pad or crop the input to {axis.size // axis.stride * axis.stride or axis.stride}"
    )
