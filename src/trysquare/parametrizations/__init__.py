"""Free tensors to weights, one method a file.

A method is a class called as ``Method(geometry, orthogonalizer, dtype=..., device=...)`` that
implements ``Parametrization``. Adding one is one new file and one line of ``METHODS``.
"""

from trysquare.parametrizations.aoc import AOC
from trysquare.parametrizations.base import Parametrization
from trysquare.parametrizations.orthonormal import OrthonormalMatrix

METHODS = {"aoc": AOC}

__all__ = ["AOC", "METHODS", "OrthonormalMatrix", "Parametrization"]
