"""Orthogonal and 1-Lipschitz layers for PyTorch: exact, fast and easy to check."""

from trysquare import linalg, lipschitz
from trysquare.auditing import AuditReport, audit
from trysquare.checkpoint import load_model, save_checkpoint
from trysquare.export import to_torch
from trysquare.layers import (
    OrthoConv1d,
    OrthoConv2d,
    OrthoConv3d,
    OrthoConvTranspose1d,
    OrthoConvTranspose2d,
    OrthoConvTranspose3d,
    OrthoLinear,
)
from trysquare.lipschitz import lipschitz_bound, lipschitz_lower_bound
from trysquare.parametrizations import METHODS
from trysquare.spectrum import extreme_singular_values, singular_values, spectral_norm_bound

__version__ = "0.1.0"

__all__ = [
    "METHODS",
    "AuditReport",
    "OrthoConv1d",
    "OrthoConv2d",
    "OrthoConv3d",
    "OrthoConvTranspose1d",
    "OrthoConvTranspose2d",
    "OrthoConvTranspose3d",
    "OrthoLinear",
    "audit",
    "extreme_singular_values",
    "linalg",
    "lipschitz",
    "lipschitz_bound",
    "lipschitz_lower_bound",
    "load_model",
    "save_checkpoint",
    "singular_values",
    "spectral_norm_bound",
    "to_torch",
]
