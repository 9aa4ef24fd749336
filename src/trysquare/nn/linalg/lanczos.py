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

    ``largest`` is never above the truth, ``smallest`` never below it, up to rounding (they are those of the operator
    restricted to a subspace). Within the tolerance of each there is a singular value of the operator; that it is the
    extreme one is certain only if the tolerance is 0 or the start, which is random, was not orthogonal to it.
    """

    smallest: float
    largest: float
    smallest_tolerance: float
    largest_tolerance: float


def golub_kahan(apply: Apply, transpose: Apply, size: int, steps: int, tolerance: float) -> ExtremeSingularValues:
    """Return extreme singular values found by Golub-Kahan bidiagonalisation with full reorthogonalisation.

    Args:
        apply: maps a vector of ``size`` numbers to a longer one (or one as long), linearly. Float64.
        transpose: the adjoint of ``apply``.
        size: the smaller side of the operator, so that every singular value counts.
        steps: largest dimension of the subspace.
        tolerance: stop when both residuals are below this multiple of the largest value.
    """
    steps = min(steps, size)
    generator = torch.Generator().manual_seed(0)
    right, left = _Basis(size, steps + 1), None
    right.append(torch.randn(size, dtype=torch.float64, generator=generator))
    diagonal: list[float] = []
    above: list[float] = []
    for step in track(range(steps), "Lanczos", steps):
        image = apply(right.last)
        left = left or _Basis(len(image), steps)
        diagonal.append(left.append(image))
        complete = step + 1 == size
        above.append(0.0 if complete else right.append(transpose(left.last)))
        if complete or step + 1 == steps or step % _LOOK_EVERY == _LOOK_EVERY - 1:
            found = _ritz(diagonal, above)
            if max(found.smallest_tolerance, found.largest_tolerance) <= tolerance * found.largest:
                break
    return found


class _Basis:
    """Orthonormal vectors, one row each, in memory that is allocated once."""

    def __init__(self, size: int, capacity: int) -> None:
        self.rows = torch.empty(capacity, size, dtype=torch.float64)
        self.count = 0

    @property
    def last(self) -> Tensor:
        return self.rows[self.count - 1]

    def append(self, vector: Tensor) -> float:
        """Append the normalised part of ``vector`` orthogonal to all rows; return its length, 0 if it is rounding."""
        before = float(vector.norm())
        vector = self._rest(vector)
        length = float(vector.norm())
        if length <= 1e-14 * before or length == 0:
            # The rows span an invariant subspace: go on with any direction outside of it.
            generator = torch.Generator().manual_seed(self.count)
            vector, length = self._rest(torch.randn(vector.shape, dtype=torch.float64, generator=generator)), 0.0
        self.rows[self.count] = vector / vector.norm()
        self.count += 1
        return length

    def _rest(self, vector: Tensor) -> Tensor:
        known = self.rows[: self.count]
        for _ in range(2):
            vector = vector - (known @ vector) @ known
        return vector


def _ritz(diagonal: list[float], above: list[float]) -> ExtremeSingularValues:
    """Return singular values of the bidiagonal matrix, and residuals ``above[-1] |last entry of the left vector|``."""
    matrix = torch.diag(torch.tensor(diagonal, dtype=torch.float64))
    if len(diagonal) > 1:
        matrix += torch.diag(torch.tensor(above[:-1], dtype=torch.float64), 1)
    left, values, _ = torch.linalg.svd(matrix)
    residuals = left[-1].abs() * above[-1]
    return ExtremeSingularValues(float(values[-1]), float(values[0]), float(residuals[-1]), float(residuals[0]))
