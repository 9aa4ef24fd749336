"""Optimizers for parameters that are themselves orthogonal."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from trysquare.nn.geometry import positive
from trysquare.nn.linalg.precision import full_precision
from trysquare.nn.linalg.unitary import distance_from_unitary, low_rank_factors, polish, rotate

_POLISH_EVERY = 100
_DTYPES = (torch.float32, torch.float64, torch.complex64, torch.complex128)
# Largest entry of U* U - I that a parameter may start with.
_START_TOLERANCE = 1e-3


class ProjUNN(torch.optim.Optimizer):
    """ProjUNN-T (Kiani et al., 2022): gradient steps of low rank along the orthogonal or unitary group.

    A step approximates the gradient by a matrix of low rank, projects it to the tangent space at the parameter, and
    moves along the geodesic in that direction (the exponential map), at the cost of ``n²`` times the rank. Parameters
    stay orthogonal to rounding, whatever the step; what rounding adds up is taken off every 100 steps. The vectors that
    find the low rank depend on the number of the step only, so equal gradients on several ranks make equal steps.

    Parameters are batches of square matrices: the recurrent matrix of a network, or the blocks ``(*frequencies, n, n)``
    of a convolution in the Fourier domain (see ``trysquare.linalg.fourier``), real or complex. Blocks of opposite
    frequencies stay conjugate to each other. Everything else in the model needs an optimizer of its own.

    Args:
        params: orthogonal or unitary matrices ``(..., n, n)``.
        lr: length of a step relative to the gradient.
        rank: rank of the approximation; 1 is the cheapest, ``n`` is exact Riemannian gradient descent.
        alpha: decay of the running mean of squared gradients by which each entry is divided first, as in RMSprop; 0 for
            none.
        eps: added to the root of that mean.

    Raises:
        ValueError: if a parameter is not square, not orthogonal at the start, or in a dtype shorter than float32.

    >>> matrix = nn.Parameter(nn.init.orthogonal_(torch.empty(8, 8)))
    >>> optimizer = ts.ProjUNN([matrix], lr=0.1, rank=2)
    >>> for _ in range(10):
    ...     optimizer.zero_grad()
    ...     (matrix - torch.eye(8)).square().sum().backward()
    ...     optimizer.step()
    >>> bool(torch.allclose(matrix @ matrix.T, torch.eye(8), atol=1e-5))
    True
    """

    def __init__(self, params: ParamsT, lr: float = 1e-2, rank: int = 1, alpha: float = 0.0, eps: float = 1e-8) -> None:
        super().__init__(params, {"lr": lr, "rank": rank, "alpha": alpha, "eps": eps})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters, with options of their own.

        Raises:
            ValueError: if one of them is not orthogonal, or an option has no meaning.
        """
        super().add_param_group(param_group)
        group = self.param_groups.pop()
        _check_options(**{name: group[name] for name in ("lr", "rank", "alpha")})
        for parameter in group["params"]:
            _check_orthogonal(parameter)
        self.param_groups.append(group)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> Any:  # type: ignore[override]
        """Take a step with every parameter that has a gradient.

        Args:
            closure: evaluates the model again and returns the loss.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    with full_precision(parameter):
                        self._update(parameter, group)
        return loss

    def _update(self, parameter: Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        state["step"] = state.get("step", 0) + 1
        gradient = self._scaled(parameter.grad, state, group)  # type: ignore[arg-type]
        # The same vectors on every rank of a distributed run, or the replicas would drift apart.
        left, right = low_rank_factors(gradient, min(group["rank"], parameter.shape[-1]), seed=state["step"])
        moved = rotate(parameter, left, right, group["lr"])
        parameter.copy_(polish(moved) if state["step"] % _POLISH_EVERY == 0 else moved)

    @staticmethod
    def _scaled(gradient: Tensor, state: dict[str, Any], group: dict[str, Any]) -> Tensor:
        if not group["alpha"]:
            return gradient
        square = gradient.abs().square()
        mean = state.setdefault("square_mean", torch.zeros_like(square))
        mean.lerp_(square, 1 - group["alpha"])
        unbiased = mean / (1 - group["alpha"] ** state["step"])
        return gradient / (unbiased.sqrt() + group["eps"])


def _check_options(lr: float, rank: int, alpha: float) -> None:
    if not 0 <= lr < math.inf:
        raise ValueError(f"lr={lr!r} must be finite and not negative")
    positive("rank", rank)
    if not 0 <= alpha < 1:
        raise ValueError(f"alpha={alpha!r} must be at least 0 and less than 1")


def _check_orthogonal(parameter: Tensor) -> None:
    shape = tuple(parameter.shape)
    if parameter.dtype not in _DTYPES:
        raise ValueError(
            f"a parameter of dtype {parameter.dtype} cannot stay orthogonal: its rounding is too coarse; keep it in "
            "float32 and cast it where it is used"
        )
    if parameter.ndim < 2 or shape[-1] != shape[-2]:
        raise ValueError(
            f"ProjUNN moves square matrices, got a parameter of shape {shape}; give the others to another optimizer"
        )
    with full_precision(parameter):
        missed = distance_from_unitary(parameter.detach())
    if not missed < _START_TOLERANCE:
        raise ValueError(
            f"a parameter of shape {shape} is not orthogonal: U* U - I has entries up to {missed:.2g}; start from "
            "nn.init.orthogonal_ or from torch.linalg.qr of a complex matrix"
        )
