"""Extreme singular values of an operator that is only applied, never written down."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from trysquare.progress import track

Apply = Callable[[Tensor], Tensor]
_LOOK_EVERY = 5


class ExtremeSingularValues(NamedTuple):
    """Smallest and largest singular value, and how far each can be from a true one.

    ``largest`` is never above the truth, ``smallest`` never below it, up to rounding (they are those of the operator restricted
    to a subspace). Within the tolerance of each there is a singular value of the operator; that it is the extreme one is
    certain only if the tolerance is 0 or the start, which is random, was not orthogonal to it.
    """

    smallest: float
    largest: float
    smallest_tolerance: float
    largest_tolerance: float


def golub_kahan(apply: Apply, transpose: Apply, size: int, steps: int, tolerance: float) -> ExtremeSingularValues:
    """Extreme singular values by Golub-Kahan bidiagonalisation with full reorthogonalisation.

    Args:
        apply: maps a vector of ``size`` numbers to a longer one (or one as long), linearly. Float64.
        transpose: the adjoint of ``apply``.
        size: the smaller side of the operator, so that every singular value counts.
        steps: largest dimension of the subspace.
        tolerance: stop when both residuals are below this multiple of the largest value.
    """
    steps = min(steps, size)
    generator = torch.Generator().manual_seed(0)
    right = [_unit(torch.randn(size, dtype=torch.float64, generator=generator))]
    left: list[Tensor] = []
    diagonal: list[float] = []
    above: list[float] = []
    for step in track(range(steps), "Lanczos", steps):
        image = apply(right[-1])
        diagonal.append(_append(left, image))
        back = transpose(left[-1])
        above.append(_append(right, back))
        complete = step + 1 == size
        if complete or step + 1 == steps or step % _LOOK_EVERY == _LOOK_EVERY - 1:
            found = _ritz(diagonal, above, complete)
            if max(found.smallest_tolerance, found.largest_tolerance) <= tolerance * found.largest:
                break
    return found


def _unit(vector: Tensor) -> Tensor:
    return vector / vector.norm()


def _append(basis: list[Tensor], vector: Tensor) -> float:
    """Append the part of ``vector`` orthogonal to ``basis``, normalised; its length (0 if rounding is all that is left)."""
    before = float(vector.norm())
    if basis:
        known = torch.stack(basis)
        for _ in range(2):
            vector = vector - (known @ vector) @ known
    length = float(vector.norm())
    if length <= 1e-14 * max(before, 1e-300):
        # An invariant subspace: go on with any direction that is orthogonal to it.
        generator = torch.Generator().manual_seed(len(basis))
        vector = torch.randn(vector.shape, dtype=torch.float64, generator=generator)
        if basis:
            for _ in range(2):
                vector = vector - (known @ vector) @ known
        basis.append(_unit(vector))
        return 0.0
    basis.append(vector / length)
    return length


def _ritz(diagonal: list[float], above: list[float], complete: bool) -> ExtremeSingularValues:
    """Singular values of the bidiagonal matrix, with their residuals ``above[-1] * |last entry of the left vector|``."""
    matrix = torch.diag(torch.tensor(diagonal, dtype=torch.float64))
    if len(diagonal) > 1:
        matrix += torch.diag(torch.tensor(above[:-1], dtype=torch.float64), 1)
    left, values, _ = torch.linalg.svd(matrix)
    residuals = left[-1].abs() * (0.0 if complete else above[-1])
    return ExtremeSingularValues(float(values[-1]), float(values[0]), float(residuals[-1]), float(residuals[0]))
