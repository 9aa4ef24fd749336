"""Pure functions on tensors: kernels, projectors, orthonormal matrices and spectra."""

from trysquare.linalg.kernels import adjoint, compose, identity
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

__all__ = [
    "ORTHOGONALIZERS",
    "adjoint",
    "bjorck",
    "cayley",
    "cholesky",
    "compose",
    "exponential",
    "grow",
    "identity",
    "newton_schulz",
    "orthogonalizer",
    "orthonormal_rows",
    "qr",
    "recondition",
]
