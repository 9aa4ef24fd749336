"""Weights whose free tensors are orthonormal matrices themselves: a training pass orthonormalises nothing.

A chain of projectors is ``M₀ E(z) M₁ E(w) M₂ …``, where ``E(z) = diag(I, z I)`` shifts the last channels by a tap, and
the ``M`` are orthogonal (``[N, I - N] = Qᵀ E(z) Q`` for a projector ``N`` onto the first rows of ``Q``). Matrices of
two blocks commute with ``E``. By the decomposition ``M = diag(U₁, U₂) R(θ) diag(V₁, V₂)`` into blocks and a rotation of
pairs of channels (the CS decomposition), every other ``M`` can therefore be a rotation ``R(θ)`` whose blocks belong to
its neighbours. For 3 x 3 that leaves three orthogonal matrices and two vectors of angles, which have the dimension of
AOC's matrix and four projectors, and reach the same kernels. Products: 4 half taps of the matrix in the middle, 12 of
the first one, ``16 c³`` FLOPs and ``48 c³`` with backward.

``RiemannianAdam`` keeps the matrices orthonormal, and then they are used as they are. After any other write (by another
optimizer, by hand, by loading) they are orthonormalised by Cholesky factors wherever they are used, so that the weight
is orthogonal whatever they are; then this is one more parametrization, slower than ``aoc``. They are orthonormalised
too where gradients are off, so that the weight that is evaluated, exported and certified is orthogonal to rounding.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from functools import reduce
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from trysquare.nn.geometry import ConvGeometry
from trysquare.nn.linalg.orthogonalize import orthogonalizer
from trysquare.nn.linalg.orthonormal import random_orthonormal
from trysquare.nn.linalg.precision import apply_function, for_first_derivatives, only_first_derivatives
from trysquare.nn.parametrizations.aoc import AOC
from trysquare.nn.parametrizations.base import Parametrization
from trysquare.nn.parametrizations.orthonormal import OrthonormalMatrix
from trysquare.nn.riemannian import is_known

_CHOLESKY = orthogonalizer("cholesky")

# An orthonormal matrix as it is, whose gradient is right in tangent directions, which is all that RiemannianAdam takes
# of it. Derivatives of the gradient are those of the matrix orthonormalised.
_as_it_is = for_first_derivatives(
    "AsItIs", lambda ctx, matrix: matrix.clone(), lambda ctx, grad: (grad,), lambda matrix: _CHOLESKY.apply(matrix)
)


class _OnManifold(Parametrization):
    """A parametrization whose first free tensors are orthonormal matrices."""

    def _are_known(self, free: Sequence[Tensor]) -> bool:
        """Whether these are the free tensors of this layer, and those of them that are matrices orthonormal."""
        slots = list(self.slots.values())[: self.orthonormal_count]
        return bool(slots) and all(
            is_known(slot) and _is_same(slot, tensor) for slot, tensor in zip(slots, free, strict=False)
        )

    def _uses_as_they_are(self, free: Sequence[Tensor]) -> bool:
        """Whether the matrices are used as they are: where they are known, and somebody will train them."""
        return torch.is_grad_enabled() and only_first_derivatives() and self._are_known(free)

    @property
    def alike(self) -> Hashable:
        """Also whether the matrices are used as they are."""
        return super().alike, self._uses_as_they_are(list(self.slots.values()))

    def _matrices(self, free: Sequence[Tensor], as_they_are: bool) -> list[Tensor]:
        """Return the orthonormal matrices."""
        matrices = free[: self.orthonormal_count]
        if as_they_are:
            return [apply_function(_as_it_is, matrix) for matrix in matrices]
        return [_CHOLESKY.apply(matrix) for matrix in matrices]

    def reconditioned(self, *free: Tensor) -> list[Tensor]:
        """Return well conditioned free tensors that give the same weight, which orthonormal ones are."""
        if self._are_known(free):
            return list(free)
        count = self.orthonormal_count
        return [*(_CHOLESKY.reconditioned(matrix) for matrix in free[:count]), *free[count:]]


def _is_same(slot: Tensor, tensor: Tensor) -> bool:
    """Whether ``tensor`` is a parameter, or shares its memory and has seen all writes to it."""
    if slot is tensor:
        return True
    return (
        type(tensor) is Tensor
        and not tensor.is_inference()
        and (tensor.shape, tensor.dtype, tensor.stride()) == (slot.shape, slot.dtype, slot.stride())
        and (tensor.data_ptr(), tensor._version) == (slot.data_ptr(), slot._version)
    )


class ManifoldMatrix(_OnManifold, OrthonormalMatrix):
    """``(..., out, in)`` with orthonormal rows or columns, which is its own free tensor."""

    @property
    def orthonormal_count(self) -> int:
        return 1

    def build(self, *free: Tensor) -> Tensor:
        """Return the matrix, orthonormalised unless it is known to be orthonormal."""
        return self._matrices(free, self._uses_as_they_are(free))[0].contiguous()

    def build_together(self, *free: Tensor) -> Tensor:
        """Return the matrices of layers that are alike."""
        return self._matrices(free, self._uses_as_they_are(list(self.slots.values())))[0].contiguous()


class Manifold(_OnManifold, AOC):
    """Orthogonal kernel ``(out, in / groups, *k)`` from orthonormal matrices and angles.

    Free tensors: the first matrix, of shape ``geometry.matrix_shape``; where taps are missing, the square ones in the
    middle ``(count, g, c, c)``, if there are any, the last one ``(g, c, in / g)``, and angles ``(count, g, c // 2)``.
    """

    uses_orthogonalizer = False

    def __init__(self, geometry: ConvGeometry, orthogonalizer_name: str, **options: Any) -> None:
        super().__init__(geometry, orthogonalizer_name, **options)
        axes = self.geometry.frame_axes
        self._axes = () if self.geometry.frames_shape is None else axes
        # Of the matrices, one more than there are shifts, those in odd places are rotations, except for the last one.
        self._middle = tuple(range(2, len(self._axes), 2))
        self._rotations = tuple(range(1, len(self._axes), 2))

    @property
    def orthonormal_count(self) -> int:
        return (1 + bool(self._middle) + 1) if self._axes else 1

    @property
    def free_shapes(self) -> tuple[tuple[int, ...], ...]:
        """Matrices, then angles."""
        geometry, count = self.geometry, len(self._rotations)
        groups, c, h = geometry.groups, geometry.inner_channels, geometry.frame_rank
        if not self._axes:
            return (geometry.matrix_shape,)
        middle = ((len(self._middle), groups, c, c),) if self._middle else ()
        angles = ((count, groups, h),) if count else ()
        return (geometry.matrix_shape, *middle, (groups, c, self._last_channels), *angles)

    @property
    def _last_channels(self) -> int:
        geometry = self.geometry
        return geometry.inner_channels if geometry.built_from_adjoint else geometry.group_in

    def draw(self) -> list[Tensor]:
        """Return uniformly distributed matrices, and angles as those between uniformly distributed projectors."""
        shapes = self.free_shapes
        count = self.orthonormal_count
        drawn = [random_orthonormal(*shape) for shape in shapes[:count]]
        if self._rotations:
            c, h = self.geometry.inner_channels, self.geometry.frame_rank
            corner = random_orthonormal(*shapes[-1][:-1], c, c)[..., :h, :h]
            drawn.append(torch.linalg.svdvals(corner).clamp_max(1).acos())
        return drawn

    def build(self, *free: Tensor) -> Tensor:
        """Return the kernel in torch's layout."""
        return self._kernel(free, self._uses_as_they_are(free))

    def build_together(self, *free: Tensor) -> Tensor:
        """Build the kernels as groups of one, from stacked free tensors."""
        as_they_are = self._uses_as_they_are(list(self.slots.values()))
        # Matrices of one place are (count, g, ...), those of several (count, p, g, ...).
        joined = [
            each.flatten(0, 1) if len(shape) == 3 and self._has_no_places(number) else each.movedim(0, 1).flatten(1, 2)
            for number, (each, shape) in enumerate(zip(free, self.free_shapes, strict=True))
        ]
        return self._kernel(joined, as_they_are).unflatten(0, (len(free[0]), -1))

    def _has_no_places(self, number: int) -> bool:
        """Whether a free tensor is one matrix for each group: the first is, and the last matrix."""
        return number in (0, self.orthonormal_count - 1)

    def _kernel(self, free: Sequence[Tensor], as_they_are: bool) -> Tensor:
        first, *others = self._matrices(free, as_they_are)
        taps = self._split_taps(first)
        if not self._axes:
            return self._to_torch(self.grown(taps, (), self.geometry.frame_axes))
        *middle, last = others
        squares = dict(zip(self._middle, middle[0].unbind() if middle else (), strict=True))
        turns: dict[int, tuple[Tensor, Tensor]] = {}
        if self._rotations:
            angles = free[-1][(..., *(None,) * (self.geometry.dims + 1))]
            pairs = zip(angles.cos().unbind(), angles.sin().unbind(), strict=True)
            turns = dict(zip(self._rotations, pairs, strict=True))
        return self._to_torch(self._chain(taps, squares, last, turns))

    def _chain(
        self, first: Tensor, squares: dict[int, Tensor], last: Tensor, turns: dict[int, tuple[Tensor, Tensor]]
    ) -> Tensor:
        """Multiply from the right: ``(g, rows, c, *k)``.

        What has been multiplied is kept as its first and its last rows, ``(g, rows, *taps, columns)``, because ``E``
        shifts the last ones.
        """
        dims, h = self.geometry.dims, self.geometry.frame_rank
        inner = last[(..., *(None,) * dims, slice(None))]  # one tap
        above, below = inner[:, :h], inner[:, h:]
        for place in reversed(range(len(self._axes))):
            axis = self._axes[place] + 2
            if place in turns:
                above, below = _rotated(above, below, *turns[place], axis)
            elif place:
                inner = _shifted_sum(
                    _product(squares[place][..., :h], above), _product(squares[place][..., h:], below), axis
                )
                above, below = inner[:, :h], inner[:, h:]
        groups, *reach, rows, _ = first.shape
        left = first.reshape(groups, -1, first.shape[-1])  # (g, reach * rows, c)
        kernel = _shifted_sum(_product(left[..., :h], above), _product(left[..., h:], below), self._axes[0] + 2)
        kernel = kernel.unflatten(1, (*reach, rows))
        for axis, size in reversed(list(enumerate(reach))):
            # Of (g, *reach up to this axis, rows, *taps, columns).
            pieces = kernel.unbind(axis + 1)
            moved = [_padded(piece, 2 * axis + 2, tap, size - 1 - tap) for tap, piece in enumerate(pieces)]
            kernel = reduce(torch.add, moved)
        return kernel.movedim(-1, 2)

    def solve(self, weight: Tensor) -> list[Tensor]:
        """Return the matrices and angles that have the kernel of AOC's matrix and projectors."""
        return self._from_projectors(super().solve(weight))

    def guess(self, weight: Tensor) -> list[Tensor]:
        """Return those of AOC's guess."""
        return self.draw() if self.solves else self._from_projectors(super().guess(weight))

    def _from_projectors(self, free: Sequence[Tensor]) -> list[Tensor]:
        """Return matrices and angles from AOC's matrix and frames."""
        if not self._axes:
            return list(free)
        matrix, frames = free
        h = self.geometry.frame_rank
        # Orthogonal matrices whose first rows span the projectors, and those that lead from one to the next.
        turned = torch.linalg.qr(frames.mT, mode="complete").Q.mT
        places = [_taps_times(matrix, turned[0].mT), *torch.matmul(turned[:-1], turned[1:].mT).unbind(), turned[-1]]
        angles = []
        for place in self._rotations:
            left, angle, right = cs_decomposition(places[place], h)
            places[place - 1] = _taps_times(places[place - 1], left)
            places[place + 1] = torch.matmul(right, places[place + 1])
            angles.append(angle)
        middle = [torch.stack([places[place] for place in self._middle])] if self._middle else []
        last = places[-1][..., : self._last_channels].contiguous()
        return [places[0], *middle, last, *([torch.stack(angles)] if angles else [])]

    def describe_inner(self) -> str:
        if not self._axes:
            return "on the manifold"
        return (
            f"{len(self._middle) + 1} matrices and {len(self._rotations)} rotations of {self.geometry.frame_rank} pairs"
        )


def cs_decomposition(matrix: Tensor, rank: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return ``L``, ``θ`` and ``R`` of ``M = L rotation(θ) R``, where ``L`` and ``R`` consist of two orthogonal blocks.

    The rotation turns channel ``j`` and channel ``rank + j`` by ``θ_j``, and leaves what comes after ``2 rank``.

    Args:
        matrix: ``(..., c, c)``, orthogonal.
        rank: size of the first block, at most ``c / 2``.

    Returns:
        ``(..., c, c)``, ``(..., rank)`` from 0 to a right angle, and ``(..., c, c)``.
    """
    c = matrix.shape[-1]
    upper, cosines, right = torch.linalg.svd(matrix[..., :rank, :rank])
    # The columns of what is below are orthogonal, and as long as the sines, which descend if they are turned around.
    beside = torch.matmul(matrix[..., rank:, :rank], right.mT).flip(-1)
    lower, sines = torch.linalg.qr(beside, mode="complete")
    sines = sines.diagonal(dim1=-2, dim2=-1)
    signed = lower[..., :rank] * torch.where(sines < 0, -1.0, 1.0).unsqueeze(-2)
    lower = torch.cat([signed.flip(-1), lower[..., rank:]], -1)
    angles = torch.atan2(sines.abs().flip(-1), cosines)
    left = matrix.new_zeros(matrix.shape)
    left[..., :rank, :rank], left[..., rank:, rank:] = upper, lower
    # What is left of the matrix has the first columns of the rotation; the others span the same space as its others.
    rest = torch.matmul(torch.matmul(rotation(angles, c).mT, left.mT), matrix)
    both = matrix.new_zeros(matrix.shape)
    both[..., :rank, :rank], both[..., rank:, rank:] = right, rest[..., rank:, rank:]
    return left, angles, both


def rotation(angles: Tensor, size: int) -> Tensor:
    """Return the matrix ``(..., size, size)`` that turns channel ``j`` and channel ``h + j`` by ``angles[..., j]``.

    >>> from trysquare.nn.parametrizations.manifold import rotation
    >>> torch.equal(rotation(torch.zeros(1), 3), torch.eye(3))
    True
    """
    h = angles.shape[-1]
    diagonal = torch.cat([angles.cos(), angles.cos(), angles.new_ones(*angles.shape[:-1], size - 2 * h)], -1)
    beside = torch.diag_embed(angles.sin())
    turned = torch.diag_embed(diagonal)
    turned[..., :h, h : 2 * h], turned[..., h : 2 * h, :h] = -beside, beside
    return turned


def _taps_times(matrix: Tensor, right: Tensor) -> Tensor:
    """``(g, rows, taps * c)`` times ``(g, c, c)``, tap by tap."""
    return torch.matmul(matrix.unflatten(-1, (-1, right.shape[-1])), right.unsqueeze(1)).flatten(-2)


def _product(matrix: Tensor, rows: Tensor) -> Tensor:
    """``(g, n, h)`` times ``(g, h, *taps, columns)``."""
    groups, _, *others = rows.shape
    return torch.bmm(matrix, rows.reshape(groups, rows.shape[1], -1)).view(groups, matrix.shape[1], *others)


def _padded(tensor: Tensor, dim: int, before: int, after: int) -> Tensor:
    return F.pad(tensor, [*[0, 0] * (tensor.ndim - 1 - dim), before, after])


def _shifted_sum(first: Tensor, second: Tensor, dim: int) -> Tensor:
    """``first + z second``, where ``z`` shifts by a tap."""
    return _padded(first, dim, 0, 1) + _padded(second, dim, 1, 0)


def _rotated(above: Tensor, below: Tensor, cosines: Tensor, sines: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """Shift the rows below by a tap, then turn them with those above."""
    h = above.shape[1]
    above, below = _padded(above, dim, 0, 1), _padded(below, dim, 1, 0)
    near = below[:, :h]
    turned = torch.addcmul(sines * above, cosines, near)
    above = torch.addcmul(cosines * above, sines, near, value=-1)
    return above, turned if below.shape[1] == h else torch.cat([turned, below[:, h:]], 1)
