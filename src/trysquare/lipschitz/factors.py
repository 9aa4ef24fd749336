"""Numbers that rules are made of: constants as the forward pass uses them, and norms of matrices and axes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from trysquare.linalg.bounds import normalized, rescaled_up, singular_value_range
from trysquare.linalg.precision import at_least_float32
from trysquare.lipschitz.registry import NoRuleError, Shape, input_dtype
from trysquare.operators import Axis

# Covers the roundings of a rule that takes more than a handful of steps.
ROUND_UP = 1 + 2.0**-48


def constant(value: float) -> Callable[..., float]:
    """The rule of modules that all have the same constant."""
    return lambda module, shape: value


def readings(value: Any, dtype: torch.dtype) -> Tensor:
    """A constant in float64, as it is and as arithmetic in ``dtype`` may round it (not where that overflows).

    Python's numbers and tensors without axes are rounded to the dtype of the other operand, or to float32 where that
    is shorter.
    """
    exact = value.detach().to("cpu") if isinstance(value, Tensor) else torch.tensor(value, dtype=torch.float64)
    exact = exact.to(torch.float64)
    if not bool(exact.isfinite().all()):
        raise ValueError("a constant is not finite: the network has no Lipschitz constant")
    rounded = (exact.to(short).to(torch.float64) for short in {dtype, at_least_float32(dtype)})
    return torch.stack([exact, *(torch.where(r.isfinite(), r, exact) for r in rounded)])


def largest(value: Any, dtype: torch.dtype) -> float:
    """Largest absolute entry of a constant factor."""
    return float(readings(value, dtype).abs().max())


def smallest(value: Any, dtype: torch.dtype) -> float:
    """Smallest absolute entry of a constant divisor, before it is rounded to zero."""
    sizes = readings(value, dtype).abs()
    return float(torch.where(sizes > 0, sizes, sizes[0]).min())


def factor(value: float) -> float:
    """Absolute value of a number that a module gives to torch, as the input's dtype may round it."""
    return largest(value, input_dtype())


def copies(shape: Iterable[int], result: Iterable[int]) -> float:
    """Norm of broadcasting one shape to another: the root of the number of copies."""
    before = math.prod(shape)
    return math.sqrt(math.prod(result) // before) if before else 0.0


def matrix_norm(matrix: Tensor) -> float:
    """Certified spectral norm of a matrix."""
    scaled, exponent = normalized(matrix)
    return rescaled_up(singular_value_range([scaled[None]], lowest=False)[1], exponent)


def own_axis(dim: int | None, shape: Shape) -> int:
    """Axis of an input without batch for torch's ``dim`` of an input with batch."""
    if dim is None:
        raise NoRuleError("dim=None is ambiguous; give the axis")
    axis = dim if dim < 0 else dim - 1
    if dim == 0 or not -len(shape) <= axis < len(shape):
        raise NoRuleError(f"dim={dim} mixes the samples of a batch")
    return axis


def each(value: Any, dims: int) -> tuple[Any, ...]:
    """One value for each axis from torch's argument: one for all, or a list."""
    values = tuple(value) if isinstance(value, list | tuple) else (value,)
    return values * dims if len(values) == 1 else values


def sizes_of(shape: Shape, dims: int) -> Shape:
    """The spatial sizes of an input without batch."""
    if len(shape) != dims + 1:
        raise ValueError(f"input_shape={shape} must be channels and {dims} sizes, without the batch")
    return shape[-dims:]


def most_windows(kernel: int, stride: int, padding: int, dilation: int, size: int) -> int:
    """Largest number of windows that read the same position (windows that start past the padded end do not exist)."""
    positions = torch.arange(size).unsqueeze(1) + padding
    taps = positions - dilation * torch.arange(kernel)
    starts = (taps >= 0) & (taps % stride == 0) & (taps < size + 2 * padding)
    return max(1, int(starts.sum(1).max()))


def axis_matrix(resample: Callable[[Tensor], Tensor], size: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """Matrix ``(out, size)`` of a linear function of one axis, applied to ``(batch, 1, size)``, in float64."""
    return resample(torch.eye(size, dtype=dtype).unsqueeze(1)).squeeze(1).T.to(torch.float64)


def axis_norm(resample: Callable[[Tensor], Tensor], size: int) -> float:
    """Certified norm of a linear function of one axis."""
    return matrix_norm(axis_matrix(resample, size)) * ROUND_UP


def rounded_axis_norm(resample: Callable[[Tensor], Tensor], size: int) -> float:
    """The same where torch computes the matrix in the arithmetic of the input: the largest of its versions."""
    dtypes = {torch.float64, at_least_float32(input_dtype()), input_dtype()}
    return max(matrix_norm(axis_matrix(resample, size, dtype)) for dtype in dtypes) * ROUND_UP


def padding_norm(padding: Any, mode: str, shape: Shape) -> float:
    """Norm of torch's padding (last axis first) by ``mode``: the root of how often a position occurs at most."""
    pads = [(padding[i], padding[i + 1]) for i in range(0, len(padding), 2)]
    repeats = 1
    for size, pad in zip(reversed(shape), pads, strict=False):
        windows = size + sum(pad)
        repeats *= int(torch.bincount(Axis(size, windows, 1, 1, pad, mode).sources).max())
    return math.sqrt(repeats) * ROUND_UP
