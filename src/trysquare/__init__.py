"""Orthogonal and 1-Lipschitz layers for PyTorch: exact, fast and easy to check."""

from typing import Any

from trysquare.lab import checkpoint as checkpoint
from trysquare.lab import data, models, training
from trysquare.lab.checkpoint import load_model, save_checkpoint
from trysquare.nn import conversion as conversion
from trysquare.nn import export as export
from trysquare.nn import init as init
from trysquare.nn import layers, linalg, losses
from trysquare.nn import optim as optim
from trysquare.nn import parametrizations as parametrizations
from trysquare.nn.building import built
from trysquare.nn.conversion import from_torch
from trysquare.nn.export import to_torch
from trysquare.nn.layers import *
from trysquare.nn.losses import margin_for_radius
from trysquare.nn.optim import ProjUNN, parameter_groups
from trysquare.nn.parametrizations import METHODS
from trysquare.nn.sharing import gradient_norm, synchronize
from trysquare.nn.transfer import load_weights
from trysquare.verify import attacks, conformal, lipschitz
from trysquare.verify import auditing as auditing
from trysquare.verify import certification as certification
from trysquare.verify import spectrum as spectrum
from trysquare.verify.auditing import AuditReport, audit
from trysquare.verify.certification import Certificate, certified_radius, certify
from trysquare.verify.lipschitz import lipschitz_bound, lipschitz_lower_bound
from trysquare.verify.spectrum import extreme_singular_values, singular_values, spectral_norm_bound, stable_rank

__version__ = "0.1.0"

__all__ = [
    "METHODS", "AuditReport", "Certificate", "ProjUNN", "attacks", "audit", "built", "certified_radius", "certify",
    "conformal", "data", "extreme_singular_values", "from_torch", "gradient_norm", "init", "linalg", "lipschitz",
    "lipschitz_bound", "lipschitz_lower_bound", "load_model", "load_weights", "losses", "margin_for_radius",
    "models", "parameter_groups", "save_checkpoint", "singular_values", "spectral_norm_bound", "stable_rank",
    "synchronize", "to_torch", "training",
]  # fmt: skip
__all__ += layers.__all__


def __getattr__(name: str) -> Any:
    """Say what a name without its dimension, such as ``SLLBlock``, is called."""
    now = f"{name}2d"
    hint = f": use {now}" if now in __all__ else ""
    raise AttributeError(f"module 'trysquare' has no attribute {name!r}{hint}")
