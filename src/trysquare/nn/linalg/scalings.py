"""Guesses at the diagonal ``Ψ`` that makes the bound of a sandwich small: no part of any proof.

``lattice.sandwich_bound`` holds for every positive ``Ψ``, so that what is found here can make a
bound larger or smaller, and never wrong.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor


def is_promising(grams: list[tuple[Tensor, Tensor]], certain: bool) -> bool:
    """Whether a bound well below ``|S| |T|`` is to be expected, from the Gram matrices of the hidden channels.

    Args:
        grams: of ``Sᵀ`` and ``T``, for each group.
        certain: whether they say all about the two maps, so that it is always worth a try.
    """
    if len(grams[0][0]) > _MOST_PAIRED:
        return False
    if certain:
        return True
    product = max(math.sqrt(_top(g) * _top(h)) for g, h in grams)
    return max(_top(_scaled_gram(_paired(g, h), g, h)) for g, h in grams) / 2 < _PROMISING * product


def best_psi(second: Tensor, first: Tensor) -> Tensor:
    """``Ψ`` that makes ``Ψ⁻¹ G Ψ⁻¹ + Ψ H Ψ`` small: a guess, which the bound is then made with.

    Args:
        second: ``G``, the Gram matrix ``(h, h)`` of ``Sᵀ``.
        first: ``H``, that of ``T``.
    """
    best = _paired(second, first)
    promising = _top(_scaled_gram(best, second, first)) / 2 < _PROMISING * math.sqrt(_top(second) * _top(first))
    if promising and len(best) <= _MOST_HIDDEN:
        for squarings in _SQUARINGS:
            lower = _downhill(lambda logarithms: _scaled_gram(logarithms, second, first), best, squarings)
            best = min((best, lower), key=lambda each: _top(_scaled_gram(each, second, first)))
    return best.div(2).exp()


def _paired(second: Tensor, first: Tensor) -> Tensor:
    """Logarithms of ``ψ²`` that make ``Ψ⁻¹ G Ψ⁻¹ + Ψ H Ψ`` diagonal, if any do, and both of its terms alike, if not.

    Where ``[Sᵀ Ψ⁻¹, Ψ T]`` has orthogonal rows, as in sandwich layers, ``ψ_i² ψ_j² = -G_ij / H_ij``: linear equations
    for logarithms, each with the weight that its entries have.
    """
    tiny = torch.finfo(torch.float64).tiny
    even = (second.diagonal().clamp_min(tiny) / first.diagonal().clamp_min(tiny)).log() / 2
    weights = torch.where(second * first < 0, -second * first, 0.0).fill_diagonal_(0.0)
    wanted = torch.where(weights > 0, (-second / first).abs().clamp_min(tiny).log(), 0.0).nan_to_num()
    missing = (weights * (wanted - even[:, None] - even)).sum(1)
    matrix = torch.diag(weights.sum(1)) + weights
    if not bool(matrix.isfinite().all() and missing.isfinite().all()):
        return even
    solution = torch.linalg.lstsq(matrix, missing[:, None], driver="gelsd").solution[:, 0]
    return min((even, even + solution), key=lambda each: _top(_scaled_gram(each, second, first)))


def _scaled_gram(logarithms: Tensor, second: Tensor, first: Tensor) -> Tensor:
    psi = logarithms.div(2).exp()
    return second / psi / psi[:, None] + first * psi * psi[:, None]


def _top(gram: Tensor) -> float:
    """Return the largest eigenvalue."""
    return float(torch.linalg.eigvalsh(gram)[-1]) if bool(gram.isfinite().all()) else math.inf


# Hidden channels of a group up to which pairs of them are looked at, and up to which a scaling is improved by descent:
# how often the Gram matrix is squared then. The share of |S| |T| from which on a sandwich is promising.
_MOST_PAIRED = 512
_MOST_HIDDEN = 64
_SQUARINGS = (3, 6, 9, 12)
_PROMISING = 0.7


def _downhill(gram: Callable[[Tensor], Tensor], start: Tensor, squarings: int) -> Tensor:
    """Return where ``tr(M^p)^(1/p)`` of a matrix that depends on ``start`` is small, ``p = 2^squarings``."""
    with torch.enable_grad():
        point = start.clone().requires_grad_()
        optimizer = torch.optim.LBFGS([point], max_iter=60, line_search_fn="strong_wolfe")

        def objective() -> Tensor:
            optimizer.zero_grad()
            power, logarithm = gram(point), torch.zeros((), dtype=torch.float64)
            for _ in range(squarings):
                size = power.diagonal().sum()
                power, logarithm = (power / size) @ (power / size), 2 * (logarithm + size.log())
            value = (logarithm + power.diagonal().sum().log()) / 2**squarings
            value.backward()
            return value

        optimizer.step(objective)
    found = point.detach()
    return found if bool(found.isfinite().all()) else start
