"""Orthogonal convolutions whose kernel is as large as the image, built in the Fourier domain."""

from __future__ import annotations

from math import prod
from typing import ClassVar

import torch
from torch import Tensor, nn

from trysquare.naming import pick, refuse_arguments
from trysquare.nn.geometry import Size, Sizes, check_groups, flag, per_axis
from trysquare.nn.layers.convolution import Convolution, no_such_input
from trysquare.nn.layers.invertible import AffineInverse, Isometry
from trysquare.nn.layers.pooling import depth_to_space, space_to_depth
from trysquare.nn.linalg.bounds import singular_value_range
from trysquare.nn.linalg.fourier import (
    RESPONSES,
    apply_response,
    eco_taps,
    explicit_kernel,
    orthogonal_response,
    wide_sizes,
)
from trysquare.nn.linalg.orthonormal import random_orthonormal
from trysquare.nn.linalg.precision import at_least_float32, protected
from trysquare.nn.parametrizations import METHODS
from trysquare.nn.parametrizations.base import Caching, Device, factory_for

__all__ = [
    "FourierOrthoConv1d",
    "FourierOrthoConv2d",
    "FourierOrthoConv3d",
    "FourierOrthoConvTranspose1d",
    "FourierOrthoConvTranspose2d",
    "FourierOrthoConvTranspose3d",
]


class ImageSized(Caching):
    """A layer whose kernel is built for the size of the image at hand, on a circular domain.

    The convolution acts on the coarse side: after an invertible downsampling by the stride, or, in a transposed layer,
    before an upsampling.
    """

    dims: ClassVar[int]
    transposed: ClassVar[bool] = False

    def _set_numbers(
        self,
        channels: tuple[int, int],
        sizes: tuple[Size, Size, Size],
        groups: int,
        others: dict[str, object],
    ) -> None:
        why = "the domain is always circular, and the output as large as the input / stride; leave it out"
        refuse_arguments(self._get_name(), others, padding=why, padding_mode=why, output_padding=why)
        self.in_channels, self.out_channels = channels
        check_groups(groups, in_channels=self.in_channels, out_channels=self.out_channels)
        self.groups = groups
        names = ("kernel_size", "stride", "dilation")
        self.kernel_size, self.stride, self.dilation = (
            per_axis(name, size, self.dims) for name, size in zip(names, sizes, strict=True)
        )

    @property
    def _group_shape(self) -> tuple[int, int, int]:
        """Groups, channels of a group on the coarse side, and on the fine side with all positions of a block."""
        sides = (self.in_channels, self.out_channels) if self.transposed else (self.out_channels, self.in_channels)
        coarse, fine = (side // self.groups for side in sides)
        return self.groups, coarse, fine * prod(self.stride)

    def _batched(self, x: Tensor) -> Tensor:
        """Return the input with a batch axis.

        Raises:
            ValueError: if the shape is another one.
        """
        batched = x.unsqueeze(0) if x.ndim == self.dims + 1 else x
        if batched.ndim != self.dims + 2 or batched.shape[1] != self.in_channels or 0 in batched.shape[2:]:
            raise no_such_input(x, self.in_channels, self.dims)
        return batched

    def coarse_sizes(self, sizes: Sizes) -> Sizes:
        """Return the sizes of the domain on which the convolution acts, for an input of the given sizes.

        Raises:
            ValueError: if the stride does not divide them.
        """
        if self.transposed:
            return sizes
        if any(size % s for size, s in zip(sizes, self.stride, strict=True)):
            raise ValueError(
                f"sizes {sizes} must be multiples of stride={self.stride}: downsampling would lose pixels; pad or crop "
                "the input"
            )
        return self._coarse(sizes)

    def _coarse(self, sizes: Sizes) -> Sizes:
        return sizes if self.transposed else tuple(n // s for n, s in zip(sizes, self.stride, strict=True))

    def _to_coarse(self, x: Tensor) -> Tensor:
        self.coarse_sizes(tuple(x.shape[2:]))
        return x if self.transposed or max(self.stride) == 1 else space_to_depth(x, self.stride)

    def _to_output(self, y: Tensor) -> Tensor:
        return depth_to_space(y, self.stride) if self.transposed and max(self.stride) > 1 else y

    def as_torch(self) -> nn.Module:
        """Refuse: no plain layer is the same for every size.

        Raises:
            ValueError: always; ``at_size`` returns the plain layer for one size.
        """
        raise ValueError(
            f"{self._get_name()} has a kernel as large as the image, so no plain layer is the same for every size; "
            "replace it by layer.at_size(*sizes) first"
        )

    def at_size(self, *sizes: int) -> nn.Module:
        """Return the same function in plain ``torch.nn`` layers, for inputs of the given sizes only.

        Raises:
            ValueError: if the layer does not take inputs of these sizes.
        """
        raise NotImplementedError


# Numbers of complex matrices that are looked at together.
_CHUNK_NUMBERS = 1 << 23


def blocks_norm(blocks: Tensor, owner: str) -> float:
    """Return the certified norm of the largest of many complex matrices ``(*frequencies, groups, n, m)``.

    A real convolution by half of the frequencies has at most that norm: the transform back projects what is not the
    transform of something real.

    Raises:
        ValueError: if they hold numbers that are not finite.
    """
    if not bool(torch.view_as_real(blocks).isfinite().all()):
        raise ValueError(f"the response of {owner} holds values that are not finite: it has no norm")
    flat = blocks.detach().to("cpu", torch.complex128).flatten(0, -3)
    chunk = max(1, _CHUNK_NUMBERS // prod(flat.shape[1:]))
    return singular_value_range(flat.split(chunk), lowest=False)[1]


def plain_layer(
    response: Tensor, sizes: Sizes, stride: Sizes, transposed: bool, bias: Tensor | None, dtype: torch.dtype
) -> nn.Module:
    """Return plain layers of torch for the blocks of a convolution on a coarse domain.

    Args:
        response: ``(*frequencies, g, n, m prod(stride))``, with inputs downsampled by the stride.
        sizes: sizes of the coarse domain.
        stride: stride of the convolution.
        transposed: whether the adjoint is wanted, from ``n`` to ``m`` channels.
        bias: bias of the layer.
        dtype: dtype of the layer.
    """
    kernel = depth_to_space(explicit_kernel(response, sizes).flatten(0, 1), stride)
    fine = tuple(size * s for size, s in zip(sizes, stride, strict=True))
    pads = tuple((0, size - s) for size, s in zip(fine, stride, strict=True))
    convolution = Convolution(fine, stride, (1,) * len(sizes), response.shape[len(sizes)], pads, "circular")
    convolution = convolution.adjoint() if transposed else convolution
    return convolution.plain(kernel.to(dtype), bias, training=False)


class _FourierConvolution(Isometry, ImageSized):
    """A free kernel, the response that it has at the present size, and the cache of that."""

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
        method: str = "cayley",
        **others: object,
    ) -> None:
        super().__init__()
        if method in METHODS:
            raise ValueError(
                f"method={method!r} makes small kernels: it is a method of OrthoConv1d, 2d and 3d, not of layers in "
                f"the Fourier domain, which have {', '.join(RESPONSES)}"
            )
        pick(RESPONSES, method, "method")
        self._set_numbers((in_channels, out_channels), (kernel_size, stride, dilation), groups, others)
        self.method = method
        if method == "eco" and max(self.dilation) > 1:
            raise ValueError(
                f"dilation={dilation!r} has no meaning for method='eco': its taps are always size / kernel_size apart"
            )
        factory = factory_for(device, dtype)
        self.weight = nn.Parameter(torch.empty(*self._group_shape, *self.kernel_size, **factory))
        self.bias = nn.Parameter(torch.empty(out_channels, **factory)) if flag("bias", bias) else None
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw a kernel near a random orthonormal matrix (``"lot"``) or of moderate rotations, and torch's bias."""
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

    def response(self, sizes: Sizes) -> Tensor:
        """Return orthonormal blocks for a coarse domain; in eval mode without gradients they are cached."""
        return self.cached(lambda: self._built(sizes), [self.weight], self._parameters, ["weight"], sizes)

    def _built(self, sizes: Sizes) -> Tensor:
        exact = self.weight.to(at_least_float32(self.weight.dtype))
        return protected(lambda free: orthogonal_response(free, sizes, self.dilation, self.method), [exact])

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        """Apply the convolution, or its adjoint, to ``(b, in_channels, *sizes)``, or without the batch.

        Raises:
            ValueError: if the shape is another one, or the stride of a layer that makes maps smaller does not divide
                the sizes.
        """
        coarse = self._to_coarse(self._batched(input))
        response = self.response(tuple(coarse.shape[2:]))
        y = self._to_output(self._convolved(coarse, response.mH if self.transposed else response)).to(input.dtype)
        if self.bias is not None:
            y = y + self.bias.view(-1, *(1,) * self.dims)
        return y.squeeze(0) if input.ndim == self.dims + 1 else y

    def _convolved(self, x: Tensor, response: Tensor) -> Tensor:
        exact = x.to(at_least_float32(x.dtype))
        return apply_response(response.to(torch.promote_types(exact.dtype, torch.complex64)), exact, self.dims)

    @torch.no_grad()
    def lipschitz_constant(self, input_shape: Sizes, dtype: torch.dtype) -> float:
        """Return the largest norm of the blocks that the spectrum is multiplied by; see ``linalg.operator``."""
        used = self.response(self._coarse(input_shape[1:]))
        return blocks_norm(used.to(torch.promote_types(at_least_float32(dtype), torch.complex64)), type(self).__name__)

    def equivalent_kernel_size(self, *sizes: int) -> tuple[int, ...]:
        """Return the taps of the kernel on each axis, for an input of the given sizes: all positions of the finer map.

        On an axis with a single tap of the free kernel they are as many as the stride. ECO may have fewer, which are
        spread over the whole map: on each axis, of the domain after the stride, the smallest divisor of its size that
        is at least ``kernel_size``.

        >>> FourierOrthoConv2d(4, 4, 3, method="eco").equivalent_kernel_size(32, 33)
        (4, 3)
        """
        taps_of = eco_taps if self.method == "eco" else wide_sizes
        taps = taps_of(self.kernel_size, self.coarse_sizes(per_axis("sizes", sizes, self.dims)))
        return tuple(count * s for count, s in zip(taps, self.stride, strict=True))

    def at_size(self, *sizes: int) -> nn.Module:
        """Return the same function in plain ``torch.nn`` layers, for inputs of the given sizes only.

        Raises:
            ValueError: if the layer does not take inputs of these sizes.

        >>> layer = FourierOrthoConv2d(4, 8, 3, stride=2)
        >>> x = torch.randn(1, 4, 6, 8)
        >>> torch.allclose(layer.at_size(6, 8)(x), layer(x), atol=1e-5)
        True
        """
        coarse = self.coarse_sizes(per_axis("sizes", sizes, self.dims))
        built = self._built(coarse)
        plain = plain_layer(built, coarse, self.stride, self.transposed, self.bias, self.weight.dtype)
        return plain.train(self.training)

    def adjoint(self) -> _FourierConvolution:
        """Return the layer, without bias, whose matrix is the transpose; it shares the free kernel of this one."""
        twin = (_CONVOLUTION if self.transposed else _TRANSPOSED)[self.dims](
            self.out_channels, self.in_channels, self.kernel_size, self.stride, self.dilation, self.groups, bias=False,
            device="meta", method=self.method,
        )  # fmt: skip
        twin.weight, twin.cache = self.weight, self.cache
        return twin.train(self.training)

    def inverse(self) -> nn.Module:
        """Return the exact inverse, which subtracts the bias and applies the adjoint; it shares all parameters.

        Raises:
            ValueError: if the layer is not square.
        """
        _, coarse, fine = self._group_shape
        if coarse != fine:
            raise ValueError(
                f"only a square layer has an inverse: on the side of the smaller maps this one has {coarse} channels a "
                f"group, and would need {fine} at stride={self.stride}; .adjoint() is a one-sided inverse"
            )
        return self.adjoint() if self.bias is None else AffineInverse(self.adjoint(), self.bias, self.dims)

    def extra_repr(self) -> str:
        extras = "".join(
            f", {name}={value}"
            for name, value, usual in (
                ("dilation", self.dilation, (1,) * self.dims), ("groups", self.groups, 1),
                ("bias", self.bias is not None, True),
            )
            if value != usual
        )  # fmt: skip
        kernel = "of few taps all over the image" if self.method == "eco" else "as large as the image"
        return (
            f"{self.in_channels}, {self.out_channels}, free kernel {self.kernel_size}, stride={self.stride}{extras}, "
            f"method={self.method}, equivalent kernel {kernel}"
        )


class _Transposed(_FourierConvolution):
    transposed = True


class FourierOrthoConv1d(_FourierConvolution):
    """Orthogonal circular convolution with a kernel as long as the signal; see ``FourierOrthoConv2d``."""

    dims = 1


class FourierOrthoConv2d(_FourierConvolution):
    """Orthogonal circular convolution with a kernel as large as the image: Cayley, LOT and ECO.

    All singular values are 1, for every number of channels (rows orthonormal if the layer maps to fewer numbers,
    columns if to more) and every size of the image, which may change from call to call. A stride is an invertible
    downsampling followed by the convolution. The blocks are rebuilt when the size changes; in eval mode without
    gradients they are kept otherwise.

    Args:
        in_channels: channels of the input.
        out_channels: channels of the output.
        kernel_size: size of the *free* kernel, from which the blocks are made. Where it divides the size (after the
            stride), ``"eco"`` has as many taps, all over the axis; elsewhere the next larger divisor, which costs more
            to build. ``equivalent_kernel_size`` tells how many.
        stride: stride; must divide the input.
        dilation: spacing of the taps of the free kernel; not for ``"eco"``.
        groups: number of independent groups of channels.
        bias: whether to add a learnable bias.
        device: device of the parameters.
        dtype: dtype of the parameters.
        method: ``"cayley"``, ``"lot"`` or ``"eco"``; see ``trysquare.linalg.fourier``.

    Raises:
        ValueError: if an argument has no meaning.
        TypeError: for an argument of ``nn.Conv2d`` that it does not have, such as ``padding``.
        ArithmeticError: at a forward pass, if the free kernel has left the domain of the method.

    >>> layer = FourierOrthoConv2d(3, 16, 3, stride=2, method="lot")
    >>> layer(torch.randn(2, 3, 10, 12)).shape
    torch.Size([2, 16, 5, 6])
    >>> layer.equivalent_kernel_size(10, 12)
    (10, 12)
    """

    dims = 2


class FourierOrthoConv3d(_FourierConvolution):
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


_CONVOLUTION: dict[int, type[_FourierConvolution]] = {
    1: FourierOrthoConv1d,
    2: FourierOrthoConv2d,
    3: FourierOrthoConv3d,
}
_TRANSPOSED: dict[int, type[_Transposed]] = {
    1: FourierOrthoConvTranspose1d,
    2: FourierOrthoConvTranspose2d,
    3: FourierOrthoConvTranspose3d,
}
