"""Functions of ``torch.nn.functional`` that a module is the forward pass of: they have the rule of the module."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trysquare.lipschitz.arguments import FUNCTIONS, Call, Constants, FunctionRule, on
from trysquare.lipschitz.functions.rearrangements import own_dims
from trysquare.lipschitz.registry import NoRuleError, find_rule

# A function has its own signature, or, where Python cannot see that, the one of its module after the input.
_MODULES: dict[Any, Callable[..., nn.Module]] = {
    F.relu: nn.ReLU, F.relu6: nn.ReLU6, F.leaky_relu: nn.LeakyReLU, F.elu: nn.ELU, F.selu: nn.SELU, F.celu: nn.CELU,
    F.gelu: nn.GELU, F.rrelu: nn.RReLU,
    F.silu: nn.SiLU, F.mish: nn.Mish, F.softplus: nn.Softplus, F.softsign: nn.Softsign, F.hardtanh: nn.Hardtanh,
    F.hardswish: nn.Hardswish, F.hardsigmoid: nn.Hardsigmoid, F.logsigmoid: nn.LogSigmoid, F.tanhshrink: nn.Tanhshrink,
    F.softshrink: nn.Softshrink, F.tanh: nn.Tanh, F.sigmoid: nn.Sigmoid, torch.selu: nn.SELU, torch.celu: nn.CELU,
    F.avg_pool1d: nn.AvgPool1d, F.avg_pool2d: nn.AvgPool2d, F.avg_pool3d: nn.AvgPool3d,
    F.adaptive_avg_pool1d: nn.AdaptiveAvgPool1d, F.adaptive_avg_pool2d: nn.AdaptiveAvgPool2d,
    F.adaptive_avg_pool3d: nn.AdaptiveAvgPool3d,
    F.interpolate: nn.Upsample, F.pixel_shuffle: nn.PixelShuffle, F.pixel_unshuffle: nn.PixelUnshuffle,
    F.channel_shuffle: nn.ChannelShuffle, F.unfold: nn.Unfold,
}  # fmt: skip


def _max_pool(
    input: Tensor,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> None:
    """Signature of torch's pooling functions: not the order of its modules."""


def _adaptive_max_pool(input: Tensor, output_size: Any, return_indices: bool = False) -> None:
    """Signature of torch's adaptive pooling functions."""


_MAX_POOLS: dict[Any, Callable[..., nn.Module]] = {
    F.max_pool1d: nn.MaxPool1d, F.max_pool2d: nn.MaxPool2d, F.max_pool3d: nn.MaxPool3d,
    torch.max_pool1d: nn.MaxPool1d, torch.max_pool2d: nn.MaxPool2d, torch.max_pool3d: nn.MaxPool3d,
}  # fmt: skip
_ADAPTIVE_MAX_POOLS: dict[Any, Callable[..., nn.Module]] = {
    F.adaptive_max_pool1d: nn.AdaptiveMaxPool1d, F.adaptive_max_pool2d: nn.AdaptiveMaxPool2d,
    F.adaptive_max_pool3d: nn.AdaptiveMaxPool3d,
}  # fmt: skip


def _signature(function: Any, cls: Callable[..., nn.Module]) -> inspect.Signature:
    try:
        return inspect.signature(function)
    except ValueError:
        first = inspect.Parameter("input", inspect.Parameter.POSITIONAL_OR_KEYWORD)
        return inspect.Signature([first, *inspect.signature(cls).parameters.values()])


def _through_module(cls: Callable[..., nn.Module]) -> Callable[..., Constants]:
    """The rule of the module that calls the function with the same arguments."""
    known = inspect.signature(cls).parameters

    def constants(
        call: Call, input: Tensor, inplace: bool = False, training: bool = False, **options: Any
    ) -> Constants:
        if training:
            raise NoRuleError("it is called for training; call model.eval() and pass training=self.training")
        for name, value in options.items():
            if name not in known and value:
                raise NoRuleError(f"{name}={value} has no rule")
        module = cls(**{name: value for name, value in options.items() if name in known}).eval()
        rule = find_rule(module)
        assert rule is not None
        return float(rule(module, tuple(input.shape[1:])))  # type: ignore[arg-type]

    return constants


for _function, _cls in _MODULES.items():
    FUNCTIONS[_function] = FunctionRule(_through_module(_cls), _signature(_function, _cls))
for _function, _cls in _MAX_POOLS.items():
    FUNCTIONS[_function] = FunctionRule(_through_module(_cls), inspect.signature(_max_pool))
for _function, _cls in _ADAPTIVE_MAX_POOLS.items():
    FUNCTIONS[_function] = FunctionRule(_through_module(_cls), inspect.signature(_adaptive_max_pool))


@on(F.softmax, torch.softmax, "softmax")
def softmax(call: Call, input: Tensor, dim: Any = None, _stacklevel: int = 3, dtype: Any = None) -> Constants:
    """At most 1/2, see the rule of ``nn.Softmax``."""
    own_dims(input, dim)
    return 0.5


@on(F.log_softmax, torch.log_softmax, "log_softmax")
def log_softmax(call: Call, input: Tensor, dim: Any = None, _stacklevel: int = 3, dtype: Any = None) -> Constants:
    """The root of the number of classes, see the rule of ``nn.LogSoftmax``."""
    (axis,) = own_dims(input, dim)
    return math.sqrt(input.shape[axis])


def _dropout(call: Call, input: Tensor, p: float, training: bool, inplace: bool = False) -> Constants:
    """Nothing is dropped in eval mode."""
    if training:
        raise NoRuleError("dropout in training mode; call model.eval() and pass training=self.training")
    return 1.0


for _function in (F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout):
    on(_function, like=_function)(_dropout)


@on(torch.dropout)
def dropout(call: Call, input: Tensor, p: float, train: bool) -> Constants:
    """Nothing is dropped in eval mode."""
    return _dropout(call, input, p, train)
