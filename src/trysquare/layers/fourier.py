"""Orthogonal convolutions whose kernel is as large as the image, built in the Fourier domain."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from trysquare.geometry import check_groups, per_axis
from trysquare.layers.pooling import depth_to_space, space_to_depth
from trysquare.linalg.fourier import RESPONSES, apply_response, explicit_kernel, orthogonal_response
from trysquare.linalg.precision import at_least_float32
from trysquare.parametrizations.base import random_orthonormal

Size = int | Sequence[int]
_CIRCULAR_PAD: dict[int, Any] = {1: nn.CircularPad1d, 2: nn.CircularPad2d, 3: nn.CircularPad3d}
_CONV: dict[int, Any] = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}


class _FourierConvolution(nn.Module):
    """Free kernel, response for the present size, and its cache."""

    dims: ClassVar[int]
    transposed: ClassVar[bool] = False

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Size,
        stride: Size = 1,
        dilation: Size = 1,
        groups: int = 1,
        bias: bool = True,
        device: Any = None,
        dtype: Any = None,
        *,
        method: str = "cayley",
    ) -> None:
        super().__init__()
        if method not in RESPONSES:
            raise ValueError(f"method={method!r} must be one of {', '.join(map(repr, RESPONSES))}")
        check_groups(groups, in_channels=in_channels, out_channels=out_channels)
        self.in_channels, self.out_channels, self.groups, self.method = in_channels, out_channels, groups, method
        self.kernel_size = per_axis("kernel_size", kernel_size, self.dims)
        self.stride = per_axis("stride", stride, self.dims)
        self.dilation = per_axis("dilation", dilation, self.dims)
        if method == "eco" and max(self.dilation) > 1:
            raise ValueError(
                f"dilation={dilation!r} has no meaning for method='eco': its taps are always size / kernel_size apart"
            )
        coarse, fine = (in_channels, out_channels) if self.transposed else (out_channels, in_channels)
        shape = (groups, coarse // groups, fine // groups * prod(self.stride), *self.kernel_size)
        self.weight = nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(out_channels, device=device, dtype=dtype)) if bias else None
        self._cached: tuple[Any, Tensor, Tensor] | None = None
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """A kernel near a random orthonormal matrix (``"lot"``) or of moderate rotations, and torch's bias."""
        groups, n, m, *taps = self.weight.shape
        scale = 0.1 if self.method == "lot" else 1.0
        fresh = scale * torch.randn(self.weight.shape, dtype=torch.float64) / (max(n, m) * prod(taps)) ** 0.5
        if self.method == "lot":
            middle = (..., *((k - 1) // 2 for k in taps))
            fresh[middle] += random_orthonormal(groups, n, m)
        self.weight.copy_(fresh)
        if self.bias is not None:
            bound = (m * prod(taps)) ** -0.5
            nn.init.uniform_(self.bias, -bound, bound)

    def response(self, sizes: tuple[int, ...]) -> Tensor:
        """Orthonormal blocks on a coarse domain of the given sizes; kept in eval mode where no gradient is wanted."""
        if self.training or torch.compiler.is_compiling() or (torch.is_grad_enabled() and self.weight.requires_grad):
            return self._built(sizes)
        key = (sizes, id(self.weight), self.weight._version, self.weight.data_ptr(), self.weight.dtype)
        if self._cached is None or self._cached[0] != key:
            # Holding on to the free kernel keeps its memory from being reused: equal addresses mean the same memory.
            self._cached = (key, self._built(sizes), self.weight.detach())
        return self._cached[1]

    def _built(self, sizes: tuple[int, ...]) -> Tensor:
        exact = self.weight.to(at_least_float32(self.weight.dtype))
        return orthogonal_response(exact, sizes, self.dilation, self.method)

    def _convolved(self, x: Tensor, response: Tensor) -> Tensor:
        exact = x.to(at_least_float32(x.dtype))
        return apply_response(response.to(torch.promote_types(exact.dtype, torch.complex64)), exact, self.dims)

    def _finished(self, y: Tensor, x: Tensor) -> Tensor:
        y = y.to(x.dtype)
        return y if self.bias is None else y + self.bias.view(-1, *(1,) * self.dims)

    def equivalent_kernel_size(self, *sizes: int) -> tuple[int, ...]:
        """Size of the kernel on images of the given sizes: that of the image."""
        return per_axis("sizes", sizes, self.dims)

    def train(self, mode: bool = True) -> Any:
        """Switch mode; a switch forgets the cached blocks."""
        if mode != self.training:
            self._cached = None
        return super().train(mode)

    def __getstate__(self) -> dict[str, Any]:
        """Everything but the cache."""
        return {**self.__dict__, "_cached": None}

    def extra_repr(self) -> str:
        """Torch's line, and the truth about the kernel."""
        extras = "".join(
            f", {name}={value}"
            for name, value, usual in (
                ("dilation", self.dilation, (1,) * self.dims), ("groups", self.groups, 1),
                ("bias", self.bias is not None, True),
            )
            if value != usual
        )  # fmt: skip
        return (
            f"{self.in_channels}, {self.out_channels}, free kernel {self.kernel_size}, stride={self.stride}{extras}, "
            f"method={self.method}, equivalent kernel as large as the image"
        )

    def as_torch(self) -> nn.Module:
        """There is no plain layer for every size.

        Raises:
            ValueError: always; ``at_size`` gives the plain layer for one size.
        """
        raise ValueError(
            f"{self._get_name()} has a kernel as large as the image, so no plain layer is the same for every size; "
            "replace it by layer.at_size(*sizes) first"
        )


class _Plain(_FourierConvolution):
    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        """Convolve ``(b, in_channels, *sizes)``, sizes divisible by the stride."""
        x = input.unsqueeze(0) if input.ndim == self.dims + 1 else input
        self._check(x)
        coarse = space_to_depth(x, self.stride) if max(self.stride) > 1 else x
        y = self._finished(self._convolved(coarse, self.response(tuple(coarse.shape[2:]))), input)
        return y.squeeze(0) if input.ndim == self.dims + 1 else y

    def _check(self, x: Tensor) -> None:
        sizes = tuple(x.shape[2:])
        if x.ndim != self.dims + 2 or x.shape[1] != self.in_channels:
            raise ValueError(f"input of shape {tuple(x.shape)} must be (batch, {self.in_channels}, {self.dims} sizes)")
        if any(size % s for size, s in zip(sizes, self.stride, strict=True)):
            raise ValueError(f"sizes {sizes} must be multiples of stride={self.stride}: downsampling would lose pixels")

    def adjoint(self) -> Any:
        """The transposed layer, without bias, that shares the free kernel of this one."""
        twin = _TRANSPOSED[self.dims](
            self.out_channels, self.in_channels, self.kernel_size, self.stride, self.dilation, self.groups, bias=False,
            device="meta", method=self.method,
        )  # fmt: skip
        twin.weight = self.weight
        return twin.train(self.training)

    @torch.no_grad()
    def at_size(self, *sizes: int) -> nn.Module:
        """The same function in plain ``torch.nn`` layers, for images of the given sizes only.

        >>> layer = FourierOrthoConv2d(4, 8, 3, stride=2)
        >>> x = torch.randn(1, 4, 6, 8)
        >>> torch.allclose(layer.at_size(6, 8)(x), layer(x), atol=1e-5)
        True
        """
        sizes = per_axis("sizes", sizes, self.dims)
        coarse = tuple(size // s for size, s in zip(sizes, self.stride, strict=True))
        kernel = explicit_kernel(self._built(coarse), coarse)  # (g, n, m prod(s), *coarse)
        flat = depth_to_space(kernel.flatten(0, 1), self.stride)
        pads = [amount for size, s in zip(sizes[::-1], self.stride[::-1], strict=True) for amount in (0, size - s)]
        plain = _CONV[self.dims](
            self.in_channels, self.out_channels, sizes, self.stride, groups=self.groups, bias=self.bias is not None,
            device="meta",
        )  # fmt: skip
        plain.weight = nn.Parameter(flat.to(self.weight.dtype).contiguous())
        if self.bias is not None:
            plain.bias = nn.Parameter(self.bias.detach().clone())
        return nn.Sequential(_CIRCULAR_PAD[self.dims](tuple(pads)), plain).train(self.training)


class _Transposed(_FourierConvolution):
    transposed = True

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        """Apply the adjoint of the convolution to ``(b, in_channels, *sizes)``: sizes grow by the stride."""
        x = input.unsqueeze(0) if input.ndim == self.dims + 1 else input
        if x.ndim != self.dims + 2 or x.shape[1] != self.in_channels:
            raise ValueError(f"input of shape {tuple(x.shape)} must be (batch, {self.in_channels}, {self.dims} sizes)")
        fine = self._convolved(x, self.response(tuple(x.shape[2:])).mH)
        y = self._finished(depth_to_space(fine, self.stride) if max(self.stride) > 1 else fine, input)
        return y.squeeze(0) if input.ndim == self.dims + 1 else y


class FourierOrthoConv1d(_Plain):
    """Orthogonal circular convolution with a kernel as long as the signal; see ``FourierOrthoConv2d``."""

    dims = 1


class FourierOrthoConv2d(_Plain):
    """Orthogonal circular convolution with a kernel as large as the image: Cayley, LOT and ECO.

    All singular values are 1, for every number of channels (rows orthonormal if the layer maps to fewer numbers,
    columns if to more) and every size of the image, which may change from call to call. A stride is an invertible
    downsampling followed by the convolution. The blocks are rebuilt when the size changes; in eval mode without
    gradients they are kept otherwise.

    Args:
        in_channels: channels of the input.
        out_channels: channels of the output.
        kernel_size: size of the *free* kernel, from which the blocks are made.
        stride: stride; must divide the input.
        dilation: spacing of the taps of the free kernel; not for ``"eco"``.
        groups: number of independent groups of channels.
        bias: whether to add a learnable bias.
        device: device of the parameters.
        dtype: dtype of the parameters.
        method: ``"cayley"``, ``"lot"`` or ``"eco"``; see ``trysquare.linalg.fourier``.

    Raises:
        ValueError: if an argument has no meaning.
        ArithmeticError: at a forward pass, if the free kernel has left the domain of the method.

    >>> layer = FourierOrthoConv2d(3, 16, 3, stride=2, method="lot")
    >>> layer(torch.randn(2, 3, 10, 12)).shape
    torch.Size([2, 16, 5, 6])
    >>> layer.equivalent_kernel_size(10, 12)
    (10, 12)
    """

    dims = 2


class FourierOrthoConv3d(_Plain):
    """Orthogonal circular convolution with a kernel as large as the volume; see ``FourierOrthoConv2d``."""

    dims = 3


class FourierOrthoConvTranspose1d(_Transposed):
    """Adjoint of ``FourierOrthoConv1d``."""

    dims = 1


class FourierOrthoConvTranspose2d(_Transposed):
    """Adjoint of ``FourierOrthoConv2d`` with the same numbers; arguments are those of ``FourierOrthoConv2d``."""

    dims = 2


class FourierOrthoConvTranspose3d(_Transposed):
    """Adjoint of ``FourierOrthoConv3d``."""

    dims = 3


_TRANSPOSED: dict[int, Any] = {
    1: FourierOrthoConvTranspose1d,
    2: FourierOrthoConvTranspose2d,
    3: FourierOrthoConvTranspose3d,
}
