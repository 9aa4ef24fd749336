"""Linear layers as operators: a kernel, and what each axis of a domain lets it read.

A transposed convolution is the adjoint of the plain convolution with the same weight, so it is read as that one. A
matrix is a convolution without axes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from typing import Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from torch import Tensor

from trysquare import torch_internals
from trysquare.nn.geometry import Pads, Sizes, extent, flat_pads
from trysquare.nn.linalg.kernels import CONV, CONV_TRANSPOSE
from trysquare.nn.linalg.precision import full_precision


@dataclass(frozen=True)
class Axis:
    """One axis of a convolution: what it reads of a domain of ``size`` positions.

    Attributes:
        size: positions of the domain.
        windows: outputs.
        extent: positions from the first tap to the last.
        stride: positions from one window to the next.
        pad: positions added (cut off if negative) on the left and on the right.
        mode: what they hold: ``"zeros"``, ``"circular"``, ``"reflect"`` or ``"replicate"``.
    """

    size: int
    windows: int
    extent: int
    stride: int
    pad: tuple[int, int]
    mode: str

    @cached_property
    def read(self) -> int:
        """Padded positions that some window spans."""
        return (self.windows - 1) * self.stride + self.extent

    @cached_property
    def sources(self) -> Tensor:
        """Position of the domain that each padded position repeats."""
        positions = torch.arange(-self.pad[0], self.size + self.pad[1])
        if self.mode == "circular":
            return positions % self.size
        if self.mode == "reflect":
            folded = positions.abs()
            return torch.minimum(folded, 2 * (self.size - 1) - folded)
        return positions.clamp(0, self.size - 1)

    @cached_property
    def repeats(self) -> int:
        """How often the padding repeats a position that is read: the square of the norm of the padding."""
        if self.mode == "zeros" or self.on_circle:
            return 1
        # It depends on what is near the ends alone: leave out windows in the middle of a long axis.
        enough = 4 * (sum(map(abs, self.pad)) + self.extent + self.stride)
        if (spare := (self.size - enough) // self.stride) > 0:
            return replace(self, size=self.size - spare * self.stride, windows=self.windows - spare).repeats
        return int(torch.bincount(self.sources[: self.read]).max())

    @cached_property
    def apart(self) -> bool:
        """Whether windows neither overlap nor meet the padding, so that any domain will do."""
        return self.pad[0] == 0 and self.extent <= self.stride and self.read <= self.size

    @cached_property
    def on_circle(self) -> bool:
        """Whether the outputs are distinct outputs of the circular convolution on the domain itself."""
        total = sum(self.pad)
        return self.apart or (
            self.mode == "circular" and 0 <= total < self.extent and min(self.pad) >= 0 and self.size % self.stride == 0
        )

    @cached_property
    def all_of_circle(self) -> bool:
        """Whether they are all of its outputs."""
        return self.apart or (self.on_circle and self.windows * self.stride == self.size)

    @cached_property
    def period(self) -> int:
        """Size of a circular domain, a multiple of the stride, whose convolution has this one as a part."""
        if self.apart:
            return self.windows * self.stride
        if self.on_circle:
            return self.size
        needed = max(self.windows * self.stride, self.read)
        if self.mode == "zeros":
            # Zeros on the right may wrap around onto zeros on the left, if all that is not zero stays where it is.
            left = max(self.pad[0], 0)
            data = min(self.read, self.pad[0] + self.size)
            needed = max(self.windows * self.stride, self.read - left, data)
        return -(-needed // self.stride) * self.stride


@dataclass(frozen=True)
class LinearOperator:
    """A linear or convolution layer on inputs of a given shape, without its bias.

    Attributes:
        kernel: ``(c_out, c_in / groups, *k)`` in float64 on the CPU: the weight that the forward pass uses.
        dilation: dilation of each axis.
        groups: number of groups.
        axes: the spatial axes.
        transposed: whether the layer is the adjoint of this convolution.
        copies: how often the same map is applied side by side (leading axes of a linear layer's input).
    """

    kernel: Tensor
    dilation: Sizes
    groups: int
    axes: tuple[Axis, ...]
    transposed: bool = False
    copies: int = 1

    @classmethod
    def of_matrix(cls, weight: Tensor, shape: Sizes) -> LinearOperator:
        """Return the product by a matrix, on inputs of a shape whose last axis it reads.

        Raises:
            ValueError: if the shape does not fit the matrix.
        """
        if not shape or shape[-1] != weight.shape[1]:
            raise ValueError(f"input_shape={shape} must end in in_features={weight.shape[1]}")
        return cls(weight, (), 1, (), copies=math.prod(shape[:-1]))

    @classmethod
    def of_convolution(
        cls, kernel: Tensor, shape: Sizes, stride: Sizes, dilation: Sizes, groups: int, pads: Pads, mode: str
    ) -> LinearOperator:
        """Return a convolution of inputs ``(channels, *sizes)``.

        Raises:
            ValueError: if the shape does not fit the kernel, or the kernel does not fit in the padded input.
        """
        sizes, span = _sizes_of(shape, kernel.shape[1] * groups, len(stride)), extent(kernel.shape[2:], dilation)
        windows = [(n + sum(pad) - e) // s + 1 for n, e, s, pad in zip(sizes, span, stride, pads, strict=True)]
        if min(windows) < 1:
            raise ValueError(
                f"an input of size {sizes}, padded by {pads}, is smaller than the kernel, which extends over {span}"
            )
        axes = tuple(Axis(*numbers, mode) for numbers in zip(sizes, windows, span, stride, pads, strict=True))
        return cls(kernel, dilation, groups, axes)

    @classmethod
    def of_transposed(
        cls, kernel: Tensor, shape: Sizes, stride: Sizes, dilation: Sizes, groups: int, crops: Pads, mode: str
    ) -> LinearOperator:
        """Return a transposed convolution of inputs ``(channels, *sizes)``: the adjoint of one that reads its output.

        Raises:
            ValueError: if the shape does not fit the kernel, or nothing is left of the output.
        """
        sizes, span = _sizes_of(shape, kernel.shape[0], len(stride)), extent(kernel.shape[2:], dilation)
        if mode == "circular":
            # What falls past the border is wrapped around, whatever the crop. A crop on the left only shifts the
            # circle, so leave it out: no singular value depends on it.
            domain = tuple(n * s for n, s in zip(sizes, stride, strict=True))
            crops = tuple((0, max(0, e - s)) for e, s in zip(span, stride, strict=True))
        else:
            each = zip(sizes, stride, span, crops, strict=True)
            domain = tuple((n - 1) * s + e - sum(crop) for n, s, e, crop in each)
        if min(domain) < 1:
            raise ValueError(f"an input of size {sizes} is too small: the output would have size {domain}")
        axes = tuple(Axis(*numbers, mode) for numbers in zip(domain, sizes, span, stride, crops, strict=True))
        return cls(kernel, dilation, groups, axes, transposed=True)

    @property
    def stride(self) -> Sizes:
        """Stride of each axis."""
        return tuple(axis.stride for axis in self.axes)

    @property
    def domain(self) -> Sizes:
        """Shape that the convolution reads."""
        return self.kernel.shape[1] * self.groups, *(axis.size for axis in self.axes)

    @property
    def image(self) -> Sizes:
        """Shape that the convolution makes."""
        return self.kernel.shape[0], *(axis.windows for axis in self.axes)

    @property
    def smaller_side(self) -> int:
        """Number of singular values of one copy."""
        return min(math.prod(self.domain), math.prod(self.image))

    @property
    def circular(self) -> bool:
        """Whether the Fourier transform makes it block diagonal."""
        return all(axis.all_of_circle for axis in self.axes)

    @property
    def repeats(self) -> int:
        """Square of the norm of the padding."""
        return math.prod(axis.repeats for axis in self.axes)

    def apply(self, x: Tensor) -> Tensor:
        """Convolve ``(batch, *domain)``, which has the dtype of the kernel."""
        if not self.axes:
            return F.linear(x, self.kernel)
        if self.axes[0].mode == "zeros":
            x = F.pad(x, flat_pads(tuple(axis.pad for axis in self.axes)))
        else:
            for dim, axis in enumerate(self.axes, start=2):
                x = x.index_select(dim, axis.sources)
        for dim, axis in enumerate(self.axes, start=2):
            x = x.narrow(dim, 0, axis.read)
        return CONV[len(self.axes)](x, self.kernel, None, self.stride, 0, self.dilation, self.groups)

    def transpose(self, y: Tensor) -> Tensor:
        """Apply the adjoint of ``apply``."""
        if not self.axes:
            return F.linear(y, self.kernel.mT)
        transposed = CONV_TRANSPOSE[len(self.axes)]
        x = transposed(y, self.kernel, None, self.stride, 0, 0, self.groups, self.dilation)
        unread = [(0, axis.size + sum(axis.pad) - axis.read) for axis in self.axes]
        if self.axes[0].mode == "zeros":
            cut = [(-axis.pad[0], right - axis.pad[1]) for axis, (_, right) in zip(self.axes, unread, strict=True)]
            return F.pad(x, flat_pads(tuple(cut)))
        for dim, axis in enumerate(self.axes, start=2):
            shape = (*x.shape[:dim], axis.size, *x.shape[dim + 1 :])
            x = x.new_zeros(shape).index_add_(dim, axis.sources[: axis.read], x)
        return x

    def dense(self) -> Tensor:
        """Return the matrices ``(groups, image / groups, domain / groups)`` of the convolution."""
        if not self.axes:
            return self.kernel.unsqueeze(0)
        windows, positions = math.prod(self.image[1:]), math.prod(self.domain[1:])
        taps = self.kernel.flatten(2).unflatten(0, (self.groups, -1))  # (groups, n, m, taps)
        blocks = taps.new_zeros(windows, positions, *taps.shape[:3])
        for tap, offsets in enumerate(product(*map(range, self.kernel.shape[2:]))):
            window, position = self._read_by(offsets)
            blocks[window, position] += taps[..., tap]
        return blocks.permute(2, 3, 0, 4, 1).flatten(3).flatten(1, 2)

    def _read_by(self, offsets: Sizes) -> tuple[Tensor, Tensor]:
        """Return windows whose tap at ``offsets`` is on a position of the domain, and these positions, flattened."""
        window = position = torch.zeros(1, dtype=torch.long)
        for axis, dilation, offset in zip(self.axes, self.dilation, offsets, strict=True):
            windows = torch.arange(axis.windows)
            padded = windows * axis.stride + dilation * offset
            inside = padded - axis.pad[0] if axis.mode == "zeros" else axis.sources[padded]
            kept = (inside >= 0) & (inside < axis.size)
            window = (window[:, None] * axis.windows + windows[kept]).flatten()
            position = (position[:, None] * axis.size + inside[kept]).flatten()
        return window, position


@runtime_checkable
class LinearLayer(Protocol):
    """A layer that is linear but for its bias, and says which operator it is."""

    def linear_operator(self, input_shape: Sequence[int], weight: Tensor | None = None) -> LinearOperator:
        """Return the layer without its bias as a linear operator.

        Args:
            input_shape: shape of one input, without the batch.
            weight: the weight, if it is not the one that a forward pass uses now.

        Raises:
            ValueError: if the shape does not fit the layer, or the weight has no spectrum.
        """
        ...


@runtime_checkable
class LipschitzLayer(Protocol):
    """A layer or block with a Lipschitz constant that follows from a theorem, not from the calls that it makes."""

    def lipschitz_constant(self, input_shape: Sizes, dtype: torch.dtype) -> float:
        """Return a certified upper bound on the l2 Lipschitz constant, with the weights that a forward pass uses.

        Args:
            input_shape: shape of one input, without the batch.
            dtype: of the input, to which the layer may round what it multiplies with.

        Raises:
            ValueError: if the weights hold no numbers, or some that are not finite.
        """
        ...


def _sizes_of(shape: Sizes, channels: int, dims: int) -> Sizes:
    if len(shape) != dims + 1 or shape[0] != channels:
        sizes = "one size" if dims == 1 else f"{dims} sizes"
        raise ValueError(f"input_shape={shape} must be ({channels} channels, and {sizes}), without the batch")
    return shape[1:]


def checked_weight(weight: Tensor, owner: str) -> Tensor:
    """Return a weight in float64 on the CPU, if it is one that has a spectrum.

    Raises:
        ValueError: if it is complex, not dense or not finite, on the meta device, or of a class that says by itself
            what torch computes with it.
    """
    if torch_internals.computes_by_itself(weight):
        raise ValueError(
            f"the weight of {owner} is a {type(weight).__name__}, which says by itself what torch computes with it; "
            "make it a plain tensor first, weight.as_subclass(torch.Tensor)"
        )
    if weight.is_complex():
        raise ValueError(
            f"the weight of {owner} is complex ({weight.dtype}), and only real ones are supported: write z as the pair "
            "of its real and imaginary part, which has the same norm"
        )
    if weight.is_meta:
        raise ValueError(f"the weight of {owner} is on the meta device, which holds no numbers: load the weights first")
    if weight.layout != torch.strided:
        raise ValueError(f"the weight of {owner} is in the layout {weight.layout}, and must be dense: use to_dense()")
    with full_precision(weight):
        exact = weight.detach().as_subclass(Tensor).to("cpu", torch.float64)
    if not bool(exact.isfinite().all()):
        bad = int((~exact.isfinite()).sum())
        raise ValueError(
            f"the weight of {owner} holds {bad} values that are not finite (of {exact.numel()}): it has no norm"
        )
    return exact
