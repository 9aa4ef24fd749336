"""SOC (Singla and Feizi, 2021): the exponential of a skew kernel, as one explicit kernel.

A kernel ``S`` with ``Sᵀ = -S`` has an orthogonal exponential. It is approximated by a polynomial of ``S``, which a
layer either forms as one kernel, by block convolution (the paper, appendix E), or applies to its input term by term
(``layers.series``).

The norm of ``S`` is known: the free kernel is divided by a certified bound of its norm *before* it is made skew, which
keeps it skew. So the eigenvalues of ``S`` are on the segment from ``-i norm`` to ``i norm``, and the polynomial is the
truncated Chebyshev series of ``exp`` on this segment, ``Σ_k i^k (2 - δ_k0) J_k(norm) T_k(S / (i norm))`` with Bessel
functions ``J_k``. Because ``|J_k(x)| <= (x / 2)^k / k!``, singular values are within
``Σ_{k > terms} 2 (norm / 2)^k / k!`` of 1. The Taylor polynomial, which the authors use, is about ``2^terms`` times
further off: for an error below 1e-6 it takes 9 terms where this one takes 7.
"""

from __future__ import annotations

from itertools import accumulate, islice, zip_longest
from math import factorial, fsum, gcd, prod
from typing import Any, ClassVar, Unpack

import torch
from torch import Tensor

from trysquare import torch_internals
from trysquare.nn.geometry import ConvGeometry, Sizes, positive
from trysquare.nn.linalg.kernels import adjoint, compose, polynomial_kernel
from trysquare.nn.linalg.norms import kernel_norm_bound
from trysquare.nn.linalg.precision import at_least_float32, protected
from trysquare.nn.parametrizations.base import Factory, WeightCache, gathered
from trysquare.nn.parametrizations.composed import Composed

_TOLERANCE = 1e-6
# An angle of pi reaches every rotation. The terms add up to about exp(norm), and with them their rounding.
_LARGEST_NORM = 8.0
_MOST_TERMS = 60


def truncation_error(norm: float, terms: int) -> float:
    """``Σ_{k > terms} 2 (norm / 2)^k / k!``: how far the polynomial may be from the exponential.

    >>> f"{truncation_error(1.0, 7):.1e}"
    '2.1e-07'
    """
    sizes = accumulate(range(1, terms + _MOST_TERMS), lambda size, k: size * norm / (2 * k), initial=2.0)
    return sum(islice(sizes, terms + 1, None))


def exponential_coefficients(norm: float, terms: int) -> list[float]:
    """Return the coefficients of a polynomial near ``exp`` from ``-i norm`` to ``i norm``, the constant one first.

    >>> [round(a, 4) for a in exponential_coefficients(1.0, 3)]
    [0.995, 0.9975, 0.4596, 0.1565]
    """
    # Coefficients of U_k(s) = i^k T_k(s / (i norm)): U_0 = 1, U_1 = s / norm, U_{k + 1} = 2 s / norm U_k + U_{k - 1}.
    last, present = [0.0], [1.0]
    total = [0.0] * (terms + 1)
    for k in range(terms + 1):
        twice = 2 if k else 1
        series = ((-1) ** m * (norm / 2) ** (2 * m + k) / (factorial(m) * factorial(m + k)) for m in range(_MOST_TERMS))
        bessel = fsum(series)
        for j, coefficient in enumerate(present):
            total[j] += twice * bessel * coefficient
        shifted = [0.0, *(twice / norm * coefficient for coefficient in present)]
        last, present = present, [a + b for a, b in zip_longest(shifted, last if k else (), fillvalue=0.0)]
    return total


def enough_terms(norm: float, tolerance: float = _TOLERANCE) -> int:
    """Return the least number of terms whose truncation error is below ``tolerance``.

    >>> enough_terms(1.0)
    7
    """
    return next(terms for terms in range(1, 10 * _MOST_TERMS) if truncation_error(norm, terms) < tolerance)


class SOC(Composed):
    """Orthogonal kernel as a matrix over ``reach`` taps, then the exponential of a skew kernel.

    Free tensors: the matrix, if there is a stride or a change of channels; the free kernel ``(g, c, c, *k)`` that is
    made skew. ``kernel_size`` is ``k``, odd on each axis; the weight has ``s / gcd(s, d) + terms (k - 1)`` taps.

    Args:
        geometry: numbers of the layer, with the size of the weight.
        orthogonalizer_name: how the matrix is made orthonormal.
        terms: degree of the polynomial; by default as many as make the error less than 1e-6, which are 7. With 12 it
            is less than 1e-12, for float64; with 5, which other libraries use, less than 5e-5.
        norm: bound of the norm of the skew kernel, that is of the angles by which it rotates; at most 8. Larger
            reaches more and takes more terms; pi reaches every angle.
        factory: device and dtype.
    """

    options: ClassVar[tuple[str, ...]] = ("terms", "norm")
    exact: ClassVar[bool] = False
    keeps_kernel_size: ClassVar[bool] = False
    brings_matrix = True

    def __init__(
        self,
        geometry: ConvGeometry,
        orthogonalizer_name: str,
        terms: int | None = None,
        norm: float = 1.0,
        **factory: Unpack[Factory],
    ) -> None:
        if geometry.parsimonious:
            raise ValueError("method='soc' has no parsimonious variant: its stride is that of the RKO matrix")
        self.norm = norm
        self.terms = enough_terms(norm) if terms is None else terms
        self.coefficients = exponential_coefficients(norm, self.terms)
        self.skew_size = tuple(
            (k - r) // self.terms + 1 for k, r in zip(geometry.kernel_size, geometry.reach, strict=True)
        )
        self._factors = {"matrix": WeightCache(), "skew": WeightCache()}
        super().__init__(geometry, orthogonalizer_name, **factory)
        # The argument that became another kernel size, and how exact that is.
        self.note = f"skew kernel {self.skew_size}, error < {self.truncation_error:.1e}"

    @classmethod
    def full_kernel_size(cls, kernel_size: Sizes, stride: Sizes, dilation: Sizes, **options: Any) -> Sizes:
        """Size of the weight for a skew kernel of size ``kernel_size``.

        Raises:
            ValueError: if there is no such skew kernel, or an option has no meaning.
        """
        terms, norm = options.get("terms"), options.get("norm", 1.0)
        if any(k % 2 == 0 for k in kernel_size):
            raise ValueError(
                f"kernel_size={kernel_size} must be odd for method='soc': a skew kernel has a tap at -j for each tap "
                "at j; use the next odd size"
            )
        if isinstance(norm, bool) or not isinstance(norm, int | float) or not 0 < norm <= _LARGEST_NORM:
            raise ValueError(
                f"norm={norm!r} must be a number above 0 and at most {_LARGEST_NORM:.0f}: it bounds the angles of the "
                "rotation, and pi reaches all of them"
            )
        count = enough_terms(norm) if terms is None else positive("terms", terms)
        axes = zip(kernel_size, stride, dilation, strict=True)
        return tuple(1 if k == 1 else s // gcd(s, d) + count * (k - 1) for k, s, d in axes)

    @property
    def truncation_error(self) -> float:
        """Certified bound of the distance of every singular value from 1, rounding apart."""
        return truncation_error(self.norm, self.terms)

    @property
    def matrix_shapes(self) -> tuple[tuple[int, ...], ...]:
        """None only if there is neither a stride nor a change of channels."""
        _, rows, columns = self.geometry.matrix_shape
        return () if rows == columns == self.geometry.inner_channels > 1 else (self.geometry.matrix_shape,)

    @property
    def inner_shapes(self) -> tuple[tuple[int, ...], ...]:
        """The free kernel that is made skew."""
        c = self.geometry.inner_channels
        return ((self.geometry.groups, c, c, *self.skew_size),)

    @property
    def alike(self) -> None:
        """Nothing: layers may apply the terms one by one, and never ask for the weight."""
        return None

    def draw_inner(self) -> list[Tensor]:
        """Normal entries of the size that makes the norm about 2."""
        (shape,) = self.inner_shapes
        return [torch.randn(*shape, dtype=torch.float64) / prod(shape[2:]) ** 0.5]

    def skew(self, free: Tensor) -> Tensor:
        """Scale the free kernel to a norm of at most ``norm``, then take half the difference to its adjoint."""
        dims = self.geometry.dims
        bound = kernel_norm_bound(free, dims).clamp_min(1.0)
        scaled = free * (0.5 * self.norm / bound)[(..., *(None,) * (dims + 2))]
        groups = len(scaled)
        flat = scaled.flatten(0, 1)
        return (flat - adjoint(flat, groups)).view_as(scaled)

    def factors(self, *free: Tensor) -> tuple[Tensor | None, Tensor]:
        """Return the matrix and the skew kernel in torch's layout and the layer's dtype, from the cache where possible.

        The convolution with the weight is that with the exponential of the skew kernel, then that with the matrix,
        which is the identity if there is none; the other way round where the weight is built from its adjoint.
        """
        if not torch.compiler.is_compiling() and torch_internals.jit_trace() is None:
            self.refuse_writes()
        free = tuple(gathered(tensor) for tensor in free)
        exact = [tensor.to(at_least_float32(tensor.dtype)) for tensor in free]
        skew = self._from_cache(lambda: protected(self._skew_blocks, exact[-1:]), free, self._factors["skew"])
        if not self._matrix_count:
            return None, skew
        matrix = self._from_cache(lambda: protected(self._matrix_blocks, exact[:1]), free, self._factors["matrix"])
        return matrix, skew

    def _skew_blocks(self, free: Tensor) -> Tensor:
        return self._blocks(self.skew(free))

    def _matrix_blocks(self, free: Tensor) -> Tensor:
        return self._blocks(_taps_last(self._split_taps(self.matrix(free))))

    def forget(self) -> None:
        """Clear the cache, of the factors too."""
        super().forget()
        for cache in self._factors.values():
            cache.clear()

    def of_factors(self, matrix: Tensor | None, skew: Tensor) -> Tensor:
        """Return the weight that factors make, in their dtype."""
        return self._to_torch(self._joined(None if matrix is None else self._unblocked(matrix), self._unblocked(skew)))

    def _blocks(self, kernel: Tensor) -> Tensor:
        """``(g, n, m, *k)`` to ``(g n, m, *k)``; each tap is transposed where those of the weight are.

        That reverses the order of the factors, and makes the exponential that of the transposed skew kernel.
        """
        kernel = kernel.transpose(1, 2) if self.geometry.built_from_adjoint else kernel
        return kernel.flatten(0, 1).to(self.like.dtype)

    def _unblocked(self, kernel: Tensor) -> Tensor:
        kernel = kernel.unflatten(0, (self.geometry.groups, -1))
        return kernel.transpose(1, 2) if self.geometry.built_from_adjoint else kernel

    def composed(self, kernel: Tensor, *inner: Tensor) -> Tensor:
        """Return the matrix, then the exponential."""
        return self._joined(_taps_last(kernel) if self._matrix_count else None, self.skew(inner[0]))

    def _joined(self, matrix: Tensor | None, skew: Tensor) -> Tensor:
        """``matrix ∘ exp(skew)``: ``(g, rows, c, *reach)`` and ``(g, c, c, *k)`` to ``(g, rows, c, ...)``."""
        dims = self.geometry.dims
        rotation = polynomial_kernel(skew, self.coefficients, dims=dims)
        return rotation if matrix is None else compose(matrix, rotation, dims=dims)

    def reconditioned_inner(self, *free: Tensor) -> list[Tensor]:
        """Return the free kernel itself, which cannot degenerate."""
        return list(free)

    def describe_inner(self) -> str:
        return (
            f"exponential of a skew kernel {self.skew_size} to {self.terms} terms (error < {self.truncation_error:.1e})"
        )


def _taps_last(kernel: Tensor) -> Tensor:
    """``(g, *k, rows, c)`` to ``(g, rows, c, *k)``."""
    return kernel.movedim((-2, -1), (1, 2))
