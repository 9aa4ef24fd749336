"""Adam for parameters that are orthonormal matrices themselves, and which parameters are known to be so."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any
from weakref import ref

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from trysquare.nn.linalg.precision import full_precision
from trysquare.nn.linalg.stiefel import retract, skew_gradient, tangent, turn
from trysquare.nn.linalg.unitary import polish

# Steps from one removal of drift to the next.
_POLISH_EVERY = 4
# Largest entry of ``X Xᵀ - I`` that a parameter may start with; and of one that is orthonormal, in units of rounding.
_START_TOLERANCE = 1e-3
_ROUNDINGS = 200.0
# Matrices with more rows are not worth copying together on a processor.
_LARGEST_IN_A_BATCH = 128

# -- which parameters are known to be orthonormal
#
# Layers with ``method="manifold"`` use such a parameter as it is, and orthonormalise any other. What is known is the
# state after a write of our own: any later write, by another optimizer or by hand, raises torch's version counter.

_known: dict[int, tuple[ref[Tensor], int, int]] = {}


def mark(parameter: Tensor) -> None:
    """Note that a parameter is orthonormal now."""
    number = id(parameter)
    _known[number] = ref(parameter, lambda _: _known.pop(number, None)), parameter._version, parameter.data_ptr()


def forget(parameter: Tensor) -> None:
    """Note that a parameter may be anything."""
    _known.pop(id(parameter), None)


def is_known(parameter: Tensor) -> bool:
    """Whether a parameter is as it was when it was marked."""
    found = _known.get(id(parameter))
    if found is None or found[0]() is not parameter:
        return False
    return found[1:] == (parameter._version, parameter.data_ptr())


# -- the optimizer


Group = dict[str, Any]
"""An entry of ``param_groups`` of an optimizer, or of its ``state``."""


class ByGroup(torch.optim.Optimizer):
    """An optimizer that checks each group of parameters before it takes it."""

    def _check_group(self, group: Group) -> None:
        raise NotImplementedError

    def _step_group(self, group: Group) -> None:
        raise NotImplementedError

    def add_param_group(self, param_group: Group) -> None:
        """Add parameters, with options of their own.

        Raises:
            ValueError: if one of them is not orthogonal, or an option has no meaning.
        """
        super().add_param_group(param_group)
        group = self.param_groups.pop()
        self._check_group(group)
        self.param_groups.append(group)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """Take a step with every parameter that has a gradient.

        Args:
            closure: evaluates the model again and returns the loss.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            self._step_group(group)
        return loss


class RiemannianAdam(ByGroup):
    """Adam on orthonormal matrices: parameters move along the manifold, and are orthonormal after each step.

    The gradient is projected to the tangent space, its moments are those of Adam, and the step follows a short
    polynomial that is orthonormal to rounding (``linalg/stiefel.py``). Moments of square matrices are those of skew
    matrices, which mean the same everywhere; those of rectangular ones are projected to where the parameter is now. A
    step turns no direction by more than 0.4 radians: a longer one is shortened, on the device. Every 4 steps (every one
    in float64) drift is removed. Nothing is factorised, and the host never waits for a value.

    Parameters are orthonormal in rows or, if they are tall, in columns, with any axes for batches in front. Groups with
    ``orthonormal=False`` are for all other parameters of a model, which get AdamW; ``ts.parameter_groups`` says which
    is which.

    Args:
        params: orthonormal matrices ``(..., n, m)``, or groups.
        lr: learning rate: entries of the generator of a step are about that large.
        betas: decays of the moments.
        eps: added to the root of the second moment.
        weight_decay: of groups with ``orthonormal=False``; the others have no scale that could decay.
        orthonormal: whether the parameters of a group that says nothing else are orthonormal.

    Raises:
        ValueError: if a parameter is not orthonormal at the start, is shorter than float32, or is spread over processes
            by ``fully_shard``.

    >>> layer = OrthoLinear(8, 4, method="manifold")
    >>> optimizer = ts.optim.RiemannianAdam(ts.parameter_groups(layer), lr=0.01)
    >>> for _ in range(3):
    ...     optimizer.zero_grad()
    ...     layer(torch.ones(1, 8)).square().sum().backward()
    ...     optimizer.step()
    >>> bool(torch.allclose(layer.free_tensors[0] @ layer.free_tensors[0].T, torch.eye(4), atol=1e-6))
    True
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        orthonormal: bool = True,
    ) -> None:
        options = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "orthonormal": orthonormal}
        super().__init__(params, options)

    def _check_group(self, group: Group) -> None:
        _check_options(**{name: group[name] for name in ("lr", "betas", "eps", "weight_decay")})
        if group["orthonormal"]:
            for parameter in group["params"]:
                _begin(parameter)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load moments; parameters that were loaded before, and are orthonormal, are known to be so again."""
        super().load_state_dict(state_dict)
        for group in self.param_groups:
            for parameter in group["params"] if group["orthonormal"] else ():
                if _distance(parameter) < _ROUNDINGS * torch.finfo(parameter.dtype).eps:
                    mark(parameter)

    def _step_group(self, group: Group) -> None:
        for alike in self._batches(group["params"], group["orthonormal"]):
            self._update(alike, group)

    def _batches(self, parameters: Iterable[Tensor], orthonormal: bool) -> list[list[Tensor]]:
        """Return the parameters with a gradient, those that can take their step as one tensor side by side."""
        found: defaultdict[Hashable, list[Tensor]] = defaultdict(list)
        for parameter in parameters:
            if parameter.grad is None:
                continue
            state = self.state[parameter]
            if "mean" not in state:
                moment = torch.zeros_like(_flat(parameter, orthonormal), memory_format=torch.contiguous_format)
                state |= {"step": 0, "mean": moment, "square_mean": moment.clone()}
            state["step"] += 1
            kind = state["mean"].shape[1:], parameter.dtype, parameter.device, state["step"]
            found[kind, id(parameter) if _is_large(parameter, orthonormal) else 0].append(parameter)
        return list(found.values())

    def _update(self, parameters: Sequence[Tensor], group: Group) -> None:
        orthonormal, lr = group["orthonormal"], group["lr"]
        states = [self.state[parameter] for parameter in parameters]
        step = states[0]["step"]
        matrix = _together([_flat(parameter, orthonormal) for parameter in parameters])
        gradient = _together([_flat(p.grad, orthonormal) for p in parameters if p.grad is not None])
        with full_precision(matrix):
            if not orthonormal:
                after = matrix * (1 - lr * group["weight_decay"]) - lr * _direction(gradient, states, step, group)
            elif matrix.shape[-2] == matrix.shape[-1]:
                after = turn(matrix, -lr * _direction(skew_gradient(matrix, gradient), states, step, group))
            else:
                direction = _direction(tangent(matrix, gradient), states, step, group)
                after = retract(matrix, -lr * tangent(matrix, direction))
            if orthonormal and (matrix.dtype == torch.float64 or step % _POLISH_EVERY == 0):
                after = polish(after)
        for parameter, value in zip(parameters, _apart(after, states), strict=True):
            parameter.copy_((value.mT if orthonormal and _is_tall(parameter) else value).reshape(parameter.shape))
            if orthonormal:
                mark(parameter)


def _flat(tensor: Tensor, orthonormal: bool) -> Tensor:
    """``(batch, n, m)`` with ``n <= m``, or of what is not orthonormal all numbers."""
    if not orthonormal:
        return tensor.reshape(-1)
    return _wide(tensor.reshape(-1, *tensor.shape[-2:]))


def _is_large(parameter: Tensor, orthonormal: bool) -> bool:
    """Whether a parameter is better off alone: on a processor calls cost little, and copies something."""
    size = min(parameter.shape[-2:]) ** 2 if orthonormal else parameter.numel()
    return parameter.device.type == "cpu" and size > _LARGEST_IN_A_BATCH**2


def _direction(gradient: Tensor, states: Sequence[Group], step: int, group: Group) -> Tensor:
    """Update the moments by a gradient, and return the direction against which Adam steps."""
    first, second = group["betas"]
    mean, square = (_together([state[name] for state in states]) for name in ("mean", "square_mean"))
    mean.lerp_(gradient, 1 - first)
    square.mul_(second).addcmul_(gradient, gradient, value=1 - second)
    if len(states) > 1:
        for state, *moments in zip(states, _apart(mean, states), _apart(square, states), strict=True):
            state["mean"].copy_(moments[0])
            state["square_mean"].copy_(moments[1])
    size = (square / (1 - second**step)).sqrt_().add_(group["eps"])
    return (mean / (1 - first**step)).div_(size)


def _together(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat(list(tensors)) if len(tensors) > 1 else tensors[0]


def _apart(tensor: Tensor, states: Sequence[Group]) -> Sequence[Tensor]:
    return tensor.split([len(state["mean"]) for state in states])


def _wide(matrix: Tensor) -> Tensor:
    return matrix.mT if _is_tall(matrix) else matrix


def _is_tall(matrix: Tensor) -> bool:
    return matrix.shape[-2] > matrix.shape[-1]


@torch.no_grad()
def _distance(parameter: Tensor) -> float:
    """Return the largest entry of ``X Xᵀ - I`` over the batch, or of ``Xᵀ X - I`` of tall matrices."""
    matrix = _wide(parameter)
    with full_precision(matrix):
        gram = torch.matmul(matrix, matrix.mT)
    gram.diagonal(dim1=-2, dim2=-1).sub_(1)
    return float(gram.abs().max()) if gram.numel() else 0.0


@torch.no_grad()
def _begin(parameter: Tensor) -> None:
    """Check that a parameter is orthonormal, and make it so to rounding.

    Raises:
        ValueError: if it is not.
    """
    shape = tuple(parameter.shape)
    if hasattr(parameter, "full_tensor"):
        raise ValueError(
            "RiemannianAdam needs whole matrices, not those that fully_shard has spread over processes: use torch's "
            "AdamW there, with which layers orthonormalise the parameters themselves"
        )
    if parameter.dtype not in (torch.float32, torch.float64) or parameter.ndim < 2:
        raise ValueError(
            f"RiemannianAdam keeps float32 or float64 matrices orthonormal, got {parameter.dtype} of shape {shape}; "
            "give ts.parameter_groups(model), or put the others into a group with orthonormal=False"
        )
    if parameter.is_meta:
        return
    missed = _distance(parameter)
    if not missed < _START_TOLERANCE:
        raise ValueError(
            f"a parameter of shape {shape} is not orthonormal: X Xᵀ - I has entries up to {missed:.2g}; start from "
            "nn.init.orthogonal_, or give ts.parameter_groups(model), which says which parameters are orthonormal"
        )
    if missed > _ROUNDINGS * torch.finfo(parameter.dtype).eps:
        with full_precision(parameter):
            matrix = polish(polish(_wide(parameter)))
            parameter.copy_(matrix.mT if _is_tall(parameter) else matrix)
    mark(parameter)


def _check_options(lr: float, betas: tuple[float, float], eps: float, weight_decay: float) -> None:
    if not 0 <= lr < float("inf"):
        raise ValueError(f"lr={lr!r} must be finite and not negative")
    if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
        raise ValueError(f"betas={betas!r} must be two numbers of at least 0 and less than 1")
    if not eps > 0 or not weight_decay >= 0:
        raise ValueError(f"eps={eps!r} must be above 0, and weight_decay={weight_decay!r} at least 0")
