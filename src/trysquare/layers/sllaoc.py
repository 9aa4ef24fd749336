"""SLL blocks with stride and channel change, fused with orthogonal kernels (the paper's appendix on SLL).

``post ∘ SLL ∘ pre`` with orthogonal convolutions ``pre`` and ``post``, the second with a stride, is multiplied out:

    y = (post ∘ pre) x - 2 (post ∘ Kᵀ) σ((K ∘ pre) x + b)

so that it runs as a residual block with two convolutions in one branch and a strided one in the other. With 2x2
kernels all three are 3x3.

With zero padding the hidden map is cut off at the border. That is an activation of slope 0 outside, so the block stays
1-Lipschitz although the three padded layers, one after the other, would compute something else near the border.
"""

from __future__ import annotations

import copy
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from trysquare.geometry import ConvGeometry, Pads, per_axis
from trysquare.layers.activations import with_slopes_in_unit_interval
from trysquare.layers.base import ParametrizedWeight, factory_of
from trysquare.layers.conv import Size
from trysquare.layers.explicit import Sum, check_padding_mode, convolve, hidden_bias, plain_convolution
from trysquare.layers.packing import PackedKernels, Shapes, unpack
from trysquare.layers.sll import RowContraction
from trysquare.linalg.kernels import adjoint, compose
from trysquare.parametrizations import orthogonal_kernel


def _halves(kernel_size: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Sizes of ``K`` and of ``pre`` and ``post``, whose compositions have ``kernel_size`` taps."""
    inner = tuple(k // 2 + 1 for k in kernel_size)
    return inner, tuple(k + 1 - i for k, i in zip(kernel_size, inner, strict=True))


class FusedKernels(PackedKernels):
    """``post ∘ pre``, ``K ∘ pre`` and ``-2 post ∘ Kᵀ`` from the free tensors of ``pre``, ``post`` and ``K``."""

    def __init__(self, pre: Any, post: Any, inner: RowContraction, **factory: Any) -> None:
        super().__init__((pre, post, inner), **factory)
        (_, inputs, *outer), (hidden, _, *middle) = pre.weight_shape, inner.weight_shape
        self.outputs = post.weight_shape[0]
        self.inputs, self.hidden = inputs, hidden
        self._shortcut = tuple(2 * size - 1 for size in outer)
        self._branch = tuple(a + b - 1 for a, b in zip(middle, outer, strict=True))

    @property
    def kernel_shapes(self) -> Shapes:
        """Shortcut, first and second convolution of the branch."""
        return (
            (self.outputs, self.inputs, *self._shortcut),
            (self.hidden, self.inputs, *self._branch),
            (self.outputs, self.hidden, *self._branch),
        )

    def build_kernels(self, *tensors: Tensor) -> list[Tensor]:
        """Multiply out."""
        pre, post, inner = tensors
        return [compose(post, pre), compose(inner, pre), -2 * compose(post, adjoint(inner))]


class SLLAOCBlock(ParametrizedWeight):
    """Residual block that changes resolution and channels, 1-Lipschitz: ``post ∘ SLL ∘ pre``, fused.

    Two convolutions of ``kernel_size`` in the branch, the second with the stride; one strided
    convolution in the shortcut. Two dimensions; ``SLLAOCBlock1d`` and ``3d`` have one and three.

    Args:
        in_channels: channels of the input.
        out_channels: channels of the output.
        kernel_size: size of the kernels of the branch.
        stride: stride; must divide the input if the padding is circular.
        bias: whether the hidden layer has a learnable bias.
        padding_mode: ``"circular"`` or ``"zeros"``.
        device: device of the parameters.
        dtype: dtype of the weights; free tensors are kept in float32 or float64.
        hidden_channels: channels between the convolutions of the branch; ``out_channels`` if not
            given.
        mid_channels: channels of the SLL block between ``pre`` and ``post``; ``in_channels`` if not
            given.
        activation: acts entry by entry with slopes between 0 and 1; ReLU if not given.
        method: how ``pre`` and ``post`` are parametrized, one of ``trysquare.METHODS``.
        orthogonalizer: how their matrices are made orthonormal.

    Raises:
        ValueError: if no orthogonal ``pre`` or ``post`` has these numbers.

    >>> SLLAOCBlock2d(8, 16, stride=2)(torch.randn(1, 8, 6, 6)).shape
    torch.Size([1, 16, 3, 3])
    """

    dims: ClassVar[int] = 2

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Size = 3,
        stride: Size = 1,
        bias: bool = True,
        padding_mode: str = "circular",
        device: Any = None,
        dtype: Any = None,
        *,
        hidden_channels: int | None = None,
        mid_channels: int | None = None,
        activation: nn.Module | None = None,
        method: str = "aoc",
        orthogonalizer: str = "cholesky",
    ) -> None:
        super().__init__()
        check_padding_mode(padding_mode)
        self.in_channels, self.out_channels, self.padding_mode = in_channels, out_channels, padding_mode
        self.kernel_size = per_axis("kernel_size", kernel_size, self.dims)
        self.stride = per_axis("stride", stride, self.dims)
        self.hidden_channels = out_channels if hidden_channels is None else hidden_channels
        self.mid_channels = in_channels if mid_channels is None else mid_channels
        self.method, self.orthogonalizer = method, orthogonalizer
        self.activation = with_slopes_in_unit_interval(activation)
        self._pads = self._paddings()
        self.weight = nn.Parameter(torch.empty(0, device=device, dtype=dtype))
        self.bias = hidden_bias(self.hidden_channels, bias, factory_of(self.weight))
        kernels = self._fused_kernels()
        self._kernel_shapes = kernels.kernel_shapes
        self._parametrize_weight(kernels)
        self.reset_parameters()

    def _fused_kernels(self) -> FusedKernels:
        inner, outer = _halves(self.kernel_size)
        one = (1,) * self.dims
        pre = ConvGeometry(self.in_channels, self.mid_channels, outer, one, one)
        post = ConvGeometry(self.mid_channels, self.out_channels, outer, self.stride, one)
        factory = factory_of(self.weight)
        return FusedKernels(
            orthogonal_kernel(self.method, pre, self.orthogonalizer, **factory),
            orthogonal_kernel(self.method, post, self.orthogonalizer, **factory),
            RowContraction((self.hidden_channels, self.mid_channels, *inner), **factory),
            **factory,
        )

    def _paddings(self) -> tuple[Pads, Pads, Pads]:
        """Padding of the three convolutions.

        The fused ones agree with the three single ones if every padding is the sum of those of its
        parts, and that of ``Kᵀ`` is that of ``K`` flipped.
        """

        def axis(inner: int, outer: int) -> tuple[tuple[int, int], ...]:
            pre, middle, post = (outer - 1) // 2, inner // 2, outer // 2
            lefts = (pre + post, pre + middle, post + inner - 1 - middle)
            totals = (2 * outer - 2, inner + outer - 2, inner + outer - 2)
            return tuple((left, total - left) for left, total in zip(lefts, totals, strict=True))

        per_conv = zip(*map(axis, *_halves(self.kernel_size)), strict=True)
        shortcut, first, second = (tuple(pads) for pads in per_conv)
        return shortcut, first, second

    @property
    def kernels(self) -> list[Tensor]:
        """Kernels of the shortcut, and of the first and second convolution of the branch."""
        return unpack(self._current_weight(), self._kernel_shapes)

    def reset_parameters(self) -> None:
        """Draw new free tensors and a new bias (uniform, as torch does)."""
        self._reset(self._kernel_shapes[1])

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        """Shortcut plus branch.

        Raises:
            ValueError: if the padding is circular and the stride does not divide the input.
        """
        shortcut, first, second = self.kernels
        mode, stride = self.padding_mode, self.stride
        outer = convolve(input, shortcut, None, self._pads[0], mode, stride)
        hidden = self.activation(convolve(input, first, self.bias, self._pads[1], mode))
        return outer + convolve(hidden, second, None, self._pads[2], mode, stride)

    def as_torch(self) -> nn.Module:
        """The sum of a plain convolution, and two with the activation between them."""
        shortcut, first, second = (kernel.detach() for kernel in self.kernels)
        mode, training, stride = self.padding_mode, self.training, self.stride
        branch = nn.Sequential(
            plain_convolution(first, self.bias, self._pads[1], mode, training),
            copy.deepcopy(self.activation),
            plain_convolution(second, None, self._pads[2], mode, training, stride),
        )
        return Sum(plain_convolution(shortcut, None, self._pads[0], mode, training, stride), branch).train(training)

    def extra_repr(self) -> str:
        """Numbers of the block."""
        return (
            f"{self.in_channels}, {self.out_channels}, kernel_size={self.kernel_size}, stride={self.stride}, "
            f"hidden={self.hidden_channels}, mid={self.mid_channels}, bias={self.bias is not None}, "
            f"activation={self.activation}, padding_mode={self.padding_mode}, method={self.method}"
        )


class SLLAOCBlock1d(SLLAOCBlock):
    """The block in one dimension; see ``SLLAOCBlock``."""

    dims = 1


class SLLAOCBlock2d(SLLAOCBlock):
    """The block in two dimensions; see ``SLLAOCBlock``."""

    dims = 2


class SLLAOCBlock3d(SLLAOCBlock):
    """The block in three dimensions; see ``SLLAOCBlock``."""

    dims = 3
