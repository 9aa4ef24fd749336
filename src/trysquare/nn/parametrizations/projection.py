"""The weight of a layer that is nearest to a given one, and how weights that no layer has are told at once.

A method's ``solve`` starts well: orthonormal matrices by their polar factor, which is the nearest one, kernels by the
projectors that lose least (``linalg.projectors.peel``). Descent on the free tensors does the rest where that is not the
best already. On kernels of a trained network no random start ended nearer (``docs/conversion.md`` has the figures), and
alternating projection between orthogonal responses and small kernels, as a start, changed nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from trysquare.nn.geometry import ConvGeometry
from trysquare.nn.linalg.checks import require_dense
from trysquare.nn.linalg.precision import at_least_float32, full_precision
from trysquare.nn.linalg.spectrum import circular_singular_values

if TYPE_CHECKING:  # which imports this module
    from trysquare.nn.parametrizations.base import Parametrization

# Singular values that are further from where they must be are no rounding.
_OFF = 0.01
# Of entries: squares of larger ones, and of their inverses, may leave the range of float32 when they are summed.
_LARGEST = 1e15
# Of L-BFGS: steps between two looks, and the part of the squared distance that a look must find gone.
_STEPS_A_LOOK = 20
_LEAST_PROGRESS = 1e-3
# A gradient of this size, of the relative squared distance, is that of a minimum in float32.
_FLAT = 1e-4


def refuse_singular_values(values: Tensor, what: str, contraction: bool = False) -> None:
    """Refuse what has singular values other than 1, or above it.

    Raises:
        ValueError: if so, naming the largest and the smallest.
    """
    off = values - 1 if contraction else (values - 1).abs()
    if float(off.max()) > _OFF:
        raise ValueError(
            f"{what}: its singular values reach from {float(values.min()):.3g} to {float(values.max()):.3g}, and "
            f"must be {'at most 1' if contraction else '1'}. layer.project_(weight) sets the nearest weight that "
            "the layer can have"
        )


def refuse_kernel(weight: Tensor, geometry: ConvGeometry, contraction: bool = False) -> None:
    """Refuse a kernel that is not orthogonal, or amplifies, on circular maps.

    First on a single position, which needs one small matrix; few kernels that are not orthogonal are so there.

    Raises:
        ValueError: if so, with the singular values that tell.
    """
    kind = "amplifies" if contraction else "is not orthogonal"
    numbers = f"stride={geometry.stride}, dilation={geometry.dilation}, groups={geometry.groups}"
    small, large = geometry.stride, tuple(s * k for s, k in zip(geometry.stride, geometry.kernel_size, strict=True))
    for sizes in (small, large):
        values = circular_singular_values(weight, sizes, geometry.stride, geometry.dilation, geometry.groups)
        refuse_singular_values(values, f"this kernel {kind} on a map of {sizes} at {numbers}", contraction)


def finite_weight(weight: object, shape: Sequence[int]) -> Tensor:
    """``weight`` without its history, if it is a finite tensor of this shape.

    Raises:
        TypeError: if it is no tensor.
        ValueError: if it is no dense one of real floats, or has another shape, or numbers that no weight can have.
    """
    weight = require_dense("weight", weight, meta=False)
    if not weight.dtype.is_floating_point or weight.element_size() < 2:
        raise ValueError(f"weight must be of a real floating point type of at least 16 bits, not {weight.dtype}")
    if tuple(weight.shape) != tuple(shape):
        raise ValueError(f"weight has shape {tuple(weight.shape)}, the layer's is {tuple(shape)}")
    if not bool(weight.isfinite().all()):
        raise ValueError("weight holds values that are not finite")
    if (largest := _largest(weight)) > _LARGEST:
        raise ValueError(f"weight has entries of {largest:.1e}, whose squares may not be finite: scale it down")
    # What was made in inference mode cannot be differentiated with.
    return weight.clone() if weight.is_inference() else weight.detach()


def _largest(weight: Tensor) -> float:
    return float(weight.detach().abs().max()) if weight.numel() else 0.0


def nearest_free_tensors(
    weight: Tensor, parametrization: Parametrization, present: Sequence[Tensor], starts: int, steps: int
) -> tuple[list[Tensor], float]:
    """Return free tensors whose weight is near ``weight``, and how far it is, relative to the norm of ``weight``.

    Args:
        weight: what to be near to.
        parametrization: what makes weights of free tensors.
        present: tensors whose device and dtype the free ones get.
        starts: descents; the first from ``solve``, or ``present`` if that is nearer, the others from random tensors.
        steps: of L-BFGS, at most, in each.

    Raises:
        ValueError: if ``weight`` has another shape, or is 0, to which all weights are equally near, or too large or
            small for its squares.
    """
    weight = finite_weight(weight, parametrization.weight_shape)
    norm, largest = float(weight.double().norm()), _largest(weight)
    if largest < 1 / _LARGEST:
        what = "is zero" if largest == 0 else f"has no entry above {largest:.1e}"
        raise ValueError(f"weight {what}, and all weights of the layer are equally near to it")
    # Solved in float64, like assignment; the descent is in the precision of the layer.
    exact = weight.to(torch.float64).cpu()
    target = weight.to(present[0].device, at_least_float32(present[0].dtype))
    firsts = [parametrization.solve(exact), present, *(parametrization.draw() for _ in range(starts - 1))]
    firsts = [[tensor.to(target.device, target.dtype) for tensor in first] for first in firsts]
    with torch.no_grad(), full_precision(target):
        built = [parametrization.build(*first) for first in firsts[:2]]
    # Where all weights have one norm, the nearest one does not depend on that of the target, but the digits do that a
    # difference of distances has.
    size, other = (float(each.norm()) for each in built)
    wanted = target * (size / norm) if math.isclose(size, other, rel_tol=1e-4) else target
    if (built[1] - wanted).norm() < (built[0] - wanted).norm():
        firsts[0] = firsts[1]
    best: tuple[list[Tensor], float] = ([], math.inf)
    for first in (firsts[0], *firsts[2:]):
        with full_precision(target):
            best = min(best, descend(parametrization.build, first, wanted, steps), key=lambda found: found[1])
    with torch.no_grad(), full_precision(target):
        distance = float((parametrization.build(*best[0]) - target).double().norm()) / norm
    return [tensor.to(like.device, like.dtype) for tensor, like in zip(best[0], present, strict=True)], distance


@torch.enable_grad()
def descend(
    build: Callable[..., Tensor], start: Sequence[Tensor], target: Tensor, steps: int
) -> tuple[list[Tensor], float]:
    """Minimise the distance of ``build(*free)`` from ``target`` by L-BFGS.

    Returns:
        The free tensors, and the distance relative to the norm of ``target``.
    """
    free = [tensor.detach().clone(memory_format=torch.contiguous_format).requires_grad_() for tensor in start]
    optimizer = torch.optim.LBFGS(
        free, max_iter=_STEPS_A_LOOK, history_size=20, line_search_fn="strong_wolfe",
        tolerance_grad=0.0, tolerance_change=0.0,
    )  # fmt: skip
    square = float(target.square().sum())

    def closure() -> float:
        optimizer.zero_grad()
        loss = (build(*free) - target).square().sum() / square
        loss.backward()
        return float(loss.detach())

    left = closure()
    kept = [tensor.detach().clone() for tensor in free]
    for done in range(0, steps, _STEPS_A_LOOK):
        optimizer.param_groups[0]["max_iter"] = min(_STEPS_A_LOOK, steps - done)
        slope = math.sqrt(sum(float(tensor.grad.square().sum()) for tensor in free if tensor.grad is not None))
        if slope <= _FLAT:
            break
        optimizer.step(closure)
        before, now = left, closure()
        if not now < before:
            break
        left, kept = now, [tensor.detach().clone() for tensor in free]
        if now > (1 - _LEAST_PROGRESS) * before:
            break
    return kept, math.sqrt(left)
