"""Which orthogonal convolutions exist, and how each one is built.

Everything here is integer arithmetic on a layer's arguments, so a layer that cannot be orthogonal
is refused before a single number is drawn. Per axis let ``k``, ``s``, ``d`` be kernel size, stride
and dilation, ``q = gcd(s, d)`` and ``r = min(k, s / q)``; per group let ``m`` and ``n`` be the
input and output channels. On a circular domain whose size is a multiple of ``s``:

* orthonormal rows (nothing is amplified) exist if and only if ``n <= m * prod(r)``;
* orthonormal columns (norms are preserved) exist if and only if every ``q`` is 1, every ``k >= s``
  and ``n >= m * prod(s)``.

The reason for ``q``: a tap at ``i * s + j * d`` only ever sees positions that are multiples of
``q``, and among those two taps share a position if and only if their indices differ by a multiple
of ``s / q``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, zip_longest
from math import gcd, prod
from operator import index

from trysquare.naming import shown

Size = int | Sequence[int]
Sizes = tuple[int, ...]
Pads = tuple[tuple[int, int], ...]
PADDING_MODES = ("circular", "zeros")


_LARGEST = 2**31  # of a size; no layer of this library is that large, and tensors cannot be much larger


def per_axis(name: str, value: int | Sequence[int], dims: int, least: int = 1) -> Sizes:
    """Return ``value`` as ``dims`` integers, each at least ``least``; an integer stands for all axes.

    >>> per_axis("stride", 2, 3)
    (2, 2, 2)
    """
    values = tuple(value) if isinstance(value, Sequence) and not isinstance(value, str) else (value,) * dims
    try:
        sizes = () if any(isinstance(v, bool) for v in values) else tuple(map(index, values))
    except (TypeError, RuntimeError):  # torch's error for tensors without a value
        sizes = ()
    if len(sizes) != dims or not sizes:
        several = f" or {dims} integers, one per axis" if dims > 1 else ""
        raise ValueError(f"{name}={shown(value)} must be {'an integer' if dims else 'integers, at least one'}{several}")
    if min(sizes) < least or max(sizes) > _LARGEST:
        limits = f"at least {least}" if min(sizes) < least else f"at most {_LARGEST}"
        raise ValueError(f"{name}={shown(value)} must be {limits}{' on every axis' if dims > 1 else ''}")
    return sizes


def per_axis_each(dims: int, **values: int | Sequence[int]) -> tuple[Sizes, ...]:
    """Return each of the named values as ``dims`` integers, at least 1, in the order given.

    >>> from trysquare.nn.geometry import per_axis_each
    >>> per_axis_each(2, kernel_size=3, stride=(1, 2))
    ((3, 3), (1, 2))
    """
    return tuple(per_axis(name, value, dims) for name, value in values.items())


def positive(name: str, value: int) -> int:
    """Return ``value`` as an integer, if it is a positive one."""
    (size,) = per_axis(name, value, 1)
    return size


def number(name: str, value: float) -> float:
    """Return ``value`` as a number.

    Raises:
        TypeError: if it is something else.
    """
    try:
        if not isinstance(value, bool | str | bytes):
            return float(value)
    except (TypeError, ValueError, RuntimeError, OverflowError):  # torch's error for tensors without one value
        pass
    raise TypeError(f"{name}={shown(value)} must be a number that a float can hold")


def flag(name: str, value: object) -> bool:
    """Return ``value`` as a truth value, which ``None``, 0 and 1 count as, as they do for torch.

    Raises:
        TypeError: if it is anything else, whose truth would be an accident.
    """
    plain = value.item() if type(value).__module__ == "numpy" and hasattr(value, "item") else value
    if plain is None or isinstance(plain, bool) or (isinstance(plain, int) and plain in (0, 1)):
        return bool(plain)
    raise TypeError(f"{name} must be True or False, not {type(value).__name__}")


def check_groups(groups: int, **channels: int) -> None:
    """Refuse numbers of channels that are not positive, or that are not divisible by ``groups``.

    Raises:
        ValueError: naming the first such number, the nearest ones that would do, and the groups that would.
    """
    for name, count in (("groups", groups), *channels.items()):
        positive(name, count)
    for name, count in channels.items():
        if count % groups:
            multiples = [f"{name}={n}" for n in (count - count % groups, count - count % groups + groups) if n]
            raise ValueError(
                f"{name}={count} must be divisible by groups={groups}; use {' or '.join(multiples)}, or "
                f"groups={gcd(groups, *channels.values())}"
            )


def window_overlap(kernel_size: Sizes, stride: Sizes, dilation: Sizes) -> int:
    """Return the largest number of windows that read the same input.

    >>> from trysquare.nn.geometry import window_overlap
    >>> window_overlap((3, 3), (2, 1), (1, 1))
    6
    """
    return prod(-(-k * gcd(s, d) // s) for k, s, d in zip(kernel_size, stride, dilation, strict=True))


def extent(kernel_size: Sequence[int], dilation: Sequence[int]) -> Sizes:
    """Return the positions from the first tap to the last, both included, on each axis.

    >>> from trysquare.nn.geometry import extent
    >>> extent((3, 1), (2, 2))
    (5, 1)
    """
    return tuple(d * (k - 1) + 1 for k, d in zip(kernel_size, dilation, strict=True))


def check_padding_mode(mode: str) -> None:
    """Refuse boundaries under which a convolution amplifies more than its kernel.

    Raises:
        ValueError: if ``mode`` is not one of ``PADDING_MODES``.
    """
    if mode in ("reflect", "replicate"):
        raise ValueError(
            f"padding_mode={shown(mode)} repeats pixels, which amplifies them: no kernel makes it 1-Lipschitz; use "
            "'circular' (orthogonal) or 'zeros' (1-Lipschitz)"
        )
    if mode not in PADDING_MODES:
        raise ValueError(f"padding_mode={shown(mode)} must be one of {', '.join(map(repr, PADDING_MODES))}")


def flat_pads(pads: Pads) -> list[int]:
    """Return padding in torch's order: last axis first, left before right."""
    return [amount for pad in reversed(pads) for amount in pad]


def same_pads(extent: Sizes, stride: Sizes) -> Pads:
    """Return the padding that makes outputs of size ``input / stride``, for windows of such an extent.

    Without a stride the right side has the odd position, as in torch. With one both sides are alike, so that torch has
    an argument for it; together they are what is missing, or one more.

    >>> from trysquare.nn.geometry import same_pads
    >>> same_pads((3, 4, 4), (1, 1, 2))
    ((1, 1), (1, 2), (1, 1))
    """

    def axis(extent: int, stride: int) -> tuple[int, int]:
        if stride == 1:
            return (extent - 1) // 2, extent // 2
        pad = max(0, -((stride - extent) // 2))
        return pad, pad

    return tuple(axis(e, s) for e, s in zip(extent, stride, strict=True))


def check_circular_size(sizes: Iterable[int], stride: Sizes) -> None:
    """Refuse a feature map that the stride does not divide: its last window would overlap the first."""
    sizes = tuple(sizes)
    if any(size % s for size, s in zip(sizes, stride, strict=True)):
        raise ValueError(
            f"a circular map of size {sizes} is not divisible by stride={stride}, so windows overlap where it wraps "
            "and the layer would amplify; pad or crop the input to a multiple, or use padding_mode='zeros'"
        )


@dataclass(frozen=True)
class ConvGeometry:
    """A convolution's numbers, and the plan that makes an orthogonal kernel of them.

    The kernel is ``matrix ∘ projectors``: an orthonormal matrix that spans ``reach`` taps, grown to
    ``kernel_size`` by one rank ``frame_rank`` projector for every missing tap (see
    ``linalg.projectors``). The numbers are those of the convolution; a transposed layer
    has the geometry of the convolution that it is the adjoint of.

    With ``orthogonal=False`` only a 1-Lipschitz kernel is asked for; then every geometry is fine, and what is said
    about orthogonal kernels says what would be possible. With ``exact=False`` the kernel is orthogonal to a stated
    error, and may have one channel that is not a shift. ``transposed`` says that the numbers are those of a transposed
    layer's convolution, so that errors call them by the names that the user gave. ``axis_order`` is the order in which
    projectors grow the axes, next to the matrix first; that of the axes unless given.

    Raises:
        ValueError: if no orthogonal kernel has these numbers, or if the only ones have nothing to
            learn.

    >>> ConvGeometry(64, 128, (3, 3), (2, 2), (1, 1)).matrix_shape
    (1, 128, 256)
    """

    in_channels: int
    out_channels: int
    kernel_size: Sizes
    stride: Sizes
    dilation: Sizes
    groups: int = 1
    parsimonious: bool = False
    orthogonal: bool = True
    exact: bool = True
    transposed: bool = False
    axis_order: Sizes | None = None

    def __post_init__(self) -> None:
        """Refuse what cannot be orthogonal."""
        for name, called in (("in_channels", self._in_name), ("out_channels", self._out_name), ("groups", "groups")):
            object.__setattr__(self, name, positive(called, getattr(self, name)))
        check_groups(self.groups, **{self._in_name: self.in_channels, self._out_name: self.out_channels})
        for name, value in vars(type(self)).items():
            if isinstance(value, cached_property):  # a compiled graph can read them, but not take their lock
                getattr(self, name)
        if not self.orthogonal:
            return
        if not (self.row_orthogonal or self.column_orthogonal):
            raise ValueError(self._why_impossible())
        if self.exact and self.inner_channels == 1 and prod(self.reach) == 1 and max(self.kernel_size) > 1:
            raise ValueError(
                f"nothing to learn: with one channel per group ({self._in_name}={self.in_channels}, "
                f"{self._out_name}={self.out_channels}, groups={self.groups}) the only orthogonal kernels of size "
                f"{self.kernel_size} at stride={self.stride}{', parsimonious=True' if self.parsimonious else ''} are "
                f"signed shifts; use at least 2 channels per group, or a channel multiplier "
                f"({self._out_name}={2 * self.in_channels})"
            )

    @property
    def _in_name(self) -> str:
        """The user's name for the input channels: a transposed layer reads the outputs of its convolution."""
        return "out_channels" if self.transposed else "in_channels"

    @property
    def _out_name(self) -> str:
        return "in_channels" if self.transposed else "out_channels"

    def _why_impossible(self) -> str:
        m, n, reach = self.group_in, self.group_out, prod(self._full_reach)
        axes = list(zip(self.kernel_size, self.stride, self.dilation, strict=True))
        per_group = " a group" if self.groups > 1 else ""
        more = []
        if any(gcd(s, d) > 1 for _, s, d in axes):
            more.append(f"make dilation={self.dilation} coprime to the stride on every axis")
        if any(k < s for k, s, _ in axes):
            more.append(f"raise kernel_size to at least the stride {self.stride}")
        return (
            f"no orthogonal kernel exists: kernel_size={self.kernel_size} at stride={self.stride}, "
            f"dilation={self.dilation} reaches {m} x {reach} = {m * reach} independent {self._in_name}{per_group} for "
            f"{n} {self._out_name}{per_group}; lower {self._out_name} to at most {m * reach * self.groups}, or "
            f"{' and '.join(more)}"
        )

    @cached_property
    def dims(self) -> int:
        """Number of spatial axes."""
        return len(self.kernel_size)

    @cached_property
    def group_in(self) -> int:
        """Input channels of a group."""
        return self.in_channels // self.groups

    @cached_property
    def group_out(self) -> int:
        """Output channels of a group."""
        return self.out_channels // self.groups

    @cached_property
    def extent(self) -> Sizes:
        """Positions from the first tap to the last, both included, on each axis."""
        return extent(self.kernel_size, self.dilation)

    @cached_property
    def _full_reach(self) -> Sizes:
        axes = zip(self.kernel_size, self.stride, self.dilation, strict=True)
        return tuple(min(k, s // gcd(s, d)) for k, s, d in axes)

    @cached_property
    def row_orthogonal(self) -> bool:
        """Whether ``W Wᵀ = I`` is possible (and so is what is built)."""
        return self.group_out <= self.group_in * prod(self._full_reach)

    @cached_property
    def column_orthogonal(self) -> bool:
        """Whether ``Wᵀ W = I`` is possible (and so is what is built)."""
        axes = list(zip(self.kernel_size, self.stride, self.dilation, strict=True))
        reachable = all(gcd(s, d) == 1 and k >= s for k, s, d in axes)
        return reachable and self.group_out >= self.group_in * prod(self.stride)

    @cached_property
    def square(self) -> bool:
        """Whether the layer is a square matrix, hence invertible by its adjoint."""
        return self.row_orthogonal and self.column_orthogonal

    @cached_property
    def reach(self) -> Sizes:
        """Taps on each axis that the orthonormal matrix spans."""
        if self.parsimonious and self.group_out <= self.group_in:
            return (1,) * self.dims
        return self._full_reach

    @cached_property
    def built_from_adjoint(self) -> bool:
        """Whether the kernel is the transpose of a wide one: fewer products when there is no stride."""
        return not self.row_orthogonal and prod(self.reach) == 1

    @cached_property
    def inner_channels(self) -> int:
        """Channels between the matrix and the projectors: the size of the projectors."""
        if self.built_from_adjoint:
            return self.group_out
        return self.group_in if self.row_orthogonal else self.group_out // prod(self.stride)

    @cached_property
    def frame_rank(self) -> int:
        """Rank of the projectors."""
        return self.inner_channels // 2

    @cached_property
    def matrix_shape(self) -> tuple[int, int, int]:
        """Free tensor that becomes the orthonormal matrix: groups, rows, inner channels x taps."""
        rows = self.group_in if self.built_from_adjoint else self.group_out
        return self.groups, rows, self.inner_channels * prod(self.reach)

    @cached_property
    def frame_axes(self) -> Sizes:
        """Axis that each projector grows by one tap, alternating so that axes mix (the order of BCOP)."""
        missing = [k - r for k, r in zip(self.kernel_size, self.reach, strict=True)]
        rounds = zip_longest(*([axis] * missing[axis] for axis in self.axis_order or range(self.dims)))
        return tuple(axis for axis in chain.from_iterable(rounds) if axis is not None)

    @cached_property
    def frames_shape(self) -> tuple[int, int, int, int] | None:
        """Free tensor whose rows span the projectors, or ``None`` if the matrix is the whole kernel."""
        if not self.frame_axes or self.frame_rank == 0:
            return None
        return len(self.frame_axes), self.groups, self.frame_rank, self.inner_channels

    @cached_property
    def weight_shape(self) -> Sizes:
        """Shape of the kernel in torch's layout, which serves the layer and its adjoint alike."""
        return (self.out_channels, self.group_in, *self.kernel_size)

    def pads(self, padding: str | int | Sequence[int], mode: str) -> Pads:
        """Return the left and right padding of every axis, checked against ``mode``.

        Args:
            padding: ``"same"``, ``"valid"``, or torch's integers.
            mode: ``"circular"`` or ``"zeros"``.

        Raises:
            ValueError: if the padding repeats positions in the output, or drops outputs that a
                norm-preserving layer needs.

        >>> ConvGeometry(4, 4, (3, 2), (1, 1), (1, 1)).pads("same", "circular")
        ((1, 1), (0, 1))
        """
        check_padding_mode(mode)
        same = isinstance(padding, str) and padding == "same"
        pads = same_pads(self.extent, self.stride) if same else self._given_pads(padding)
        if mode == "circular":
            self.check_circular(pads)
        return pads

    def _given_pads(self, padding: str | int | Sequence[int]) -> Pads:
        if isinstance(padding, str):
            if padding == "valid":
                return ((0, 0),) * self.dims
            raise ValueError(f"padding={shown(padding)} must be 'same', 'valid', an integer or {self.dims} integers")
        return tuple((pad, pad) for pad in per_axis("padding", padding, self.dims, least=0))

    def check_circular(self, pads: Pads) -> None:
        """Refuse circular padding under which outputs repeat, or too few are left to preserve norms."""
        for axis, ((left, right), extent, stride) in enumerate(zip(pads, self.extent, self.stride, strict=True)):
            total = left + right
            if total >= extent:
                raise ValueError(
                    f"circular padding {(left, right)} on axis {axis} repeats outputs: a kernel that extends over "
                    f"{extent} positions allows at most {extent - 1} in total; use padding='same'"
                )
            if self.orthogonal and total < extent - stride and not self.row_orthogonal:
                raise ValueError(
                    f"circular padding {(left, right)} on axis {axis} drops outputs, so {self.group_in} -> "
                    f"{self.group_out} channels cannot preserve norms; it takes at least {extent - stride} in total: "
                    "use padding='same'"
                )
