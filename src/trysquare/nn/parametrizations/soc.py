"""SOC (Singla and Feizi, 2021): the exponential of a skew kernel, as one explicit kernel.

A kernel ``S`` with ``Sᵀ = -S`` has an orthogonal exponential. Its Taylor polynomial ``Σ_{j <= t} Sʲ / j!`` is formed by
block convolution (the paper, appendix E) once for each weight; or a layer takes ``factors`` and applies the terms to
its input (``layers.series``). The polynomial differs from the exponential by at most ``Σ_{j > t} ‖S‖ʲ / j!``,
so the norm of ``S`` must be known: the free kernel is divided by a certified bound of its norm *before* it is made
skew, which keeps it skew. Singular values are then within that sum of 1.
"""

from __future__ import annotations

from itertools import accumulate, islice
from math import gcd, prod
from typing import Any, ClassVar

import torch
from torch import Tensor

from trysquare.nn.geometry import ConvGeometry, Sizes, positive
from trysquare.nn.linalg.kernels import adjoint, compose, exponential_kernel
from trysquare.nn.linalg.norms import kernel_norm_bound
from trysquare.nn.linalg.precision import at_least_float32, protected
from trysquare.nn.parametrizations.composed import Composed
from trysquare.nn.parametrizations.upkeep import WeightCache

_TOLERANCE = 1e-6
# An angle of pi reaches every rotation. The terms of the series add up to exp(norm), and with them their rounding.
_LARGEST_NORM = 8.0
_MOST_TERMS = 60


def truncation_error(norm: float, terms: int) -> float:
    """``Σ_{j > terms} normʲ / j!``: how far the Taylor polynomial is from the exponential of a skew kernel.

    >>> f"{truncation_error(1.0, 9):.1e}"
    '3.0e-07'
    """
    sizes = accumulate(range(1, terms + _MOST_TERMS), lambda size, j: size * norm / j, initial=1.0)
    return sum(islice(sizes, terms + 1, None))


def enough_terms(norm: float, tolerance: float = _TOLERANCE) -> int:
    """Least number of terms whose truncation error is below ``tolerance``.

    >>> enough_terms(1.0)
    9
    """
    return next(terms for terms in range(1, 10 * _MOST_TERMS) if truncation_error(norm, terms) < tolerance)


class SOC(Composed):
    """Orthogonal kernel as a matrix over ``reach`` taps, then the exponential of a skew kernel.

    Free tensors: the matrix, if there is a stride or a change of channels; the free kernel ``(g, c, c, *k)`` that is
    made skew. ``kernel_size`` is ``k``, odd on each axis; the weight has ``s / gcd(s, d) + terms (k - 1)`` taps.

    Args:
        geometry: numbers of the layer, with the size of the weight.
        orthogonalizer_name: how the matrix is made orthonormal.
        terms: degree of the Taylor polynomial; by default as many as make the error less than 1e-6. Fourteen make it
            less than 1e-12, for float64.
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
        **factory: Any,
    ) -> None:
        if geometry.parsimonious:
            raise ValueError("method='soc' has no parsimonious variant: its stride is that of the RKO matrix")
        self.norm = norm
        self.terms = enough_terms(norm) if terms is None else terms
        self.skew_size = tuple(
            (k - r) // self.terms + 1 for k, r in zip(geometry.kernel_size, geometry.reach, strict=True)
        )
        self._factors = {"matrix": WeightCache(), "skew": WeightCache()}
        super().__init__(geometry, orthogonalizer_name, **factory)

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
    def note(self) -> str:
        """The argument that became another kernel size, and how exact that is."""
        return f"skew kernel {self.skew_size}, error < {self.truncation_error:.1e}"

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
        """The matrix and the skew kernel, in torch's layout and the layer's dtype, from the cache where that is right.

        The convolution with the weight is that with the exponential of the skew kernel, then that with the matrix,
        which is the identity if there is none; the other way round where the weight is built from its adjoint.
        """
        if not torch.compiler.is_compiling():
            self._be_tended()
            self._written.check()
        exact = [tensor.to(at_least_float32(tensor.dtype)) for tensor in free]
        skew = self._from(self._factors["skew"], lambda: protected(self._skew_blocks, exact[-1:]), free)
        if not self._matrix_count:
            return None, skew
        matrix = self._from(self._factors["matrix"], lambda: protected(self._matrix_blocks, exact[:1]), free)
        return matrix, skew

    def _skew_blocks(self, free: Tensor) -> Tensor:
        return self._blocks(self.skew(free))

    def _matrix_blocks(self, free: Tensor) -> Tensor:
        return self._blocks(_taps_last(self._split_taps(self.matrix(free))))

    def forget(self) -> None:
        """Build anew next time, the factors too."""
        super().forget()
        for cache in self._factors.values():
            cache.clear()

    def of_factors(self, matrix: Tensor | None, skew: Tensor) -> Tensor:
        """The weight that factors make, in their dtype."""
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
        """The matrix, then the exponential."""
        return self._joined(_taps_last(kernel) if self._matrix_count else None, self.skew(inner[0]))

    def _joined(self, matrix: Tensor | None, skew: Tensor) -> Tensor:
        """``matrix ∘ exp(skew)``: ``(g, rows, c, *reach)`` and ``(g, c, c, *k)`` to ``(g, rows, c, ...)``."""
        dims = self.geometry.dims
        rotation = exponential_kernel(skew, self.terms, dims=dims)
        return rotation if matrix is None else compose(matrix, rotation, dims=dims)

    def reconditioned_inner(self, *free: Tensor) -> list[Tensor]:
        """A free kernel cannot degenerate."""
        return list(free)

    def describe_inner(self) -> str:
        """Numbers of the inner kernel."""
        return (
            f"exponential of a skew kernel {self.skew_size} to {self.terms} terms (error < {self.truncation_error:.1e})"
        )


def _taps_last(kernel: Tensor) -> Tensor:
    """``(g, *k, rows, c)`` to ``(g, rows, c, *k)``."""
    return kernel.movedim((-2, -1), (1, 2))
