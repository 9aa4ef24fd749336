"""Exact spectra of convolutions, without their dense matrices.

On a circular domain the discrete Fourier transform makes a convolution block diagonal: one ``n x
m`` matrix for each frequency. A stride ``s`` folds the ``prod(s)`` frequencies that it cannot tell
apart into one block of ``n x (m prod(s))``.
"""

from __future__ import annotations

from math import prod

import torch
from torch import Tensor

_BLOCK_BYTES = 1 << 28


def circular_singular_values(
    kernel: Tensor,
    sizes: tuple[int, ...],
    stride: tuple[int, ...],
    dilation: tuple[int, ...],
    groups: int,
) -> Tensor:
    """All singular values of a circular convolution, largest first.

    Args:
        kernel: ``(c_out, c_in / groups, *k)``.
        sizes: spatial sizes of the input, multiples of ``stride``.
        stride: stride of each axis.
        dilation: dilation of each axis.
        groups: number of groups.

    Returns:
        Float64 vector with as many entries as the smaller side of the layer's matrix.
    """
    blocks = frequency_blocks(kernel, sizes, stride, dilation, groups)
    per_chunk = max(1, _BLOCK_BYTES // (16 * prod(blocks.shape[-2:])))
    values = [torch.linalg.svdvals(chunk) for chunk in blocks.split(per_chunk)]
    return torch.cat([value.flatten() for value in values]).sort(descending=True).values


def frequency_blocks(
    kernel: Tensor,
    sizes: tuple[int, ...],
    stride: tuple[int, ...],
    dilation: tuple[int, ...],
    groups: int,
) -> Tensor:
    """Blocks ``(groups * prod(sizes / stride), n, m * prod(stride))`` of the convolution in the Fourier domain."""
    dims = len(sizes)
    wrapped = _wrap_taps(kernel.detach().to(torch.float64), sizes, dilation)
    response = torch.fft.fftn(wrapped, dim=tuple(range(2, 2 + dims)))
    for axis, (size, s) in enumerate(zip(sizes, stride, strict=True)):
        response = response.unflatten(2 + 2 * axis, (s, size // s))  # frequency = alias * size / s + coarse
    aliases, coarse = [2 + 2 * a for a in range(dims)], [3 + 2 * a for a in range(dims)]
    response = response.unflatten(0, (groups, -1))
    order = [0, *(c + 1 for c in coarse), 1, 2, *(a + 1 for a in aliases)]
    blocks = response.permute(order).reshape(
        groups * prod(size // s for size, s in zip(sizes, stride, strict=True)),
        response.shape[1],
        -1,
    )
    return blocks / prod(stride) ** 0.5


def _wrap_taps(kernel: Tensor, sizes: tuple[int, ...], dilation: tuple[int, ...]) -> Tensor:
    """Place taps on the domain, adding those that fall on the same position."""
    for axis, (size, d) in enumerate(zip(sizes, dilation, strict=True), start=2):
        position = torch.arange(kernel.shape[axis], device=kernel.device) * d % size
        shape = list(kernel.shape)
        shape[axis] = size
        kernel = kernel.new_zeros(shape).index_add_(axis, position, kernel)
    return kernel
