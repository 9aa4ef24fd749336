"""Pure functions on tensors: kernels, projectors, orthonormal matrices and spectra."""

from trysquare.nn.linalg import checks
from trysquare.nn.linalg.kernels import adjoint, compose, identity
from trysquare.nn.linalg.norms import norm_bound, spectral_norm
from trysquare.nn.linalg.orthogonalize import (
    ORTHOGONALIZERS,
    bjorck,
    cayley,
    cholesky,
    exponential,
    newton_schulz,
    orthogonalizer,
    qr,
)
from trysquare.nn.linalg.orthonormal import orthonormal_rows, recondition
from trysquare.nn.linalg.projectors import grow
from trysquare.nn.linalg.rescaling import contract_rows, unit_rows
from trysquare.nn.linalg.sandwich import sandwich_pair

__all__ = [
    "ORTHOGONALIZERS",
    "adjoint",
    "bjorck",
    "cayley",
    "cholesky",
    "compose",
    "contract_rows",
    "exponential",
    "grow",
    "identity",
    "newton_schulz",
    "norm_bound",
    "orthogonalizer",
    "orthonormal_rows",
    "qr",
    "recondition",
    "sandwich_pair",
    "spectral_norm",
    "unit_rows",
]

# Who calls them from outside is told what they take, and has their derivatives in full precision; the library itself
# calls them without that.
for _name in __all__:
    if callable(globals()[_name]):
        globals()[_name] = checks.for_everybody(globals()[_name])
