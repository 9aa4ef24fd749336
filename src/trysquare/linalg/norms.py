"""Upper bounds of norms that hold for certain, and that gradients pass through."""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations
from math import prod

import torch
from torch import Tensor

from trysquare.linalg.kernels import adjoint, compose
from trysquare.linalg.precision import full_precision
from trysquare.linalg.rescaling import gram, row_sums, scaled_to_one

_SQUARINGS = 4


def _gram_iteration(kernel: Tensor, squarings: int, dims: int, norm: Callable[[Tensor], Tensor]) -> Tensor:
    """``‖K‖ = ‖A^(2^t)‖^(1 / 2^(t + 1))`` for ``A = K Kᵀ`` or ``KᵀK``, whichever has fewer channels.

    The norm of the power is bounded by an easier one. Each squaring takes the square root of the factor by which that
    is too large, and doubles the taps of the kernel that it is taken of.

    Args:
        kernel: ``(*batch, n, m, *k)``.
        squarings: number ``t`` of squarings.
        dims: number of kernel axes.
        norm: upper bound ``(*batch)`` of the norms of symmetric operators ``(*batch, c, c, *l)``.

    Returns:
        ``(*batch)``, never below the norm by more than rounding; 0 for a kernel of zeros.
    """
    if squarings < 0:
        raise ValueError(f"steps={squarings} must be at least 0")
    with full_precision(kernel):
        outputs, inputs = kernel.shape[-dims - 2 : kernel.ndim - dims]
        wide, scale = scaled_to_one(kernel if outputs <= inputs else adjoint(kernel, dims=dims), dims=dims)
        power, exponent = gram(wide, dims=dims), 0.5
        # The norm is scale · ‖power‖^exponent: what is divided out is kept with its exponent.
        for _ in range(squarings):
            size = norm(power.detach())
            size = torch.where(size > 0, size, 1.0)
            power = power / size[(..., *(None,) * (dims + 2))]
            power, scale, exponent = compose(power, power, dims=dims), scale * size**exponent, exponent / 2
        bound = norm(power)
        return torch.where(bound > 0, scale * torch.where(bound > 0, bound, 1.0) ** exponent, 0.0)


def gram_norm_bound(matrix: Tensor, squarings: int = _SQUARINGS) -> Tensor:
    """Upper bound of the largest singular value by Gram iteration, the norm of the power by that of Frobenius.

    Args:
        matrix: ``(..., n, m)``.
        squarings: number ``t`` of squarings; the bound is at most ``min(n, m)^(1 / 2^(t + 2))`` times the norm.

    Returns:
        ``(...)``, never below the norm by more than the rounding of the products.
    """
    return _gram_iteration(matrix, squarings, 0, torch.linalg.matrix_norm)


def norm_bound(kernel: Tensor, steps: int = 1, *, dims: int | None = None) -> Tensor:
    """Upper bound of the norm of a convolution on every domain, or of a matrix; differentiable.

    By Gram iteration, the norm of the power by its row sums, which unlike that of Frobenius bound convolutions too.
    With more steps it comes as near to the norm as wanted; ``kernel_norm_bound`` does not, but is cheaper.

    Args:
        kernel: ``(*batch, n, m, *k)``, or a matrix.
        steps: number of squarings.
        dims: number of kernel axes; all but the first two axes unless given.

    Returns:
        ``(*batch)``; 0 for a kernel of zeros.

    >>> from trysquare.linalg.norms import norm_bound
    >>> norm_bound(torch.eye(3))
    tensor(1.)
    """
    dims = kernel.ndim - 2 if dims is None else dims
    return _gram_iteration(kernel, steps, dims, lambda power: row_sums(power, dims=dims).amax(-1))


def kernel_norm_bound(kernel: Tensor, dims: int) -> Tensor:
    """Upper bound of the norm of a stride-1 convolution on every domain, by matrices of the size of the kernel.

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
