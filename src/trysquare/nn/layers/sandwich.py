"""Sandwich layers (Wang and Manchester, 2023): ``√2 Aᵀ Ψ σ(√2 Ψ⁻¹ B x + b)``, 1-Lipschitz as a whole.

``[A B]`` is a contraction, ``Ψ`` any positive diagonal (see ``linalg.sandwich``). With zero padding ``[A B]``
is restricted, which leaves it a contraction. The Jacobian is ``2 AᵀDB`` for slopes ``D``; its transpose belongs to the
layer with ``A`` and ``B`` exchanged. So a convolution ``B`` with a stride makes a layer that makes maps smaller, and a
convolution ``A`` with a stride one that makes them larger.
"""

from __future__ import annotations

from typing import Unpack

import torch
from torch import Tensor, nn

from trysquare.nn.geometry import Sizes, check_groups
from trysquare.nn.layers.block import PackedBlock, ResamplingBlock
from trysquare.nn.layers.convolution import Convolution
from trysquare.nn.layers.packing import PackedKernels, Shapes
from trysquare.nn.linalg.kernels import adjoint
from trysquare.nn.linalg.lattice import sandwich_bound
from trysquare.nn.linalg.rescaling import positive_factors
from trysquare.nn.linalg.sandwich import mix, sandwich_pair
from trysquare.nn.parametrizations import OrthonormalMatrix, Parametrization
from trysquare.nn.parametrizations.base import Device, Factory, factory_for

__all__ = [
    "SandwichAOCConv1d",
    "SandwichAOCConv2d",
    "SandwichAOCConv3d",
    "SandwichAOCConvTranspose1d",
    "SandwichAOCConvTranspose2d",
    "SandwichAOCConvTranspose3d",
    "SandwichLinear",
]


class SandwichMatrices(PackedKernels):
    """``√2 Ψ⁻¹ B`` and ``√2 Aᵀ Ψ`` for one orthonormal matrix ``[A B]`` and free factors ``Ψ``."""

    def __init__(self, inputs: int, outputs: int, hidden: int, orthogonalizer: str, **factory: Unpack[Factory]) -> None:
        both = OrthonormalMatrix((hidden, outputs + inputs), orthogonalizer, **factory)
        super().__init__((both,), ((hidden,),), **factory)
        self.inputs, self.outputs, self.hidden = inputs, outputs, hidden

    @property
    def kernel_shapes(self) -> Shapes:
        return (self.hidden, self.inputs), (self.outputs, self.hidden)

    def build_kernels(self, *tensors: Tensor) -> list[Tensor]:
        """Split the matrix, and scale both parts by ``Ψ``."""
        both, free_psi = tensors
        a, b = both[:, : self.outputs], both[:, self.outputs :]
        first, second = sandwich_pair(a, b, positive_factors(free_psi).unsqueeze(-1))
        return [first, second.mT]


class SandwichKernels(PackedKernels):
    """``[A B] = M diag(a, b)`` for orthogonal kernels ``a``, ``b`` and an orthonormal matrix ``M`` for each group.

    ``b`` is the one with the stride, or, in a transposed layer, ``a``. The second kernel is ``√2 Ψ A``
    for a transposed convolution, or its adjoint for a plain one.
    """

    def __init__(
        self,
        plain: Parametrization,
        strided: Parametrization,
        groups: int,
        transposed: bool,
        orthogonalizer: str,
        **factory: Unpack[Factory],
    ) -> None:
        hidden = plain.weight_shape[0]
        matrix = OrthonormalMatrix((groups, hidden // groups, 2 * hidden // groups), orthogonalizer, **factory)
        super().__init__((plain, strided, matrix), ((hidden,),), **factory)
        self.groups, self.transposed = groups, transposed

    @property
    def kernel_shapes(self) -> Shapes:
        plain, strided = (tuple(part.weight_shape) for part in self.parts[:2])
        if self.transposed:
            return plain, strided
        hidden, outputs, *taps = plain
        return strided, (outputs * self.groups, hidden // self.groups, *taps)

    def build_kernels(self, *tensors: Tensor) -> list[Tensor]:
        """Mix the kernels by the matrix, and scale both by ``Ψ``."""
        plain, strided, matrix, free_psi = tensors
        psi = positive_factors(free_psi).view(-1, *(1,) * (plain.ndim - 1))
        plain, strided = mix(matrix, plain, strided)
        if self.transposed:
            return list(sandwich_pair(strided, plain, psi))
        first, second = sandwich_pair(plain, strided, psi)
        return [first, adjoint(second, self.groups)]


class _Sandwich(PackedBlock):
    """The branch without a shortcut."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        """Apply the first kernel, the activation and the second kernel.

        Raises:
            ValueError: if the padding is circular and the stride does not divide the input of a layer that is not
                transposed.
        """
        return self._branch(input, *self.kernels)

    @torch.no_grad()
    def lipschitz_constant(self, input_shape: Sizes, dtype: torch.dtype) -> float:
        """Bound the branch, whatever its two kernels are, with the layer's ``Ψ``; see ``linalg.operator``."""
        first, second = maps = self._maps(self._first, self._second)
        back = second if self._second.transposed else second.transposed()
        made_of = self._before_fusing()
        psi = None if made_of is None else positive_factors(made_of[-1])
        return sandwich_bound(first, back, self._circle(maps, input_shape), psi)

    def as_torch(self) -> nn.Module:
        """Return two plain layers with the activation between them."""
        return self._plain_branch(*self.kernels)


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

    _shown = ("in_features", "out_features", "hidden_features", "orthogonalizer")

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: Device = None,
        dtype: torch.dtype | None = None,
        *,
        hidden_features: int | None = None,
        activation: nn.Module | None = None,
        orthogonalizer: str = "cholesky",
    ) -> None:
        super().__init__()
        hidden = out_features if hidden_features is None else hidden_features
        check_groups(1, in_features=in_features, out_features=out_features, hidden_features=hidden)
        self.in_features, self.out_features, self.hidden_features = in_features, out_features, hidden
        self.orthogonalizer = orthogonalizer
        self._first = self._second = Convolution()
        factory = factory_for(device, dtype)
        kernels = SandwichMatrices(in_features, out_features, hidden, orthogonalizer, **factory)
        self._finish(kernels, (hidden, in_features), bias, activation)


class _ExplicitSandwich(_Sandwich, ResamplingBlock):
    """Constructor of both convolutions; the hidden layer is on the coarse side."""

    def _kernels(self, factory: Factory) -> SandwichKernels:
        fine, coarse = ((side, self.hidden_channels) for side in self._sides)
        strided = self._geometry("the strided kernel", fine, self.kernel_size, True, "hidden_channels")
        plain = self._geometry("the plain kernel", coarse, self.kernel_size, False, "hidden_channels")
        numbers = self.dilation, self.groups, self.padding_mode
        down = Convolution.same(self.kernel_size, self.stride, *numbers)
        flat = Convolution.same(self.kernel_size, (1,) * self.dims, *numbers)
        self._first, self._second = (flat, down.adjoint()) if self.transposed else (down, flat.flipped())
        parts = self._orthogonal(plain, factory), self._orthogonal(strided, factory)
        return SandwichKernels(*parts, self.groups, self.transposed, self.orthogonalizer, **factory)


class SandwichAOCConv1d(_ExplicitSandwich):
    """The layer in one dimension; see ``SandwichAOCConv2d``."""

    dims = 1


class SandwichAOCConv2d(_ExplicitSandwich):
    """Sandwich layer with explicit orthogonal kernels and stride: two plain convolutions. 1-Lipschitz.

    The first convolution maps to ``hidden_channels`` with the stride, the second, of the same size
    and stride 1, to ``out_channels``. Their orthogonal kernels are tied by an orthonormal matrix
    (see ``linalg.sandwich.mix``). Two dimensions; ``SandwichAOCConv1d`` and ``3d`` have
    one and three.

    Args:
        in_channels: channels of the input.
        out_channels: channels of the output.
        kernel_size: size of both kernels.
        stride: stride; must divide the input if the padding is circular.
        dilation: spacing of the taps of both kernels.
        groups: number of independent groups of channels.
        bias: whether the hidden layer has a learnable bias.
        padding_mode: ``"circular"`` or ``"zeros"``.
        device: device of the parameters.
        dtype: dtype of the weights; free tensors are kept in float32 or float64.
        hidden_channels: channels between the convolutions; ``out_channels`` if not given.
        activation: acts entry by entry with slopes between 0 and 1; ReLU if not given.
        method: how the kernels are parametrized: ``"aoc"``, ``"bcop"``, ``"sc-fac"`` or
            ``"bro"``, which make orthogonal kernels of exactly the size that is asked for.
        orthogonalizer: how their matrices are made orthonormal.

    Raises:
        ValueError: if no orthogonal kernels have these numbers.

    >>> SandwichAOCConv2d(8, 16, 3, stride=2)(torch.randn(1, 8, 6, 6)).shape
    torch.Size([1, 16, 3, 3])
    """

    dims = 2


class SandwichAOCConv3d(_ExplicitSandwich):
    """The layer in three dimensions; see ``SandwichAOCConv2d``."""

    dims = 3


class _SandwichAOCConvTranspose(_ExplicitSandwich):
    transposed = True


class SandwichAOCConvTranspose1d(_SandwichAOCConvTranspose):
    """The layer in one dimension; see ``SandwichAOCConvTranspose2d``."""

    dims = 1


class SandwichAOCConvTranspose2d(_SandwichAOCConvTranspose):
    """Sandwich layer with explicit orthogonal kernels that makes maps larger. 1-Lipschitz.

    Its Jacobians are transposes of those of a ``SandwichAOCConv2d`` from ``out_channels`` to
    ``in_channels``: a plain convolution to ``hidden_channels``, then a transposed one with the
    stride. The output has ``stride`` times the size of the input; with zero padding what falls past
    its border is cut off. Two dimensions; ``SandwichAOCConvTranspose1d`` and ``3d`` have one and
    three.

    Arguments are those of ``SandwichAOCConv2d``, with ``in_channels`` for ``hidden_channels`` if not
    given.

    >>> SandwichAOCConvTranspose2d(16, 8, 3, stride=2)(torch.randn(1, 16, 3, 3)).shape
    torch.Size([1, 8, 6, 6])
    """

    dims = 2


class SandwichAOCConvTranspose3d(_SandwichAOCConvTranspose):
    """The layer in three dimensions; see ``SandwichAOCConvTranspose2d``."""

    dims = 3
