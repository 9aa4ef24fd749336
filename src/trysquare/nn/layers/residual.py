"""Ways to add a skip connection to a 1-Lipschitz function without amplifying."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from trysquare.naming import shown
from trysquare.nn.geometry import flag, number
from trysquare.nn.layers.activations import with_slopes_in_unit_interval
from trysquare.nn.layers.pooling import EuclideanNorm
from trysquare.nn.layers.traceable import Traceable
from trysquare.nn.linalg.precision import at_least_float32
from trysquare.nn.parametrizations.base import Device, factory_for

__all__ = ["AdjointResidual", "ConcatResidual", "ConvexResidual", "L2Residual", "LearnableResidual"]


def _same_shape(skip: Tensor, branch: Tensor) -> None:
    if skip.shape != branch.shape:
        raise ValueError(
            f"the branch maps to {tuple(branch.shape)}, the skip to {tuple(skip.shape)}; they must be the same: give a "
            "branch that keeps the shape, or a shortcut that changes it in the same way"
        )


class _Residual(Traceable, nn.Module):
    """A branch, and a shortcut around it (the identity if there is none)."""

    def __init__(self, branch: nn.Module, shortcut: nn.Module | None = None) -> None:
        super().__init__()
        self.branch = branch
        self.shortcut = shortcut

    def _skip(self, x: Tensor) -> Tensor:
        return x if self.shortcut is None else self.shortcut(x)


def _exact(parameter: Tensor) -> Tensor:
    """Weights are computed in float32 or better, so that they add up to 1 before they are rounded."""
    return parameter.to(at_least_float32(parameter.dtype))


class LearnableResidual(_Residual):
    """``(a1 x + f(a2 x)) / (|a1| + |a2|)``, the paper's residual block: 1-Lipschitz if ``f`` is.

    The factor ``a2`` in front of ``f`` also scales what reaches its nonlinearities. As in the
    paper, ``a1 = 1`` unless asked otherwise.

    Args:
        branch: the function ``f``, 1-Lipschitz.
        shortcut: a 1-Lipschitz module in place of ``x``, where ``f`` changes the shape.
        scale: first value of ``a2``.
        learnable_skip: whether ``a1`` is learnable too.
        device: device of the factors.
        dtype: dtype of the factors.

    >>> LearnableResidual(nn.Sequential(OrthoConv2d(4, 4, 3), MaxMin()))(torch.randn(1, 4, 8, 8)).shape
    torch.Size([1, 4, 8, 8])
    """

    def __init__(
        self,
        branch: nn.Module,
        shortcut: nn.Module | None = None,
        scale: float = 1.0,
        learnable_skip: bool = False,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(branch, shortcut)
        factory = factory_for(device, dtype)
        self.scale = nn.Parameter(torch.tensor(number("scale", scale), **factory))
        one = torch.ones((), **factory)
        if flag("learnable_skip", learnable_skip):
            self.skip_scale = nn.Parameter(one)
        else:
            self.register_buffer("skip_scale", one, persistent=False)

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        skip_scale, scale, share = self.factors(input.dtype)
        skip, branch = self._skip(input), self.branch(input * scale.to(input.dtype))
        _same_shape(skip, branch)
        return skip * (skip_scale * share).to(skip.dtype) + branch * share.to(branch.dtype)

    def plain_forward(self, input: Tensor) -> Tensor:  # noqa: A002
        total = self.skip_scale.abs() + self.scale.abs()
        weighted = self._skip(input) * self.skip_scale + self.branch(input * self.scale)
        return weighted / torch.where(total > 0, total, 1.0)

    def factors(self, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        """``a1``, ``a2`` and ``1 / (|a1| + |a2|)`` for an input of this dtype, in float32 or better.

        Neither factor is larger, nor their sum smaller (unless it is 0, and so then is the output), than the root of
        the largest number of the dtype, or its inverse: products with them would leave the range.
        """
        limit = torch.finfo(dtype).max ** 0.5
        skip_scale, scale = (_exact(factor).clamp(-limit, limit) for factor in (self.skip_scale, self.scale))
        total = skip_scale.abs() + scale.abs()
        share = torch.where(total > 0, 1 / torch.where(total > 0, total, 1.0).clamp_min(1 / limit), 0.0)
        return skip_scale, scale, share


class ConvexResidual(_Residual):
    """``(1 - t) x + t f(x)`` with a learnable ``t`` between 0 and 1: 1-Lipschitz if ``f`` is.

    Args:
        branch: the function ``f``, 1-Lipschitz.
        shortcut: a 1-Lipschitz module in place of ``x``, where ``f`` changes the shape.
        weight: first value of ``t``, between 0 and 1 (both excluded).
        device: device of the weight.
        dtype: dtype of the weight.

    >>> ConvexResidual(OrthoLinear(8, 8))(torch.randn(2, 8)).shape
    torch.Size([2, 8])
    """

    def __init__(
        self,
        branch: nn.Module,
        shortcut: nn.Module | None = None,
        weight: float = 0.5,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(branch, shortcut)
        if not 0 < number("weight", weight) < 1:
            raise ValueError(f"weight={weight} must be between 0 and 1, both excluded")
        self.logit = nn.Parameter(torch.tensor(math.log(weight / (1 - weight)), **factory_for(device, dtype)))

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        weight = _exact(self.logit).sigmoid()
        skip, branch = self._skip(input), self.branch(input)
        _same_shape(skip, branch)
        return skip * (1 - weight).to(skip.dtype) + branch * weight.to(branch.dtype)

    def plain_forward(self, input: Tensor) -> Tensor:  # noqa: A002
        weight = self.logit.sigmoid()
        return self._skip(input) * (1 - weight) + self.branch(input) * weight


class ConcatResidual(Traceable, nn.Module):
    """Half of the channels pass, the others go through ``f``: 1-Lipschitz, or isometric, if ``f`` is.

    Args:
        branch: the function ``f`` of the second half of the channels.
        dim: axis of the channels, of even size.

    >>> ConcatResidual(OrthoConv2d(4, 4, 3))(torch.randn(1, 8, 6, 6)).shape
    torch.Size([1, 8, 6, 6])
    """

    def __init__(self, branch: nn.Module, dim: int = 1) -> None:
        super().__init__()
        self.branch, self.dim = branch, dim

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        if input.shape[self.dim] % 2:
            raise ValueError(f"{input.shape[self.dim]} channels on axis {self.dim} cannot be split in two halves")
        first, second = input.chunk(2, self.dim)
        branch = self.branch(second)
        return torch.cat((first.to(branch.dtype), branch), self.dim)

    def plain_forward(self, input: Tensor) -> Tensor:  # noqa: A002
        halves = input.chunk(2, self.dim)
        return torch.cat((halves[0], self.branch(halves[1])), self.dim)


class L2Residual(_Residual):
    """``sqrt((cos(t) x)² + (sin(t) f(x))²)``, entry by entry, with a learnable ``t``: 1-Lipschitz if ``f`` is.

    The pair ``(cos(t) x, sin(t) f(x))`` depends on ``x`` in a 1-Lipschitz way and so does its norm,
    which is also an activation; the gradient at 0 is 0.

    Args:
        branch: the function ``f``, 1-Lipschitz.
        shortcut: a 1-Lipschitz module in place of ``x``, where ``f`` changes the shape.
        angle: first value of ``t``; skip and branch weigh the same at ``pi / 4``.
        device: device of the angle.
        dtype: dtype of the angle.

    >>> bool((L2Residual(OrthoLinear(8, 8))(torch.randn(2, 8)) >= 0).all())
    True
    """

    def __init__(
        self,
        branch: nn.Module,
        shortcut: nn.Module | None = None,
        angle: float = math.pi / 4,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(branch, shortcut)
        self.norm = EuclideanNorm(1)
        self.angle = nn.Parameter(torch.tensor(number("angle", angle), **factory_for(device, dtype)))

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        angle = _exact(self.angle)
        skip, branch = self._skip(input), self.branch(input)
        _same_shape(skip, branch)
        wide = at_least_float32(branch.dtype)
        both = torch.stack((skip.to(wide) * angle.cos(), branch.to(wide) * angle.sin()), 1)
        return self.norm(both).to(branch.dtype)

    def plain_forward(self, input: Tensor) -> Tensor:  # noqa: A002
        both = torch.stack((self._skip(input) * self.angle.cos(), self.branch(input) * self.angle.sin()))
        return torch.linalg.vector_norm(both, dim=0)


class AdjointResidual(Traceable, nn.Module):
    """``x - 2 Wᵀ σ(W x + b)`` for a layer ``W`` of norm at most 1 and its adjoint: 1-Lipschitz.

    As ``SLLBlock2d``, with an orthogonal layer in the place of a rescaled kernel: its Jacobian ``I - 2 WᵀDW`` is
    symmetric with eigenvalues between -1 and 1. All parameters are those of the layer.

    Args:
        layer: a layer with a method ``adjoint()``, such as ``OrthoConv2d`` or ``OrthoLinear``.
        activation: acts entry by entry with slopes between 0 and 1; ReLU if not given.

    Raises:
        TypeError: if the layer has no adjoint.
        ValueError: if it has none with its numbers, or the activation is none of these.

    >>> block, x = AdjointResidual(OrthoConv2d(4, 8, 3)), torch.randn(1, 4, 6, 6)
    >>> block(x).shape, round(ts.lipschitz_bound(block, (4, 6, 6)), 4)
    (torch.Size([1, 4, 6, 6]), 1.0)
    """

    def __init__(self, layer: Any, activation: nn.Module | None = None) -> None:
        super().__init__()
        if not isinstance(layer, nn.Module) or not callable(getattr(layer, "adjoint", None)):
            raise TypeError(f"layer={shown(layer)} must have a method adjoint(), as orthogonal layers do")
        self.layer, self.activation = layer, with_slopes_in_unit_interval(activation)
        self.adjoint: nn.Module = layer.adjoint()  # type: ignore[operator]
        self.register_load_state_dict_pre_hook(_give_to_adjoint)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the tensors of the layer, but not those of its adjoint, which are the same."""
        found = super().state_dict(*args, **kwargs)
        for name in [name for name in found if name.startswith(f"{kwargs.get('prefix', '')}adjoint.")]:
            del found[name]
        return found

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        return input - 2 * self.adjoint(self.activation(self.layer(input)))

    plain_forward = forward


def _give_to_adjoint(block: AdjointResidual, state: dict[str, Tensor], prefix: str, *rest: object) -> None:
    """Let the adjoint of an ``AdjointResidual`` load what its layer loads."""
    names = [name for name, _ in (*block.adjoint.named_parameters(), *block.adjoint.named_buffers())]
    for name in names:
        if f"{prefix}layer.{name}" in state:
            state.setdefault(f"{prefix}adjoint.{name}", state[f"{prefix}layer.{name}"])
