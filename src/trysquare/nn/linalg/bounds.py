"""Certified bounds on singular values: computed in float64, with every approximation on the safe side.

What is proved. Each function's docstring names its theorem, and adds the rounding errors of its own arithmetic by the
standard a priori bounds (Higham, *Accuracy and Stability of Numerical Algorithms*): products of length ``k`` are off
by at most ``γ_k = k u / (1 - k u)`` relative to the product of absolute values, with ``u = 2^-53``; a Cholesky
factorisation of an ``n x n`` matrix ``A`` that runs to its end shows ``λ_min(A) > -γ_{n+1} / (1 - γ_{n+1}) tr A``
(Rump, *Verification of positive definiteness*, 2006). Constants are rounded up generously (complex arithmetic costs a
factor below 4).

What is assumed. The arithmetic is IEEE double precision, matrix products and factorisations are computed by sums of
products in any order (not by Strassen-like or reduced precision schemes), and ``cos``, ``sin``, ``exp``, ``log`` are
accurate to a few units in the last place.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from trysquare.nn.linalg.kernels import adjoint, compose
from trysquare.nn.linalg.norms import gram_norm_bound
from trysquare.nn.linalg.spectrum import UNIT_ROUNDOFF, FrequencyBlocks, Polyphase

# By how much a verified bound is raised over the eigenvalue that it was guessed from.
_MARGIN = 1e-7
# The same from the second guess on for matrices this wide: their factorisations are what takes the time.
_WIDE_MARGIN = 5e-4
_WIDE = 128
_POWER_STEPS = 8
_LANCZOS_STEPS = 64
# Real operations that one certified bound may take before it falls back to a coarser grid of frequencies.
BUDGET = 4e11
# Squared norms next to which float64 underflows.
_NEGLIGIBLE = 1e-200
# Taps of a kernel that Gram iteration may grow to, times its channels squared.
_GRAM_NUMBERS = 1 << 25
# From how many operations on it is worth to ask whether matrices are multiples of orthogonal ones, and how nearly.
_MANY_OPERATIONS = 1e8
_NEARLY = 1e-3
# Points of the grid per degree of the trigonometric polynomial, finest first.
_OVERSAMPLING = (64, 48, 32, 24, 16, 12, 8, 6, 4, 3)


def normalized(kernel: Tensor) -> tuple[Tensor, int]:
    """``kernel`` in float64 divided by a power of two, so that its largest entry is in ``[1/2, 1)``; the exponent.

    Exact, except that entries below ``2^-1022`` of the largest are rounded: squares can then neither overflow nor
    vanish.

    Raises:
        ValueError: if ``kernel`` is complex.
    """
    if kernel.is_complex():
        raise ValueError(f"a kernel of {kernel.dtype} is complex, and only real ones are supported")
    exact = kernel.detach().to("cpu", torch.float64)
    largest = float(exact.abs().max()) if exact.numel() else 0.0
    exponent = math.frexp(largest)[1]
    return rescaled(exact, -exponent), exponent


def rescaled(values: Tensor, exponent: int) -> Tensor:
    """``values * 2^exponent``."""
    half = exponent // 2  # in two factors: 2^1074 is not a float64
    return values * 2.0**half * 2.0 ** (exponent - half)


def rescaled_up(value: float, exponent: int) -> float:
    """``value * 2^exponent``, rounded up; infinity where that does not fit in float64 or is not a number."""
    if math.isnan(value):
        return math.inf
    try:
        scaled = math.ldexp(value, exponent)
    except OverflowError:
        return math.inf
    return math.nextafter(scaled, math.inf) if value > 0 else 0.0


def rescaled_down(value: float, exponent: int) -> float:
    """``value * 2^exponent``, rounded down; the largest float64 where that does not fit."""
    try:
        return math.ldexp(value, exponent) * (1 - UNIT_ROUNDOFF)
    except OverflowError:
        return sys.float_info.max


class SingularValueRange(NamedTuple):
    """Where singular values are.

    Attributes:
        low: certified lower bound on all of them.
        high: certified upper bound on all of them.
        found: largest one that was found, up to rounding: the norm is between this and ``high``. 0 if none was.
    """

    low: float
    high: float
    found: float


def singular_value_range(blocks: Iterable[Tensor], rounding: float = 0.0, *, lowest: bool = True) -> SingularValueRange:
    """Certified interval that holds the ``min(n, m)`` singular values of each of many matrices.

    ``μ`` is at least every eigenvalue of a Gram matrix ``G`` if and only if ``μ I - G`` has a Cholesky factorisation.
    So guess ``μ`` from the largest eigenvalue of the matrix that looks worst, factorise for all, and repeat for those
    that fail: the result is right however bad the guesses are, and within ``1e-6`` of the best possible
    (``3e-4`` for wide matrices whose norms differ). The same for ``μ I - G`` gives the lower end. Many large
    matrices that are all nearly the same multiple of an orthogonal one need no factorisation (``_nearly_scalar``).

    Args:
        blocks: batches ``(..., n, m)``, real or complex double precision, entries of ordinary size.
        rounding: bound on the spectral norm of the error of each matrix.
        lowest: whether the lower end is wanted; otherwise it is 0, unless it costs nothing.
    """
    upper, found, low, energy, shape = 0.0, 0.0, math.inf, 0.0, (1, 1)
    for block in blocks:
        small, large = sorted(block.shape[-2:])
        shape = small, large
        gram, chunk_energy = _gram(block)
        energy = max(energy, chunk_energy)
        if chunk_energy < _NEGLIGIBLE:  # too small to factorise; the trace is a bound
            upper, low = max(upper, chunk_energy + _NEGLIGIBLE if chunk_energy else 0.0), 0.0
            continue
        if (nearly := _nearly_scalar(gram)) is not None:
            middle, off = nearly
            upper, found, low = max(upper, middle + off), max(found, middle), min(low, middle - off)
            continue
        upper, top = _raised(gram, upper, upper)
        found = max(found, top)
        if not lowest:
            low = 0.0
        if lowest and low > 0:
            mirrored = _shifted(gram, upper)
            low = min(low, upper - _raised(mirrored, max(0.0, upper - low), upper)[0])
    slack = _slack(*shape, upper, energy)
    high = math.sqrt(upper + slack) * (1 + 4 * UNIT_ROUNDOFF) + rounding
    found = math.sqrt(found)
    if low - 2 * slack <= 0 or low == math.inf:
        return SingularValueRange(0.0, high, found)
    return SingularValueRange(max(0.0, math.sqrt(low - 2 * slack) * (1 - 4 * UNIT_ROUNDOFF) - rounding), high, found)


def _gram(block: Tensor) -> tuple[Tensor, float]:
    """Gram matrices ``(f, small, small)`` of the smaller side, and the largest squared Frobenius norm."""
    block = block.flatten(0, -3)
    wide = block.shape[-2] <= block.shape[-1]
    gram = block @ block.mH if wide else block.mH @ block
    return gram, float(gram.diagonal(dim1=-2, dim2=-1).real.sum(-1).max()) * 1.01


def _nearly_scalar(gram: Tensor) -> tuple[float, float] | None:
    """``c`` and a bound on ``|G - c I|`` for all of many large matrices, if that is small, as for orthogonal layers.

    ``|E| <= |E²|_F^(1/2)`` for Hermitian ``E``: above the norm by at most the fourth root of its size.
    """
    if len(gram) * gram.shape[-1] ** 3 < _MANY_OPERATIONS:
        return None
    rest = gram.clone()
    diagonal = rest.diagonal(dim1=-2, dim2=-1)
    middle = float(diagonal.real.mean())
    diagonal.sub_(middle)
    off = float(torch.linalg.matrix_norm(rest).max())
    if not off <= _NEARLY * middle:
        return None
    squared = math.sqrt(float(torch.linalg.matrix_norm(rest @ rest).max())) * (1 + 1e-9)
    # What the product can hide: its rounding is below that of G, which is added to every bound.
    return middle, min(off, squared) * (1 + 1e-9)


def _slack(small: int, large: int, upper: float, energy: float) -> float:
    """Return what rounding can hide: in ``G`` itself, in forming ``upper I - G``, and in its factorisation."""
    return UNIT_ROUNDOFF * 4 * ((large + 8) * energy + (small + 6) * (small + 1) * upper)


def _shifted(gram: Tensor, upper: float) -> Tensor:
    """``upper I - G``."""
    mirrored = -gram
    mirrored.diagonal(dim1=-2, dim2=-1).add_(upper)
    return mirrored


def _raised(gram: Tensor, upper: float, scale: float) -> tuple[float, float]:
    """``upper``, or a guess of the top eigenvalue that factorisations show to be above those of all of ``gram``.

    And the largest eigenvalue of any of them that was met on the way (0 if none was looked at).
    """
    left = gram if upper <= 0 else gram[_not_below(gram, upper)]
    margin, last, found = _MARGIN, 0.0, 0.0
    while len(left):
        top = _top_eigenvalue(left[int(_rayleigh(left).argmax())])
        found = max(found, top)
        # A guess that is below what is known already was not good enough, so widen the margin: this ends.
        margin = 8 * margin if top <= upper and margin == last else margin
        upper, last = max(upper, top) + margin * max(scale, top), margin
        left = left[_not_below(left, upper)]
        if len(left) and gram.shape[-1] >= _WIDE:
            margin = max(margin, min(_WIDE_MARGIN, _spread(left) / max(scale, top)))
    return upper, found


def _spread(gram: Tensor) -> float:
    """About how far eigenvalues are above their mean at most: small for orthogonal layers, whose order is noise."""
    rest = gram.clone()
    diagonal = rest.diagonal(dim1=-2, dim2=-1)
    diagonal.sub_(diagonal.mean(-1, keepdim=True))
    return float(torch.linalg.matrix_norm(rest).max())


def _top_eigenvalue(matrix: Tensor) -> float:
    """Return the largest eigenvalue of a Hermitian matrix; a close guess by Lanczos where that is too costly."""
    size = len(matrix)
    if size <= _LANCZOS_STEPS:
        return float(torch.linalg.eigvalsh(matrix)[-1])
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(size, dtype=torch.float64, generator=generator).to(matrix.dtype)
    basis = (start / start.norm()).unsqueeze(0)
    while len(basis) < _LANCZOS_STEPS:
        image = vector = matrix @ basis[-1]
        for _ in range(2):
            vector = vector - (basis.conj() @ vector) @ basis
        if float(vector.norm()) <= 1e-10 * float(image.norm()):
            break  # an invariant subspace: almost surely it holds the top eigenvector, and a factorisation decides
        basis = torch.cat([basis, (vector / vector.norm()).unsqueeze(0)])
    return float(torch.linalg.eigvalsh(basis.conj() @ matrix @ basis.mT)[-1])


def _not_below(gram: Tensor, upper: float) -> Tensor:
    """Return which matrices of a batch have no factorisation that shows all their eigenvalues to be below ``upper``."""
    return torch.linalg.cholesky_ex(_shifted(gram, upper)).info != 0


def _rayleigh(gram: Tensor) -> Tensor:
    """Return a rough largest eigenvalue of each matrix, by power iteration; only decides which matrix to look at."""
    generator = torch.Generator().manual_seed(0)
    vectors = torch.randn(gram.shape[-1], 1, dtype=torch.float64, generator=generator).to(gram.dtype)
    vectors = vectors.expand(len(gram), -1, -1)
    for _ in range(_POWER_STEPS):
        vectors = gram @ vectors
        norms = vectors.norm(dim=-2, keepdim=True)
        vectors = vectors / norms.clamp_min(1e-300)
    return norms.amax((-2, -1))


def circular_range(convolution: Polyphase, sizes: tuple[int, ...], *, lowest: bool = True) -> SingularValueRange:
    """Certified interval for the singular values of a convolution on a circular domain.

    The Fourier transform is unitary, so they are those of the blocks (``FrequencyBlocks``), whose rounding is added.

    Args:
        convolution: the convolution, its stride taken out, with entries of ordinary size (``normalized``).
        sizes: sizes of the domain, on the grid of the outputs.
        lowest: whether the lower end is wanted; otherwise it is 0.
    """
    blocks = FrequencyBlocks(convolution, convolution.distinct(sizes))
    chunks = (block for block, _ in blocks.chunks("certified bound"))
    return singular_value_range(chunks, blocks.rounding, lowest=lowest)


def domain_range(
    convolution: Polyphase,
    sizes: tuple[int, ...],
    everywhere: Polyphase,
    *,
    lowest: bool = True,
    budget: float = BUDGET,
) -> SingularValueRange:
    """``circular_range``, or the bound that holds for every domain where this one has too many frequencies.

    Args:
        convolution: see ``circular_range``.
        sizes: see ``circular_range``.
        everywhere: a convolution with the same supremum over all frequencies, for the bound on every domain.
        lowest: see ``circular_range``.
        budget: real operations that may be spent on the domain.
    """
    if not sizes or convolution.gram_flops(sizes) <= budget:
        return circular_range(convolution, sizes, lowest=lowest)
    return SingularValueRange(0.0, any_size_bound(everywhere, budget / 8), 0.0)


def any_size_bound(convolution: Polyphase, budget: float) -> float:
    """Certified bound on the norm of a convolution on every circular domain, and with zero padding on every domain.

    All of them are at most the supremum over all frequencies ``θ`` of the norm of the block ``K(θ)``. For a unit
    vector ``v``, ``p(θ) = |K(θ) v|²`` is a trigonometric polynomial of degree at most ``D`` on each axis, and for any
    constant ``c`` ``|p - c|`` exceeds its maximum on a grid of ``M > 2 D`` equidistant points by at most the factor
    ``1 / cos(π D / M)`` (M. Riesz: next to its maximum ``θ*`` a polynomial stays above ``cos(D (θ - θ*))`` times it),
    axis by axis. With ``[a, b]`` a certified interval for the squared singular values on the grid and ``c`` its
    middle, the supremum is at most ``c + (b - a) / 2 / Π cos(π D / M)``: tight at once if the convolution is
    orthogonal.

    Args:
        convolution: the convolution, with entries of ordinary size.
        budget: real operations that may be spent; at least the coarsest grid is.
    """
    for oversampling in _OVERSAMPLING:
        grid = tuple(oversampling * degree if degree else 1 for degree in convolution.degrees)
        if convolution.gram_flops(grid) <= budget:
            break
    low, high, _ = circular_range(convolution, grid)
    cosines = math.prod(
        math.cos(math.pi * degree / size) for degree, size in zip(convolution.degrees, grid, strict=True)
    )
    squared = (high**2 + low**2) / 2 + (high**2 - low**2) / 2 / cosines
    return math.sqrt(squared) * (1 + 64 * UNIT_ROUNDOFF)


def gram_bound(matrices: Tensor, steps: int = 6) -> Tensor:
    """Certified bound on the largest singular value of each matrix, by Gram iteration (Delattre et al., 2023).

    ``|A|^(2^t) = |A_t|`` for ``A_0 = A``, ``A_{t+1} = A_tᴴ A_t``, and a spectral norm is at most the Frobenius norm,
    so ``|A| <= |A_t|_F^(2^-t)``, at most ``rank^(2^-(t+1))`` times too large. Computed by ``gram_norm_bound``, whose
    iterates have Frobenius norm 1, on matrices whose largest entry is 1. A step's rounding is at most ``γ |A_t|_F²``,
    where ``|A_t|² >= |A_t|_F² / rank``.

    Not used by ``spectral_norm_bound``: it is the method of the papers, to compare with. On a matrix whose singular
    values are all equal, an orthogonal one, it converges slowest; the factorisations of ``singular_value_range`` are
    within 1e-7 there.

    Args:
        matrices: ``(..., n, m)``, real or complex.
        steps: how often to square, at least once.

    Returns:
        ``(...)``, float64.

    Raises:
        ValueError: if ``steps`` is not positive.

    >>> bool(gram_bound(torch.diag(torch.tensor([3.0, 4.0])), 8) >= 4)
    True
    """
    if steps < 1:
        raise ValueError(f"steps={steps} must be at least 1: the first makes the Gram matrix")
    small, large = sorted(matrices.shape[-2:])
    exact = matrices.detach().to(torch.complex128 if matrices.is_complex() else torch.float64)
    largest = exact.abs().amax((-2, -1))
    scaled = exact / torch.where(largest > 0, largest, 1.0)[..., None, None]
    relative = UNIT_ROUNDOFF * (8 * (large + 8) * (small + 2) + 4 * (steps + 2) * (64 + math.log(large)))
    bound = gram_norm_bound(scaled, steps - 1) * largest * (1 + relative)
    return torch.nextafter(bound, torch.where(bound > 0, torch.inf, 0.0))


def circular_gram_bound(convolution: Polyphase, sizes: tuple[int, ...], steps: int = 6) -> float:
    """Gram iteration on every frequency block of a circular convolution (Delattre et al., 2023).

    To compare with ``circular_range``, as ``gram_bound``.
    """
    blocks = FrequencyBlocks(convolution, sizes)
    return max(float(gram_bound(block, steps).max()) for block, _ in blocks.chunks("Gram iteration")) + blocks.rounding


def kernel_gram_bound(convolution: Polyphase, steps: int = 4) -> float:
    """Gram iteration on the kernel itself (Delattre et al., 2024): for zero and circular padding of every size.

    With ``K_0 = K`` and ``K_{t+1} = K_tᵀ ∘ K_t`` (block convolution), the supremum over all frequencies of ``|K(θ)|``
    to the power ``2^t`` is that of ``|K_t(θ)|``, at most the sum over the taps of ``|K_t[tap]|_F``. Kernels double in
    extent at each step. A step's rounding is at most ``γ`` times the squared sum of the norms of the taps, and
    ``|K_t|_F² / rank`` is at most the squared supremum (Parseval).

    To compare with ``any_size_bound``, which ``spectral_norm_bound`` uses: after the three steps that are affordable
    the sum over the taps is 7 to 57 % too large for kernels of 3 x 3 taps and 16 to 64 channels.

    Args:
        convolution: the convolution, with entries of ordinary size.
        steps: how often to square; fewer are made where the kernel would grow too large.
    """
    groups, rows, columns = convolution.block_shape
    iterate = convolution.kernel
    if columns > rows:
        iterate = adjoint(iterate, groups)
    small = min(rows, columns)
    logarithm, relative, done = 0.0, 0.0, 0
    while done < steps and math.prod(2 * k for k in iterate.shape[2:]) * groups * small**2 <= _GRAM_NUMBERS:
        norm = float(iterate.norm())
        if norm == 0:
            return 0.0
        iterate, logarithm, done = iterate / norm, 2 * (logarithm + math.log(norm)), done + 1
        taps = math.prod(iterate.shape[2:])
        length = taps * iterate.shape[0] // groups
        relative += 2.0**-done * 8 * UNIT_ROUNDOFF * (length + 8) * taps * small * groups
        iterate = compose(adjoint(iterate, groups), iterate, groups)
    taps_norm = iterate.unflatten(0, (groups, -1)).flatten(3).norm(dim=(1, 2)).sum(-1)
    total = float(taps_norm.max())
    if total == 0:
        return 0.0
    logarithm = (logarithm + math.log(total)) * 2.0**-done
    return math.exp(logarithm) * (1 + relative + UNIT_ROUNDOFF * (2000 + math.prod(iterate.shape)))
