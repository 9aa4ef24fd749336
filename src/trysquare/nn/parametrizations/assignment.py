"""Assignment: which free tensors give a wanted weight."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from trysquare.nn.parametrizations.projection import finite_weight
from trysquare.progress import track

if TYPE_CHECKING:  # which imports this module
    from trysquare.nn.parametrizations.base import Parametrization

# Largest entry, in units of the dtype's rounding, by which an assigned weight and the one built for it may differ.
_ASSIGNMENT_ROUNDINGS = {torch.float64: 1e8, torch.float32: 50.0}
# Random starts of the search where there is no closed form: many lead to local minima. It gives up after so many, or
# when so many seconds have passed.
_ASSIGNMENT_STARTS = 64
_ASSIGNMENT_SECONDS = 60.0
# A closed form that misses by more is right that there are no free tensors; by less, it was rounded.
_NEAR = 1e-3
# Of L-BFGS from one start.
_ROUNDS = 60
_STEPS_A_ROUND = 40


def free_tensors_for(weight: Tensor, parametrization: Parametrization, present: Sequence[Tensor]) -> Sequence[Tensor]:
    """Return the ``present`` free tensors of a parametrization if they give ``weight``, otherwise others that do.

    Raises:
        ValueError: if ``weight`` has the wrong shape, or no free tensors were found that give it.
    """
    exact = finite_weight(weight, parametrization.weight_shape).double().cpu()
    parametrization.refuse_unreachable(exact)
    tolerance = _ASSIGNMENT_ROUNDINGS.get(weight.dtype, 2.0) * torch.finfo(weight.dtype).eps
    now = parametrization.build(*(tensor.double().cpu() for tensor in present))
    if float((now - exact).abs().max()) <= tolerance:
        return present
    free = parametrization.solve(exact)
    missed = float((parametrization.build(*free) - exact).abs().max())
    if missed > tolerance and not (parametrization.solves and missed > _NEAR):
        starts = _starts(parametrization, exact, free)
        free, missed = search_free_tensors(parametrization.build, starts, exact, tolerance)
    if missed > tolerance:
        raise ValueError(
            f"no free tensors were found that give this weight: the nearest one found differs by {missed:.1e}. "
            f"It must be an output of the same parametrization ({parametrization.extra_repr()}). "
            "layer.project_(weight) sets the nearest weight that the layer can have"
        )
    return [tensor.to(like.device, like.dtype) for tensor, like in zip(free, present, strict=True)]


def _starts(parametrization: Parametrization, weight: Tensor, first: list[Tensor]) -> Iterator[list[Tensor]]:
    began = time.monotonic()
    yield first
    if parametrization.solves:
        return
    for _ in track(range(_ASSIGNMENT_STARTS), "searching for free tensors", _ASSIGNMENT_STARTS):
        if time.monotonic() - began > _ASSIGNMENT_SECONDS:
            break
        yield parametrization.guess(weight)


def search_free_tensors(
    build: Callable[..., Tensor],
    starts: Iterable[Sequence[Tensor]],
    weight: Tensor,
    tolerance: float,
) -> tuple[list[Tensor], float]:
    """Minimise the distance of ``build(*free)`` to ``weight`` from each start until one arrives.

    Returns:
        The best free tensors, and the largest entry of what is left of the distance.
    """
    best: tuple[list[Tensor], float] = ([], float("inf"))
    for start in starts:
        found = _descend(build, start, weight, tolerance)
        best = min(best, found, key=lambda pair: pair[1])
        if best[1] <= tolerance:
            break
    return best


def _descend(
    build: Callable[..., Tensor], start: Sequence[Tensor], weight: Tensor, tolerance: float
) -> tuple[list[Tensor], float]:
    """L-BFGS from one start; gives up where progress is too slow to arrive."""
    exact = [tensor.to(torch.float64, copy=True).contiguous() for tensor in start]
    free = [tensor.requires_grad_() for tensor in exact]
    optimizer = torch.optim.LBFGS(
        free,
        max_iter=_STEPS_A_ROUND,
        history_size=20,
        line_search_fn="strong_wolfe",
        tolerance_grad=0.0,
        tolerance_change=0.0,
    )

    def missed() -> float:
        with torch.no_grad():
            return float((build(*free) - weight).abs().max())

    def closure() -> float:
        optimizer.zero_grad()
        with torch.enable_grad():
            loss = (build(*free) - weight).square().sum()
            loss.backward()
        return float(loss.detach())

    left = missed()
    for _ in range(_ROUNDS):
        if left <= 0.01 * tolerance:
            break
        optimizer.step(closure)
        before, left = left, missed()
        if left > 0.8 * before:
            break
    return [tensor.detach() for tensor in free], left
