"""Orthogonal convolutions in one to three dimensions, and their adjoints.

One implementation serves all six classes: torch stores the weight of a convolution as ``(out, in /
g, *k)`` and of a transposed one as ``(in, out / g, *k)``, so the same tensor makes the second the
adjoint of the first.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn

from trysquare.nn.geometry import ConvGeometry, Size, Sizes, flag, per_axis, per_axis_each
from trysquare.nn.layers.convolution import Convolution, crops, in_format_of, native_crop, no_such_input
from trysquare.nn.layers.invertible import AffineInverse, Isometry
from trysquare.nn.layers.series import Series
from trysquare.nn.linalg.operator import LinearOperator
from trysquare.nn.linalg.precision import as_autocast
from trysquare.nn.parametrizations import METHODS, SOC, find_method
from trysquare.nn.parametrizations.base import Device, ParametrizedWeight, check_dtype

__all__ = [
    "OrthoConv1d",
    "OrthoConv2d",
    "OrthoConv3d",
    "OrthoConvTranspose1d",
    "OrthoConvTranspose2d",
    "OrthoConvTranspose3d",
]

Options = dict[str, Any]

_DEFAULT_ORTHOGONALIZER = "cholesky"


class OrthogonalConvolution(Isometry, ParametrizedWeight):
    """Common to plain and transposed layers: the geometry of the convolution, and the way to the adjoint."""

    dims: ClassVar[int]
    transposed: bool = False
    geometry: ConvGeometry
    method: str
    orthogonalizer: str
    options: Options
    # Declared by torch's classes, of which this is a mixin.
    in_channels: int
    out_channels: int
    groups: int
    stride: Sizes
    padding: str | Sizes
    padding_mode: Any
    _convolution: Convolution
    _series: Series | None
    _padding_argument: str | Size
    _note: str
    _kernel_argument: Size

    def _plan(
        self,
        channels: tuple[int, int],
        sizes: dict[str, Size],
        groups: int,
        parsimonious: bool,
        method: str,
        orthogonalizer: str,
        options: Options,
    ) -> ConvGeometry:
        """Return the geometry of the convolution, with the kernel size that the method makes of ``kernel_size``."""
        made_by = find_method(method, options)
        if not made_by.uses_orthogonalizer and orthogonalizer != _DEFAULT_ORTHOGONALIZER:
            raise ValueError(f"orthogonalizer={orthogonalizer!r} has no meaning for method={method!r}; leave it out")
        parsimonious = flag("parsimonious", parsimonious)
        if parsimonious and not made_by.orthogonal:
            raise ValueError(f"parsimonious=True has no meaning for method={method!r}; leave it out")
        kernel_size, stride, dilation = per_axis_each(self.dims, **sizes)
        made_size = made_by.full_kernel_size(kernel_size, stride, dilation, **options)
        kinds = made_by.orthogonal, made_by.exact, self.transposed
        return ConvGeometry(*channels, made_size, stride, dilation, groups, parsimonious, *kinds)

    def _finish(
        self,
        geometry: ConvGeometry,
        convolution: Convolution,
        kernel_size: Size,
        padding: str | Size,
        method: str,
        orthogonalizer: str,
        options: Options,
    ) -> None:
        """Keep the arguments and parametrize the weight, once torch's constructor has run."""
        self.geometry, self.method, self.orthogonalizer = geometry, method, orthogonalizer
        self._kernel_argument, self._padding_argument = kernel_size, padding
        self.options, self._convolution = options, convolution
        made_by: Any = METHODS[method]
        made = made_by(geometry, orthogonalizer, **options, device=self.weight.device, dtype=self.weight.dtype)
        self._series = Series.of(made, geometry, convolution) if isinstance(made, SOC) else None
        self._note = f", {made.note}" if made.note else ""
        self._parametrize_weight(made)

    def _applies_terms(self) -> bool:
        """Whether a pass applies SOC's terms to the input, and does without the weight.

        That was decided when the layer was built. Nobody may have replaced the parametrization since, and the layer
        must not have been cast to a shorter dtype: a kernel is rounded once, the terms would be rounded one by one.
        """
        if self._series is None or self._made_by() is None:
            return False
        return self.parametrization.dtype_from(self._sources()) in (torch.float32, torch.float64)

    def _factors(self) -> tuple[Tensor | None, Tensor]:
        """Return SOC's matrix and skew kernel."""
        return cast("SOC", self.parametrization).factors(*self._sources())

    def _sources(self) -> list[Tensor]:
        """Return the free tensors, whether they are parameters or not."""
        held = self._parametrizations_of_weight
        return [getattr(held, f"original{number}") for number in range(held.ntensors)]

    def used_weight(self) -> Tensor:
        """Return the kernel of a pass, with the casts of autocast; of terms, what they add up to in float64."""
        if not self._applies_terms():
            return super().used_weight()
        made = cast("SOC", self.parametrization)
        matrix, skew = self._factors()
        exact = None if matrix is None else as_autocast(matrix).double()
        return made.of_factors(exact, as_autocast(skew).double())

    def linear_operator(self, input_shape: Sequence[int], weight: Tensor | None = None) -> LinearOperator:
        """Return the layer without its bias as a linear operator; see ``linalg.operator.LinearLayer``."""
        return self._convolution.linear_operator(self.exact_weight(weight), tuple(input_shape))

    @property
    def is_one_call(self) -> bool:
        """Whether a pass is one convolution of torch's with the weight: no terms, and no wrapping of its result."""
        return not self._convolution.transposed and not self._applies_terms()

    def as_torch(self) -> nn.Module:
        """Return a plain layer of torch, with a padding layer in front where torch has no argument for the padding."""
        return self._convolution.plain(self.weight, self.bias, self.training)

    @property
    def truncation_error(self) -> float:
        """Certified distance of the singular values from 1 that the method leaves, rounding apart; 0 if it is exact."""
        return self.parametrization.truncation_error

    def _options(self) -> Options:
        """Return the arguments that a layer and its adjoint have in common."""
        return {
            "kernel_size": self._kernel_argument,
            "stride": self.geometry.stride,
            "dilation": self.geometry.dilation,
            "groups": self.groups,
            "padding_mode": self.padding_mode,
            "method": self.method,
            "orthogonalizer": self.orthogonalizer,
            "parsimonious": self.geometry.parsimonious,
            **self.options,
        }

    def _share_weight(self, twin: OrthogonalConvolution) -> OrthogonalConvolution:
        if self.padding_mode == "circular" and not self._keeps_all_outputs:
            raise ValueError(
                f"circular padding {self._convolution.pads} drops outputs, so the size of the input cannot be told "
                "from that of the output; use padding='same' for a layer with an adjoint"
            )
        self._lend_weight(twin)
        return twin

    @property
    def _keeps_all_outputs(self) -> bool:
        axes = zip(self._convolution.pads, self.geometry.extent, self.geometry.stride, strict=True)
        return self.padding_mode == "circular" and all(sum(pad) >= extent - stride for pad, extent, stride in axes)

    def _check_axes(self, x: Tensor) -> None:
        channels = x.shape[-1 - self.dims] if x.ndim in (self.dims + 1, self.dims + 2) else 0
        if channels != self.in_channels or 0 in x.shape[-self.dims :]:
            raise no_such_input(x, self.in_channels, self.dims)

    def adjoint(self) -> OrthogonalConvolution:
        """Return the layer, without bias, whose matrix is the transpose; it shares the free tensors of this one."""
        raise NotImplementedError

    def inverse(self) -> nn.Module:
        """Return the exact inverse, which subtracts the bias and applies the adjoint; it shares all parameters.

        Raises:
            ValueError: if the layer is not square (it does not map to as many numbers as it reads), or not orthogonal.
        """
        geometry = self.geometry
        if not self.parametrization.is_orthogonal:
            raise ValueError(
                f"method={self.method!r} makes this layer 1-Lipschitz, not orthogonal, so its adjoint is not its "
                "inverse; use method='aoc'"
            )
        if not geometry.square:
            needed = geometry.group_in * prod(geometry.stride)
            raise ValueError(
                f"only a square layer has an inverse: {geometry.group_in} channels per group at stride="
                f"{geometry.stride} would need {needed} on the other side, not {geometry.group_out}; .adjoint() is a "
                "one-sided inverse"
            )
        if not self._keeps_all_outputs:
            raise ValueError(
                f"padding_mode={self.padding_mode!r} with padding={self.padding!r} loses what falls past the border, "
                "so there is no inverse; use padding='same', padding_mode='circular'"
            )
        return self.adjoint() if self.bias is None else AffineInverse(self.adjoint(), self.bias, self.dims)

    def extra_repr(self) -> str:
        mode = (
            ""
            if "padding_mode" in super().extra_repr() or self.padding_mode == "zeros"
            else f", padding_mode={self.padding_mode}"
        )
        variant = ", parsimonious=True" if self.geometry.parsimonious else ""
        options = "".join(f", {name}={value}" for name, value in self.options.items())
        by = f", orthogonalizer={self.orthogonalizer}" if find_method(self.method).uses_orthogonalizer else ""
        construction = f"method={self.method}{by}{variant}{options}{self._note}"
        return f"{super().extra_repr()}{mode}, {construction}"


class _Convolution(OrthogonalConvolution):
    """Constructor and forward pass of ``OrthoConv1d``, ``2d`` and ``3d``."""

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Size,
        stride: Size = 1,
        padding: str | Size = "same",
        dilation: Size = 1,
        groups: int = 1,
        bias: bool = True,
        padding_mode: str = "circular",
        device: Device = None,
        dtype: torch.dtype | None = None,
        *,
        method: str = "aoc",
        orthogonalizer: str = _DEFAULT_ORTHOGONALIZER,
        parsimonious: bool = False,
        **options: Any,
    ) -> None:
        sizes = {"kernel_size": kernel_size, "stride": stride, "dilation": dilation}
        channels = (in_channels, out_channels)
        geometry = self._plan(channels, sizes, groups, parsimonious, method, orthogonalizer, options)
        bias = flag("bias", bias)
        convolution = Convolution.of(geometry, geometry.pads(padding, padding_mode), padding_mode)
        check_dtype(dtype)
        super().__init__(
            geometry.in_channels,
            geometry.out_channels,
            geometry.kernel_size,
            geometry.stride,
            0,
            geometry.dilation,
            geometry.groups,
            bias,
            padding_mode,
            device,
            dtype,
        )
        self._reversed_padding_repeated_twice = convolution.flat_pads  # what torch's own forward would read
        self.padding = "same" if convolution.torch_pads is None else convolution.torch_pads
        self._finish(geometry, convolution, kernel_size, padding, method, orthogonalizer, options)

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        """Convolve, as ``nn.Conv*d`` does.

        Raises:
            ValueError: if the padding is circular and the stride does not divide the size of the
                input.
        """
        self._check_axes(input)
        if self._series is not None and self._applies_terms():
            return in_format_of(input, self._series(input, *self._factors(), self.bias))
        return self._convolution(input, self._current_weight(), self.bias)

    def adjoint(self) -> OrthogonalConvolution:
        """Return the transposed layer, without bias, which shares the free tensors of this one.

        With zero padding and integers for ``padding`` several input sizes give the same output size; torch's
        ``output_size`` says which one is meant.

        >>> down = OrthoConv2d(4, 16, 4, stride=2)
        >>> x = torch.randn(1, 4, 8, 8)
        >>> bool(torch.allclose(down.adjoint()(down(x) - down.bias.view(-1, 1, 1)), x, atol=1e-5))
        True
        """
        twin = _TRANSPOSED[self.dims](
            self.out_channels,
            self.in_channels,
            padding=self._padding_argument,
            bias=False,
            device="meta",
            **self._options(),
        )
        return self._share_weight(twin)


class _TransposedConvolution(OrthogonalConvolution):
    """Constructor and forward pass of ``OrthoConvTranspose1d``, ``2d`` and ``3d``."""

    transposed = True

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Size,
        stride: Size = 1,
        padding: str | Size = "same",
        output_padding: Size = 0,
        groups: int = 1,
        bias: bool = True,
        dilation: Size = 1,
        padding_mode: str = "circular",
        device: Device = None,
        dtype: torch.dtype | None = None,
        *,
        method: str = "aoc",
        orthogonalizer: str = _DEFAULT_ORTHOGONALIZER,
        parsimonious: bool = False,
        **options: Any,
    ) -> None:
        sizes = {"kernel_size": kernel_size, "stride": stride, "dilation": dilation}
        channels = (out_channels, in_channels)
        geometry = self._plan(channels, sizes, groups, parsimonious, method, orthogonalizer, options)
        bias = flag("bias", bias)
        output_padding = per_axis("output_padding", output_padding, self.dims, least=0)
        pads = crops(geometry, padding, output_padding, padding_mode)
        convolution = Convolution.of(geometry, pads, padding_mode)
        check_dtype(dtype)
        super().__init__(
            geometry.out_channels,
            geometry.in_channels,
            geometry.kernel_size,
            geometry.stride,
            0,
            0,
            geometry.groups,
            bias,
            geometry.dilation,
            "zeros",
            device,
            dtype,
        )
        self.padding_mode = padding_mode
        self.padding, self.output_padding, _ = native_crop(pads, geometry.stride, geometry.dilation)
        self._finish(geometry, convolution, kernel_size, padding, method, orthogonalizer, options)

    def forward(self, input: Tensor, output_size: list[int] | None = None) -> Tensor:  # noqa: A002
        """Apply the adjoint of the convolution, as ``nn.ConvTranspose*d`` does.

        Args:
            input: ``(batch, in_channels, *sizes)``.
            output_size: wanted spatial sizes; with circular padding only ``sizes * stride`` is
                possible.
        """
        self._check_axes(input)
        convolution = self._convolution
        if output_size is not None:
            sizes = input.shape[-self.dims :]
            convolution = convolution.to_size(sizes, output_size)
        if self._series is not None and convolution.pads == self._convolution.pads and self._applies_terms():
            return in_format_of(input, self._series(input, *self._factors(), self.bias))
        return convolution(input, self._current_weight(), self.bias)

    def adjoint(self) -> OrthogonalConvolution:
        """Return the convolution, without bias, that this layer is the adjoint of; it shares the free tensors.

        Raises:
            ValueError: if zeros are added to the output that no convolution with these numbers would read.
        """
        added = tuple(left - right for left, right in self._convolution.pads)
        if self.padding_mode == "zeros" and any(a >= s for a, s in zip(added, self.stride, strict=True)):
            raise ValueError(
                f"output_padding={added} reaches the stride {self.stride}, so the convolution of the output has more "
                "windows than the input has positions; use a smaller output_padding for a layer with an adjoint"
            )
        twin = CONVOLUTION[self.dims](
            self.out_channels,
            self.in_channels,
            padding=self._padding_argument,
            bias=False,
            device="meta",
            **self._options(),
        )
        return self._share_weight(twin)


class OrthoConv1d(_Convolution, nn.Conv1d):
    """Orthogonal ``nn.Conv1d``; see ``OrthoConv2d``."""

    dims = 1


class OrthoConv2d(_Convolution, nn.Conv2d):
    """An ``nn.Conv2d`` that is an orthogonal matrix: rows orthonormal if it maps to fewer numbers, columns if to more.

    Arguments are torch's, integers or one for each axis. With the defaults all singular values are
    1, for every kernel size, stride, dilation and number of groups for which that is possible; what
    is not possible raises ``ValueError`` with the reason.

    Args:
        in_channels: channels of the input.
        out_channels: channels of the output.
        kernel_size: size of the kernel.
        stride: stride; must divide the input if the padding is circular.
        padding: ``"same"`` (output size is input size / stride), ``"valid"`` or integers.
        dilation: spacing of the taps.
        groups: number of independent groups of channels.
        bias: whether to add a learnable bias.
        padding_mode: ``"circular"`` (orthogonal) or ``"zeros"`` (1-Lipschitz, orthogonal away from
            the border).
        device: device of the parameters.
        dtype: dtype of the weight; free tensors are kept in float32 or float64.
        method: how the kernel is parametrized, one of ``trysquare.METHODS``.
        orthogonalizer: how matrices are made orthonormal, one of
            ``trysquare.linalg.ORTHOGONALIZERS``.
        parsimonious: with a stride and no more outputs than inputs, use the paper's cheaper and
            less expressive kernel.
        options: further options of the method; ``trysquare.METHODS[method].options`` names them, and its class
            explains them.

    Raises:
        ValueError: if no orthogonal layer has these numbers, naming them and a way out.
        TypeError: if the method has no such option.

    >>> down = OrthoConv2d(64, 128, 3, stride=2)
    >>> down(torch.randn(1, 64, 32, 32)).shape
    torch.Size([1, 128, 16, 16])
    """

    dims = 2


class OrthoConv3d(_Convolution, nn.Conv3d):
    """Orthogonal ``nn.Conv3d``; see ``OrthoConv2d``."""

    dims = 3


class OrthoConvTranspose1d(_TransposedConvolution, nn.ConvTranspose1d):
    """Orthogonal ``nn.ConvTranspose1d``; see ``OrthoConvTranspose2d``."""

    dims = 1


class OrthoConvTranspose2d(_TransposedConvolution, nn.ConvTranspose2d):
    """An ``nn.ConvTranspose2d`` that is the exact adjoint of the ``OrthoConv2d`` with the same numbers.

    Arguments are torch's, in torch's order, and otherwise those of ``OrthoConv2d``. Circular
    padding, which torch's own transposed layers refuse, wraps around what falls past the border;
    the output is then ``input size x stride``.

    >>> up = OrthoConvTranspose2d(128, 64, 3, stride=2)
    >>> up(torch.randn(1, 128, 16, 16)).shape
    torch.Size([1, 64, 32, 32])
    """

    dims = 2


class OrthoConvTranspose3d(_TransposedConvolution, nn.ConvTranspose3d):
    """Orthogonal ``nn.ConvTranspose3d``; see ``OrthoConvTranspose2d``."""

    dims = 3


CONVOLUTION: dict[int, type[_Convolution]] = {1: OrthoConv1d, 2: OrthoConv2d, 3: OrthoConv3d}
_TRANSPOSED: dict[int, type[_TransposedConvolution]] = {
    1: OrthoConvTranspose1d,
    2: OrthoConvTranspose2d,
    3: OrthoConvTranspose3d,
}
