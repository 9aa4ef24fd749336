"""Orthogonal convolutions of a circular domain, one orthonormal matrix for each frequency.

On a circular domain of given sizes the Fourier transform makes a convolution block diagonal. If every block has
orthonormal rows (or columns), so has the convolution; its kernel is then in general as large as the domain. Blocks are
complex, with those of opposite frequencies conjugate to each other. What makes them orthonormal commutes with
conjugation, so the kernel stays real.

=========== ============================================= =======================================================
name        block                                         from
=========== ============================================= =======================================================
``cayley``  Cayley transform of the free block            Trockman and Kolter, 2021
``lot``     ``W (W* W)^(-1/2)`` by a Newton iteration     Xu, Li and Li, 2022
``eco``     exponential, of period ``k`` in frequency     Yu et al., 2022
=========== ============================================= =======================================================

ECO's kernel has ``k`` taps on an axis, ``size / k`` apart: its response repeats every ``k`` frequencies, so only
``prod(k)`` matrices have to be built. Such a kernel exists only if ``k`` divides the size; otherwise the next larger
divisor, at most the size itself, takes its place.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from trysquare.nn.linalg.orthogonalize import cayley, exponential, newton_schulz
from trysquare.nn.linalg.precision import full_precision, refuse_linearized_gradient

Sizes = tuple[int, ...]


def place_taps(kernel: Tensor, sizes: Sizes, dilation: Sizes) -> Tensor:
    """Put the taps of a kernel, the middle one at the origin, on a circular domain: ``(..., *k)`` to ``(..., *sizes)``.

    Taps that fall on the same position are added.
    """
    first = kernel.ndim - len(sizes)
    for axis, (size, d) in enumerate(zip(sizes, dilation, strict=True), start=first):
        taps = kernel.shape[axis]
        position = (torch.arange(taps, device=kernel.device) - (taps - 1) // 2) * d % size
        shape = [*kernel.shape[:axis], size, *kernel.shape[axis + 1 :]]
        kernel = kernel.new_zeros(shape).index_add(axis, position, kernel)
    return kernel


def _blocks(placed: Tensor, dims: int, half: bool) -> Tensor:
    """Response ``(*frequencies, g, n, m)`` of torch's cross-correlation by a placed kernel ``(g, n, m, *sizes)``."""
    refuse_linearized_gradient(placed)
    axes = tuple(range(-dims, 0))
    transform = torch.fft.rfftn(placed, dim=axes) if half else torch.fft.fftn(placed, dim=axes)
    blocks = transform.conj().movedim(tuple(range(3, 3 + dims)), tuple(range(dims)))
    # Products of matrices whose entries are far from each other would be made one by one.
    return blocks.resolve_conj().contiguous()


def free_response(kernel: Tensor, sizes: Sizes, dilation: Sizes) -> Tensor:
    """Blocks ``(*frequencies, g, n, m)`` of a free kernel ``(g, n, m, *k)`` at the frequencies that ``rfftn`` keeps."""
    return _blocks(place_taps(kernel, sizes, dilation), len(sizes), half=True)


def _frequencies(sizes: Sizes) -> Sizes:
    """Return how many ``rfftn`` keeps on each axis."""
    return (*sizes[:-1], sizes[-1] // 2 + 1)


def wide_sizes(kernel_size: Sizes, sizes: Sizes) -> Sizes:
    """Return the sizes, but 1 along axes with a single tap: there all frequencies have the same block.

    >>> from trysquare.nn.linalg.fourier import wide_sizes
    >>> wide_sizes((3, 1), (8, 9))
    (8, 1)
    """
    return tuple(1 if k == 1 else size for k, size in zip(kernel_size, sizes, strict=True))


def of_response(function: Callable[[Tensor], Tensor], kernel: Tensor, sizes: Sizes, dilation: Sizes) -> Tensor:
    """``function`` of each block of ``free_response``; equal ones are made once, and repeated without a copy."""
    dims = len(sizes)
    blocks = function(free_response(kernel, wide_sizes(tuple(kernel.shape[-dims:]), sizes), dilation))
    return blocks.expand(*_frequencies(sizes), *blocks.shape[dims:])


def _cayley(kernel: Tensor, sizes: Sizes, dilation: Sizes) -> Tensor:
    return of_response(cayley, kernel, sizes, dilation)


def _lot(kernel: Tensor, sizes: Sizes, dilation: Sizes) -> Tensor:
    return of_response(newton_schulz, kernel, sizes, dilation)


def divisor_from(least: int, size: int) -> int:
    """Return the smallest divisor of ``size`` that is at least ``least``, or ``size`` itself.

    >>> from trysquare.nn.linalg.fourier import divisor_from
    >>> divisor_from(3, 33), divisor_from(3, 32), divisor_from(3, 31), divisor_from(3, 2)
    (3, 4, 31, 2)
    """
    return next((k for k in range(least, size) if size % k == 0), size)


def eco_taps(kernel_size: Sizes, sizes: Sizes) -> Sizes:
    """Return how many taps ECO has on each axis of a domain of these sizes."""
    return tuple(divisor_from(k, size) for k, size in zip(kernel_size, sizes, strict=True))


def _eco(kernel: Tensor, sizes: Sizes, dilation: Sizes) -> Tensor:
    dims = len(sizes)
    periods = eco_taps(tuple(kernel.shape[-dims:]), sizes)
    free = _blocks(place_taps(kernel, periods, (1,) * dims), dims, half=False)
    blocks = exponential(free)
    for axis, (count, period) in enumerate(zip(_frequencies(sizes), periods, strict=True)):
        blocks = blocks.index_select(axis, torch.arange(count, device=blocks.device) % period)
    return blocks


RESPONSES: dict[str, Callable[[Tensor, Sizes, Sizes], Tensor]] = {
    "cayley": _cayley,
    "lot": _lot,
    "eco": _eco,
}

_DOMAINS = {
    "cayley": "entries of its response must stay below about 10 (float32) or 1e4 (float64)",
    "lot": "its response must have full rank at every frequency, with condition number up to 1e6 (float32) or 1e10 "
    "(float64)",
    "eco": "entries of its response must stay below about 10 (float32) or 1e4 (float64)",
}


def orthogonal_response(kernel: Tensor, sizes: Sizes, dilation: Sizes, method: str) -> Tensor:
    """Orthonormal blocks of a real convolution on a circular domain.

    Args:
        kernel: free kernel ``(g, n, m, *k)``, float32 or float64.
        sizes: sizes of the domain, any.
        dilation: distance of the taps of the free kernel; ECO has its own.
        method: a key of ``RESPONSES``.

    Returns:
        ``(*sizes with the last one halved, g, n, m)``, complex: the blocks at the frequencies that ``rfftn`` keeps.

    Raises:
        ArithmeticError: if the free kernel is outside of the domain of the method, such as a kernel without full rank
            at some frequency for ``"lot"``.
    """
    with full_precision(kernel):
        try:
            return RESPONSES[method](kernel, sizes, dilation)
        except ArithmeticError:
            raise ArithmeticError(
                f"method={method!r} cannot make orthonormal blocks of this free kernel on a domain of {sizes}: "
                f"{_DOMAINS[method]}. Draw it anew (layer.reset_parameters()) and train with smaller steps, or use "
                "another method"
            ) from None


def apply_response(response: Tensor, x: Tensor, dims: int) -> Tensor:
    """Convolve ``(b, g m, *sizes)`` by the blocks ``(*frequencies, g, n, m)``: ``(b, g n, *sizes)``, real."""
    axes, sizes = tuple(range(-dims, 0)), x.shape[-dims:]
    groups, outputs, _ = response.shape[dims:]
    if x.shape[0] == 0:  # which torch's transform refuses
        return x.new_zeros(0, groups * outputs, *sizes) + 0 * (x.sum() + response.real.sum())
    refuse_linearized_gradient(x)
    with full_precision(x):
        spectrum = torch.fft.rfftn(x.unflatten(1, (groups, -1)), dim=axes)  # (b, g, m, *frequencies)
        columns = spectrum.permute(*range(3, 3 + dims), 1, 2, 0).contiguous()
        product = torch.matmul(response, columns)
        back = product.permute(dims + 2, dims, dims + 1, *range(dims))
        return torch.fft.irfftn(back, s=sizes, dim=axes).flatten(1, 2)


def explicit_kernel(response: Tensor, sizes: Sizes) -> Tensor:
    """Kernel ``(g, n, m, *sizes)`` of the blocks, its first tap at the origin."""
    dims = len(sizes)
    blocks = response.movedim(tuple(range(dims)), tuple(range(3, 3 + dims))).conj().resolve_conj()
    return torch.fft.irfftn(blocks, s=sizes, dim=tuple(range(-dims, 0)))
