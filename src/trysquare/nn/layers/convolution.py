"""One convolution: its numbers, and how it is applied, transposed, exported and read as a linear operator.

All layers that convolve, plain or transposed, in one to three dimensions, do it by a ``Convolution``. It knows stride,
dilation, groups, padding and its mode, and is given the kernel. Torch has circular padding for plain convolutions only,
and keeps a padded copy of the input for backward; the second half of this file makes up for both.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import Node

from trysquare import torch_internals
from trysquare.nn.geometry import (
    ConvGeometry,
    Pads,
    Sizes,
    check_circular_size,
    extent,
    flat_pads,
    same_pads,
)
from trysquare.nn.linalg.kernels import CONV, CONV_TRANSPOSE
from trysquare.nn.linalg.lattice import LatticeMap
from trysquare.nn.linalg.operator import LinearOperator
from trysquare.nn.linalg.precision import Context, Gradients, apply_function, each_as_autocast, full_precision
from trysquare.nn.parametrizations.base import copy_weights

PLAIN_CONV: dict[int, Callable[..., nn.Module]] = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
PLAIN_CONV_TRANSPOSE: dict[int, Callable[..., nn.Module]] = {
    1: nn.ConvTranspose1d,
    2: nn.ConvTranspose2d,
    3: nn.ConvTranspose3d,
}
CIRCULAR_PAD: dict[int, Callable[..., nn.Module]] = {1: nn.CircularPad1d, 2: nn.CircularPad2d, 3: nn.CircularPad3d}
ZERO_PAD: dict[int, Callable[..., nn.Module]] = {1: nn.ZeroPad1d, 2: nn.ZeroPad2d, 3: nn.ZeroPad3d}


@dataclass(frozen=True)
class Convolution:
    """How a kernel is applied: a convolution without its kernel and bias. Without axes, a product by a matrix.

    Attributes:
        kernel_size: taps on each axis.
        stride: stride of each axis.
        dilation: dilation of each axis.
        groups: number of groups.
        pads: left and right padding; of a transposed convolution, what is cut off its full output.
        mode: ``"zeros"`` or ``"circular"``: padding is periodic, and what is cut off is wrapped around. The stride must
            divide what a circular convolution reads, and a transposed one makes ``stride`` times as many positions.
        transposed: whether it is the transposed convolution, with a kernel ``(in, out / groups, *k)``.
    """

    kernel_size: Sizes = ()
    stride: Sizes = ()
    dilation: Sizes = ()
    groups: int = 1
    pads: Pads = ()
    mode: str = "zeros"
    transposed: bool = False
    # Torch's arguments: all of the padding, and one number for both sides of an axis where they are alike.
    flat_pads: list[int] = field(init=False, repr=False, compare=False)
    torch_pads: Sizes | None = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        alike = all(left == right for left, right in self.pads)
        object.__setattr__(self, "torch_pads", tuple(left for left, _ in self.pads) if alike else None)
        object.__setattr__(self, "flat_pads", flat_pads(self.pads))

    @classmethod
    def of(cls, geometry: ConvGeometry, pads: Pads, mode: str) -> Convolution:
        """Return the convolution, or the transposed one, with the numbers of a geometry."""
        numbers = geometry.kernel_size, geometry.stride, geometry.dilation, geometry.groups
        return cls(*numbers, pads, mode, geometry.transposed)

    @classmethod
    def same(cls, kernel_size: Sizes, stride: Sizes, dilation: Sizes, groups: int, mode: str) -> Convolution:
        """Return the convolution whose outputs have the size of the input divided by the stride."""
        unpadded = cls(kernel_size, stride, dilation, groups, (), mode)
        return replace(unpadded, pads=same_pads(unpadded.extent, stride))

    @property
    def dims(self) -> int:
        """Number of axes."""
        return len(self.kernel_size)

    @property
    def extent(self) -> Sizes:
        """Positions from the first tap to the last on each axis."""
        return extent(self.kernel_size, self.dilation)

    def adjoint(self) -> Convolution:
        """Return the transposed convolution, with the same kernel, whose outputs have ``stride`` times the size."""
        axes = zip(self.pads, self.extent, self.stride, strict=True)
        return replace(self, transposed=True, pads=tuple((left, e - s - left) for (left, _), e, s in axes))

    def flipped(self) -> Convolution:
        """Return the adjoint of a convolution without stride as a plain convolution, with the adjoint kernel."""
        return replace(self, pads=tuple((right, left) for left, right in self.pads))

    def to_size(self, sizes: Sequence[int], output_size: Sequence[int]) -> Convolution:
        """Return the transposed convolution that makes ``output_size`` of an input of ``sizes``.

        Raises:
            ValueError: if there is none.
        """
        wanted = tuple(output_size)[-self.dims :]
        if len(wanted) != self.dims:
            raise ValueError(f"output_size={tuple(output_size)} must have {self.dims} sizes, one per axis")
        full = [(size - 1) * s + e for size, s, e in zip(sizes, self.stride, self.extent, strict=True)]
        cut = tuple((left, f - left - want) for (left, _), f, want in zip(self.pads, full, wanted, strict=True))
        fits = [abs(new - old) < s for (_, new), (_, old), s in zip(cut, self.pads, self.stride, strict=True)]
        if self.mode == "circular":
            fits = [want == size * s for want, size, s in zip(wanted, sizes, self.stride, strict=True)]
        if not all(fits):
            raise ValueError(
                f"output_size={wanted} cannot be made from an input of size {tuple(sizes)} at stride={self.stride}"
            )
        return replace(self, pads=cut)

    def __call__(self, x: Tensor, kernel: Tensor, bias: Tensor | None = None) -> Tensor:
        """Apply ``kernel`` to ``(batch, channels, *sizes)``, or without the batch; a matrix to the last axis.

        Short, because an eval pass must cost what torch's own does. The result lies in memory as that of torch would.

        Raises:
            ValueError: if the padding is circular and the stride does not divide the sizes.
        """
        if not self.dims:
            return F.linear(x, kernel, bias)
        if self.transposed:
            return in_format_of(x, self._spread(x, kernel, bias))
        padding: int | Sizes = 0
        if self.mode == "circular":
            sizes = x.shape[-self.dims :]
            if any(size % stride for size, stride in zip(sizes, self.stride, strict=True)):
                check_circular_size(sizes, self.stride)
            if any(self.flat_pads):
                if all(max(pad) <= size for pad, size in zip(self.pads, sizes, strict=True)):
                    numbers = self.flat_pads, self.stride, self.dilation, self.groups
                    return in_format_of(x, circular_convolution(x, kernel, bias, *numbers))
                x = in_format_of(x, circular_pad(x, self.pads))
        elif self.torch_pads is not None:
            padding = self.torch_pads
        else:
            x = F.pad(x, self.flat_pads)
        return in_format_of(x, CONV[self.dims](x, kernel, bias, self.stride, padding, self.dilation, self.groups))

    def _spread(self, x: Tensor, kernel: Tensor, bias: Tensor | None) -> Tensor:
        transpose = CONV_TRANSPOSE[self.dims]
        if self.mode == "circular":
            full = transpose(x, kernel, None, self.stride, 0, 0, self.groups, self.dilation)
            sizes = tuple(size * s for size, s in zip(x.shape[-self.dims :], self.stride, strict=True))
            output = circular_fold(full, tuple(left for left, _ in self.pads), sizes)
            return output if bias is None else output + bias.to(output.dtype).view(-1, *(1,) * self.dims)
        padding, extra, rest = native_crop(self.pads, self.stride, self.dilation)
        output = transpose(x, kernel, bias, self.stride, padding, extra, self.groups, self.dilation)
        return F.pad(output, flat_pads(rest)) if any(map(any, rest)) else output

    def linear_operator(self, kernel: Tensor, shape: Sizes) -> LinearOperator:
        """Return what it does to inputs of a shape, without the batch, as a linear operator.

        Args:
            kernel: float64 on the CPU, as ``linalg.operator.checked_weight`` returns it.
            shape: ``(channels, *sizes)``; of a matrix, any shape that ends in what it reads.

        Raises:
            ValueError: if the shape does not fit, or the padding is circular and the stride does not divide the sizes.
        """
        if not self.dims:
            return LinearOperator.of_matrix(kernel, shape)
        numbers = self.stride, self.dilation, self.groups, self.pads, self.mode
        if self.transposed:
            return LinearOperator.of_transposed(kernel, shape, *numbers)
        operator = LinearOperator.of_convolution(kernel, shape, *numbers)
        if self.mode == "circular":
            check_circular_size(shape[1:], self.stride)
        return operator

    def on_lattice(self, kernel: Tensor) -> LatticeMap:
        """Return the map on the infinite lattice; of a transposed convolution, the map that it is the adjoint of."""
        if not self.dims:
            return LatticeMap.of_matrix(kernel)
        return LatticeMap(kernel, self.stride, self.dilation, self.groups, tuple(-left for left, _ in self.pads))

    def plain(self, kernel: Tensor, bias: Tensor | None, training: bool) -> nn.Module:
        """Return the same with this kernel in plain layers of torch; one pads where torch has no argument for it."""
        if not self.dims:
            plain = nn.Linear(kernel.shape[1], kernel.shape[0], bias is not None, device="meta")
            return copy_weights(plain, kernel, bias, training)
        return (self._plain_transposed if self.transposed else self._plain_convolution)(kernel, bias, training)

    def _plain_convolution(self, kernel: Tensor, bias: Tensor | None, training: bool) -> nn.Module:
        padding = self._torch_padding()
        plain = PLAIN_CONV[self.dims](
            kernel.shape[1] * self.groups, kernel.shape[0], self.kernel_size, self.stride,
            0 if padding is None else padding, self.dilation, self.groups, bias is not None, self.mode, device="meta",
        )  # fmt: skip
        copy_weights(plain, kernel, bias, training)
        if padding is not None:
            return plain
        pad = CIRCULAR_PAD if self.mode == "circular" else ZERO_PAD
        return nn.Sequential(pad[self.dims](tuple(self.flat_pads)), plain).train(training)

    def _torch_padding(self) -> Sizes | Literal["same"] | None:
        """Return torch's argument for the padding, if there is one."""
        if self.torch_pads is not None:
            return self.torch_pads
        # Torch's own layers with a stride have no padding "same".
        same = set(self.stride) == {1} and self.pads == same_pads(self.extent, self.stride)
        return "same" if same and self.mode == "circular" else None

    def _plain_transposed(self, kernel: Tensor, bias: Tensor | None, training: bool) -> nn.Module:
        """Return a transposed convolution; an extension of the input and a crop of the result wrap around."""
        if self.mode == "zeros":
            return self._cropped(self.pads, kernel, bias, training)
        axes = list(zip(self.pads, self.extent, self.stride, strict=True))
        # Inputs before the first and after the last one that reach into the output when the domain wraps around.
        reach = tuple(((extent - 1 - left) // stride, -(-left // stride)) for (left, _), extent, stride in axes)
        crops = tuple(
            (left + before * stride, (after - 1) * stride + extent - left)
            for ((left, _), extent, stride), (before, after) in zip(axes, reach, strict=True)
        )
        plain = self._cropped(crops, kernel, bias, training)
        if not any(map(any, reach)):
            return plain
        return nn.Sequential(CIRCULAR_PAD[self.dims](tuple(flat_pads(reach))), plain).train(training)

    def _cropped(self, crops: Pads, kernel: Tensor, bias: Tensor | None, training: bool) -> nn.Module:
        """Return ``nn.ConvTranspose*d`` with ``crops`` cut off its full output."""
        padding, extra, rest = native_crop(crops, self.stride, self.dilation)
        plain = PLAIN_CONV_TRANSPOSE[self.dims](
            kernel.shape[0], kernel.shape[1] * self.groups, self.kernel_size, self.stride, padding, extra, self.groups,
            bias is not None, self.dilation, device="meta",
        )  # fmt: skip
        copy_weights(plain, kernel, bias, training)
        if not any(map(any, rest)):
            return plain
        return nn.Sequential(plain, ZERO_PAD[self.dims](tuple(flat_pads(rest)))).train(training)


def no_such_input(x: Tensor, channels: int, dims: int) -> ValueError:
    """Return the error for an input that no convolution of these channels takes."""
    return ValueError(
        f"input of shape {tuple(x.shape)} must be (batch, {channels}, and {dims} sizes), with or without the batch; no "
        "size may be 0"
    )


# -- padding


def native_crop(crops: Pads, stride: Sizes, dilation: Sizes) -> tuple[Sizes, Sizes, Pads]:
    """Return torch's ``padding`` and ``output_padding`` that cut off ``crops``, and what they leave to be cut."""
    starts, ends = zip(*crops, strict=True)
    limits = [max(s, d) for s, d in zip(stride, dilation, strict=True)]
    padding = tuple(min(start, end + limit - 1) for start, end, limit in zip(starts, ends, limits, strict=True))
    extra = tuple(max(0, pad - end) for pad, end in zip(padding, ends, strict=True))
    rest = tuple((p - start, p - e - end) for p, e, start, end in zip(padding, extra, starts, ends, strict=True))
    return padding, extra, rest


def crops(geometry: ConvGeometry, padding: str | int | Sequence[int], output_padding: Sizes, mode: str) -> Pads:
    """Return what to cut off both ends of the full transposed convolution, or to wrap around, for torch's arguments.

    Raises:
        ValueError: if they do not fit each other.
    """
    pads = geometry.pads(padding, mode)
    if padding == "same":
        if any(output_padding):
            raise ValueError(
                f"output_padding={output_padding} has no effect with padding='same', whose output is input x stride"
            )
        axes = zip(pads, geometry.extent, geometry.stride, strict=True)
        return tuple((left, extent - stride - left) for (left, _), extent, stride in axes)
    limits = [max(s, d) for s, d in zip(geometry.stride, geometry.dilation, strict=True)]
    if any(extra >= limit for extra, limit in zip(output_padding, limits, strict=True)):
        raise ValueError(f"output_padding={output_padding} must be smaller than stride or dilation, {tuple(limits)}")
    cut = tuple((left, right - extra) for (left, right), extra in zip(pads, output_padding, strict=True))
    if mode == "circular":
        geometry.check_circular(cut)
    return cut


# -- circular boundaries: reading past the edge, and adding what falls past it


def in_format_of(x: Tensor, y: Tensor) -> Tensor:
    """Return ``y`` with channels last in memory, if that is how ``x`` lies there."""
    if y.ndim not in (4, 5) or x.ndim != y.ndim or not _has_channels_last(x):
        return y
    last = torch.channels_last if y.ndim == 4 else torch.channels_last_3d
    y = y.contiguous(memory_format=last)
    if _has_channels_last(y) or not y.numel():
        return y
    # Of one channel, or one pixel: the numbers lie as they should, only the strides along axes of size 1 do not say so.
    lines = y.movedim(1, -1)
    return lines.flatten().view(lines.shape).movedim(-1, 1)


def _has_channels_last(x: Tensor) -> bool:
    """Whether strides are those of channels last, by the rule of torch's own convolutions.

    ``x.is_contiguous(memory_format=torch.channels_last)`` does not tell it: it is true of every contiguous tensor with
    one channel, or one pixel.
    """
    if x.stride(1) != 1:
        return False
    least = x.shape[1]
    for axis in (*range(x.ndim - 1, 1, -1), 0):
        if x.stride(axis) < least or (axis == 0 and least == 1):
            return False
        least = x.stride(axis) * x.shape[axis]
    return True


def _around(x: Tensor, pads: list[int]) -> Tensor:
    if not torch.compiler.is_compiling() and torch_internals.graph_recorder() is not None:
        # torch.func.linearize loses what is written into views.
        return circular_pad(x, tuple(zip(pads[-2::-2], pads[::-2], strict=True)))
    return in_format_of(x, F.pad(x, pads, mode="circular"))


def circular_pad(x: Tensor, pads: Pads) -> Tensor:
    """Extend the last axes of ``x`` periodically, by any amount.

    Torch's own is faster, but stops at one period.
    """
    sizes = x.shape[-len(pads) :]
    for axis, ((left, right), size) in enumerate(zip(pads, sizes, strict=True), start=-len(pads)):
        x = x.index_select(axis, torch.arange(-left, size + right, device=x.device) % size)
    return x


def circular_fold(full: Tensor, lefts: tuple[int, ...], sizes: tuple[int, ...]) -> Tensor:
    """Apply the adjoint of ``circular_pad``: add position ``p`` to ``(p - left) mod size`` on each of the last axes."""
    for axis, (left, size) in enumerate(zip(lefts, sizes, strict=True), start=-len(sizes)):
        length = full.shape[axis]
        front = -left % size
        back = -(front + length) % size
        pads = [0, 0] * (-axis - 1) + [front, back]
        full = F.pad(full, pads).unflatten(axis, (-1, size)).sum(axis - 1)
    return full


_Numbers = tuple[Sizes, list[int], Sizes, int]
"""Stride, padding, dilation and groups, in torch's order."""
_Inputs = tuple[Tensor, Tensor, Tensor | None, list[int], _Numbers]


class _CircularContext(Context, Protocol):
    pads: list[int]
    numbers: _Numbers
    bias_shape: list[int] | None
    next_functions: tuple[tuple[Node | None, int], ...]


class _CircularConvolution(torch.autograd.Function):
    """Convolution of the periodic extension of ``x``.

    Backward extends ``x`` again. Torch's own two steps keep the extended copy in addition to ``x``, which the layer
    before keeps anyway, and fold its gradient through one copy of all of it for each edge.
    """

    @staticmethod
    def forward(x: Tensor, weight: Tensor, bias: Tensor | None, pads: list[int], numbers: _Numbers) -> Tensor:
        return CONV[x.ndim - 2](_around(x, pads), weight, bias, *numbers)

    @staticmethod
    def setup_context(ctx: _CircularContext, inputs: _Inputs, output: Tensor) -> None:
        x, weight, bias, ctx.pads, ctx.numbers = inputs
        ctx.bias_shape = None if bias is None else list(bias.shape)
        ctx.save_for_backward(x, weight)
        ctx.save_for_forward(x, weight)

    @staticmethod
    def backward(ctx: _CircularContext, grad: Tensor) -> Gradients:
        x, weight = ctx.saved_tensors
        stride, padding, dilation, groups = ctx.numbers
        # Asked of the engine: `needs_input_grad` is about the graph, not about this pass through it.
        nodes = [node for node, _ in ctx.next_functions]
        wanted = [node is not None and torch_internals.will_run(node) for node in nodes]
        wanted += [False] * (3 - len(wanted))
        grad_x, *others = torch.ops.aten.convolution_backward(
            grad, _around(x, ctx.pads), weight, ctx.bias_shape,
            stride, padding, dilation, False, padding, groups, wanted,
        )  # fmt: skip
        return _folded(grad_x, ctx.pads, x.shape) if wanted[0] else None, *others, None, None

    @staticmethod
    def jvp(ctx: _CircularContext, x: Tensor | None, weight: Tensor | None, bias: Tensor | None, *_: None) -> Tensor:
        old_x, old_weight = ctx.saved_tensors
        forward = _CircularConvolution.forward
        terms = [] if x is None else [forward(x, old_weight, None, ctx.pads, ctx.numbers)]
        terms += [] if weight is None else [forward(old_x, weight, None, ctx.pads, ctx.numbers)]
        terms += [] if bias is None else [bias.view(-1, *(1,) * (old_x.ndim - 2))]
        return sum(terms[1:], terms[0])


def _folded(full: Tensor, pads: list[int], shape: torch.Size) -> Tensor:
    """Do as ``circular_fold``, in place, for what reaches at most one period past each edge."""
    for axis, (left, right) in enumerate(zip(pads[::2], pads[1::2], strict=True)):
        axis = -1 - axis
        size = shape[axis]
        full.narrow(axis, size, left).add_(full.narrow(axis, 0, left))
        full.narrow(axis, left, right).add_(full.narrow(axis, left + size, right))
        full = full.narrow(axis, left, size)
    return full


def circular_convolution(
    x: Tensor, weight: Tensor, bias: Tensor | None, pads: list[int], stride: Sizes, dilation: Sizes, groups: int
) -> Tensor:
    """Convolve ``x``, extended periodically by ``pads``, torch's flat ones, none larger than its axis.

    In training ``x`` is kept for backward, and no padded copy of it.
    """
    numbers = stride, [0] * len(stride), dilation, groups
    if not _is_for_training(x, weight):
        return CONV[len(stride)](_around(x, pads), weight, bias, *numbers)
    tensors = each_as_autocast(_no_leaf(x), _no_leaf(weight), None if bias is None else _no_leaf(bias))
    with full_precision(x):
        return apply_function(_CircularConvolution, *tensors, pads, numbers)


def _is_for_training(x: Tensor, weight: Tensor) -> bool:
    """Whether autograd wants gradients of a batch; compilers and transforms want plain operations."""
    if not torch.is_grad_enabled() or torch.compiler.is_compiling() or x.ndim != weight.ndim:
        return False
    if torch_internals.transforms_are_active() or torch_internals.jit_trace() is not None:
        return False
    return x.requires_grad or weight.requires_grad


def _no_leaf(tensor: Tensor) -> Tensor:
    """Return a tensor that is no leaf: the engine does not say whether the gradient of a leaf is wanted."""
    return tensor.view_as(tensor) if tensor.is_leaf and tensor.requires_grad else tensor
