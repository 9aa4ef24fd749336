"""Free tensors to weights, one method a file.

A method is a class called as ``Method(geometry, orthogonalizer, dtype=..., device=..., **options)``
that implements ``Parametrization``. Adding one is one new file and one line of ``METHODS``.
"""

from trysquare.parametrizations.aoc import AOC
from trysquare.parametrizations.aol import AOL
from trysquare.parametrizations.base import Parametrization
from trysquare.parametrizations.bcop import BCOP
from trysquare.parametrizations.bro import BRO
from trysquare.parametrizations.orthonormal import OrthonormalMatrix
from trysquare.parametrizations.rko import RKO
from trysquare.parametrizations.sc_fac import SCFac
from trysquare.parametrizations.soc import SOC

METHODS: dict[str, type[Parametrization]] = {
    "aoc": AOC,
    "bcop": BCOP,
    "rko": RKO,
    "sc-fac": SCFac,
    "soc": SOC,
    "aol": AOL,
    "bro": BRO,
}

__all__ = ["AOC", "AOL", "BCOP", "BRO", "METHODS", "RKO", "SOC", "OrthonormalMatrix", "Parametrization", "SCFac"]
