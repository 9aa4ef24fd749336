"""Pure functions on tensors: kernels, projectors, orthonormal matrices and spectra."""

from trysquare.linalg.kernels import adjoint, compose, identity
from trysquare.linalg.norms import norm_bound
from trysquare.linalg.orthogonalize import (
    ORTHOGONALIZERS,
    bjorck,
    cayley,
    cholesky,
    exponential,
    newton_schulz,
    orthogonalizer,
    qr,
)
from trysquare.linalg.orthonormal import orthonormal_rows, recondition
from trysquare.linalg.projectors import grow
from trysquare.linalg.rescaling import contract_rows, unit_rows
from trysquare.linalg.sandwich import sandwich_pair

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
    "unit_rows",
]
