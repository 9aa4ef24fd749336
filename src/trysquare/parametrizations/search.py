"""Numerical search for free tensors that give a wanted weight."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

_ROUNDS = 20
_STEPS_A_ROUND = 50


def search_free_tensors(
    build: Callable[..., Tensor], start: Sequence[Tensor], weight: Tensor, tolerance: float
) -> tuple[list[Tensor], float]:
    """Minimise the distance of ``build(*free)`` to ``weight`` from ``start`` by L-BFGS, unless it is there already.

    Returns:
        The free tensors, and the largest entry of what is left of the distance.
    """
    free = [tensor.clone().requires_grad_() for tensor in start]
    target = 0.01 * tolerance

    def missed() -> float:
        with torch.no_grad():
            return float((build(*free) - weight).abs().max())

    optimizer = torch.optim.LBFGS(
        free,
        max_iter=_STEPS_A_ROUND,
        history_size=20,
        line_search_fn="strong_wolfe",
        tolerance_change=0.0,
    )

    def closure() -> float:
        optimizer.zero_grad()
        with torch.enable_grad():
            loss = (build(*free) - weight).square().sum()
            loss.backward()
        return float(loss)

    left, rounds = missed(), 0
    while left > target and rounds < _ROUNDS:
        optimizer.step(closure)
        before, left, rounds = left, missed(), rounds + 1
        if left > 0.9 * before and left > tolerance and rounds > 5:
            break
    return [tensor.detach() for tensor in free], left
