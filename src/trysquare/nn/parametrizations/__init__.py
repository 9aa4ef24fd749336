"""Free tensors to weights, one method per file.

A method is a subclass of ``KernelMethod``, and is called as ``Method(geometry, orthogonalizer, dtype=..., device=...,
**options)``. A new one is one new file and one line of ``METHODS``.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Unpack

from trysquare.naming import require_known
from trysquare.nn.geometry import ConvGeometry
from trysquare.nn.linalg.fourier import RESPONSES
from trysquare.nn.parametrizations.aoc import AOC
from trysquare.nn.parametrizations.aol import AOL
from trysquare.nn.parametrizations.base import Factory, Parametrization
from trysquare.nn.parametrizations.bcop import BCOP
from trysquare.nn.parametrizations.bro import BRO
from trysquare.nn.parametrizations.manifold import Manifold, ManifoldMatrix
from trysquare.nn.parametrizations.method import KernelMethod
from trysquare.nn.parametrizations.orthonormal import OrthonormalMatrix
from trysquare.nn.parametrizations.rko import RKO
from trysquare.nn.parametrizations.sc_fac import SCFac
from trysquare.nn.parametrizations.soc import SOC
from trysquare.nn.parametrizations.spectral import Spectral

METHODS: dict[str, type[KernelMethod]] = {
    "aoc": AOC,
    "bcop": BCOP,
    "rko": RKO,
    "sc-fac": SCFac,
    "soc": SOC,
    "aol": AOL,
    "bro": BRO,
    "spectral": Spectral,
    "manifold": Manifold,
}


# Those that blocks of several orthogonal kernels can be made of.
BLOCK_METHODS = tuple(name for name, method in METHODS.items() if method.orthogonal and method.keeps_kernel_size)


def find_method(name: str, options: Collection[str] = ()) -> type[KernelMethod]:
    """Return the class of a method, if it has these options.

    Raises:
        ValueError: if there is no method of that name.
        TypeError: if it has no such option.
    """
    if name in RESPONSES:
        raise ValueError(
            f"method={name!r} makes kernels as large as the image: it is a method of FourierOrthoConv1d, 2d and 3d, "
            f"not of layers with small kernels, which have {', '.join(METHODS)}"
        )
    if not isinstance(name, str) or name not in METHODS:
        require_known(name, METHODS, "method")
    for option in options:
        if option not in (known := METHODS[name].options):
            takes = f"has the options {', '.join(known)}" if known else "has no options"
            raise TypeError(
                f"got an unexpected keyword argument {option!r}: the layer has none of that name, and "
                f"method={name!r} {takes}"
            )
    return METHODS[name]


def orthogonal_kernel(
    name: str, geometry: ConvGeometry, orthogonalizer: str, **factory: Unpack[Factory]
) -> KernelMethod:
    """Return an orthogonal kernel of just this geometry, for blocks that are made of several.

    Raises:
        ValueError: if the method is not one of ``BLOCK_METHODS``.
    """
    if name not in BLOCK_METHODS:
        find_method(name)
        raise ValueError(
            f"method={name!r} cannot be a part of a block, which needs orthogonal kernels of exactly the size that it "
            f"asks for; use one of {', '.join(BLOCK_METHODS)}"
        )
    return METHODS[name](geometry, orthogonalizer, **factory)


__all__ = [
    "AOC",
    "AOL",
    "BCOP",
    "BLOCK_METHODS",
    "BRO",
    "METHODS",
    "RKO",
    "SOC",
    "KernelMethod",
    "Manifold",
    "ManifoldMatrix",
    "OrthonormalMatrix",
    "Parametrization",
    "SCFac",
    "Spectral",
    "find_method",
    "orthogonal_kernel",
]
