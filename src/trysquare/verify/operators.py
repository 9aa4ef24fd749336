"""Linear layers read into numbers: the one place that knows how torch and this library apply a convolution.

A transposed convolution is the adjoint of the plain convolution with the same weight, so it is read as that one. A
linear layer is a convolution without axes.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules import module as torch_module
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd
from torch.nn.utils.prune import BasePruningMethod
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from trysquare.naming import shown
from trysquare.nn.geometry import Pads, Sizes, check_circular_size
from trysquare.nn.layers.conv import _Convolution, _OrthogonalConvolution, _TransposedConvolution
from trysquare.nn.layers.convolution import CONV, CONV_TRANSPOSE, flat
from trysquare.nn.layers.heads import UnitNormLinear
from trysquare.nn.layers.linear import OrthoLinear
from trysquare.nn.linalg.precision import as_autocast, full_precision
from trysquare.nn.parametrizations.base import ParametrizedWeight

# Numbers of one input, beyond which torch cannot even count them.
_LARGEST_INPUT = 1 << 62
# Torch's hooks that set the weight before each pass.
WEIGHT_HOOKS = (WeightNorm, SpectralNorm, BasePruningMethod)
_READABLE = (
    nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d,
    _Convolution, _TransposedConvolution, OrthoLinear, UnitNormLinear,
)  # fmt: skip
# What a class may define anew without computing something else.
_HARMLESS = frozenset(
    """
    __init__ __module__ __doc__ __qualname__ __annotations__ __dict__ __weakref__ __getstate__ __setstate__
    __deepcopy__ __repr__ __parameters__ __orig_bases__ __abstractmethods__ _abc_impl __firstlineno__
    __static_attributes__ extra_repr reset_parameters _get_name
    """.split()
)
# The code of classes as it was when they were made known.
_KNOWN: dict[type, dict[str, Any]] = {}


def _code_of(cls: type) -> dict[str, Any]:
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
        remember(*(sub for sub in below if _is_ours(sub)))


def _is_ours(cls: type) -> bool:
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


def has_hooks(module: nn.Module) -> bool:
    """Whether a call of a module does anything besides its forward pass and setting its weight."""
    before = (*module._forward_pre_hooks.values(), *torch_module._global_forward_pre_hooks.values())
    after = (*module._forward_hooks.values(), *torch_module._global_forward_hooks.values())
    return bool(after) or not all(isinstance(hook, WEIGHT_HOOKS) for hook in before)


@dataclass(frozen=True)
class Axis:
    """One axis of a convolution: what it reads of a domain of ``size`` positions.

    Attributes:
        size: positions of the domain.
        windows: outputs.
        extent: positions from the first tap to the last.
        stride: positions from one window to the next.
        pad: positions added (cut off if negative) on the left and on the right.
        mode: what they hold: ``"zeros"``, ``"circular"``, ``"reflect"`` or ``"replicate"``.
    """

    size: int
    windows: int
    extent: int
    stride: int
    pad: tuple[int, int]
    mode: str

    @cached_property
    def read(self) -> int:
        """Padded positions that some window spans."""
        return (self.windows - 1) * self.stride + self.extent

    @cached_property
    def sources(self) -> Tensor:
        """Position of the domain that each padded position repeats."""
        positions = torch.arange(-self.pad[0], self.size + self.pad[1])
        if self.mode == "circular":
            return positions % self.size
        if self.mode == "reflect":
            folded = positions.abs()
            return torch.minimum(folded, 2 * (self.size - 1) - folded)
        return positions.clamp(0, self.size - 1)

    @cached_property
    def repeats(self) -> int:
        """How often the padding repeats a position that is read: the square of the norm of the padding."""
        if self.mode == "zeros" or self.on_circle:
            return 1
        # It depends on what is near the ends alone: leave out windows in the middle of a long axis.
        enough = 4 * (sum(map(abs, self.pad)) + self.extent + self.stride)
        if (spare := (self.size - enough) // self.stride) > 0:
            return replace(self, size=self.size - spare * self.stride, windows=self.windows - spare).repeats
        return int(torch.bincount(self.sources[: self.read]).max())

    @cached_property
    def apart(self) -> bool:
        """Whether windows neither overlap nor meet the padding, so that any domain will do."""
        return self.pad[0] == 0 and self.extent <= self.stride and self.read <= self.size

    @cached_property
    def on_circle(self) -> bool:
        """Whether the outputs are distinct outputs of the circular convolution on the domain itself."""
        total = sum(self.pad)
        return self.apart or (
            self.mode == "circular" and 0 <= total < self.extent and min(self.pad) >= 0 and self.size % self.stride == 0
        )

    @cached_property
    def all_of_circle(self) -> bool:
        """Whether they are all of its outputs."""
        return self.apart or (self.on_circle and self.windows * self.stride == self.size)

    @cached_property
    def period(self) -> int:
        """Size of a circular domain, a multiple of the stride, whose convolution has this one as a part."""
        if self.apart:
            return self.windows * self.stride
        if self.on_circle:
            return self.size
        needed = max(self.windows * self.stride, self.read)
        if self.mode == "zeros":
            # Zeros on the right may wrap around onto zeros on the left, if all that is not zero stays where it is.
            left = max(self.pad[0], 0)
            data = min(self.read, self.pad[0] + self.size)
            needed = max(self.windows * self.stride, self.read - left, data)
        return -(-needed // self.stride) * self.stride


@dataclass(frozen=True)
class LinearOperator:
    """A linear or convolution layer on inputs of a given shape, without its bias.

    Attributes:
        kernel: ``(c_out, c_in / groups, *k)`` in float64 on the CPU: the weight that the forward pass uses.
        dilation: dilation of each axis.
        groups: number of groups.
        axes: the spatial axes.
        transposed: whether the layer is the adjoint of this convolution.
        copies: how often the same map is applied side by side (leading axes of a linear layer's input).
    """

    kernel: Tensor
    dilation: Sizes
    groups: int
    axes: tuple[Axis, ...]
    transposed: bool = False
    copies: int = 1

    @property
    def stride(self) -> Sizes:
        """Stride of each axis."""
        return tuple(axis.stride for axis in self.axes)

    @property
    def domain(self) -> Sizes:
        """Shape that the convolution reads."""
        return self.kernel.shape[1] * self.groups, *(axis.size for axis in self.axes)

    @property
    def image(self) -> Sizes:
        """Shape that the convolution makes."""
        return self.kernel.shape[0], *(axis.windows for axis in self.axes)

    @property
    def smaller_side(self) -> int:
        """Number of singular values of one copy."""
        return min(math.prod(self.domain), math.prod(self.image))

    @property
    def circular(self) -> bool:
        """Whether the Fourier transform makes it block diagonal."""
        return all(axis.all_of_circle for axis in self.axes)

    @property
    def repeats(self) -> int:
        """Square of the norm of the padding."""
        return math.prod(axis.repeats for axis in self.axes)

    def apply(self, x: Tensor) -> Tensor:
        """The convolution of ``(batch, *domain)``, of the kernel's dtype."""
        if not self.axes:
            return F.linear(x, self.kernel)
        if self.axes[0].mode == "zeros":
            x = F.pad(x, flat(tuple(axis.pad for axis in self.axes)))
        else:
            for dim, axis in enumerate(self.axes, start=2):
                x = x.index_select(dim, axis.sources)
        for dim, axis in enumerate(self.axes, start=2):
            x = x.narrow(dim, 0, axis.read)
        return CONV[len(self.axes)](x, self.kernel, None, self.stride, 0, self.dilation, self.groups)

    def transpose(self, y: Tensor) -> Tensor:
        """The adjoint of ``apply``."""
        if not self.axes:
            return F.linear(y, self.kernel.mT)
        transposed = CONV_TRANSPOSE[len(self.axes)]
        x = transposed(y, self.kernel, None, self.stride, 0, 0, self.groups, self.dilation)
        unread = [(0, axis.size + sum(axis.pad) - axis.read) for axis in self.axes]
        if self.axes[0].mode == "zeros":
            cut = [(-axis.pad[0], right - axis.pad[1]) for axis, (_, right) in zip(self.axes, unread, strict=True)]
            return F.pad(x, flat(tuple(cut)))
        for dim, axis in enumerate(self.axes, start=2):
            shape = (*x.shape[:dim], axis.size, *x.shape[dim + 1 :])
            x = x.new_zeros(shape).index_add_(dim, axis.sources[: axis.read], x)
        return x

    def dense(self) -> Tensor:
        """Matrices ``(groups, image / groups, domain / groups)`` of the convolution."""
        windows, positions = math.prod(self.image[1:]), math.prod(self.domain[1:])
        taps = self.kernel.flatten(2).unflatten(0, (self.groups, -1))  # (groups, n, m, taps)
        blocks = taps.new_zeros(windows, positions, *taps.shape[:3])
        for tap, offsets in enumerate(product(*map(range, self.kernel.shape[2:]))):
            window, position = self._read_by(offsets)
            blocks[window, position] += taps[..., tap]
        return blocks.permute(2, 3, 0, 4, 1).flatten(3).flatten(1, 2)

    def _read_by(self, offsets: Sizes) -> tuple[Tensor, Tensor]:
        """Windows whose tap at ``offsets`` falls on a position of the domain, and that position, both flattened."""
        window = position = torch.zeros(1, dtype=torch.long)
        for axis, dilation, offset in zip(self.axes, self.dilation, offsets, strict=True):
            windows = torch.arange(axis.windows)
            padded = windows * axis.stride + dilation * offset
            inside = padded - axis.pad[0] if axis.mode == "zeros" else axis.sources[padded]
            kept = (inside >= 0) & (inside < axis.size)
            window = (window[:, None] * axis.windows + windows[kept]).flatten()
            position = (position[:, None] * axis.size + inside[kept]).flatten()
        return window, position


def read_layer(layer: nn.Module, input_shape: Sequence[int]) -> LinearOperator:
    """A linear or convolution layer of torch or ours, on inputs of ``input_shape`` (without the batch).

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
    if not reads(layer):
        raise TypeError(
            f"{type(layer).__name__} is not a linear or convolution layer of torch or trysquare, or overrides forward "
            "or __call__: its matrix cannot be read off its weight; trysquare.lipschitz_bound follows other modules"
        )
    _refuse_hooks(layer)
    kernel = used_weight(layer)
    if isinstance(layer, nn.Linear):
        if not shape or shape[-1] != layer.in_features:
            raise ValueError(f"input_shape={shape} must end in in_features={layer.in_features}")
        return LinearOperator(kernel, (), 1, (), copies=math.prod(shape[:-1]))
    assert isinstance(layer, _ConvNd)
    dims = len(layer.kernel_size)
    if len(shape) != dims + 1 or shape[0] != layer.in_channels:
        sizes = "one size" if dims == 1 else f"{dims} sizes"
        raise ValueError(f"input_shape={shape} must be ({layer.in_channels} channels, and {sizes}), without the batch")
    return _read_convolution(layer, kernel, shape[1:])


def reads(layer: nn.Module) -> bool:
    """Whether ``read_layer`` knows what the layer computes."""
    return any(cls in _READABLE and as_defined(layer, cls) for cls in type(layer).__mro__)


def misfit(layer: nn.Module | None, shapes: Sequence[Sequence[int]]) -> str:
    """What a linear or convolution layer expects instead of inputs of these shapes (without the batch).

    Empty if it is another module or function, or has nothing against them.
    """
    if layer is None or not reads(layer) or len(shapes) != 1:
        return ""
    try:
        read_layer(layer, shapes[0])
    except ValueError as error:
        return f"{type(layer).__name__.removeprefix('Parametrized')}: {error}"
    return ""


def _refuse_hooks(layer: nn.Module) -> None:
    """Refuse hooks that can change what the layer computes, except those of torch that set the weight."""
    before = (*layer._forward_pre_hooks.values(), *torch_module._global_forward_pre_hooks.values())
    after = (*layer._forward_hooks.values(), *torch_module._global_forward_hooks.values())
    unknown = [hook for hook in before if not isinstance(hook, WEIGHT_HOOKS)] + list(after)
    if unknown:
        names = ", ".join(getattr(hook, "__name__", type(hook).__name__) for hook in unknown)
        raise ValueError(
            f"{type(layer).__name__} has forward hooks ({names}), which can change what it computes: remove them first"
        )


@torch.no_grad()
def used_weight(layer: nn.Module) -> Tensor:
    """The weight after the casts that the forward pass makes, in float64 on the CPU.

    Of a convolution that is applied in terms, what they add up to.

    The hooks of torch's ``weight_norm``, ``spectral_norm`` and pruning set it before each pass, so until then the
    attribute is the one of the pass before: they are asked for it.
    """
    if isinstance(layer, ParametrizedWeight) and not layer._forward_pre_hooks:
        return checked_weight(layer.used_weight(), type(layer).__name__)
    weight: Any = layer.weight
    for hook in layer._forward_pre_hooks.values():
        if isinstance(hook, WeightNorm) and hook.name == "weight":
            weight = hook.compute_weight(layer)
        if isinstance(hook, SpectralNorm) and hook.name == "weight":
            weight = hook.compute_weight(layer, do_power_iteration=False)
        if isinstance(hook, BasePruningMethod) and hook._tensor_name == "weight":
            weight = hook.apply_mask(layer)
    return checked_weight(as_autocast(weight), type(layer).__name__)


def checked_weight(weight: Tensor, owner: str) -> Tensor:
    """``weight`` in float64 on the CPU.

    Raises:
        ValueError: if it is complex, not dense or not finite, or on the meta device.
    """
    if weight.is_complex():
        raise ValueError(
            f"the weight of {owner} is complex ({weight.dtype}), and only real ones are supported: write z as the pair "
            "of its real and imaginary part, which has the same norm"
        )
    if weight.is_meta:
        raise ValueError(f"the weight of {owner} is on the meta device, which holds no numbers: load the weights first")
    if weight.layout != torch.strided:
        raise ValueError(f"the weight of {owner} is in the layout {weight.layout}, and must be dense: use to_dense()")
    with full_precision(weight):
        exact = weight.detach().to("cpu", torch.float64)
    if not bool(exact.isfinite().all()):
        bad = int((~exact.isfinite()).sum())
        raise ValueError(
            f"the weight of {owner} holds {bad} values that are not finite (of {exact.numel()}): it has no norm"
        )
    return exact


def _read_convolution(layer: _ConvNd, kernel: Tensor, sizes: Sizes) -> LinearOperator:
    transposed = isinstance(layer, _ConvTransposeNd)
    # Torch takes the size of the kernel from the weight, whatever ``kernel_size`` says.
    extent = tuple(d * (k - 1) + 1 for d, k in zip(layer.dilation, kernel.shape[2:], strict=True))
    if transposed:
        axes = _transposed_axes(layer, extent, sizes)
    else:
        axes = convolution_axes(sizes, extent, tuple(layer.stride), _pads(layer, extent), layer.padding_mode)
        if isinstance(layer, _OrthogonalConvolution):
            if layer.padding_mode == "circular":
                check_circular_size(sizes, layer.geometry.stride)
        else:
            _check_torch_padding(axes)
    return LinearOperator(kernel, tuple(layer.dilation), layer.groups, axes, transposed)


def _pads(layer: _ConvNd, extent: Sizes) -> Pads:
    if isinstance(layer, _OrthogonalConvolution):
        return layer._convolution.pads
    if layer.padding_mode != "zeros":
        # What the forward pass uses, which is not `padding` if that was changed later; last axis first.
        flat: Any = layer._reversed_padding_repeated_twice
        return tuple(zip(flat[::2], flat[1::2], strict=True))[::-1]
    return given_pads(layer.padding, extent)


def given_pads(padding: Any, extent: Sizes) -> Pads:
    """Left and right padding of each axis from torch's argument."""
    if padding == "valid":
        return ((0, 0),) * len(extent)
    if padding == "same":
        return tuple(((e - 1) // 2, e - 1 - (e - 1) // 2) for e in extent)
    each = (padding,) * len(extent) if isinstance(padding, int) else tuple(padding)
    return tuple((pad, pad) for pad in each)


def convolution_axes(sizes: Sizes, extent: Sizes, stride: Sizes, pads: Pads, mode: str) -> tuple[Axis, ...]:
    """Axes of a plain convolution.

    Raises:
        ValueError: if the kernel does not fit in the padded input.
    """
    windows = [(n + sum(pad) - e) // s + 1 for n, e, s, pad in zip(sizes, extent, stride, pads, strict=True)]
    if min(windows) < 1:
        raise ValueError(
            f"an input of size {sizes}, padded by {pads}, is smaller than the kernel, which extends over {extent}"
        )
    return tuple(Axis(*numbers, mode) for numbers in zip(sizes, windows, extent, stride, pads, strict=True))


def _check_torch_padding(axes: tuple[Axis, ...]) -> None:
    limits = {"reflect": -1, "circular": 0}
    for number, axis in enumerate(axes):
        if axis.mode in limits and max(axis.pad) > axis.size + limits[axis.mode]:
            raise ValueError(
                f"{axis.mode} padding {axis.pad} on axis {number} is too wide for a size of {axis.size}: torch "
                f"allows at most {axis.size + limits[axis.mode]}"
            )


def _transposed_axes(layer: _ConvNd, extent: Sizes, sizes: Sizes) -> tuple[Axis, ...]:
    """Axes of the convolution that a transposed layer is the adjoint of: its domain is the layer's output."""
    stride = tuple(layer.stride)
    if isinstance(layer, _OrthogonalConvolution) and layer.padding_mode == "circular":
        # What falls past the border is wrapped around, whatever the crop. A crop on the left only shifts the circle,
        # so leave it out: no singular value depends on it.
        return tuple(
            Axis(n * s, n, e, s, (0, max(0, e - s)), "circular") for n, e, s in zip(sizes, extent, stride, strict=True)
        )
    if isinstance(layer, _OrthogonalConvolution):
        pads: Pads = layer._convolution.pads
    else:
        padding: Any = layer.padding
        pads = tuple((p, p - extra) for p, extra in zip(padding, layer.output_padding, strict=True))
    domain = tuple((n - 1) * s + e - sum(pad) for n, s, e, pad in zip(sizes, stride, extent, pads, strict=True))
    if min(domain) < 1:
        raise ValueError(f"an input of size {sizes} is too small: the output would have size {domain}")
    return tuple(Axis(*numbers, "zeros") for numbers in zip(domain, sizes, extent, stride, pads, strict=True))


remember(*_READABLE)
