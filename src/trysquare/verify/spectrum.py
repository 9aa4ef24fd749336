"""Singular values of layers, and certified bounds on them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from trysquare.nn.linalg.bounds import (
    BUDGET,
    SingularValueRange,
    any_size_bound,
    circular_range,
    domain_range,
    normalized,
    rescaled,
    rescaled_down,
    rescaled_up,
    singular_value_range,
)
from trysquare.nn.linalg.lanczos import ExtremeSingularValues, golub_kahan
from trysquare.nn.linalg.operator import Axis, LinearLayer, LinearOperator
from trysquare.nn.linalg.precision import own_tensors
from trysquare.nn.linalg.spectrum import UNIT_ROUNDOFF, Polyphase, circular_singular_values, polyphase
from trysquare.progress import busy
from trysquare.verify.operators import read_layer

# Entries of the largest dense matrix whose singular values are computed, and the side of the largest that a bound is
# certified on.
_DENSE_ENTRIES = 1 << 25
_CERTIFIED_SIDE = 1536
# The same on maps of few positions, where the circle that the Fourier transform needs is much larger than the map: for
# random 3x3 kernels with zero padding its bound is 1.50 times the norm on 2x2 positions, 1.10 on 4x4, 1.04 on 6x6.
_SMALL_MAP = 49
_SMALL_MAP_SIDE = 4096
_BUDGET = BUDGET
# How near to 1 a bound is not worth improving.
_SETTLED = 1e-4
# The most singular values that are computed (a gigabyte of them), and operations (about a day on a core).
_MOST_VALUES = 1 << 27
_MOST_OPERATIONS = 1e15
# Frequencies that a bound looks at, which take about a hundred bytes each.
_MOST_FREQUENCIES = 1 << 25
# Entries of the input and the output of a layer that Lanczos iteration keeps several of: eight take 8 GB.
_LANCZOS_ENTRIES = 1 << 27
_LANCZOS_STEPS = 200
_LANCZOS_BYTES = 1 << 30


@own_tensors()
@torch.no_grad()
def singular_values(layer: nn.Module, input_shape: Sequence[int]) -> Tensor:
    """Return every singular value of a linear or convolution layer on inputs of a given shape.

    Circular convolutions, plain and transposed, with any stride, dilation and groups, are split by polyphase
    decomposition and Fourier transform, so the cost is that of many small matrices; so are convolutions whose windows
    neither overlap nor meet the padding. Others (zero padding, reflection, circular padding that repeats outputs) are
    written as a dense matrix for each group.

    Args:
        layer: a linear or convolution layer, of torch or this library. The bias is left out.
        input_shape: shape of one input without the batch, such as ``(64, 32, 32)``.

    Returns:
        Float64 vector, largest first, as long as the smaller side of the layer's matrix. Each is off by about 1e-15 of
        the largest, so that a singular value of 0 comes out as 0 or as anything below that; infinite where it does not
        fit in float64.

    Raises:
        TypeError: if the layer is not a linear or convolution layer.
        ValueError: if the shape does not fit the layer, the layer has hooks, the weight is complex or not finite, a
            dense matrix is needed and would be too large, or there are too many values.

    >>> values = singular_values(nn.Conv2d(2, 4, 3, stride=2, padding=1, padding_mode="circular"), (2, 8, 8))
    >>> len(values)
    64
    """
    operator = read_layer(layer, input_shape)
    _refuse_endless(operator, layer, operator.copies)
    return _values(operator, layer).repeat_interleave(operator.copies)


def _refuse_endless(operator: LinearOperator, layer: nn.Module, copies: int) -> None:
    """Refuse a spectrum that nobody would wait for.

    Raises:
        ValueError: if it has too many values, or takes too many operations.
    """
    if not operator.circular:
        return  # the size of the dense matrix is looked at where it is made
    values, operations = operator.smaller_side * copies, spectrum_flops(operator)
    if values > _MOST_VALUES or operations > _MOST_OPERATIONS:
        raise ValueError(
            f"{type(layer).__name__} on an input of this shape has {values} singular values, which take "
            f"{operations:.0e} operations; at most {_MOST_VALUES} and {_MOST_OPERATIONS:.0e} are computed. "
            "trysquare.spectral_norm_bound gives a certified bound for any size"
        )


def stable_rank(layer: nn.Module, input_shape: Sequence[int]) -> float:
    """Return the sum of the squares of a layer's singular values, over the square of the largest.

    How many directions the layer passes on with full strength: of an orthogonal layer the smaller of its numbers of
    inputs and outputs. Arguments and errors are those of ``singular_values``.

    >>> round(ts.stable_rank(OrthoLinear(8, 3), (8,)), 4)
    3.0
    """
    values = singular_values(layer, input_shape)
    return float((values / values[0]).square().sum()) if values[0] > 0 else 0.0


def spectrum_flops(operator: LinearOperator) -> float:
    """Return about how many real operations the singular values of one copy take, up to a factor."""
    if operator.circular:
        return _polyphase(operator).gram_flops(_coarse(operator))
    return 4.0 * _dense_entries(operator) * (operator.smaller_side // operator.groups)


def _values(operator: LinearOperator, layer: nn.Module) -> Tensor:
    kernel, exponent = normalized(operator.kernel)
    scaled = replace(operator, kernel=kernel)
    return rescaled(_circular_values(scaled) if operator.circular else _dense_values(scaled, layer), exponent)


def _polyphase(operator: LinearOperator, *, any_size: bool = False) -> Polyphase:
    return polyphase(operator.kernel, operator.stride, operator.dilation, operator.groups, any_size=any_size)


def _coarse(operator: LinearOperator) -> tuple[int, ...]:
    """Return the sizes of the circular domain on the grid of the outputs."""
    return tuple(axis.period // axis.stride for axis in operator.axes)


def _periods(operator: LinearOperator) -> tuple[int, ...]:
    return tuple(axis.period for axis in operator.axes)


def _circular_values(operator: LinearOperator) -> Tensor:
    periods = _periods(operator)
    values = circular_singular_values(operator.kernel, periods, operator.stride, operator.dilation, operator.groups)
    # Positions that no window reads change how many zeros there are, nothing else.
    missing = operator.smaller_side - len(values)
    return torch.cat([values, values.new_zeros(missing)]) if missing > 0 else values[: operator.smaller_side]


def _dense_entries(operator: LinearOperator) -> int:
    return math.prod(operator.domain) * math.prod(operator.image) // operator.groups


def _dense_values(operator: LinearOperator, layer: nn.Module) -> Tensor:
    if _dense_entries(operator) > _DENSE_ENTRIES:
        rows, columns = math.prod(operator.image), math.prod(operator.domain)
        raise ValueError(
            f"{type(layer).__name__} on this input is a {rows} x {columns} matrix that no Fourier transform makes "
            f"block diagonal (padding_mode={operator.axes[0].mode!r}): too large for all singular values; "
            "trysquare.extreme_singular_values gives the smallest and the largest, trysquare.spectral_norm_bound a "
            "certified bound"
        )
    with busy("dense singular values"):
        return torch.linalg.svdvals(operator.dense()).flatten().sort(descending=True).values


@own_tensors()
@torch.no_grad()
def extreme_singular_values(
    layer: nn.Module, input_shape: Sequence[int], *, steps: int = _LANCZOS_STEPS, tolerance: float = 1e-10
) -> ExtremeSingularValues:
    """Return the smallest and the largest singular value of a layer, with the tolerances that were reached.

    They are taken from the whole spectrum where a Fourier transform or a small dense matrix gives it. Otherwise
    matrix-free Lanczos iteration (Golub-Kahan) on the layer itself finds them.

    Args:
        layer: a linear or convolution layer, of torch or this library.
        input_shape: shape of one input without the batch.
        steps: largest number of applications of the layer and its adjoint.
        tolerance: error, relative to the largest singular value, at which the iteration stops.

    Raises:
        TypeError: if the layer is not a linear or convolution layer.
        ValueError: if the shape does not fit the layer, the layer has hooks, the weight is complex or not finite, or
            the input is too large to be iterated on.

    >>> extremes = extreme_singular_values(OrthoConv2d(4, 4, 3, padding_mode="zeros"), (4, 16, 16))
    >>> round(extremes.largest, 4)
    1.0
    """
    operator = read_layer(layer, input_shape)
    small = operator.smaller_side // operator.groups <= _CERTIFIED_SIDE and _dense_entries(operator) <= _DENSE_ENTRIES
    if operator.circular or small:
        _refuse_endless(operator, layer, 1)
        values = _values(operator, layer)
        rounding = float(values[0]) * 1e-14 * math.sqrt(len(values))
        return ExtremeSingularValues(float(values[-1]), float(values[0]), rounding, rounding)
    entries = math.prod(operator.domain) + math.prod(operator.image)
    if entries > _LANCZOS_ENTRIES:
        raise ValueError(
            f"{type(layer).__name__} on this input has {entries} numbers in its input and output, and the iteration, "
            f"which keeps several of both, takes at most {_LANCZOS_ENTRIES}; trysquare.spectral_norm_bound gives a "
            "certified bound for any size"
        )
    return lanczos_extremes(operator, steps, tolerance)


def lanczos_extremes(operator: LinearOperator, steps: int, tolerance: float) -> ExtremeSingularValues:
    """Return extreme singular values found by applying the operator, whatever its size."""
    kernel, exponent = normalized(operator.kernel)
    scaled = replace(operator, kernel=kernel)

    def forward(x: Tensor) -> Tensor:
        return scaled.apply(x.view(1, *operator.domain)).flatten()

    def backward(y: Tensor) -> Tensor:
        return scaled.transpose(y.view(1, *operator.image)).flatten()

    rows, columns = math.prod(operator.image), math.prod(operator.domain)
    fits = max(8, _LANCZOS_BYTES // (8 * (rows + columns)))
    apply, transpose = (forward, backward) if columns <= rows else (backward, forward)
    found = golub_kahan(apply, transpose, min(rows, columns), min(steps, fits), tolerance)
    return ExtremeSingularValues(*rescaled(torch.tensor(found, dtype=torch.float64), exponent).tolist())


@own_tensors()
@torch.no_grad()
def spectral_norm_bound(layer: nn.Module, input_shape: Sequence[int] | None = None) -> float:
    """Return a certified upper bound on the largest singular value of a linear or convolution layer.

    Proved, rounding included: the bound is at least the spectral norm of the linear part of the layer, with the weight
    that the forward pass uses (after the layer's casts, and those of autocast where it is active), in exact
    arithmetic. See ``linalg.bounds`` for the theorems and the assumptions on float64 arithmetic. Not
    included: the rounding of the forward pass itself in the layer's dtype.

    How tight: within 1e-6 (3e-4 with more than 128 channels, unless orthogonal) for linear layers, circular
    convolutions, and layers of any kind whose matrix is small (each group at most 1536 wide, or 4096 on maps of at most
    49 positions). Zero padding is otherwise bounded by a slightly larger circular domain, which is tight for orthogonal
    layers and within a few percent for others. Padding that repeats positions multiplies by the norm of the padding,
    where the matrix is too large to be certified as a whole. A layer whose frequencies are too many (33 million, or
    ``4e11`` operations) gets the bound that holds for every size.

    Args:
        layer: a linear or convolution layer, of torch or this library.
        input_shape: shape of one input without the batch; ``None`` for a bound that holds for every size at once.

    Raises:
        TypeError: if the layer is not a linear or convolution layer.
        ValueError: if the shape does not fit the layer, the layer has hooks, or the weight is complex or not finite.

    >>> 1 <= spectral_norm_bound(OrthoConv2d(4, 8, 3, stride=2), (4, 16, 16)) < 1.00001
    True
    """
    if input_shape is None:
        return _bound_for_any_size(layer)
    return norm_range(read_layer(layer, input_shape), lowest=False)[1]


def norm_range(operator: LinearOperator, *, lowest: bool = True) -> SingularValueRange:
    """Return a certified interval for the singular values of a layer.

    Its lower end is 0 where another one is not affordable. Where only a larger circle was looked at, no singular value
    is ``found``.
    """
    kernel, exponent = normalized(operator.kernel)
    scaled = replace(operator, kernel=kernel)
    low, high, found = _fourier_range(scaled, lowest and operator.circular)
    padding = math.sqrt(operator.repeats) * (1 + 4 * UNIT_ROUNDOFF)
    high = high * padding if operator.repeats > 1 else high
    found = found if operator.circular else 0.0
    # On the larger circle an orthogonal kernel has the norm that it has on almost any map.
    settled = not lowest and abs(rescaled_up(high, exponent) - 1) < _SETTLED
    if not operator.circular and not settled and _certifiable(operator):
        low, dense_high, found = _dense_range(scaled, lowest)
        high = min(high, dense_high)
    if math.prod(operator.domain) > _read_positions(operator) and operator.smaller_side > _read_rank(operator):
        low = 0.0
    return SingularValueRange(
        rescaled_down(low, exponent), rescaled_up(high, exponent), rescaled_down(min(found, high), exponent)
    )


def _read_positions(operator: LinearOperator) -> int:
    return operator.domain[0] * math.prod(min(axis.size, axis.period) for axis in operator.axes)


def _read_rank(operator: LinearOperator) -> int:
    """Return the number of singular values on the circular domain."""
    return min(operator.domain[0] * math.prod(_periods(operator)), math.prod(operator.image))


def _certifiable(operator: LinearOperator) -> bool:
    positions = min(math.prod(shape[1:]) for shape in (operator.domain, operator.image))
    widest = _SMALL_MAP_SIDE if positions <= _SMALL_MAP else _CERTIFIED_SIDE
    return operator.smaller_side // operator.groups <= widest and _dense_entries(operator) <= _DENSE_ENTRIES


def _fourier_range(operator: LinearOperator, lowest: bool) -> SingularValueRange:
    everywhere = _polyphase(operator, any_size=True)
    if math.prod(_coarse(operator)) > _MOST_FREQUENCIES:
        return SingularValueRange(0.0, any_size_bound(everywhere, _BUDGET / 8), 0.0)
    return domain_range(_polyphase(operator), _coarse(operator), everywhere, lowest=lowest, budget=_BUDGET)


def _dense_range(operator: LinearOperator, lowest: bool) -> SingularValueRange:
    """Return a certified interval from the matrix itself, whose entries are sums of taps on the same position."""
    taps = math.prod(operator.kernel.shape[2:])
    rounding = 2 * (taps + 2) * UNIT_ROUNDOFF * operator.repeats * taps * float(operator.kernel.norm()) * 1.01
    with busy("dense bound"):
        return singular_value_range([operator.dense()], rounding, lowest=lowest)


def _bound_for_any_size(layer: nn.Module) -> float:
    """Return the supremum over all frequencies, times the largest norm that the padding has on any size."""
    smallest = _smallest_input(layer)
    operator = read_layer(layer, smallest)
    kernel, exponent = normalized(operator.kernel)
    convolution = _polyphase(replace(operator, kernel=kernel), any_size=True)
    bound = (
        any_size_bound(convolution, _BUDGET / 8) if operator.axes else circular_range(convolution, (), lowest=False)[1]
    )
    # Ours refuse sizes on which circular windows overlap.
    circle = operator.transposed or isinstance(layer, LinearLayer)
    repeats = 1 if circle else math.prod(_most_repeats(axis) for axis in operator.axes)
    return rescaled_up(bound * math.sqrt(repeats) * (1 + 4 * UNIT_ROUNDOFF), exponent)


def _smallest_input(layer: nn.Module) -> tuple[int, ...]:
    """Return the shape of an input that fits the layer."""
    if isinstance(layer, nn.Linear):
        return (layer.in_features,)
    channels = getattr(layer, "in_channels", 1)
    kernel, stride, dilation = (getattr(layer, name, (1,)) for name in ("kernel_size", "stride", "dilation"))
    padding: str | tuple[int, ...] = getattr(layer, "padding", (0,))
    widest = 0 if isinstance(padding, str) else max(padding)
    return channels, *(s * (d * k + 1 + 2 * widest) for k, s, d in zip(kernel, stride, dilation, strict=True))


def _most_repeats(axis: Axis) -> int:
    """Return how often padding can repeat a position, on a domain of any size that torch allows."""
    total = sum(axis.pad)
    if axis.mode == "zeros" or axis.apart or not total:
        return 1
    if axis.mode == "circular":
        return 1 if axis.stride == 1 and total < axis.extent else 3
    return 3 if axis.mode == "reflect" else total + 1
