"""Linear maps with a kernel at hand, and their export: what convolutions and blocks of several kernels share."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from trysquare.geometry import Pads, Sizes, check_circular_size
from trysquare.layers.base import copy_weights
from trysquare.layers.padding import (
    CIRCULAR_PAD,
    CONV,
    CONV_TRANSPOSE,
    PLAIN_CONV,
    PLAIN_CONV_TRANSPOSE,
    ZERO_PAD,
    flat,
    native_crop,
    symmetric,
)
from trysquare.layers.wrapping import circular_convolution, circular_fold, circular_pad


@dataclass(frozen=True)
class Application:
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

    @property
    def dims(self) -> int:
        """Number of axes."""
        return len(self.kernel_size)

    @property
    def extent(self) -> Sizes:
        """Positions from the first tap to the last on each axis."""
        return tuple(d * (k - 1) + 1 for k, d in zip(self.kernel_size, self.dilation, strict=True))

    def adjoint(self) -> Application:
        """Of a convolution, the transposed one, with the same kernel, to outputs of ``stride`` times the size."""
        axes = zip(self.pads, self.extent, self.stride, strict=True)
        return replace(self, transposed=True, pads=tuple((left, e - s - left) for (left, _), e, s in axes))

    def flipped(self) -> Application:
        """Of a convolution with stride 1, the transposed one as a plain one, with the adjoint kernel."""
        return replace(self, pads=tuple((right, left) for left, right in self.pads))

    def __call__(self, x: Tensor, kernel: Tensor, bias: Tensor | None = None) -> Tensor:
        """Apply ``kernel`` to ``(batch, channels, *sizes)``, or without the batch; a matrix to the last axis.

        Raises:
            ValueError: if the padding is circular and the stride does not divide the sizes.
        """
        if not self.dims:
            return F.linear(x, kernel, bias)
        if self.transposed:
            return self._spread(x, kernel, bias)
        if self.mode == "circular":
            return self._convolve_around(x, kernel, bias)
        return self._convolve(F.pad(x, flat(self.pads)), kernel, bias)

    def _convolve(self, padded: Tensor, kernel: Tensor, bias: Tensor | None) -> Tensor:
        return CONV[self.dims](padded, kernel, bias, self.stride, 0, self.dilation, self.groups)

    def _convolve_around(self, x: Tensor, kernel: Tensor, bias: Tensor | None) -> Tensor:
        sizes = x.shape[-self.dims :]
        check_circular_size(sizes, self.stride)
        if not any(map(any, self.pads)):
            return self._convolve(x, kernel, bias)
        if any(max(pad) > size for pad, size in zip(self.pads, sizes, strict=True)):
            return self._convolve(circular_pad(x, self.pads), kernel, bias)
        return circular_convolution(x, kernel, bias, flat(self.pads), self.stride, self.dilation, self.groups)

    def _spread(self, x: Tensor, kernel: Tensor, bias: Tensor | None) -> Tensor:
        transpose: Any = CONV_TRANSPOSE[self.dims]
        if self.mode == "circular":
            full = transpose(x, kernel, None, self.stride, 0, 0, self.groups, self.dilation)
            sizes = tuple(size * s for size, s in zip(x.shape[-self.dims :], self.stride, strict=True))
            output = circular_fold(full, tuple(left for left, _ in self.pads), sizes)
            return output if bias is None else output + bias.to(output.dtype).view(-1, *(1,) * self.dims)
        padding, extra, rest = native_crop(self.pads, self.stride, self.dilation)
        output = transpose(x, kernel, bias, self.stride, padding, extra, self.groups, self.dilation)
        return F.pad(output, flat(rest)) if any(map(any, rest)) else output

    def plain(self, kernel: Tensor, bias: Tensor | None, training: bool) -> nn.Module:
        """The same with this kernel in plain layers of torch; padding is one where torch has no argument for it."""
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
            return plain  # type: ignore[no-any-return]
        pad = CIRCULAR_PAD if self.mode == "circular" else ZERO_PAD
        return nn.Sequential(pad[self.dims](tuple(flat(self.pads))), plain).train(training)

    def _torch_padding(self) -> Any:
        """Torch's argument for the padding, if it has one."""
        if symmetric(self.pads):
            return tuple(left for left, _ in self.pads)
        same = self.pads == tuple(((e - 1) // 2, e // 2) for e in self.extent)
        return "same" if same and self.mode == "circular" and set(self.stride) == {1} else None

    def _plain_transposed(self, kernel: Tensor, bias: Tensor | None, training: bool) -> nn.Module:
        """A transposed convolution; a periodic extension of the input and a crop of the result wrap around."""
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
        return nn.Sequential(CIRCULAR_PAD[self.dims](tuple(flat(reach))), plain).train(training)

    def _cropped(self, crops: Pads, kernel: Tensor, bias: Tensor | None, training: bool) -> nn.Module:
        """``nn.ConvTranspose*d`` with ``crops`` cut off its full output."""
        padding, extra, rest = native_crop(crops, self.stride, self.dilation)
        plain = PLAIN_CONV_TRANSPOSE[self.dims](
            kernel.shape[0], kernel.shape[1] * self.groups, self.kernel_size, self.stride, padding, extra, self.groups,
            bias is not None, self.dilation, device="meta",
        )  # fmt: skip
        copy_weights(plain, kernel, bias, training)
        if not any(map(any, rest)):
            return plain  # type: ignore[no-any-return]
        return nn.Sequential(plain, ZERO_PAD[self.dims](tuple(flat(rest)))).train(training)
