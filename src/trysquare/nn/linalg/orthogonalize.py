"""Orthonormal matrices from free ones: six ways, each with the domain on which it is exact.

Every function takes ``(..., n, m)`` in float32 or float64, all but Gram-Schmidt complex too, and returns the same shape
with orthonormal rows if ``n <= m``, orthonormal columns otherwise. None returns a matrix that is not orthonormal: what
an iteration or a formula could not reach raises ``ArithmeticError`` (on the CPU at once; on an accelerator as a
device-side assertion, so that nothing stalls, and in a compiled graph as the ``RuntimeError`` of an assertion).

================= ============================= ============================ ==================================
name              result                        exact for                    reaches
================= ============================= ============================ ==================================
``cholesky``      Gram-Schmidt                  every matrix                 every orthonormal matrix
``qr``            Gram-Schmidt                  every matrix                 every orthonormal matrix
``newton_schulz`` nearest orthonormal (polar)   condition up to 1e6 / 1e10   every orthonormal matrix
``bjorck``        nearest orthonormal (polar)   condition up to 1e6 / 1e10   every orthonormal matrix
``cayley``        Cayley transform              entries up to 10 / 1e4       rotations without the angle pi
``exponential``   exponential of a skew matrix  entries up to 10 / 1e4       rotations (determinant 1 if square)
================= ============================= ============================ ==================================

The two limits are those of float32 and float64.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps

import torch
from torch import Tensor

from trysquare import torch_internals
from trysquare.naming import require_known
from trysquare.nn.linalg.inverse import inverse
from trysquare.nn.linalg.matrix_exponential import matrix_exponential
from trysquare.nn.linalg.orthonormal import orthonormal_rows, random_orthonormal, recondition
from trysquare.nn.linalg.precision import (
    Context,
    Gradients,
    Operation,
    full_precision,
    host_can_look,
    is_differentiated,
    keep_outputs,
    nothing_for,
    protected,
    unwrapped,
)
from trysquare.nn.linalg.unitary import corrected, polish

_DTYPES = (torch.float32, torch.float64, torch.complex64, torch.complex128)
_BJORCK_STEPS = {torch.float32: 50, torch.float64: 80}
# Weakest singular value, relative to the bound that the matrix is divided by, that the Newton
# schedule still carries to 1.
_NEWTON_FLOOR = {torch.float32: 1e-8, torch.float64: 1e-12}
# The best scaling, sqrt(3), sends the largest singular value to 0, where rounding would turn it:
# stay clear of that.
_NEWTON_MAX_SCALE = 1.7


def on_rows(rows_only: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Extend a function of wide matrices to tall ones by transposition."""

    @wraps(rows_only)
    def orthogonalize(matrix: Tensor) -> Tensor:
        if matrix.ndim < 2:
            raise ValueError(f"a matrix has two axes, got shape {tuple(matrix.shape)}")
        if matrix.dtype not in _DTYPES:
            raise ValueError(
                f"{rows_only.__name__} takes float32, float64 and their complex kinds, got {matrix.dtype}: "
                "orthonormalise matrix.float(), then round"
            )
        if not matrix.numel():
            return matrix.clone()
        return protected(compute, [matrix])

    def compute(matrix: Tensor) -> Tensor:
        if matrix.shape[-2] > matrix.shape[-1]:
            return rows_only(matrix.mH).mH.resolve_conj()
        return rows_only(matrix)

    return orthogonalize


def within(domain: str) -> Callable[[Callable[[Tensor], Tensor]], Callable[[Tensor], Tensor]]:
    """Have a method that does not take every matrix compute in full precision, and refuse results that are off.

    Rows must be orthonormal to 32 times the rounding of the dtype.
    """

    def decorate(method: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        @wraps(method)
        def checked(matrix: Tensor) -> Tensor:
            with full_precision(matrix):
                basis = method(matrix)
                with torch.no_grad():
                    eye = torch.eye(basis.shape[-2], dtype=basis.dtype, device=basis.device)
                    missed = torch.linalg.matrix_norm(torch.matmul(basis, basis.mH) - eye) / basis.shape[-2] ** 0.5
                    missed = unwrapped(missed).amax()
                    fine = missed < 32 * torch.finfo(basis.dtype).eps
            if not host_can_look(missed):
                problem = f"{method.__name__} did not reach an orthonormal matrix: {domain}"
                torch_internals.assert_on_device(fine, problem)
            elif not bool(fine):
                raise ArithmeticError(
                    f"{method.__name__} reached rows that are orthonormal only to {float(missed):.1e}: {domain}; "
                    "re-initialise the free matrix, or use orthogonalizer='cholesky', which is exact for every matrix"
                )
            return basis

        return checked

    return decorate


_ENTRIES = "its domain is free matrices with entries up to about 10 (float32) or 1e4 (float64)"
_CONDITION = "its domain is full rank with condition number up to 1e6 (float32) or 1e10 (float64)"


@on_rows
def cholesky(matrix: Tensor) -> Tensor:
    """Gram-Schmidt by Cholesky factors; exact for every matrix, and the cheapest."""
    return orthonormal_rows(_real(matrix, "cholesky"))


@on_rows
def qr(matrix: Tensor) -> Tensor:
    """Gram-Schmidt by Householder reflections; exact for every matrix, and ``cholesky`` at full rank."""
    return orthonormal_rows(_real(matrix, "qr"), householder=True)


def _real(matrix: Tensor, name: str) -> Tensor:
    if matrix.is_complex():
        raise ValueError(
            f"{name} takes real matrices, got {matrix.dtype}: use newton_schulz, bjorck, cayley or exponential"
        )
    return matrix


class _Polar(torch.autograd.Function):
    """``Q`` and ``H`` of ``W = H Q`` by the given iteration.

    Derivatives solve a Lyapunov equation, whatever the iteration was.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(matrix: Tensor, iterate: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
        largest = matrix.abs().amax((-2, -1), keepdim=True)
        unit = _divided(matrix, torch.where(largest > 0, largest, 1.0))
        gram = torch.matmul(unit, unit.mH)
        bound = torch.minimum(torch.linalg.matrix_norm(gram), gram.abs().sum(-1).amax(-1))
        bound = bound.sqrt()[..., None, None]
        basis = iterate(unit / torch.where(bound > 0, bound, 1.0))
        return basis, torch.matmul(matrix, basis.mH)

    @staticmethod
    def setup_context(ctx: Context, inputs: tuple[object, ...], output: tuple[Tensor, Tensor]) -> None:
        keep_outputs(ctx, output)

    @staticmethod
    def backward(ctx: Context, grad: Tensor | None, grad_stretch: Tensor | None) -> Gradients:
        if grad is None and grad_stretch is None:
            return nothing_for(ctx)
        basis, stretch = ctx.saved_tensors
        with full_precision(basis):
            if grad_stretch is None:
                assert grad is not None
                return _polar_derivative(basis, stretch, grad), None
            # dH = dW Qᴴ + H Q dQᴴ
            through = torch.matmul(torch.matmul(grad_stretch.mH, stretch), basis)
            grad = through if grad is None else grad + through
            return _polar_derivative(basis, stretch, grad) + torch.matmul(grad_stretch, basis), None

    @staticmethod
    def jvp(ctx: Context, tangent: Tensor, _: None) -> tuple[Tensor, Tensor]:
        basis, stretch = ctx.saved_tensors
        with full_precision(basis):
            moved = _polar_derivative(basis, stretch, tangent)
            along = torch.matmul(tangent, basis.mH) + torch.matmul(torch.matmul(stretch, basis), moved.mH)
        return moved, along


_polar = Operation(_Polar)


def _polar_derivative(basis: Tensor, stretch: Tensor, change: Tensor) -> Tensor:
    """``dQ`` for a change ``dW``, and the gradient of ``W`` from that of ``Q``: a map that is its own adjoint.

    ``dQ = X Q + H⁻¹ dW (I - QᴴQ)`` where ``H X + X H = dW Qᴴ - Q dWᴴ``.
    """
    symmetric = (stretch + stretch.mH) / 2
    tangent = torch.matmul(change, basis.mH)
    normal = change - torch.matmul(tangent, basis)
    if not is_differentiated():
        values, vectors = _eigenvalues(symmetric)
        skew = torch.matmul(vectors.mH, torch.matmul(tangent - tangent.mH, vectors))
        skew = skew / (values.unsqueeze(-1) + values.unsqueeze(-2))
        along = torch.matmul(vectors.mH, normal) / values.unsqueeze(-1)
        return torch.matmul(vectors, torch.matmul(skew, torch.matmul(vectors.mH, basis)) + along)
    skew = _lyapunov(symmetric, tangent - tangent.mH)
    # Not `torch.linalg.solve`: the gradient of its forward mode is wrong (torch 2.13).
    return torch.matmul(skew, basis) + torch.matmul(torch.linalg.inv(symmetric), normal)


def _eigenvalues(symmetric: Tensor) -> tuple[Tensor, Tensor]:
    values, vectors = torch.linalg.eigh(symmetric)
    return values.clamp_min(torch.finfo(values.dtype).tiny ** 0.75), vectors  # or the gradient is not finite


class _Lyapunov(torch.autograd.Function):
    """``X`` with ``H X + X H = B`` for a Hermitian positive definite ``H``; then ``H`` itself, which derivatives need.

    Eigenvectors have no derivatives where eigenvalues meet; the solution has, and they are solutions again.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(symmetric: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
        values, vectors = _eigenvalues(symmetric)
        turned = torch.matmul(vectors.mH, torch.matmul(right, vectors))
        turned = turned / (values.unsqueeze(-1) + values.unsqueeze(-2))
        return torch.matmul(vectors, torch.matmul(turned, vectors.mH)), symmetric.clone()

    @staticmethod
    def setup_context(ctx: Context, inputs: tuple[object, ...], output: tuple[Tensor, Tensor]) -> None:
        keep_outputs(ctx, output)

    @staticmethod
    def backward(ctx: Context, grad: Tensor | None, grad_symmetric: Tensor | None) -> Gradients:
        if grad is None:
            return grad_symmetric, None
        solution, symmetric = ctx.saved_tensors
        right = _lyapunov(symmetric, grad)
        other = -torch.matmul(right, solution.mH) - torch.matmul(solution.mH, right)
        return other if grad_symmetric is None else other + grad_symmetric, right

    @staticmethod
    def jvp(ctx: Context, moved: Tensor | None, moved_right: Tensor | None) -> tuple[Tensor, Tensor]:
        solution, symmetric = ctx.saved_tensors
        right = torch.zeros_like(solution) if moved_right is None else moved_right
        if moved is None:
            return _lyapunov(symmetric, right), torch.zeros_like(symmetric)
        right = right - torch.matmul(moved, solution) - torch.matmul(solution, moved)
        return _lyapunov(symmetric, right), moved.clone()


_lyapunov = Operation(_Lyapunov)


def _divided(matrix: Tensor, size: Tensor) -> Tensor:
    """By a real size that may be subnormal: the division of complex numbers would take its reciprocal, infinity."""
    if matrix.is_complex():
        return torch.view_as_complex(torch.view_as_real(matrix.resolve_conj()) / size.unsqueeze(-1))
    return matrix / size


def _bjorck_steps(basis: Tensor) -> Tensor:
    settled = 4 * torch.finfo(basis.dtype).eps * basis.shape[-2]
    for _ in range(_BJORCK_STEPS[basis.real.dtype]):
        gram = torch.matmul(basis, basis.mH)
        basis = 1.5 * basis - 0.5 * torch.matmul(gram, basis)
        trace = gram.diagonal(dim1=-2, dim2=-1).real.sum(-1)
        if host_can_look(basis) and bool((basis.shape[-2] - trace).amax() < settled):
            break
    return basis


def _newton_steps(basis: Tensor) -> Tensor:
    """Newton-Schulz with the scaling that is best for singular values in ``[low, 1]``: a known number of steps."""
    low = _NEWTON_FLOOR[basis.real.dtype]
    while low < 1 - 1e-3 * torch.finfo(basis.dtype).eps ** 0.5:
        scale = min((3 / (1 + low + low * low)) ** 0.5, _NEWTON_MAX_SCALE)
        basis = 1.5 * scale * basis - 0.5 * scale**3 * torch.matmul(torch.matmul(basis, basis.mH), basis)
        low = min(0.5 * scale * x * (3 - scale**2 * x * x) for x in (low, 1.0))
    return polish(polish(basis))


@on_rows
@within(_CONDITION)
def bjorck(matrix: Tensor) -> Tensor:
    """Nearest orthonormal matrix by Björck and Bowie's iteration, run until it has converged."""
    return _polar(matrix, _bjorck_steps)


@on_rows
@within(_CONDITION)
def newton_schulz(matrix: Tensor) -> Tensor:
    """Nearest orthonormal matrix by Newton-Schulz steps with optimal scaling."""
    return _polar(matrix, _newton_steps)


def cayley_rows(matrix: Tensor) -> Tensor:
    """Cayley transform of ``U - Uᴴ + VᴴV`` for the blocks ``[U, V]ᴴ`` of wide matrices, real or complex.

    The rows are orthonormal up to rounding, which grows with the square of the entries.
    """
    n = matrix.shape[-2]
    upper, lower = matrix[..., :n].mH, matrix[..., n:].mH
    skew = upper - upper.mH
    if lower.shape[-2]:  # what has no rows costs calls, and Inductor cannot differentiate it (torch 2.13)
        skew = skew + torch.matmul(lower.mH, lower)
    eye = torch.eye(n, dtype=matrix.dtype, device=matrix.device)
    half = inverse(eye + skew)  # of I + (I - A)(I + A)⁻¹
    first = 2 * half - eye
    columns = torch.cat([first, -2 * torch.matmul(lower, half)], dim=-2) if lower.shape[-2] else first
    return corrected(columns.mH)


@on_rows
@within(_ENTRIES)
def cayley(matrix: Tensor) -> Tensor:
    """``cayley_rows`` within its domain."""
    return cayley_rows(matrix)


@on_rows
@within(_ENTRIES)
def exponential(matrix: Tensor) -> Tensor:
    """First rows of the exponential of the skew matrix whose first rows the free matrix gives."""
    n, m = matrix.shape[-2:]
    basis = exponential_of_few(matrix) if 2 * n < m else exponential_of_all(matrix)
    return corrected(basis)


def exponential_of_all(matrix: Tensor) -> Tensor:
    """Return the first ``n`` rows ``E exp(A)`` of the exponential of ``A = Eᵀ M - Mᴴ E``, for ``M`` of ``n`` rows."""
    n, m = matrix.shape[-2:]
    square = torch.cat([matrix, matrix.new_zeros(*matrix.shape[:-2], m - n, m)], dim=-2)
    return matrix_exponential(square - square.mH)[..., :n, :]


def exponential_of_few(matrix: Tensor) -> Tensor:
    """Return the same by an exponential of size ``2 n``.

    ``A = X Y`` for ``X = [Eᵀ, -Mᴴ]`` and ``Y = [M; E]``, so ``exp(A) = I + X f(Z) Y`` with ``Z = Y X`` and ``Z f(Z) =
    exp(Z) - I``. The lower half of ``Z`` is ``E X``, so ``E exp(A) = E + (lower half of exp(Z) - I) Y``. The scale
    makes both off-diagonal blocks of ``Z`` of the same size; the result does not depend on it.
    """
    n, m = matrix.shape[-2:]
    first, gram = matrix[..., :n], torch.matmul(matrix, matrix.mH)
    scale = torch.linalg.matrix_norm(gram.detach(), ord=float("inf"), keepdim=True).sqrt()
    scale = torch.where(scale > 0, scale, 1.0)
    eye = torch.eye(n, dtype=matrix.dtype, device=matrix.device).expand_as(first)
    upper, lower = torch.cat([first, -gram / scale], -1), torch.cat([scale * eye, -first.mH], -1)
    left, right = matrix_exponential(torch.cat([upper, lower], -2))[..., n:, :].split(n, -1)
    return torch.matmul(left / scale, matrix) + torch.nn.functional.pad(right, (0, m - n))


def _unchanged(basis: Tensor) -> Tensor:
    return basis


def _cayley_inverse(basis: Tensor) -> Tensor:
    if basis.shape[-2] > basis.shape[-1]:
        return _cayley_inverse(basis.mH).mH
    n = basis.shape[-2]
    upper, lower = basis[..., :n].mH, basis[..., n:].mH
    eye = torch.eye(n, dtype=basis.dtype, device=basis.device)
    skew = 2 * inverse(eye + upper) - eye
    lower = -0.5 * torch.matmul(lower, eye + skew)
    upper = 0.5 * (skew - torch.matmul(lower.mH, lower))
    return torch.cat([upper, lower], dim=-2).mH


def polar_factor(matrix: Tensor) -> Tensor:
    """Nearest matrix with orthonormal rows or columns, in the Frobenius norm, by a singular value decomposition.

    >>> from trysquare.nn.linalg.orthogonalize import polar_factor
    >>> polar_factor(torch.tensor([[3.0, 0.0], [0.0, -0.5]]))
    tensor([[ 1.,  0.],
            [ 0., -1.]])
    """
    left, _, right = torch.linalg.svd(matrix, full_matrices=False)
    return torch.matmul(left, right)


def _nearest_rotation(matrix: Tensor) -> Tensor:
    """Polar factor of a matrix that is not square or complex; otherwise the nearest one of determinant 1."""
    left, _, right = torch.linalg.svd(matrix, full_matrices=False)
    if matrix.shape[-2] == matrix.shape[-1] and not matrix.is_complex():
        left[..., -1:] *= torch.linalg.det(torch.matmul(left, right))[..., None, None].sign()
    return torch.matmul(left, right)


@dataclass(frozen=True)
class Orthogonalizer:
    """A way to an orthonormal matrix, and the way back if there is a closed form for it.

    Attributes:
        apply: free matrix to orthonormal matrix.
        inverse: orthonormal matrix to a free matrix that ``apply`` maps to it, or ``None``.
        keeps_orthonormal: whether an orthonormal free matrix is the natural start; a small normal
            one otherwise.
    """

    apply: Callable[[Tensor], Tensor]
    inverse: Callable[[Tensor], Tensor] | None = _unchanged
    keeps_orthonormal: bool = True

    def draw(self, *shape: int) -> Tensor:
        """Return a fresh free matrix from which this way starts well, float64 on the CPU."""
        if self.keeps_orthonormal:
            return random_orthonormal(*shape)
        return torch.randn(*shape, dtype=torch.float64) / max(shape[-2:]) ** 0.5

    def free(self, basis: Tensor) -> Tensor:
        """Return a free matrix that gives ``basis``, or a fresh one where there is no closed form.

        Of what is not orthonormal, one that gives the nearest matrix that is; the nearest rotation where only these are
        reached.
        """
        if self.inverse is None:
            return self.draw(*basis.shape)
        return self.inverse(polar_factor(basis) if self.keeps_orthonormal else _nearest_rotation(basis))

    def reconditioned(self, matrix: Tensor) -> Tensor:
        """Return a free matrix that gives the same result as ``matrix`` and is safe to train on."""
        if not self.keeps_orthonormal:
            return matrix
        basis = self.apply(matrix)
        if matrix.shape[-2] > matrix.shape[-1]:
            return recondition(matrix.mT, basis.mT).mT
        return recondition(matrix, basis)


ORTHOGONALIZERS = {
    "cholesky": Orthogonalizer(cholesky),
    "qr": Orthogonalizer(qr),
    "newton_schulz": Orthogonalizer(newton_schulz),
    "bjorck": Orthogonalizer(bjorck),
    "cayley": Orthogonalizer(cayley, _cayley_inverse, keeps_orthonormal=False),
    "exponential": Orthogonalizer(exponential, None, keeps_orthonormal=False),
}


def orthogonalizer(name: str) -> Orthogonalizer:
    """Look up an orthogonalizer by name.

    Raises:
        ValueError: if there is none of that name.
    """
    if not isinstance(name, str) or name not in ORTHOGONALIZERS:
        require_known(name, ORTHOGONALIZERS, "orthogonalizer")
    return ORTHOGONALIZERS[name]
