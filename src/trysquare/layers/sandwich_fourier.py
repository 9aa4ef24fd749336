"""Sandwich convolution in the frequency domain, as its authors have it."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from trysquare.geometry import per_axis
from trysquare.layers.activations import with_slopes_in_unit_interval
from trysquare.layers.base import keeping_precision
from trysquare.layers.conv import Size
from trysquare.layers.explicit import hidden_bias
from trysquare.layers.pooling import space_to_depth
from trysquare.linalg.precision import at_least_float32, full_precision
from trysquare.linalg.rescaling import positive
from trysquare.linalg.sandwich import frequency_pair, sandwich_pair
from trysquare.parametrizations.upkeep import WeightCache


class FrequencyResponse(nn.Module):
    """Free kernel to ``√2 Ψ⁻¹ B`` and ``√2 Ψ A`` at each frequency of a domain, kept in eval until something changes.

    Free tensors stay in float32 or float64 when the layer is cast to a shorter dtype.
    """

    def __init__(self, inputs: int, outputs: int, kernel_size: tuple[int, ...], device: Any, dtype: Any) -> None:
        super().__init__()
        self.outputs = outputs
        precise = at_least_float32(torch.get_default_dtype() if dtype is None else dtype)
        self.free = nn.Parameter(torch.empty(outputs + inputs, outputs, *kernel_size, device=device, dtype=precise))
        self.free_psi = nn.Parameter(torch.empty(outputs, device=device, dtype=precise))
        self._cache = WeightCache()
        self._sizes: tuple[int, ...] = ()
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """A normal kernel whose frequency response has entries of size ``1 / sqrt(rows)``, and ``Ψ = I``."""
        nn.init.normal_(self.free, std=(self.free.shape[0] * prod(self.free.shape[2:])) ** -0.5)
        nn.init.zeros_(self.free_psi)

    def forward(self, sizes: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        """``(frequencies, n, m)`` before the activation and ``(frequencies, n, n)``, to be transposed, after it."""
        if self._may_cache():
            if not self._cache.fresh() or self._sizes != sizes:
                self._cache.store(self._built(sizes), self._parameters)
                self._sizes = sizes
            assert self._cache.weight is not None
            both = self._cache.weight
        else:
            both = self._built(sizes)
        return both[..., self.outputs :], both[..., : self.outputs]

    def _may_cache(self) -> bool:
        if self.training or torch.compiler.is_compiling():
            return False
        tensors = (self.free, self.free_psi)
        return not any(t.is_inference() or (torch.is_grad_enabled() and t.requires_grad) for t in tensors)

    def _built(self, sizes: tuple[int, ...]) -> Tensor:
        with full_precision(self.free):
            a, b = frequency_pair(self.free, sizes, self.outputs)
            before, after = sandwich_pair(a.transpose(0, 1), b.transpose(0, 1), positive(self.free_psi))
            return torch.cat((after, before), -1).transpose(0, 1)

    def train(self, mode: bool = True) -> Self:
        """Switch mode; a switch forgets what is kept."""
        if mode != self.training:
            self._cache.clear()
        return super().train(mode)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        self._cache.clear()
        return super()._apply(keeping_precision(fn, self.parameters()), recurse)


class SandwichConv(nn.Module):
    """Sandwich convolution by Fourier and Cayley transforms, on a circular domain of any size. 1-Lipschitz.

    ``[A B]`` has orthonormal rows at every frequency. The kernels that do this are as large as the
    feature map, which is why the layer has no plain export; ``SandwichAOCConv`` has small ones. In
    eval the frequency response is kept until the parameters or the size of the input change. Two
    dimensions; ``SandwichConv1d`` and ``3d`` have one and three.

    Args:
        in_channels: channels of the input.
        out_channels: channels of the output and of the hidden layer.
        kernel_size: size of the free kernel that is transformed.
        stride: stride, by invertible downsampling; must divide the input.
        bias: whether the hidden layer has a learnable bias.
        device: device of the parameters.
        dtype: dtype of the bias; free tensors are kept in float32 or float64.
        activation: acts entry by entry with slopes between 0 and 1; ReLU if not given.

    >>> SandwichConv2d(8, 16, 3, stride=2)(torch.randn(1, 8, 6, 6)).shape
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
        device: Any = None,
        dtype: Any = None,
        *,
        activation: nn.Module | None = None,
    ) -> None:
        super().__init__()
        for name, size in (("in_channels", in_channels), ("out_channels", out_channels)):
            if not isinstance(size, int) or size < 1:
                raise ValueError(f"{name}={size!r} must be a positive integer")
        self.in_channels, self.out_channels = in_channels, out_channels
        self.kernel_size = per_axis("kernel_size", kernel_size, self.dims)
        self.stride = per_axis("stride", stride, self.dims)
        self.activation = with_slopes_in_unit_interval(activation)
        inputs = in_channels * prod(self.stride)
        self.response = FrequencyResponse(inputs, out_channels, self.kernel_size, device, dtype)
        self.bias = hidden_bias(out_channels, bias, {"device": device, "dtype": dtype})
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw new free tensors and a new bias (uniform, as torch does)."""
        self.response.reset_parameters()
        if self.bias is not None:
            bound = (self.in_channels * prod(self.kernel_size)) ** -0.5
            nn.init.uniform_(self.bias, -bound, bound)

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        """``(batch, in_channels, *sizes)`` to ``(batch, out_channels, *(sizes / stride))``.

        Raises:
            ValueError: if the stride does not divide the sizes, or the shape is another one.
        """
        if input.ndim != self.dims + 2 or input.shape[1] != self.in_channels:
            raise ValueError(
                f"input of shape {tuple(input.shape)} must be (batch, {self.in_channels}, and {self.dims} sizes)"
            )
        with full_precision(input):
            x = space_to_depth(input.to(self.response.free.dtype), self.stride)
            before, after = self.response(tuple(x.shape[2:]))
            hidden = self._filtered(x, before)
            if self.bias is not None:
                hidden = hidden + self.bias.to(hidden.dtype).view(-1, *(1,) * self.dims)
            return self._filtered(self.activation(hidden), after.mH).to(input.dtype)

    def _filtered(self, x: Tensor, response: Tensor) -> Tensor:
        """Multiply by a matrix at each frequency."""
        axes = tuple(range(2, x.ndim))
        spectrum = torch.fft.rfftn(x, dim=axes)
        mixed = torch.matmul(response, spectrum.flatten(2).permute(2, 1, 0)).permute(2, 1, 0)
        return torch.fft.irfftn(mixed.unflatten(2, spectrum.shape[2:]), s=x.shape[2:], dim=axes)

    def extra_repr(self) -> str:
        """Numbers of the layer."""
        return f"{self.in_channels}, {self.out_channels}, kernel_size={self.kernel_size}, stride={self.stride}"


class SandwichConv1d(SandwichConv):
    """The layer in one dimension; see ``SandwichConv``."""

    dims = 1


class SandwichConv2d(SandwichConv):
    """The layer in two dimensions; see ``SandwichConv``."""

    dims = 2


class SandwichConv3d(SandwichConv):
    """The layer in three dimensions; see ``SandwichConv``."""

    dims = 3
