"""What a network does at least: Jacobians at points that were looked at."""

from __future__ import annotations

import time

import torch
from torch import Tensor, nn

from trysquare.export import with_fixed_weights
from trysquare.progress import track


def lipschitz_lower_bound(
    model: nn.Module,
    inputs: Tensor,
    *,
    power_steps: int = 10,
    ascent_steps: int = 5,
    seconds: float | None = None,
) -> float:
    """Largest Jacobian norm seen: a lower bound on the l2 Lipschitz constant of a network.

    At each input, power iteration on ``Jᵀ J`` by Jacobian-vector and vector-Jacobian products finds the direction that
    is amplified most. The inputs then climb: along the gradient of that amplification, or, where the network is
    piecewise linear and there is none, along the direction itself. The value returned is ``|J v| / |v|`` for the best
    input and direction, computed in float64 with the weights of the model as they are: right whatever the search did,
    to about 1e-12 (1e-6 with layers of the Fourier domain in float32, whose blocks are rebuilt).

    Args:
        model: maps each sample of a batch on its own; set to eval mode in a copy, so it is not touched.
        inputs: ``(batch, ...)``: where to start.
        power_steps: iterations at each point.
        ascent_steps: moves of the inputs.
        seconds: stop after the move in which this time is over.

    Raises:
        ValueError: if inputs or Jacobians are not finite.

    >>> model = nn.Sequential(OrthoConv2d(4, 8, 3, stride=2), nn.ReLU())
    >>> 0.9 < lipschitz_lower_bound(model, torch.randn(2, 4, 8, 8)) < 1.001
    True
    """
    if inputs.ndim < 2 or not len(inputs):
        raise ValueError(f"inputs of shape {tuple(inputs.shape)} must be a batch of at least one sample")
    if not bool(inputs.isfinite().all()):
        raise ValueError("inputs hold values that are not finite")
    # Responses are no fixed weights: they are rebuilt in float64, which moves the value by their float32 rounding.
    plain = with_fixed_weights(model).eval()
    exact = with_fixed_weights(model).double().eval()
    x, direction = inputs.detach(), torch.randn_like(inputs)
    best, started = 0.0, time.monotonic()
    for step in track(range(ascent_steps + 1), "lower bound", ascent_steps + 1):
        jacobian = _Jacobian(plain, x)
        direction = jacobian.most_amplified(direction, power_steps)
        best = max(best, _amplification(exact, x.double(), direction.double()))
        if step == ascent_steps or (seconds is not None and time.monotonic() - started > seconds):
            break
        x = x + jacobian.uphill(direction) * (_norms(x) + 1) * 0.1
    return best


def _norms(x: Tensor) -> Tensor:
    """Norm of each sample, shaped to divide the batch."""
    return x.flatten(1).norm(dim=1).view(-1, *(1,) * (x.ndim - 1))


def _unit(x: Tensor) -> Tensor:
    return x / _norms(x).clamp_min(torch.finfo(x.dtype).tiny)


def _amplification(model: nn.Module, x: Tensor, direction: Tensor) -> float:
    ratio = (_norms(_Jacobian(model, x).push(direction)) / _norms(direction)).max()
    if not bool(ratio.isfinite()):
        raise ValueError("the Jacobian holds values that are not finite: look for NaN or infinite weights")
    return float(ratio)


class _Jacobian:
    """The Jacobian of a network at a batch of inputs, never written down.

    ``w ↦ Jᵀ w`` is linear, so its derivative in the direction of ``v`` is ``J v``: two backward passes over one
    recorded forward pass, which is several times as fast as forward-mode differentiation and needs no support from the
    operations.
    """

    def __init__(self, model: nn.Module, x: Tensor) -> None:
        with torch.enable_grad():
            self.x = x.detach().clone().requires_grad_()
            self.output = model(self.x)
            if not isinstance(self.output, Tensor):
                raise ValueError(f"the model must return one tensor, not {type(self.output).__name__}")
            self.weights = torch.zeros_like(self.output, requires_grad=True)
            (self.pulled,) = torch.autograd.grad(
                self.output, self.x, self.weights, create_graph=True, materialize_grads=True
            )

    def push(self, direction: Tensor, *, keep: bool = False) -> Tensor:
        """``J v``."""
        (image,) = torch.autograd.grad(
            self.pulled, self.weights, direction, retain_graph=True, create_graph=keep, materialize_grads=True
        )
        return image

    def pull(self, image: Tensor) -> Tensor:
        """``Jᵀ w``."""
        (back,) = torch.autograd.grad(self.output, self.x, image, retain_graph=True, materialize_grads=True)
        return back

    def most_amplified(self, direction: Tensor, steps: int) -> Tensor:
        """The direction at each input that is amplified most, as far as power iteration from ``direction`` finds it."""
        direction = _unit(direction)
        for _ in range(steps):
            back = self.pull(_unit(self.push(direction)))
            direction = torch.where(_norms(back) > 0, _unit(back), direction)
        return direction

    def uphill(self, direction: Tensor) -> Tensor:
        """Unit direction in which the amplification grows; where it does not, the amplified direction itself."""
        growth = self.push(direction, keep=True).square().sum()
        if not growth.requires_grad:
            return direction
        (gradient,) = torch.autograd.grad(growth, self.x, retain_graph=True, materialize_grads=True)
        finite = gradient.isfinite().flatten(1).all(1).view(-1, *(1,) * (gradient.ndim - 1))
        return torch.where((_norms(gradient) > 0) & finite, _unit(gradient), direction)
