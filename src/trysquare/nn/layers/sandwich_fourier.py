"""Sandwich convolution in the frequency domain, as its authors have it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from math import prod
from typing import ClassVar, Self

import torch
from torch import Tensor, nn

from trysquare.nn.geometry import Size, Sizes, flag, per_axis
from trysquare.nn.layers.activations import with_slopes_in_unit_interval
from trysquare.nn.layers.fourier import ImageSized, blocks_norm, plain_layer
from trysquare.nn.linalg.fourier import apply_response, of_response
from trysquare.nn.linalg.lattice import ROUND_UP
from trysquare.nn.linalg.orthogonalize import cayley_rows
from trysquare.nn.linalg.precision import at_least_float32, full_precision, protected
from trysquare.nn.linalg.rescaling import limited, positive_factors
from trysquare.nn.linalg.sandwich import sandwich_pair
from trysquare.nn.linalg.spectrum import UNIT_ROUNDOFF
from trysquare.nn.parametrizations.base import Caching, Device, factory_for, keeping_precision

__all__ = [
    "SandwichConv1d",
    "SandwichConv2d",
    "SandwichConv3d",
    "SandwichConvTranspose1d",
    "SandwichConvTranspose2d",
    "SandwichConvTranspose3d",
]

# Mean norm of the rows of a free kernel above which it is scaled down: far beyond it the rounding of the Cayley
# transform, which grows with the square, would make it no contraction. At the start it is 1.
_MOST = 30.0


class FrequencyResponse(Caching):
    """Free kernel to ``√2 Ψ⁻¹ B`` and ``√2 Ψ A`` at each frequency of a domain, kept in eval until something changes.

    Free tensors stay in float32 or float64 when the layer is cast to a shorter dtype.

    Args:
        shape: groups, hidden channels of a group, and channels of a group on the side with the stride, all of its
            positions; on the other side there are as many as hidden ones.
        kernel_size: size of the free kernel.
        dilation: spacing of its taps.
        transposed: whether ``A`` has the stride; otherwise ``B``.
        device: device of the parameters.
        dtype: dtype of the layer.
    """

    def __init__(
        self,
        shape: tuple[int, int, int],
        kernel_size: Sizes,
        dilation: Sizes,
        transposed: bool,
        device: Device,
        dtype: torch.dtype | None,
    ) -> None:
        super().__init__()
        groups, self.hidden, strided = shape
        self.dilation, self.transposed = dilation, transposed
        precise = at_least_float32(torch.get_default_dtype() if dtype is None else dtype)
        free = (groups, self.hidden, self.hidden + strided, *kernel_size)
        self.free = nn.Parameter(torch.empty(free, device=device, dtype=precise))
        self.free_psi = nn.Parameter(torch.empty(groups, self.hidden, device=device, dtype=precise))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """A normal kernel whose frequency response has entries of size ``1 / sqrt(columns)``, and ``Ψ = I``."""
        nn.init.normal_(self.free, std=prod(self.free.shape[2:]) ** -0.5)
        nn.init.zeros_(self.free_psi)

    @property
    def psi(self) -> Tensor:
        """``Ψ``, to be multiplied with blocks ``(..., groups, hidden, m)``."""
        return positive_factors(self.free_psi).unsqueeze(-1)

    def forward(self, sizes: Sizes) -> tuple[Tensor, Tensor]:
        """``(*frequencies, groups, hidden, m)`` before the activation and, to be transposed, after it."""
        free, names = (self.free, self.free_psi), ("free", "free_psi")
        return self._ordered(self.cached(lambda: self._built(sizes), free, self._parameters, names, sizes))

    def _ordered(self, both: Tensor) -> tuple[Tensor, Tensor]:
        """Return the halves in the order in which they are applied."""
        plain, strided = both[..., : self.hidden], both[..., self.hidden :]
        return (plain, strided) if self.transposed else (strided, plain)

    def _built(self, sizes: Sizes) -> Tensor:
        def build(free: Tensor, free_psi: Tensor) -> Tensor:
            bounded = limited(free, _MOST, dims=len(sizes))
            return of_response(lambda blocks: self._pair(blocks, free_psi), bounded, sizes, self.dilation)

        return protected(build, [tensor.to(at_least_float32(tensor.dtype)) for tensor in (self.free, self.free_psi)])

    def _pair(self, blocks: Tensor, free_psi: Tensor) -> Tensor:
        b, a = self._ordered(cayley_rows(blocks))
        before, after = sandwich_pair(a, b, positive_factors(free_psi).unsqueeze(-1))
        return torch.cat((before, after) if self.transposed else (after, before), -1)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        return super()._apply(keeping_precision(fn, self.parameters()), recurse)


class _FourierSandwich(ImageSized):
    """Constructor and forward pass of both convolutions; the hidden layer is on the coarse side."""

    dims: ClassVar[int] = 2

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Size,
        stride: Size = 1,
        dilation: Size = 1,
        groups: int = 1,
        bias: bool = True,
        device: Device = None,
        dtype: torch.dtype | None = None,
        *,
        activation: nn.Module | None = None,
        **others: object,
    ) -> None:
        super().__init__()
        self._set_numbers((in_channels, out_channels), (kernel_size, stride, dilation), groups, others)
        self.activation = with_slopes_in_unit_interval(activation)
        factory = factory_for(device, dtype)
        shape = self._group_shape
        self.response = FrequencyResponse(shape, self.kernel_size, self.dilation, self.transposed, **factory)
        with_bias = flag("bias", bias)
        self.bias = nn.Parameter(torch.empty(groups * shape[1], **factory)) if with_bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw new free tensors and a new bias (uniform, as torch does)."""
        self.response.reset_parameters()
        if self.bias is not None:
            bound = (self.in_channels // self.groups * prod(self.kernel_size)) ** -0.5
            nn.init.uniform_(self.bias, -bound, bound)

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        """``(batch, in_channels, *sizes)`` to ``(batch, out_channels, *(sizes / stride))``, or times the stride.

        Raises:
            ValueError: if a stride that makes maps smaller does not divide the sizes, or the shape is another one.
        """
        with full_precision(input):
            coarse = self._to_coarse(self._batched(input)).to(self.response.free.dtype)
            y = self._to_output(self._on_coarse_grid(coarse)).to(input.dtype)
        return y.squeeze(0) if input.ndim == self.dims + 1 else y

    def _on_coarse_grid(self, x: Tensor) -> Tensor:
        before, after = self.response(tuple(x.shape[2:]))
        hidden = apply_response(before, x, self.dims)
        if self.bias is not None:
            hidden = hidden + self.bias.to(hidden.dtype).view(-1, *(1,) * self.dims)
        return apply_response(after.mH, self.activation(hidden), self.dims)

    @torch.no_grad()
    def lipschitz_constant(self, input_shape: Sizes, dtype: torch.dtype) -> float:
        """Bound the branch by two blocks for each frequency and group; see ``linalg.operator.LipschitzLayer``."""
        before, after = (response.to(torch.complex128) for response in self.response(self._coarse(input_shape[1:])))
        psi = positive_factors(self.response.free_psi.detach().double()).unsqueeze(-1)
        both = torch.cat((after / psi, before * psi), -1)
        rounding = 4 * UNIT_ROUNDOFF * float(torch.linalg.matrix_norm(both).max())
        return (blocks_norm(both, type(self).__name__) + rounding) ** 2 / 2 * ROUND_UP

    def at_size(self, *sizes: int) -> nn.Module:
        """Return the same function in plain layers and the activation, for inputs of the given sizes only.

        Raises:
            ValueError: if the layer does not take inputs of these sizes.

        >>> layer = SandwichConv2d(4, 8, 3, stride=2)
        >>> x = torch.randn(1, 4, 6, 8)
        >>> torch.allclose(layer.at_size(6, 8)(x), layer(x), atol=1e-5)
        True
        """
        coarse = self.coarse_sizes(per_axis("sizes", sizes, self.dims))
        before, after = self.response(coarse)
        dtype = self.response.free.dtype if self.bias is None else self.bias.dtype
        one = (1,) * self.dims
        down, up = (one, self.stride) if self.transposed else (self.stride, one)
        first = plain_layer(before, coarse, down, False, self.bias, dtype)
        second = plain_layer(after, coarse, up, True, None, dtype)
        return nn.Sequential(first, copy.deepcopy(self.activation), second).train(self.training)

    def extra_repr(self) -> str:
        return (
            f"{self.in_channels}, {self.out_channels}, kernel_size={self.kernel_size}, stride={self.stride}, "
            f"dilation={self.dilation}, groups={self.groups}"
        )


class SandwichConv1d(_FourierSandwich):
    """The layer in one dimension; see ``SandwichConv2d``."""

    dims = 1


class SandwichConv2d(_FourierSandwich):
    """Sandwich convolution by Fourier and Cayley transforms, on a circular domain of any size. 1-Lipschitz.

    ``[A B]`` has orthonormal rows at every frequency. The kernels that do this are as large as the
    feature map, so ``at_size`` exports plain layers for one size only; ``SandwichAOCConv2d`` has small ones. In
    eval the frequency response is kept until the parameters or the size of the input change.

    Args:
        in_channels: channels of the input.
        out_channels: channels of the output and of the hidden layer.
        kernel_size: size of the free kernel that is transformed.
        stride: stride, by invertible downsampling; must divide the input.
        dilation: spacing of the taps of the free kernel, after the downsampling.
        groups: number of independent groups of channels.
        bias: whether the hidden layer has a learnable bias.
        device: device of the parameters.
        dtype: dtype of the bias; free tensors are kept in float32 or float64.
        activation: acts entry by entry with slopes between 0 and 1; ReLU if not given.

    >>> SandwichConv2d(8, 16, 3, stride=2)(torch.randn(1, 8, 6, 6)).shape
    torch.Size([1, 16, 3, 3])
    """

    dims = 2


class SandwichConv3d(_FourierSandwich):
    """The layer in three dimensions; see ``SandwichConv2d``."""

    dims = 3


class _SandwichConvTranspose(_FourierSandwich):
    transposed = True


class SandwichConvTranspose1d(_SandwichConvTranspose):
    """The layer in one dimension; see ``SandwichConvTranspose2d``."""

    dims = 1


class SandwichConvTranspose2d(_SandwichConvTranspose):
    """Sandwich convolution by Fourier and Cayley transforms that makes maps larger. 1-Lipschitz.

    Its Jacobians are transposes of those of a ``SandwichConv2d`` from ``out_channels`` to
    ``in_channels``; the stride is an invertible upsampling at the end.

    Arguments are those of ``SandwichConv2d``; the hidden layer has ``in_channels``.

    >>> SandwichConvTranspose2d(16, 8, 3, stride=2)(torch.randn(1, 16, 3, 3)).shape
    torch.Size([1, 8, 6, 6])
    """

    dims = 2


class SandwichConvTranspose3d(_SandwichConvTranspose):
    """The layer in three dimensions; see ``SandwichConvTranspose2d``."""

    dims = 3
