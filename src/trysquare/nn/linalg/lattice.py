"""Two linear maps with an activation between them, bounded as a whole, from nothing but their kernels.

An activation that acts entry by entry with slopes between 0 and 1 changes by ``D`` times the change of its input, with
``D`` diagonal and between 0 and 1. So a block ``A x + S σ(T x + b)`` changes by a matrix ``A + S D T``, and what is
bounded here is the norm of that over all ``D``. It can be far below ``|A| + |S| |T|``: SLL and CPL blocks, whose parts
add up to 3, have the constant 1.

The maps are convolutions on the integer lattice; one tap on one position is a matrix. A convolution with zero padding
is a part of the one on the lattice, and so is one on a circle that is larger by the extent of the kernels: ``D`` is 0
outside of the hidden map. Kernels may have been rounded in any way, since nothing is assumed about them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from trysquare.nn.geometry import Sizes, extent
from trysquare.nn.linalg.bounds import domain_range, normalized, rescaled_up
from trysquare.nn.linalg.kernels import adjoint, compose
from trysquare.nn.linalg.scalings import best_psi, is_promising
from trysquare.nn.linalg.spectrum import UNIT_ROUNDOFF, Polyphase, polyphase

# Covers the roundings of a formula of a handful of steps.
ROUND_UP = 1 + 2.0**-48
# Norms of differences of kernels below which the sum over their taps will do.
SMALL = 1e-6
# Share of the second map that is not explained by the others from which on it has nothing to do with them.
_UNLIKE = 0.5


@dataclass(frozen=True)
class LatticeMap:
    """A convolution on the integer lattice: output ``i`` reads ``stride * i + start + dilation * tap`` on each axis.

    Attributes:
        kernel: ``(c_out, c_in / groups, *k)`` in float64.
        stride: stride of each axis.
        dilation: dilation of each axis.
        groups: number of groups.
        start: what the first tap of output 0 reads: minus the padding.
    """

    kernel: Tensor
    stride: Sizes
    dilation: Sizes
    groups: int
    start: Sizes

    @classmethod
    def of_matrix(cls, matrix: Tensor) -> LatticeMap:
        """Return a matrix as a map: one tap on one position."""
        return cls(matrix[..., None], (1,), (1,), 1, (0,))

    @property
    def extent(self) -> Sizes:
        """Positions from the first tap to the last."""
        return extent(self.kernel.shape[2:], self.dilation)

    def identity(self) -> LatticeMap:
        """Return the map that changes nothing, on the channels that this one reads."""
        channels = self.kernel.shape[1]
        eye = torch.eye(channels, dtype=torch.float64).repeat(self.groups, 1)
        return replace(self, kernel=eye.view(*eye.shape, *(1,) * len(self.start)), start=(0,) * len(self.start))

    def transposed(self) -> LatticeMap:
        """Return the adjoint of a map without stride."""
        start = tuple(1 - e - s for e, s in zip(self.extent, self.start, strict=True))
        return replace(self, kernel=adjoint(self.kernel, self.groups), start=start)

    def after(self, before: LatticeMap) -> LatticeMap:
        """Return the map that applies ``before``, which has no stride, then this one."""
        start = tuple(a + b for a, b in zip(self.start, before.start, strict=True))
        return replace(self, kernel=compose(self.kernel, before.kernel, self.groups), start=start)

    def with_hidden(self, factors: Tensor) -> LatticeMap:
        """Return the map with its output channels multiplied by factors."""
        return replace(self, kernel=self.kernel * factors.view(-1, *(1,) * (self.kernel.ndim - 1)))

    def norm(self, circle: Sizes) -> float:
        """Return the certified norm on a circle of so many outputs."""
        return _norm(polyphase(self.kernel, self.stride, self.dilation, self.groups), circle)


def circle_around(maps: list[LatticeMap], coarse: Sizes, stride: Sizes, circular: bool) -> Sizes:
    """Return the sizes of a circle, on the coarse side, that has a block of maps as a part.

    Args:
        maps: the maps of the block.
        coarse: size of the coarse side of the block.
        stride: steps of the fine side to one of the coarse side.
        circular: whether the block is on that circle already; otherwise its padding is zeros.
    """
    if circular:
        return coarse
    reach = [sum(each) for each in zip(*(one.extent for one in maps), strict=True)]
    return tuple(size + -(-far // s) for size, far, s in zip(coarse, reach, stride, strict=True))


def residual_bound(shortcut: LatticeMap, first: LatticeMap, second: LatticeMap, circle: Sizes) -> float:
    """Bound ``|A + S D T|`` for all ``D``; infinite where the three maps have nothing to do with each other.

    For every diagonal ``E >= 0``, ``A + S D T = A (I - Tᵀ E D T) + (S + A Tᵀ E) D T``, and the matrix in the first
    brackets is symmetric with eigenvalues from ``1 - |√E T|²`` to 1. So the norm is at most

        |A| max(1, |√E T|² - 1) + |S + A Tᵀ E| |T|.

    ``E`` is a number for each hidden channel, chosen so that the last term is small.

    Args:
        shortcut: ``A``.
        first: ``T``, without stride. A block whose first map is the strided one has the transposed matrices.
        second: ``S``.
        circle: sizes on the side of the outputs.
    """
    maps = (shortcut, first, second)
    if not _same_lattice(*maps) or shortcut.stride != second.stride:
        return math.inf
    steps = tuple(
        next((each.dilation[axis] for each in maps if each.kernel.shape[2 + axis] > 1), 1)
        for axis in range(len(first.start))
    )
    shortcut, first, second = (_with_dilation(each, steps) for each in maps)
    through = shortcut.after(first.transposed())
    if (pair := _on_same_taps(second, through)) is None:
        return math.inf
    used, expected = (each.unflatten(0, (first.groups, -1)).flatten(3) for each in pair)  # (groups, out, hidden, taps)
    overlap, square = (-(used * expected).sum((1, 3)), expected.square().sum((1, 3)))
    scales = torch.where(square > 0, overlap / square, 0.0).clamp_min(0.0)  # (groups, hidden)
    if not bool(scales.isfinite().all()):
        return math.inf
    rest = replace(second, kernel=pair[0] + (expected * scales[:, None, :, None]).flatten(0, 1).view(pair[1].shape))
    if not float(rest.kernel.norm()) <= _UNLIKE * float(second.kernel.norm()):
        return math.inf
    largest = float(scales.max()) if scales.numel() else 0.0
    products = shortcut.kernel.shape[1] * min(shortcut.kernel[0, 0].numel(), first.kernel[0, 0].numel()) + 8
    rounding = 4 * UNIT_ROUNDOFF * (
        products * largest * tap_norms(shortcut.kernel) * tap_norms(first.kernel) + tap_norms(second.kernel)
    )  # fmt: skip
    left = tap_norms(rest.kernel)
    left = left if left < SMALL else min(left, rest.norm(circle))
    fine = tuple(size * s for size, s in zip(circle, shortcut.stride, strict=True))
    scaled = first.with_hidden(scales.flatten().sqrt()).norm(fine) * ROUND_UP
    step = max(1.0, (scaled**2 - 1) * ROUND_UP)
    return (shortcut.norm(circle) * step + (left + rounding) * first.norm(fine)) * ROUND_UP


def hidden_grams(first: LatticeMap, second: LatticeMap) -> list[tuple[Tensor, Tensor]]:
    """Return the Gram matrices of the hidden channels of ``Sᵀ`` and ``T``, over all taps, for each group."""
    rows = [m.kernel.unflatten(0, (m.groups, -1)).flatten(2) for m in (second, first)]
    return [(a @ a.mT, b @ b.mT) for a, b in zip(*rows, strict=True)]


def looks_like_sandwich(first: LatticeMap, second: LatticeMap) -> bool:
    """Whether a search for a bound below ``|S| |T|`` is worth its time, for maps as of ``sandwich_bound``."""
    if first.groups != second.groups or len(first.kernel) != len(second.kernel):
        return False
    matrices = first.kernel[0, 0].numel() == second.kernel[0, 0].numel() == 1
    return is_promising(hidden_grams(first, second), certain=matrices)  # of matrices the Gram matrices say all


def sandwich_bound(first: LatticeMap, second: LatticeMap, circle: Sizes, psi: Tensor | None = None) -> float:
    """Bound ``|S D T|`` for all ``D`` by ``|[Sᵀ Ψ⁻¹, Ψ T]|² / 2``, for any positive diagonal ``Ψ``.

    The proof is that of ``linalg.sandwich`` with ``A = Ψ⁻¹ Sᵀ / √2`` and ``B = Ψ T / √2``. Shifting one map
    against the other does not change the norm.

    Args:
        first: ``T``, to the hidden channels.
        second: ``Sᵀ``, from the outputs to the hidden channels.
        circle: sizes of the hidden map.
        psi: a number for each hidden channel; what looks best, unless given.
    """
    if first.groups != second.groups:
        return math.inf
    if psi is None:
        psi = torch.cat([best_psi(*grams) for grams in hidden_grams(first, second)])
    if not bool((psi.isfinite() & (psi > 0)).all()):
        return math.inf
    a, b = second.with_hidden(1 / psi), first.with_hidden(psi)
    left, right = (polyphase(m.kernel, m.stride, m.dilation, m.groups) for m in (a, b))
    columns = left.block_shape[2], right.block_shape[2]
    coefficients = torch.cat((F.pad(left.coefficients, (0, columns[1])), F.pad(right.coefficients, (columns[0], 0))))
    both = Polyphase(torch.cat((left.positions, right.positions)), coefficients)
    norm = _norm(both, circle) + 2 * UNIT_ROUNDOFF * (tap_norms(a.kernel) + tap_norms(b.kernel))
    return norm**2 / 2 * ROUND_UP


def _same_lattice(*maps: LatticeMap) -> bool:
    """Whether maps have the same groups, and the same dilation on axes on which they have more than one tap."""
    for axis in range(len(maps[0].start)):
        if len({each.dilation[axis] for each in maps if each.kernel.shape[2 + axis] > 1}) > 1:
            return False
    return len({each.groups for each in maps}) == 1


def _with_dilation(given: LatticeMap, dilation: Sizes) -> LatticeMap:
    """Return the same map with another dilation on axes of a single tap, where it means nothing."""
    taps = given.kernel.shape[2:]
    return replace(
        given, dilation=tuple(d if k == 1 else own for d, own, k in zip(dilation, given.dilation, taps, strict=True))
    )


def _on_same_taps(one: LatticeMap, two: LatticeMap) -> tuple[Tensor, Tensor] | None:
    """Pad the kernels of two maps by zeros, so that the same taps read the same positions."""
    if one.kernel.shape[:2] != two.kernel.shape[:2] or one.dilation != two.dilation:
        return None
    pads: tuple[list[int], list[int]] = [], []
    both_starts = zip(one.start, two.start, strict=True)
    both_taps = zip(one.kernel.shape[2:], two.kernel.shape[2:], strict=True)
    for d, starts, taps in zip(one.dilation, both_starts, both_taps, strict=True):
        if (starts[0] - starts[1]) % d:
            return None
        lefts = [(start - min(starts)) // d for start in starts]
        length = max(left + k for left, k in zip(lefts, taps, strict=True))
        for pad, left, k in zip(pads, lefts, taps, strict=True):
            pad[:0] = [left, length - left - k]  # torch has the last axis first
    return F.pad(one.kernel, pads[0]), F.pad(two.kernel, pads[1])


def _norm(convolution: Polyphase, circle: Sizes) -> float:
    """Return the certified norm on a circle, or on every domain where the circle has too many frequencies."""
    coefficients, exponent = normalized(convolution.coefficients)
    scaled = Polyphase(convolution.positions, coefficients)
    return rescaled_up(domain_range(scaled, circle, scaled, lowest=False)[1], exponent)


def tap_norms(kernel: Tensor) -> float:
    """Sum the Frobenius norms of the taps: at least the norm of the convolution on every domain."""
    return float(kernel.flatten(2).norm(dim=(0, 1)).sum()) * (1 + kernel.numel() * UNIT_ROUNDOFF)
