"""Layers with torch's signatures."""

from trysquare.layers.conv import (
    OrthoConv1d,
    OrthoConv2d,
    OrthoConv3d,
    OrthoConvTranspose1d,
    OrthoConvTranspose2d,
    OrthoConvTranspose3d,
)
from trysquare.layers.linear import OrthoLinear

__all__ = [
    "OrthoConv1d",
    "OrthoConv2d",
    "OrthoConv3d",
    "OrthoConvTranspose1d",
    "OrthoConvTranspose2d",
    "OrthoConvTranspose3d",
    "OrthoLinear",
]
