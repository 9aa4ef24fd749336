"""Exact spectra of convolutions, without their dense matrices.

A stride is taken out by the polyphase decomposition: a convolution with stride ``s`` is one without stride that reads
``prod(s)`` times as many channels, each a subsampled copy of an input channel. On a circular domain the discrete
Fourier transform then makes it block diagonal: an ``n x (m prod(s))`` matrix for each group and frequency. Everything
here is a function of those blocks.

The transform is evaluated tap by tap rather than by a fast one: kernels have few taps, so it costs less than the
products of the blocks that follow, any subset of the frequencies can be made (kernels are real: half of them
suffice), and the rounding error of each entry has an elementary bound (``FrequencyBlocks.rounding``).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from trysquare.progress import track

_CHUNK_BYTES = 1 << 27
UNIT_ROUNDOFF = 2.0**-53


@dataclass(frozen=True)
class Polyphase:
    """A convolution without stride: ``y[i] = Σ_t coefficients[t] x[i + positions[t]]``.

    Attributes:
        positions: ``(taps, dims)``, integers on the grid of the outputs.
        coefficients: ``(taps, groups, n, m * prod(stride))``, float64.
    """

    positions: Tensor
    coefficients: Tensor

    @cached_property
    def degrees(self) -> tuple[int, ...]:
        """Largest difference of two positions on each axis."""
        spread = self.positions.amax(0) - self.positions.amin(0)
        return tuple(int(degree) for degree in spread)

    def distinct(self, sizes: tuple[int, ...]) -> tuple[int, ...]:
        """``sizes``, or 1 on axes on which there is one tap only, so that all frequencies have the same block."""
        return tuple(size if degree else 1 for size, degree in zip(sizes, self.degrees, strict=True))

    @cached_property
    def block_shape(self) -> tuple[int, int, int]:
        """Groups, rows and columns of the blocks."""
        groups, rows, columns = self.coefficients.shape[1:]
        return groups, rows, columns

    def gram_flops(self, sizes: tuple[int, ...]) -> float:
        """Real operations of the Gram matrices of all blocks on a circular domain."""
        groups, rows, columns = self.block_shape
        return 4.0 * math.prod(self.distinct(sizes)) * groups * rows * columns * min(rows, columns)

    @cached_property
    def kernel(self) -> Tensor:
        """Return the same without dilation, as a kernel ``(groups * n, m * prod(stride), *(degrees + 1))``."""
        taps = self.coefficients.shape[0]
        start = self.positions.amin(0)
        dense = self.coefficients.new_zeros(*(d + 1 for d in self.degrees), *self.block_shape)
        for t in range(taps):
            dense[tuple((self.positions[t] - start).tolist())] += self.coefficients[t]
        dims = len(self.degrees)
        return dense.permute(dims, dims + 1, dims + 2, *range(dims)).flatten(0, 1)


def polyphase(
    kernel: Tensor, stride: tuple[int, ...], dilation: tuple[int, ...], groups: int, *, any_size: bool = False
) -> Polyphase:
    """Take the stride out of a convolution.

    Args:
        kernel: ``(c_out, c_in / groups, *k)``.
        stride: stride of each axis.
        dilation: dilation of each axis.
        groups: number of groups.
        any_size: whether the result is only used for its supremum over all frequencies, which does not depend on the
            dilation of an axis without stride.
    """
    dims = len(stride)
    if any_size:
        dilation = tuple(1 if s == 1 else d for s, d in zip(stride, dilation, strict=True))
    taps = _grid(tuple(kernel.shape[2:]))
    read = taps * torch.tensor(dilation, dtype=torch.long)
    coarse = read // torch.tensor(stride, dtype=torch.long)
    phase = torch.zeros(len(taps), dtype=torch.long)
    for axis, s in enumerate(stride):
        phase = phase * s + read[:, axis] % s
    positions, group_of = torch.unique(coarse, dim=0, return_inverse=True) if dims else (coarse, phase)
    n, m = kernel.shape[0] // groups, kernel.shape[1]
    coefficients = kernel.new_zeros(len(positions), math.prod(stride), groups, n, m, dtype=torch.float64)
    values = kernel.detach().to(torch.float64).reshape(groups, n, m, -1).movedim(-1, 0)
    coefficients[group_of, phase] = values
    return Polyphase(positions, coefficients.permute(0, 2, 3, 4, 1).flatten(-2))


def _grid(sizes: tuple[int, ...]) -> Tensor:
    """Return all index vectors ``(prod(sizes), dims)`` in order, the last axis fastest."""
    return (
        torch.stack([i.flatten() for i in torch.meshgrid(*map(torch.arange, sizes), indexing="ij")], -1)
        if sizes
        else torch.zeros(1, 0, dtype=torch.long)
    )


class FrequencyBlocks:
    """The blocks of a convolution without stride on a circular domain.

    Attributes:
        convolution: what is transformed.
        sizes: sizes of the circular domain on the grid of the outputs.
        multiplicity: how often each frequency counts: 2 where the conjugate is left out.
    """

    def __init__(self, convolution: Polyphase, sizes: tuple[int, ...]) -> None:
        self.convolution, self.sizes = convolution, sizes
        grid = _grid(sizes)
        index, mirrored = self._flat_index(grid), self._flat_index(-grid)
        self._frequencies = grid[index <= mirrored]
        self.multiplicity = 1 + (index < mirrored)[index <= mirrored].long()

    def _flat_index(self, grid: Tensor) -> Tensor:
        index = torch.zeros(len(grid), dtype=torch.long)
        for axis, size in enumerate(self.sizes):
            index = index * size + grid[:, axis] % size
        return index

    @property
    def rounding(self) -> float:
        """Bound the Frobenius norm of the error of any block.

        An entry is ``Σ_t K_t e^{i φ_t}``. Angles are reduced in integers; each axis adds less than a full turn that was
        rounded three times (the constant, the product, the sum), so that cosine and sine, themselves rounded, are off
        by less than ``32 (dims + 1)`` roundoffs; a sum of ``taps`` products by ``taps + 1`` more, relative to
        ``Σ_t |K_t|``.
        """
        taps, dims = self.convolution.positions.shape
        total = float(self.convolution.coefficients.flatten(2).norm(dim=-1).sum(0).max())
        return 2 * (taps + 32 * (dims + 1) + 2) * UNIT_ROUNDOFF * total * 1.01

    def chunks(self, label: str) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield blocks ``(f, groups, n, m)`` of as many frequencies as fit in memory, and their multiplicities."""
        per_chunk = max(1, _CHUNK_BYTES // (16 * math.prod(self.convolution.block_shape)))
        parts = list(zip(self._frequencies.split(per_chunk), self.multiplicity.split(per_chunk), strict=True))
        for frequencies, multiplicity in track(parts, label, len(parts)):
            yield self._blocks(frequencies), multiplicity

    def _blocks(self, frequencies: Tensor) -> Tensor:
        angle = torch.zeros(len(frequencies), len(self.convolution.positions), dtype=torch.float64)
        for axis, size in enumerate(self.sizes):
            turns = torch.outer(frequencies[:, axis], self.convolution.positions[:, axis]) % size
            angle += turns.to(torch.float64) * (2 * math.pi / size)
        coefficients = self.convolution.coefficients.flatten(1)
        real = (angle.cos() @ coefficients).unflatten(1, self.convolution.block_shape)
        if not bool(angle.any()):
            return real
        return torch.complex(real, (angle.sin() @ coefficients).unflatten(1, self.convolution.block_shape))


def circular_singular_values(
    kernel: Tensor,
    sizes: tuple[int, ...],
    stride: tuple[int, ...],
    dilation: tuple[int, ...],
    groups: int,
) -> Tensor:
    """Return all singular values of a circular convolution, largest first.

    Args:
        kernel: ``(c_out, c_in / groups, *k)``.
        sizes: spatial sizes of the input, multiples of ``stride``.
        stride: stride of each axis.
        dilation: dilation of each axis.
        groups: number of groups.

    Returns:
        Float64 vector with as many entries as the smaller side of the layer's matrix.
    """
    coarse = tuple(size // s for size, s in zip(sizes, stride, strict=True))
    convolution = polyphase(kernel, stride, dilation, groups)
    distinct = convolution.distinct(coarse)
    blocks, copies = FrequencyBlocks(convolution, distinct), math.prod(coarse) // math.prod(distinct)
    values = [
        torch.linalg.svdvals(chunk).flatten(1).repeat_interleave(copies * multiplicity, 0).flatten()
        for chunk, multiplicity in blocks.chunks("singular values")
    ]
    return torch.cat(values).sort(descending=True).values
