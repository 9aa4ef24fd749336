"""Orthogonal and 1-Lipschitz layers for PyTorch: exact, fast and easy to check."""

from trysquare import linalg
from trysquare.export import to_torch
from trysquare.layers import (
    FourierOrthoConv1d,
    FourierOrthoConv2d,
    FourierOrthoConv3d,
    FourierOrthoConvTranspose1d,
    FourierOrthoConvTranspose2d,
    FourierOrthoConvTranspose3d,
    OrthoConv1d,
    OrthoConv2d,
    OrthoConv3d,
    OrthoConvTranspose1d,
    OrthoConvTranspose2d,
    OrthoConvTranspose3d,
    OrthoLinear,
)
from trysquare.optim import ProjUNN
from trysquare.parametrizations import METHODS
from trysquare.spectrum import singular_values

__version__ = "0.1.0"

__all__ = [
    "METHODS",
    "FourierOrthoConv1d",
    "FourierOrthoConv2d",
    "FourierOrthoConv3d",
    "FourierOrthoConvTranspose1d",
    "FourierOrthoConvTranspose2d",
    "FourierOrthoConvTranspose3d",
    "OrthoConv1d",
    "OrthoConv2d",
    "OrthoConv3d",
    "OrthoConvTranspose1d",
    "OrthoConvTranspose2d",
    "OrthoConvTranspose3d",
    "OrthoLinear",
    "ProjUNN",
    "linalg",
    "singular_values",
    "to_torch",
]
