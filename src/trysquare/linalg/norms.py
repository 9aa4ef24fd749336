"""Upper bounds of norms that gradients pass through, for parametrizations; ``bounds`` adds rounding and certifies."""

from __future__ import annotations

from itertools import combinations
from math import prod

import torch
from torch import Tensor

from trysquare.linalg.precision import full_precision

_SQUARINGS = 4


def gram_norm_bound(matrix: Tensor, squarings: int = _SQUARINGS) -> Tensor:
    """Upper bound of the largest singular value by Gram iteration: ``‖G‖ = ‖G^(2^t)‖^(1/2^t) <= ‖G^(2^t)‖_F^(1/2^t)``.

    ``trysquare.linalg.bounds.gram_bound`` is this in float64, with the rounding added.

    Args:
        matrix: ``(..., n, m)``, real or complex, with entries whose fourth powers fit in the dtype.
        squarings: number ``t`` of squarings; the bound is at most ``min(n, m)^(1 / 2^(t + 2))`` times the norm.

    Returns:
        ``(...)``, never below the norm by more than the rounding of the products.
    """
    with full_precision(matrix):
        wide = matrix if matrix.shape[-2] <= matrix.shape[-1] else matrix.mH
        gram = torch.matmul(wide, wide.mH)
        tiny = torch.finfo(gram.dtype).tiny ** 0.5
        logarithm = torch.zeros_like(gram[..., 0, 0].real)
        for step in range(squarings + 1):
            size = torch.linalg.matrix_norm(gram).clamp_min(tiny)
            logarithm = logarithm + size.log() / 2**step
            if step < squarings:
                gram = gram / size[..., None, None]
                gram = torch.matmul(gram, gram)
        return (logarithm / 2).exp()


def kernel_norm_bound(kernel: Tensor, dims: int) -> Tensor:
    """Upper bound of the norm of a stride-1 convolution, on any domain with circular or zero padding.

    For each way to split the kernel axes into two sets, let ``R`` be the kernel as a matrix with output channels and
    the first set as rows, input channels and the second set as columns. The convolution cuts the input into windows
    along the second set (norm at most the square root of their taps), multiplies by ``R``, and adds shifted copies
    along the first (the same). So ``sqrt(prod(k)) ‖R‖`` is a bound.

    Args:
        kernel: ``(*batch, c_out, c_in, *k)``.
        dims: number of kernel axes.

    Returns:
        ``(*batch,)``: the least bound over the splits into halves.
    """
    first = kernel.ndim - dims
    taps = prod(kernel.shape[first:])
    bounds = []
    for rows in combinations(range(dims), dims // 2):
        columns = [axis for axis in range(dims) if axis not in rows]
        order = [*range(first - 2), first - 2, *(first + a for a in rows), first - 1, *(first + a for a in columns)]
        matrix = kernel.permute(order).flatten(first - 2, first - 2 + len(rows)).flatten(first - 1)
        bounds.append(gram_norm_bound(matrix))
    return torch.stack(bounds).amin(0) * taps**0.5
