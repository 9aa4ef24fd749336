"""What a network does at least: slopes at points that were looked at."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from trysquare.naming import shown
from trysquare.nn.export import with_fixed_weights
from trysquare.nn.geometry import number, per_axis
from trysquare.nn.linalg.precision import own_tensors, users_device
from trysquare.progress import track
from trysquare.verify.lipschitz.checks import require_dense, require_plain_module

# Half the distance of the two points whose images confirm a slope, in multiples of the norm of the input plus 1: the
# first loses nothing but rounding, the second less of that where outputs are large.
_DISTANCES = (1e-6, 1e-3)
# Roundings of a forward pass in float64 that a difference of two outputs may be made of.
_ROUNDINGS = 64


@own_tensors()
def lipschitz_lower_bound(
    model: nn.Module,
    inputs: Tensor,
    *,
    power_steps: int = 10,
    ascent_steps: int = 5,
    seconds: float | None = None,
) -> float:
    """Return the largest slope seen: a lower bound on the l2 Lipschitz constant of a network in eval mode.

    At each input, power iteration on ``Jᵀ J`` by Jacobian-vector and vector-Jacobian products finds the direction that
    is amplified most. The inputs then climb: along the gradient of that amplification, or, where the network is
    piecewise linear and there is none, along the direction itself.

    Autograd's ``J`` is the Jacobian only where the network is differentiable, and not of what is detached or goes
    straight through. So the value returned is never ``|J v| / |v|`` alone, but at most ``|f(a) - f(b)| / |a - b|`` for
    two points on both sides of the input, less the rounding that this difference can hold: a slope that the function
    itself has, whatever autograd says. Both are computed in float64 with the weights of the model as they are, which
    is right to about 1e-8 (1e-6 with layers of the Fourier domain in float32, whose blocks are rebuilt).

    Args:
        model: maps each sample of a batch on its own; set to eval mode in a copy, so it is not touched.
        inputs: ``(batch, ...)``, floating point: where to start.
        power_steps: iterations at each point.
        ascent_steps: moves of the inputs.
        seconds: stop after the move in which this time is over.

    Raises:
        ValueError: if inputs or Jacobians are not finite, inputs or outputs are not floating point numbers, or the
            output does not depend on the input.

    >>> model = nn.Sequential(OrthoConv2d(4, 8, 3, stride=2), nn.ReLU())
    >>> 0.9 < lipschitz_lower_bound(model, torch.randn(2, 4, 8, 8)) < 1.001
    True
    """
    require_plain_module(model)
    _check_inputs(inputs)
    (power_steps,) = per_axis("power_steps", power_steps, 1)
    (ascent_steps,) = per_axis("ascent_steps", ascent_steps, 1, least=0)
    seconds = None if seconds is None else number("seconds", seconds)
    # Responses are no fixed weights: they are rebuilt in float64, which moves the value by their float32 rounding.
    with _without_history(model):
        plain = with_fixed_weights(model).eval().requires_grad_(False)
        exact = with_fixed_weights(model).double().eval().requires_grad_(False)
    x, direction = inputs.detach(), torch.randn_like(inputs)
    best, started = 0.0, time.monotonic()
    for step in track(range(ascent_steps + 1), "lower bound", ascent_steps + 1):
        try:
            jacobian = _Jacobian(plain, x)
            direction = jacobian.most_amplified(direction, power_steps)
            best = max(best, _slope(exact, x.double(), direction.double(), best))
        except Exception as error:  # whatever the model raises
            shape = tuple(inputs.shape[1:])
            raise ValueError(
                f"{type(model).__name__} cannot be differentiated, or computed in float64, on inputs of shape {shape}: "
                f"{error}"
            ) from error
        if step == ascent_steps or (seconds is not None and time.monotonic() - started > seconds):
            break
        x = x + jacobian.uphill(direction) * (_norms(x) + 1) * 0.1
    return best


def _check_inputs(inputs: Tensor) -> None:
    if not isinstance(inputs, Tensor):
        raise TypeError(
            f"inputs must be a batch of samples (torch.randn(4, *shape), or some of your data), not {shown(inputs)}"
        )
    require_dense("inputs", inputs)
    if inputs.ndim < 2 or not len(inputs):
        raise ValueError(f"inputs of shape {tuple(inputs.shape)} must be a batch of at least one sample")
    if not inputs.is_floating_point():
        raise ValueError(f"inputs must be floating point numbers, not {_kind(inputs)}: others have no slope")
    if not bool(inputs.isfinite().all()):
        raise ValueError("inputs hold values that are not finite")


def _kind(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


@contextmanager
def _without_history(model: nn.Module) -> Iterator[None]:
    """Context in which weights that hooks compute (pruning, ``weight_norm``) can be copied."""
    computed = [
        (module.__dict__, name, value)
        for module in model.modules()
        for name, value in module.__dict__.items()
        if isinstance(value, Tensor) and not value.is_leaf
    ]
    for attributes, name, value in computed:
        attributes[name] = value.detach()
    try:
        yield
    finally:
        for attributes, name, value in computed:
            attributes[name] = value


def _norms(x: Tensor) -> Tensor:
    """Return the norm of each sample, shaped to divide the batch."""
    return x.flatten(1).norm(dim=1).view(-1, *(1,) * (x.ndim - 1))


def _unit(x: Tensor) -> Tensor:
    return x / _norms(x).clamp_min(torch.finfo(x.dtype).tiny)


def _slope(model: nn.Module, x: Tensor, direction: Tensor, known: float) -> float:
    """Largest slope at any of the inputs, in a float64 model; not looked at closely if it is not above ``known``."""
    amplified = _norms(_Jacobian(model, x).push(direction)) / _norms(direction)
    if not bool(amplified.isfinite().all()):
        raise ValueError("the Jacobian holds values that are not finite: look for NaN or infinite weights")
    if float(amplified.max()) <= known:
        return known
    seen = torch.zeros_like(amplified)
    for distance in _DISTANCES:
        seen = torch.maximum(seen, _secant(model, x, direction, distance))
        if bool((seen >= 0.999 * amplified).all()):
            break
    return float(torch.minimum(seen, amplified).max())


@torch.no_grad()
def _secant(model: nn.Module, x: Tensor, direction: Tensor, distance: float) -> Tensor:
    """``|f(a) - f(b)| / |a - b|`` across each input, less what the difference can owe to rounding."""
    move = _unit(direction) * distance * (_norms(x) + 1)
    a, b = x + move, x - move
    with users_device():
        images = [model(point).flatten(1) for point in (a, b)]
    rounding = _ROUNDINGS * torch.finfo(x.dtype).eps * sum(_norms(image) for image in images)
    change = (_norms(images[0] - images[1]) - rounding).clamp_min(0)
    return change.view(_norms(x).shape) / _norms(a - b)


class _Jacobian:
    """The Jacobian of a network at a batch of inputs, never written down.

    ``w ↦ Jᵀ w`` is linear, so its derivative in the direction of ``v`` is ``J v``: two backward passes over one
    recorded forward pass, which is several times as fast as forward-mode differentiation and needs no support from the
    operations.
    """

    def __init__(self, model: nn.Module, x: Tensor) -> None:
        with torch.enable_grad():
            self.x = x.detach().clone().requires_grad_()
            with users_device():
                self.output = model(self.x)
            if not isinstance(self.output, Tensor):
                raise ValueError(f"the model must return one tensor, not {type(self.output).__name__}")
            if not self.output.is_floating_point():
                raise ValueError(f"the model must return floating point numbers, not {_kind(self.output)}")
            if not self.output.requires_grad:
                raise ValueError("the output of the model does not depend on its input, as far as autograd sees")
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
        """Return the direction at each input that is amplified most, as power iteration from ``direction`` finds it."""
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
