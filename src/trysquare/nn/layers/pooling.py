"""Pooling and resampling that never amplify.

A window that shares no input with another maps its inputs by a function of gradient norm at most 1, so the whole does
not amplify. Where windows overlap, an input is read by up to ``overlap`` of them, and the result is divided by
``sqrt(overlap)``.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trysquare.nn.geometry import Size, Sizes, flag, per_axis, window_overlap
from trysquare.nn.layers.invertible import Isometry
from trysquare.nn.layers.traceable import Traceable
from trysquare.nn.linalg.norms import euclidean
from trysquare.nn.linalg.precision import at_least_float32

__all__ = [
    "GlobalL2NormPool",
    "GlobalMaxPool",
    "GlobalScaledAvgPool",
    "InvertibleDownsampling1d",
    "InvertibleDownsampling2d",
    "InvertibleDownsampling3d",
    "InvertibleUpsampling1d",
    "InvertibleUpsampling2d",
    "InvertibleUpsampling3d",
    "L2NormPool1d",
    "L2NormPool2d",
    "L2NormPool3d",
    "LipschitzMaxPool1d",
    "LipschitzMaxPool2d",
    "LipschitzMaxPool3d",
    "ScaledAvgPool1d",
    "ScaledAvgPool2d",
    "ScaledAvgPool3d",
]


_AVERAGE: dict[int, Callable[..., Tensor]] = {1: F.avg_pool1d, 2: F.avg_pool2d, 3: F.avg_pool3d}
_MAX: dict[int, Callable[..., Tensor]] = {1: F.max_pool1d, 2: F.max_pool2d, 3: F.max_pool3d}


class EuclideanNorm(Traceable, nn.Module):
    """Norms along an axis other than the first, exact at every scale, with gradient 0 at 0. 1-Lipschitz.

    Args:
        dim: the axis.
    """

    def __init__(self, dim: int = -1) -> None:
        super().__init__()
        self.dim = dim

    def forward(self, vectors: Tensor) -> Tensor:
        """Return the norm of each vector, computed in float32 or better."""
        return euclidean(vectors.to(at_least_float32(vectors.dtype)), self.dim)

    def plain_forward(self, input: Tensor) -> Tensor:  # noqa: A002
        return torch.linalg.vector_norm(input, dim=self.dim)

    def lipschitz_constant(self, input_shape: Sizes, dtype: torch.dtype) -> float:
        """A norm is 1-Lipschitz."""
        return 1.0


class _Pool(Traceable, nn.Module):
    """Windows of a pooling layer; the arguments are torch's."""

    dims: ClassVar[int]

    def __init__(self, kernel_size: Size, stride: Size | None = None, padding: Size = 0, dilation: Size = 1) -> None:
        super().__init__()
        self.kernel_size = per_axis("kernel_size", kernel_size, self.dims)
        self.stride = per_axis("stride", kernel_size if stride is None else stride, self.dims)
        self.padding = per_axis("padding", padding, self.dims, least=0)
        self.dilation = per_axis("dilation", dilation, self.dims)
        if any(2 * pad > size for pad, size in zip(self.padding, self.kernel_size, strict=True)):
            raise ValueError(f"padding={self.padding} must be at most half of kernel_size={self.kernel_size}")
        self.overlap = window_overlap(self.kernel_size, self.stride, self.dilation)

    def extra_repr(self) -> str:
        dilation = f", dilation={self.dilation}" if max(self.dilation) > 1 else ""
        return f"kernel_size={self.kernel_size}, stride={self.stride}, padding={self.padding}{dilation}"


class _SumPool(_Pool):
    """Pooling by sums over windows; torch has no dilation for these."""

    def __init__(self, kernel_size: Size, stride: Size | None = None, padding: Size = 0) -> None:
        super().__init__(kernel_size, stride, padding)


class _ScaledAvgPool(_SumPool):
    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        mean = _AVERAGE[self.dims](input, self.kernel_size, self.stride, self.padding)
        return mean * (prod(self.kernel_size) / self.overlap) ** 0.5

    plain_forward = forward


class _L2NormPool(_SumPool):
    def __init__(self, kernel_size: Size, stride: Size | None = None, padding: Size = 0) -> None:
        super().__init__(kernel_size, stride, padding)
        self.norm = EuclideanNorm()

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        pads = [pad for amount in reversed(self.padding) for pad in (amount, amount)]
        windows = F.pad(input, pads)
        for axis, (size, stride) in enumerate(zip(self.kernel_size, self.stride, strict=True)):
            windows = windows.unfold(input.ndim - self.dims + axis, size, stride)
        norms = self.norm(windows.flatten(input.ndim)) * self.overlap**-0.5
        return norms.to(input.dtype)

    def plain_forward(self, input: Tensor) -> Tensor:  # noqa: A002
        windows = F.pad(input, [pad for amount in reversed(self.padding) for pad in (amount, amount)])
        for size, stride in zip(self.kernel_size, self.stride, strict=True):
            windows = windows.unfold(-self.dims, size, stride)  # the axis of the positions inside goes to the end
        return torch.linalg.vector_norm(windows.flatten(-self.dims), dim=-1) * self.overlap**-0.5


class _LipschitzMaxPool(_Pool):
    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        pooled = _MAX[self.dims](input, self.kernel_size, self.stride, self.padding, self.dilation)
        return pooled if self.overlap == 1 else pooled * self.overlap**-0.5

    plain_forward = forward


class ScaledAvgPool1d(_ScaledAvgPool):
    """Scaled average pooling of ``(batch, channels, length)``; see ``ScaledAvgPool2d``."""

    dims = 1


class ScaledAvgPool2d(_ScaledAvgPool):
    """Average pooling times the square root of the window's size: rows of norm 1, not ``1 / sqrt(size)``.

    Without overlap the layer has orthonormal rows. With overlap it is scaled to stay 1-Lipschitz.

    Args:
        kernel_size: size of the window.
        stride: step of the window; the window's size if not given.
        padding: zeros added on both sides.

    >>> ScaledAvgPool2d(2)(torch.ones(1, 1, 2, 2))
    tensor([[[[2.]]]])
    """

    dims = 2


class ScaledAvgPool3d(_ScaledAvgPool):
    """Scaled average pooling of ``(batch, channels, depth, height, width)``; see ``ScaledAvgPool2d``."""

    dims = 3


class L2NormPool1d(_L2NormPool):
    """Norm pooling of ``(batch, channels, length)``; see ``L2NormPool2d``."""

    dims = 1


class L2NormPool2d(_L2NormPool):
    """Euclidean norm of each window: 1-Lipschitz, norm preserving without overlap, and with gradient 0 at 0.

    Args:
        kernel_size: size of the window.
        stride: step of the window; the window's size if not given.
        padding: zeros added on both sides.

    >>> L2NormPool2d(2)(torch.tensor([[[[0.0, 3.0], [4.0, 0.0]]]]))
    tensor([[[[5.]]]])
    """

    dims = 2


class L2NormPool3d(_L2NormPool):
    """Norm pooling of ``(batch, channels, depth, height, width)``; see ``L2NormPool2d``."""

    dims = 3


class LipschitzMaxPool1d(_LipschitzMaxPool):
    """1-Lipschitz max pooling of ``(batch, channels, length)``; see ``LipschitzMaxPool2d``."""

    dims = 1


class LipschitzMaxPool2d(_LipschitzMaxPool):
    """``nn.MaxPool2d`` divided by the root of the number of windows that share an input, so that it is 1-Lipschitz.

    Torch's own has Lipschitz constant ``2`` with windows of 3 and stride 2: one input may be the
    maximum of four windows.

    Args:
        kernel_size: size of the window.
        stride: step of the window; the window's size if not given.
        padding: minus infinity added on both sides.
        dilation: spacing of the window's entries.

    >>> LipschitzMaxPool2d(3, stride=2, padding=1)(torch.ones(1, 1, 4, 4))
    tensor([[[[0.5000, 0.5000],
              [0.5000, 0.5000]]]])
    """

    dims = 2


class LipschitzMaxPool3d(_LipschitzMaxPool):
    """1-Lipschitz max pooling of ``(batch, channels, depth, height, width)``; see ``LipschitzMaxPool2d``."""

    dims = 3


class _GlobalPool(Traceable, nn.Module):
    """Pooling over every position of ``(batch, channels, *sizes)``, any number of axes."""

    def __init__(self, keepdim: bool = True) -> None:
        super().__init__()
        self.keepdim = flag("keepdim", keepdim)

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        """Pool ``(batch, channels, *sizes)`` to ``(batch, channels, 1, ...)``."""
        if input.ndim < 3:
            raise ValueError(f"input of shape {tuple(input.shape)} has no positions; it must be (batch, channels, ...)")
        pooled = self._pool(input.flatten(2))
        return pooled[(..., *(None,) * (input.ndim - 2))] if self.keepdim else pooled

    def plain_forward(self, input: Tensor) -> Tensor:  # noqa: A002
        pooled = self._pool(input.flatten(2))
        return pooled.reshape(input.shape[:2] + (input.ndim - 2) * (1,)) if self.keepdim else pooled

    def _pool(self, positions: Tensor) -> Tensor:
        raise NotImplementedError

    def extra_repr(self) -> str:
        return f"keepdim={self.keepdim}"


class GlobalScaledAvgPool(_GlobalPool):
    """Mean over all positions, times the root of their number: orthonormal rows.

    Args:
        keepdim: whether the pooled axes stay, with size 1.

    >>> GlobalScaledAvgPool(keepdim=False)(torch.ones(1, 2, 4, 4))
    tensor([[4., 4.]])
    """

    def _pool(self, positions: Tensor) -> Tensor:
        return positions.mean(-1) * positions.shape[-1] ** 0.5


class GlobalL2NormPool(_GlobalPool):
    """Euclidean norm over all positions, with gradient 0 at 0. 1-Lipschitz and norm preserving.

    Args:
        keepdim: whether the pooled axes stay, with size 1.

    >>> GlobalL2NormPool(keepdim=False)(torch.ones(1, 2, 4, 4))
    tensor([[4., 4.]])
    """

    def __init__(self, keepdim: bool = True) -> None:
        super().__init__(keepdim)
        self.norm = EuclideanNorm()

    def _pool(self, positions: Tensor) -> Tensor:
        return self.norm(positions).to(positions.dtype)


class GlobalMaxPool(_GlobalPool):
    """Maximum over all positions. 1-Lipschitz.

    Args:
        keepdim: whether the pooled axes stay, with size 1.

    >>> GlobalMaxPool(keepdim=False)(torch.arange(4.0).view(1, 1, 2, 2))
    tensor([[3.]])
    """

    def _pool(self, positions: Tensor) -> Tensor:
        return positions.amax(-1)


class _Resampling(Traceable, Isometry, nn.Module):
    """Blocks of positions, moved to channels or back."""

    dims: ClassVar[int]

    def __init__(self, factor: Size = 2) -> None:
        super().__init__()
        self.factor = per_axis("factor", factor, self.dims)

    def _check_axes(self, x: Tensor) -> None:
        if x.ndim not in (self.dims + 1, self.dims + 2):
            raise ValueError(f"input of shape {tuple(x.shape)} must be ([batch,] channels, and {self.dims} sizes)")

    def inverse(self) -> nn.Module:
        """Return the layer that moves the positions back, which is the adjoint too."""
        downwards = isinstance(self, _InvertibleDownsampling)
        return (_UPSAMPLING if downwards else _DOWNSAMPLING)[self.dims](self.factor)

    adjoint = inverse

    def extra_repr(self) -> str:
        return f"factor={self.factor}"


class _InvertibleDownsampling(_Resampling):
    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        """``(batch, channels, *sizes)`` to ``(batch, channels * prod(factor), *(sizes / factor))``."""
        self._check_axes(input)
        return space_to_depth(input, self.factor)

    def plain_forward(self, input: Tensor) -> Tensor:  # noqa: A002
        x, channels = input, -self.dims - 1
        for axis, factor in enumerate(self.factor, start=-self.dims):
            x = x.unflatten(axis, (-1, factor)).movedim(axis, channels).flatten(channels - 1, channels)
        return x


class _InvertibleUpsampling(_Resampling):
    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        """``(batch, channels, *sizes)`` to ``(batch, channels / prod(factor), *(sizes * factor))``."""
        self._check_axes(input)
        return depth_to_space(input, self.factor)

    def plain_forward(self, input: Tensor) -> Tensor:  # noqa: A002
        x, channels = input, -self.dims - 1
        for axis, factor in reversed(list(enumerate(self.factor, start=-self.dims))):
            x = x.unflatten(channels, (-1, factor)).movedim(channels, axis).flatten(axis - 1, axis)
        return x


def space_to_depth(x: Tensor, factor: tuple[int, ...]) -> Tensor:
    """Move each block of ``factor`` positions of the last axes to channels, in the order of ``nn.PixelUnshuffle``."""
    dims = len(factor)
    sizes = x.shape[-dims:]
    if any(size % f for size, f in zip(sizes, factor, strict=True)):
        raise ValueError(f"sizes {tuple(sizes)} are not divisible by factor={factor}; pad or crop the input")
    blocks = [part for size, f in zip(sizes, factor, strict=True) for part in (size // f, f)]
    lead = x.ndim - dims
    split = x.reshape(*x.shape[:lead], *blocks)
    order = [*range(lead), *(lead + 2 * a + 1 for a in range(dims)), *(lead + 2 * a for a in range(dims))]
    return split.permute(order).flatten(lead - 1, lead + dims - 1)


def depth_to_space(x: Tensor, factor: tuple[int, ...]) -> Tensor:
    """Inverse of ``space_to_depth``."""
    dims = len(factor)
    lead = x.ndim - dims
    channels = x.shape[lead - 1]
    if channels % prod(factor):
        raise ValueError(f"{channels} channels are not divisible by {prod(factor)}, the positions of factor={factor}")
    split = x.unflatten(lead - 1, (channels // prod(factor), *factor))
    order = [*range(lead), *(axis for a in range(dims) for axis in (lead + dims + a, lead + a))]
    spread = split.permute(order)
    return spread.reshape(*spread.shape[:lead], *(s * f for s, f in zip(x.shape[lead:], factor, strict=True)))


class InvertibleDownsampling1d(_InvertibleDownsampling):
    """Move blocks of positions to channels; see ``InvertibleDownsampling2d``."""

    dims = 1


class InvertibleDownsampling2d(_InvertibleDownsampling):
    """Move each block of positions to channels. Isometric: it permutes.

    The order is that of ``nn.PixelUnshuffle``, with a factor for each axis.

    Args:
        factor: size of the blocks; must divide the input.

    >>> InvertibleDownsampling2d((1, 2))(torch.randn(1, 3, 4, 4)).shape
    torch.Size([1, 6, 4, 2])
    """

    dims = 2


class InvertibleDownsampling3d(_InvertibleDownsampling):
    """Move blocks of positions to channels; see ``InvertibleDownsampling2d``."""

    dims = 3


class InvertibleUpsampling1d(_InvertibleUpsampling):
    """Inverse of ``InvertibleDownsampling1d``."""

    dims = 1


class InvertibleUpsampling2d(_InvertibleUpsampling):
    """Inverse of ``InvertibleDownsampling2d``, the permutation of ``nn.PixelShuffle``.

    Args:
        factor: size of the blocks; its product must divide the number of channels.

    >>> x = torch.randn(1, 3, 4, 4)
    >>> bool((InvertibleUpsampling2d(2)(InvertibleDownsampling2d(2)(x)) == x).all())
    True
    """

    dims = 2


class InvertibleUpsampling3d(_InvertibleUpsampling):
    """Inverse of ``InvertibleDownsampling3d``."""

    dims = 3


_DOWNSAMPLING: dict[int, type[_Resampling]] = {
    1: InvertibleDownsampling1d,
    2: InvertibleDownsampling2d,
    3: InvertibleDownsampling3d,
}
_UPSAMPLING: dict[int, type[_Resampling]] = {
    1: InvertibleUpsampling1d,
    2: InvertibleUpsampling2d,
    3: InvertibleUpsampling3d,
}
