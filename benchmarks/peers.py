"""Layers of ``orthogonium``, the paper's library, behind one signature; what is missing is said, not raised."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from functools import cache
from importlib import import_module
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

Make = Callable[[int, int, int, int, int], nn.Module]
"""From input and output channels, kernel size, stride and groups to a circular convolution."""

_HOW = "pip install -c constraints.txt '.[bench]'"


def missing() -> list[str]:
    """What cannot be imported, why, and what that leaves out."""
    lost = {"orthogonium": "its figures", "einops": "orthogonium's copies of BCOP, SOC and Cayley, which need it"}
    return [f"{_problem(name)} ({_HOW}): without {what}" for name, what in lost.items() if _problem(name)]


def installed() -> bool:
    """Whether the peer is there."""
    return not _problem("orthogonium")


def that_run(names: Iterable[str]) -> list[str]:
    """Return the contestants without those of a peer that is not installed.

    Raises:
        ValueError: if none is left.
    """
    left = [name for name in names if installed() or not name.startswith("orthogonium")]
    if not left:
        raise ValueError("; ".join(missing()))
    return left


@cache
def _problem(name: str) -> str:
    """Why a package cannot be imported; nothing if it can."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            import_module(name)
    except ModuleNotFoundError as error:
        return f"{name} is not installed" if error.name == name else f"{name} cannot be imported: {error}"
    except Exception as error:
        return f"{name} cannot be imported: {error}"
    return ""


def load(module: str, name: str) -> Any:
    """An object of ``orthogonium``, without the warnings of its import.

    Raises:
        ImportError: if it, or something it needs, is not installed.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return getattr(import_module(f"orthogonium.{module}"), name)


class _NoAccelerator(TorchFunctionMode):
    """Its copies of BCOP and SOC put tensors on the first accelerator, whether there is one or not: leave them."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.Tensor.cuda:
            return args[0]
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
        return func(*args, **kwargs)


def _without_groups(module: str, name: str, groups: int) -> Any:
    if groups > 1:
        raise ValueError(f"orthogonium's {name} has no groups")
    return load(module, name)


def parameters(way: str) -> Any:
    """Its settings for one of ``ORTHOGONALIZERS``."""
    return load("reparametrizers", ORTHOGONALIZERS[way])


def aoc(channels: int, outputs: int, kernel_size: int, stride: int, groups: int, **options: Any) -> nn.Module:
    make = load("layers", "AdaptiveOrthoConv2d")
    padding = (kernel_size - 1) // 2
    shape = (channels, outputs, kernel_size, stride)
    return make(*shape, padding=padding, groups=groups, padding_mode="circular", **options)


def aoc_by(way: str) -> Make:
    """Its adaptive orthogonal convolution, by one of ``ORTHOGONALIZERS``."""
    return lambda *shape: aoc(*shape, ortho_params=parameters(way))


def adaptive_soc(channels: int, outputs: int, kernel_size: int, stride: int, groups: int) -> nn.Module:
    """Its SOC with an explicit kernel, larger than asked for: padded so that the map is ``stride`` times smaller."""
    make = load("layers.conv.adaptiveSOC", "AdaptiveSOCConv2d")
    options = {"groups": groups, "padding_mode": "circular"}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        taps = make(channels, outputs, kernel_size, stride, padding=0, **options).weight.shape[-1]
        return make(channels, outputs, kernel_size, stride, padding=(taps - 1) // 2, **options)


def bcop(channels: int, outputs: int, kernel_size: int, stride: int, groups: int) -> nn.Module:
    """Its copy of the original BCOP; strides are emulated."""
    with _NoAccelerator():
        return _without_groups("legacy.block_ortho_conv", "BCOP", groups)(channels, outputs, kernel_size, stride)


def soc(channels: int, outputs: int, kernel_size: int, stride: int, groups: int) -> nn.Module:
    """Its copy of the original SOC, by repeated convolution with zeros around the map; strides are emulated."""
    with _NoAccelerator():
        return _without_groups("legacy.skew_ortho_conv", "SOC", groups)(channels, outputs, kernel_size, stride)


def cayley(channels: int, outputs: int, kernel_size: int, stride: int, groups: int) -> nn.Module:
    """Its copy of the original Cayley convolution; strides are emulated."""
    chosen = _without_groups("legacy.cayley_ortho_conv", "Cayley", groups)
    return chosen(channels, outputs, kernel_size, stride=stride)


def aol(channels: int, outputs: int, kernel_size: int, stride: int, groups: int) -> nn.Module:
    make = load("layers.conv.AOL", "AOLConv2D")
    padding = (kernel_size - 1) // 2
    return make(channels, outputs, kernel_size, stride, padding=padding, groups=groups, padding_mode="circular")


def linear(features: int, outputs: int, **options: Any) -> nn.Module:
    return load("layers", "OrthoLinear")(features, outputs, **options)


def linear_by(way: str) -> Callable[[int, int], nn.Module]:
    """Its orthogonal linear layer, by one of ``ORTHOGONALIZERS``."""
    return lambda features, outputs: linear(features, outputs, ortho_params=parameters(way))


def with_plain_layers(model: nn.Module) -> nn.Module:
    """The model in eval mode, with its layers exchanged, in place, for torch's with their present weights.

    Its own write into their parameters whenever they are called, so that they are no fixed function to certify.
    """
    for name, child in list(model.eval().named_children()):
        if any(cls.__module__.startswith("orthogonium") for cls in type(child).__mro__):
            setattr(model, name, _plain(child))
        else:
            with_plain_layers(child)
    return model


@torch.no_grad()
def _plain(layer: Any) -> nn.Module:
    has_bias = layer.bias is not None
    if isinstance(layer, nn.Linear):
        plain: nn.Module = nn.Linear(layer.in_features, layer.out_features, has_bias)
    else:
        numbers = (layer.kernel_size, layer.stride, layer.padding, layer.dilation, layer.groups)
        plain = nn.Conv2d(layer.in_channels, layer.out_channels, *numbers, has_bias, layer.padding_mode)
    plain.weight.copy_(layer.weight)
    if has_bias:
        plain.bias.copy_(layer.bias)
    return plain.eval()


class Orthogonalizer(nn.Module):
    """One of its ways to orthonormal matrices of a shape."""

    def __init__(self, way: str, shape: tuple[int, ...]) -> None:
        super().__init__()
        chosen = parameters(way)
        self.steps = nn.Sequential(chosen.spectral_normalizer(shape), chosen.orthogonalizer(shape))

    def forward(self, matrix: torch.Tensor) -> torch.Tensor:
        """``(b, n, m)`` to the same shape."""
        return self.steps(matrix)


DEFAULT = "Björck-Bowie"
ORTHOGONALIZERS = {
    DEFAULT: "DEFAULT_ORTHO_PARAMS",
    "Cholesky": "CHOLESKY_ORTHO_PARAMS",
    "QR": "QR_ORTHO_PARAMS",
    "exponential": "EXP_ORTHO_PARAMS",
}
