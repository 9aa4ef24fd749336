"""Sandwich layers (Wang and Manchester, 2023): ``√2 Aᵀ Ψ σ(√2 Ψ⁻¹ B x + b)``, 1-Lipschitz as a whole.

``[A B]`` is a contraction, ``Ψ`` any positive diagonal (see ``trysquare.linalg.sandwich``). With zero padding ``[A B]``
is restricted, which leaves it a contraction.
"""

from __future__ import annotations

import copy
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trysquare.geometry import ConvGeometry, per_axis
from trysquare.layers.activations import with_slopes_in_unit_interval
from trysquare.layers.base import ParametrizedWeight, factory_of
from trysquare.layers.conv import Size
from trysquare.layers.explicit import convolve, flipped, hidden_bias, plain_convolution, plain_linear
from trysquare.layers.packing import PackedKernels, Shapes, unpack
from trysquare.linalg.kernels import adjoint
from trysquare.linalg.rescaling import positive
from trysquare.linalg.sandwich import mix, sandwich_pair
from trysquare.parametrizations import OrthonormalMatrix, orthogonal_kernel


class SandwichMatrices(PackedKernels):
    """``√2 Ψ⁻¹ B`` and ``√2 Aᵀ Ψ`` for one orthonormal matrix ``[A B]`` and free factors ``Ψ``."""

    def __init__(self, inputs: int, outputs: int, hidden: int, orthogonalizer: str, **factory: Any) -> None:
        both = OrthonormalMatrix((hidden, outputs + inputs), orthogonalizer, **factory)
        super().__init__((both,), ((hidden,),), **factory)
        self.inputs, self.outputs, self.hidden = inputs, outputs, hidden

    @property
    def kernel_shapes(self) -> Shapes:
        """First and second matrix."""
        return (self.hidden, self.inputs), (self.outputs, self.hidden)

    def build_kernels(self, *tensors: Tensor) -> list[Tensor]:
        """Split, and scale by ``Ψ``."""
        both, free_psi = tensors
        first, second = sandwich_pair(both[:, : self.outputs], both[:, self.outputs :], positive(free_psi))
        return [first, second.mT]


class SandwichKernels(PackedKernels):
    """``[A B] = M diag(a, b)`` for orthogonal kernels ``a``, ``b`` and an orthonormal matrix ``M``."""

    def __init__(self, a: Any, b: Any, orthogonalizer: str, **factory: Any) -> None:
        hidden, outputs, *taps = a.weight_shape
        matrix = OrthonormalMatrix((hidden, 2 * hidden), orthogonalizer, **factory)
        super().__init__((a, b, matrix), ((hidden,),), **factory)
        self._shapes = (tuple(b.weight_shape), (outputs, hidden, *taps))

    @property
    def kernel_shapes(self) -> Shapes:
        """First and second kernel."""
        return self._shapes

    def build_kernels(self, *tensors: Tensor) -> list[Tensor]:
        """Mix, and scale by ``Ψ``."""
        a, b, matrix, free_psi = tensors
        first, second = sandwich_pair(*mix(matrix, a, b), positive(free_psi))
        return [first, adjoint(second)]


class _Sandwich(ParametrizedWeight):
    """Two packed kernels with an activation between them."""

    def _finish(self, kernels: PackedKernels, bias: bool, activation: nn.Module | None) -> None:
        self.activation = with_slopes_in_unit_interval(activation)
        self.bias = hidden_bias(kernels.kernel_shapes[0][0], bias, factory_of(self.weight))
        self._kernel_shapes = kernels.kernel_shapes
        self._parametrize_weight(kernels)
        self.reset_parameters()

    @property
    def kernels(self) -> list[Tensor]:
        """The kernels before and after the activation."""
        return unpack(self._current_weight(), self._kernel_shapes)

    def reset_parameters(self) -> None:
        """Draw new free tensors and a new bias (uniform, as torch does)."""
        self._reset(self._kernel_shapes[0])


def _check_sizes(**sizes: int) -> None:
    for name, size in sizes.items():
        if not isinstance(size, int) or size < 1:
            raise ValueError(f"{name}={size!r} must be a positive integer")


class SandwichLinear(_Sandwich):
    """``√2 Aᵀ Ψ σ(√2 Ψ⁻¹ B x + b)`` for vectors, with ``[A B]`` orthonormal. 1-Lipschitz.

    Args:
        in_features: size of each input sample.
        out_features: size of each output sample.
        bias: whether there is a learnable ``b``.
        device: device of the parameters.
        dtype: dtype of the weights; free tensors are kept in float32 or float64.
        hidden_features: rows of ``A`` and ``B``; ``out_features`` if not given.
        activation: acts entry by entry with slopes between 0 and 1; ReLU if not given.
        orthogonalizer: how ``[A B]`` is made orthonormal; the original method has ``"cayley"``.

    >>> SandwichLinear(16, 8)(torch.randn(2, 16)).shape
    torch.Size([2, 8])
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: Any = None,
        dtype: Any = None,
        *,
        hidden_features: int | None = None,
        activation: nn.Module | None = None,
        orthogonalizer: str = "cholesky",
    ) -> None:
        super().__init__()
        hidden = out_features if hidden_features is None else hidden_features
        _check_sizes(in_features=in_features, out_features=out_features, hidden_features=hidden)
        self.in_features, self.out_features, self.hidden_features = in_features, out_features, hidden
        self.orthogonalizer = orthogonalizer
        self.weight = nn.Parameter(torch.empty(0, device=device, dtype=dtype))
        factory = factory_of(self.weight)
        self._finish(SandwichMatrices(in_features, out_features, hidden, orthogonalizer, **factory), bias, activation)

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        """``(..., in_features)`` to ``(..., out_features)``."""
        first, second = self.kernels
        return F.linear(self.activation(F.linear(input, first, self.bias)), second)

    def as_torch(self) -> nn.Module:
        """Two plain ``nn.Linear`` with the activation between them."""
        first, second = (kernel.detach() for kernel in self.kernels)
        before, after = plain_linear(first, self.bias, self.training), plain_linear(second, None, self.training)
        return nn.Sequential(before, copy.deepcopy(self.activation), after).train(self.training)

    def extra_repr(self) -> str:
        """Sizes."""
        return (
            f"{self.in_features}, {self.out_features}, hidden={self.hidden_features}, bias={self.bias is not None}, "
            f"activation={self.activation}, orthogonalizer={self.orthogonalizer}"
        )


class SandwichAOCConv(_Sandwich):
    """Sandwich layer with explicit orthogonal kernels and stride: two plain convolutions. 1-Lipschitz.

    The first convolution maps to ``hidden_channels`` with the stride, the second, of the same size
    and stride 1, to ``out_channels``. Their orthogonal kernels are tied by an orthonormal matrix
    (see ``trysquare.linalg.sandwich.mix``). Two dimensions; ``SandwichAOCConv1d`` and ``3d`` have
    one and three.

    Args:
        in_channels: channels of the input.
        out_channels: channels of the output.
        kernel_size: size of both kernels.
        stride: stride; must divide the input if the padding is circular.
        bias: whether the hidden layer has a learnable bias.
        padding_mode: ``"circular"`` or ``"zeros"``.
        device: device of the parameters.
        dtype: dtype of the weights; free tensors are kept in float32 or float64.
        hidden_channels: channels between the convolutions; ``out_channels`` if not given.
        activation: acts entry by entry with slopes between 0 and 1; ReLU if not given.
        method: how the kernels are parametrized, one of ``trysquare.METHODS``.
        orthogonalizer: how their matrices are made orthonormal.

    Raises:
        ValueError: if no orthogonal kernels have these numbers.

    >>> SandwichAOCConv2d(8, 16, 3, stride=2)(torch.randn(1, 8, 6, 6)).shape
    torch.Size([1, 16, 3, 3])
    """

    dims: ClassVar[int] = 2

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Size,
        stride: Size = 1,
        bias: bool = True,
        padding_mode: str = "circular",
        device: Any = None,
        dtype: Any = None,
        *,
        hidden_channels: int | None = None,
        activation: nn.Module | None = None,
        method: str = "aoc",
        orthogonalizer: str = "cholesky",
    ) -> None:
        super().__init__()
        self.in_channels, self.out_channels, self.padding_mode = in_channels, out_channels, padding_mode
        self.hidden_channels = out_channels if hidden_channels is None else hidden_channels
        self.kernel_size = per_axis("kernel_size", kernel_size, self.dims)
        self.stride = per_axis("stride", stride, self.dims)
        self.method, self.orthogonalizer = method, orthogonalizer
        one = (1,) * self.dims
        before = ConvGeometry(in_channels, self.hidden_channels, self.kernel_size, self.stride, one)
        after = ConvGeometry(out_channels, self.hidden_channels, self.kernel_size, one, one)
        self._pads = before.pads("same", padding_mode), flipped(after.pads("same", padding_mode))
        self.weight = nn.Parameter(torch.empty(0, device=device, dtype=dtype))
        factory = factory_of(self.weight)
        a, b = (orthogonal_kernel(method, geometry, orthogonalizer, **factory) for geometry in (after, before))
        self._finish(SandwichKernels(a, b, orthogonalizer, **factory), bias, activation)

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        """Convolve, activate, convolve.

        Raises:
            ValueError: if the padding is circular and the stride does not divide the input.
        """
        first, second = self.kernels
        hidden = convolve(input, first, self.bias, self._pads[0], self.padding_mode, self.stride)
        return convolve(self.activation(hidden), second, None, self._pads[1], self.padding_mode)

    def as_torch(self) -> nn.Module:
        """Two plain ``nn.Conv*d`` with the activation between them."""
        first, second = (kernel.detach() for kernel in self.kernels)
        mode, training = self.padding_mode, self.training
        return nn.Sequential(
            plain_convolution(first, self.bias, self._pads[0], mode, training, self.stride),
            copy.deepcopy(self.activation),
            plain_convolution(second, None, self._pads[1], mode, training),
        ).train(training)

    def extra_repr(self) -> str:
        """Numbers of the layer."""
        return (
            f"{self.in_channels}, {self.out_channels}, kernel_size={self.kernel_size}, stride={self.stride}, "
            f"hidden={self.hidden_channels}, bias={self.bias is not None}, activation={self.activation}, "
            f"padding_mode={self.padding_mode}, method={self.method}"
        )


class SandwichAOCConv1d(SandwichAOCConv):
    """The layer in one dimension; see ``SandwichAOCConv``."""

    dims = 1


class SandwichAOCConv2d(SandwichAOCConv):
    """The layer in two dimensions; see ``SandwichAOCConv``."""

    dims = 2


class SandwichAOCConv3d(SandwichAOCConv):
    """The layer in three dimensions; see ``SandwichAOCConv``."""

    dims = 3
