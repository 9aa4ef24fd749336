"""Arithmetic of bounds, the one place where they are rounded: up, and never to zero.

A bound says how fast a value can change with the network's input. ``None`` is the bound of a value that does not
depend on the input at all; 0 is that of one that provably does not change, such as ``0 * x``. What is merely too small
for float64 stays at least its smallest normal number, what is too large becomes infinity.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

# Rules compute constants with less than 16 roundings; this covers them, and those of combining them.
_UP = 1 + 2.0**-48
_LEAST = sys.float_info.min


def flatten(bounds: Any) -> Iterator[float]:
    """The bounds in nested lists, tuples, dictionaries and slices of values that depend on the input."""
    if isinstance(bounds, dict):
        bounds = list(bounds.values())
    if isinstance(bounds, list | tuple):
        for part in bounds:
            yield from flatten(part)
    elif bounds is not None:
        yield bounds


def scaled(constant: float, bound: float) -> float:
    """Bound after a function with a Lipschitz constant; an input that does not change hides any constant."""
    if constant == 0 or bound == 0:
        return 0.0
    return max(_LEAST, constant * bound)


def side_by_side(bounds: Iterable[float]) -> float:
    """Bound of values that lie next to each other: the root of the sum of squares."""
    bounds = list(bounds)
    return bounds[0] if len(bounds) == 1 else _rounded(math.hypot(*bounds))


def _rounded(value: float) -> float:
    return max(_LEAST, value * _UP) if value > 0 else value


@dataclass(frozen=True)
class Combination:
    """How the bounds of inputs make that of a result.

    Attributes:
        parts: a Lipschitz constant and a bound for each input.
        apart: whether the changes of the inputs lie side by side in the result; otherwise they add up.
    """

    parts: list[tuple[float, float]]
    apart: bool = False

    @property
    def bound(self) -> float:
        """Bound of the result."""
        return self._joined(1.0)

    @property
    def constant(self) -> float:
        """Bound of the result over the largest of the inputs', unless that is 0 or infinite."""
        largest = max(bound for _, bound in self.parts)
        return self._joined(largest if 0 < largest < math.inf else 1.0)

    def _joined(self, unit: float) -> float:
        changes = [scaled(constant, bound / unit) for constant, bound in self.parts]
        return _rounded(math.hypot(*changes) if self.apart else sum(changes))
