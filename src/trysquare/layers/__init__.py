"""Layers with torch's signatures."""

from trysquare.layers.conv import (
    OrthoConv1d,
    OrthoConv2d,
    OrthoConv3d,
    OrthoConvTranspose1d,
    OrthoConvTranspose2d,
    OrthoConvTranspose3d,
)
from trysquare.layers.fourier import (
    FourierOrthoConv1d,
    FourierOrthoConv2d,
    FourierOrthoConv3d,
    FourierOrthoConvTranspose1d,
    FourierOrthoConvTranspose2d,
    FourierOrthoConvTranspose3d,
)
from trysquare.layers.linear import OrthoLinear

__all__ = [
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
]
