"""Numerical search for free tensors that give a wanted weight."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

_ROUNDS = 60
_STEPS_A_ROUND = 40


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
