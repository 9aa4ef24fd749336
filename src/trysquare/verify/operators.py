"""Linear layers of torch read into linear operators, and what must hold before a layer is taken at its word.

Layers of this library say themselves which operator they are (``linalg.operator.LinearLayer``).
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.prune import BasePruningMethod
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from trysquare.naming import shown
from trysquare.nn import layers
from trysquare.nn.geometry import Pads, extent, same_pads
from trysquare.nn.linalg.operator import Axis as Axis
from trysquare.nn.linalg.operator import LinearLayer
from trysquare.nn.linalg.operator import LinearOperator as LinearOperator
from trysquare.nn.linalg.operator import checked_weight as checked_weight
from trysquare.nn.linalg.precision import as_autocast
from trysquare.nn.parametrizations.base import ParametrizedWeight
from trysquare.torch_internals import hooks_of

# The most numbers in one input that torch can count.
_LARGEST_INPUT = 1 << 62
# Torch's own hooks, which set the weight before each pass.
WEIGHT_HOOKS = (WeightNorm, SpectralNorm, BasePruningMethod)
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_TORCHS_OWN = (nn.Linear, *_CONVOLUTIONS, *_TRANSPOSED)
AnyConvolution = nn.Conv1d | nn.Conv2d | nn.Conv3d | nn.ConvTranspose1d | nn.ConvTranspose2d | nn.ConvTranspose3d
# What a subclass may define without computing something else.
_HARMLESS = frozenset(
    """
    __init__ __module__ __doc__ __qualname__ __annotations__ __dict__ __weakref__ __getstate__ __setstate__
    __deepcopy__ __repr__ __parameters__ __orig_bases__ __abstractmethods__ _abc_impl __firstlineno__
    __static_attributes__ extra_repr reset_parameters _get_name
    """.split()
)
# The code of classes as it was when they were made known.
_KNOWN: dict[type, dict[str, object]] = {}


def _code_of(cls: type) -> dict[str, object]:
    kinds = (staticmethod, classmethod, property)
    # The way in is watched while something is traced, and compilers put something around constructors.
    left_out = {"__call__", *_HARMLESS}
    return {n: v for n, v in vars(cls).items() if n not in left_out and (callable(v) or isinstance(v, kinds))}


def remember(*classes: type) -> None:
    """Keep the code of classes, and of our own below them, so that ``as_defined`` can tell when a part is replaced."""
    for cls in classes:
        for base in cls.__mro__[:-1]:
            _KNOWN.setdefault(base, _code_of(base))
        below: list[type] = cls.__subclasses__()
        remember(*(sub for sub in below if is_ours(sub)))


def is_ours(cls: type) -> bool:
    """Whether a class is one of this package, and not one that somebody calls so."""
    home = sys.modules.get(cls.__module__) if cls.__module__.startswith("trysquare.") else None
    return home is not None and getattr(home, cls.__name__, None) is cls


def as_defined(module: nn.Module, cls: type) -> bool:
    """Whether a module computes what its base class ``cls`` does.

    It does if nothing that ``cls`` has was replaced: not in the module, not in a subclass (torch's parametrizations and
    our own subclasses apart), and not in the classes themselves.
    """
    inside = vars(module)
    if any(name in inside for name in _code_of(nn.Module)) or "__call__" in inside:
        return False
    own = type(module).__mro__
    for base in own[:-1]:
        if base in _KNOWN:
            now = _code_of(base)
            if len(now) != len(_KNOWN[base]) or any(now.get(n) is not v for n, v in _KNOWN[base].items()):
                return False
            if any(name in inside for name in now):
                return False
        elif any(hasattr(cls, name) for name in vars(base) if name not in _HARMLESS):
            return False
    return getattr(type(module), "forward", None) is getattr(cls, "forward", None)


def unknown_hooks(module: nn.Module) -> list[Callable[..., object]]:
    """Return the hooks by which a call of a module does more than its forward pass and setting its weight."""
    before, after = hooks_of(module)
    return [*(hook for hook in before if not isinstance(hook, WEIGHT_HOOKS)), *after]


def has_hooks(module: nn.Module) -> bool:
    """Whether a module has hooks that can change what it computes."""
    return bool(unknown_hooks(module))


def read_layer(layer: nn.Module, input_shape: Sequence[int]) -> LinearOperator:
    """Read a linear or convolution layer of torch or this library, on inputs of ``input_shape`` (without the batch).

    Raises:
        TypeError: if the layer is of another kind, or a subclass that computes something else.
        ValueError: if the shape does not fit the layer, it has hooks that can change what it computes, or the weight
            is complex or not finite.
    """
    if not isinstance(input_shape, Sequence) or isinstance(input_shape, str):
        raise TypeError(f"input_shape={shown(input_shape)} must be the shape of one input, such as (3, 32, 32)")
    shape = tuple(input_shape)
    if not all(isinstance(size, int) and size > 0 for size in shape):
        raise ValueError(f"input_shape={shown(input_shape)} must be positive integers: one input without the batch")
    if math.prod(shape) > _LARGEST_INPUT:
        raise ValueError(
            f"input_shape={shown(shape)} has more than the {_LARGEST_INPUT} numbers that torch can count: "
            "trysquare.spectral_norm_bound(layer), without a shape, bounds every size at once"
        )
    if (kind := _kind(layer)) is None:
        raise TypeError(
            f"{type(layer).__name__} is not a linear or convolution layer of torch or trysquare, or overrides forward "
            "or __call__: its matrix cannot be read off its weight; trysquare.lipschitz_bound follows other modules"
        )
    if unknown := unknown_hooks(layer):
        names = ", ".join(getattr(hook, "__name__", type(hook).__name__) for hook in unknown)
        raise ValueError(
            f"{type(layer).__name__} has forward hooks ({names}), which can change what it computes: remove them first"
        )
    kernel = used_weight(layer)
    if kind not in _TORCHS_OWN:
        assert isinstance(layer, LinearLayer)
        return layer.linear_operator(shape, kernel)
    if isinstance(layer, nn.Linear):
        return LinearOperator.of_matrix(kernel, shape)
    assert isinstance(layer, (*_CONVOLUTIONS, *_TRANSPOSED))
    numbers = tuple(layer.stride), tuple(layer.dilation), layer.groups
    if isinstance(layer, _TRANSPOSED):
        pads = zip(_pads(layer, kernel), layer.output_padding, strict=True)
        crops = tuple((left, right - extra) for (left, right), extra in pads)
        return LinearOperator.of_transposed(kernel, shape, *numbers, crops, "zeros")
    operator = LinearOperator.of_convolution(kernel, shape, *numbers, _pads(layer, kernel), layer.padding_mode)
    _check_torch_padding(operator.axes)
    return operator


def _kind(layer: nn.Module) -> type | None:
    """Return the class whose function the layer computes: one of torch, or one that knows its operator."""
    for cls in type(layer).__mro__:
        knows_its_operator = is_ours(cls) and issubclass(cls, LinearLayer)
        if (knows_its_operator or cls in _TORCHS_OWN) and as_defined(layer, cls):
            return cls
    return None


def reads(layer: nn.Module) -> bool:
    """Whether ``read_layer`` knows what the layer computes."""
    return _kind(layer) is not None


def misfit(layer: nn.Module | None, shapes: Sequence[Sequence[int]]) -> str:
    """Return what a linear or convolution layer expects instead of inputs of these shapes (without the batch).

    The text is empty if the shapes fit, or the module is of another kind.
    """
    if layer is None or not reads(layer) or len(shapes) != 1:
        return ""
    try:
        read_layer(layer, shapes[0])
    except ValueError as error:
        return f"{type(layer).__name__.removeprefix('Parametrized')}: {error}"
    return ""


@torch.no_grad()
def used_weight(layer: nn.Module) -> Tensor:
    """Return the weight after the casts that the forward pass makes, in float64 on the CPU.

    For a convolution that is applied in terms it is the kernel that they add up to.

    The hooks of torch's ``weight_norm``, ``spectral_norm`` and pruning set the weight before each pass, so that until
    then the attribute is that of the pass before. They are asked for the next one.
    """
    if isinstance(layer, ParametrizedWeight) and not layer._forward_pre_hooks:
        return layer.exact_weight()
    weight: Any = layer.weight
    for hook in layer._forward_pre_hooks.values():
        if isinstance(hook, WeightNorm) and hook.name == "weight":
            weight = hook.compute_weight(layer)
        if isinstance(hook, SpectralNorm) and hook.name == "weight":
            weight = hook.compute_weight(layer, do_power_iteration=False)
        if isinstance(hook, BasePruningMethod) and hook._tensor_name == "weight":
            weight = hook.apply_mask(layer)
    return checked_weight(as_autocast(weight), type(layer).__name__)


def _pads(layer: AnyConvolution, kernel: Tensor) -> Pads:
    """Return the left and right padding of each axis of one of torch's convolutions."""
    if layer.padding_mode != "zeros":
        # What the forward pass uses, which is not `padding` if that was changed later; last axis first.
        flat: list[int] = layer._reversed_padding_repeated_twice
        return tuple(zip(flat[::2], flat[1::2], strict=True))[::-1]
    padding, dims = layer.padding, len(layer.stride)
    if isinstance(padding, str):
        # Torch takes the size of the kernel from the weight, whatever ``kernel_size`` says.
        return (
            same_pads(extent(kernel.shape[2:], layer.dilation), (1,) * dims) if padding == "same" else ((0, 0),) * dims
        )
    each = (padding,) * dims if isinstance(padding, int) else padding
    return tuple((pad, pad) for pad in each)


def _check_torch_padding(axes: tuple[Axis, ...]) -> None:
    limits = {"reflect": -1, "circular": 0}
    for number, axis in enumerate(axes):
        if axis.mode in limits and max(axis.pad) > axis.size + limits[axis.mode]:
            raise ValueError(
                f"{axis.mode} padding {axis.pad} on axis {number} is too wide for a size of {axis.size}: torch "
                f"allows at most {axis.size + limits[axis.mode]}"
            )


remember(*_TORCHS_OWN, *(cls for cls in vars(layers).values() if isinstance(cls, type)))
