"""Circular boundaries: reading past the edge, and adding what falls past it."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from trysquare.geometry import Pads, Sizes
from trysquare.layers.padding import CONV
from trysquare.linalg.functions import apply_function
from trysquare.linalg.precision import as_autocast, full_precision


def in_format_of(x: Tensor, y: Tensor) -> Tensor:
    """``y`` with channels last in memory, if that is how ``x`` is."""
    if x.is_contiguous() or y.ndim not in (4, 5) or x.ndim != y.ndim:
        return y
    last = torch.channels_last if y.ndim == 4 else torch.channels_last_3d
    return y.contiguous(memory_format=last) if x.is_contiguous(memory_format=last) else y


def _around(x: Tensor, pads: list[int]) -> Tensor:
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
    """Adjoint of ``circular_pad``: add position ``p`` to ``(p - left) mod size`` on each of the last axes."""
    for axis, (left, size) in enumerate(zip(lefts, sizes, strict=True), start=-len(sizes)):
        length = full.shape[axis]
        front = -left % size
        back = -(front + length) % size
        pads = [0, 0] * (-axis - 1) + [front, back]
        full = F.pad(full, pads).unflatten(axis, (-1, size)).sum(axis - 1)
    return full


class _CircularConvolution(torch.autograd.Function):
    """Convolution of the periodic extension of ``x``.

    Backward extends ``x`` anew. Torch's own two steps keep the extended copy besides ``x``, which the layer before
    keeps anyway, and fold its gradient through one copy of all of it for each edge.
    """

    @staticmethod
    def forward(x: Tensor, weight: Tensor, bias: Tensor | None, pads: list[int], numbers: tuple[Any, ...]) -> Tensor:
        return CONV[x.ndim - 2](_around(x, pads), weight, bias, *numbers)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        x, weight, bias, ctx.pads, ctx.numbers = inputs
        ctx.bias_shape = None if bias is None else list(bias.shape)
        ctx.save_for_backward(x, weight)
        ctx.save_for_forward(x, weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        stride, padding, dilation, groups = ctx.numbers
        # Asked of the engine: `needs_input_grad` is about the graph, not about this pass through it.
        nodes = [node for node, _ in ctx.next_functions]
        wanted = [node is not None and torch._C._will_engine_execute_node(node) for node in nodes]
        wanted += [False] * (3 - len(wanted))
        grad_x, *others = torch.ops.aten.convolution_backward(
            grad, _around(x, ctx.pads), weight, ctx.bias_shape,
            stride, padding, dilation, False, padding, groups, wanted,
        )  # fmt: skip
        return _folded(grad_x, ctx.pads, x.shape) if wanted[0] else None, *others, None, None

    @staticmethod
    def jvp(ctx: Any, x: Tensor | None, weight: Tensor | None, bias: Tensor | None, *_: Any) -> Tensor:
        old_x, old_weight = ctx.saved_tensors
        forward = _CircularConvolution.forward
        terms = [] if x is None else [forward(x, old_weight, None, ctx.pads, ctx.numbers)]
        terms += [] if weight is None else [forward(old_x, weight, None, ctx.pads, ctx.numbers)]
        terms += [] if bias is None else [bias.view(-1, *(1,) * (old_x.ndim - 2))]
        return sum(terms[1:], terms[0])


def _folded(full: Tensor, pads: list[int], shape: torch.Size) -> Tensor:
    """``circular_fold`` in place, for what reaches at most one period past each edge."""
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
    x, weight, bias = (_ready(tensor) for tensor in (x, weight, bias))
    with full_precision(x):
        return apply_function(_CircularConvolution, x, weight, bias, pads, numbers)  # type: ignore[no-any-return]


def _is_for_training(x: Tensor, weight: Tensor) -> bool:
    """Whether autograd wants gradients of a batch; compilers and transforms want plain operations."""
    if not torch.is_grad_enabled() or torch.compiler.is_compiling() or x.ndim != weight.ndim:
        return False
    if torch._C._are_functorch_transforms_active() or torch._C._get_tracing_state() is not None:
        return False
    return x.requires_grad or weight.requires_grad


def _ready(tensor: Any) -> Any:
    """As autocast wants it, and no leaf: about leaves the engine does not say whether their gradient is wanted."""
    if tensor is None:
        return None
    tensor = as_autocast(tensor)
    return tensor.view_as(tensor) if tensor.is_leaf and tensor.requires_grad else tensor
