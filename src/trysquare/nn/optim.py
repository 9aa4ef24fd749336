"""Groups of parameters, an optimizer for orthogonal ones, and what can be added to any optimizer."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import ParametrizationList
from torch.optim.optimizer import ParamsT

from trysquare.nn.geometry import number, positive
from trysquare.nn.linalg.orthonormal import orthonormal_rows
from trysquare.nn.linalg.precision import full_precision
from trysquare.nn.linalg.stiefel import nearest
from trysquare.nn.linalg.unitary import distance_from_unitary, low_rank_factors, polish, rotate
from trysquare.nn.riemannian import ByGroup, Group, is_known, mark
from trysquare.nn.riemannian import RiemannianAdam as RiemannianAdam

_POLISH_EVERY = 100
_DTYPES = (torch.float32, torch.float64, torch.complex64, torch.complex128)
# Largest entry of U* U - I that a parameter may start with.
_START_TOLERANCE = 1e-3


def parameter_groups(model: nn.Module, *, lr: float | None = None, weight_decay: float = 0.0) -> list[Group]:
    """Return the trainable parameters of a model in groups for an optimizer, of which only plain weights decay.

    Most weights of this library do not depend on the scale of their free tensors. Decay then does not make the weight
    smaller, but every further step larger, which is what a learning rate is for; for the other weights it changes what
    the method means by 0. So only weights with two axes or more decay, of layers that are not parametrized.

    Args:
        model: any model.
        lr: learning rate of all groups; the optimizer's own if not given.
        weight_decay: decay of plain weights.

    Returns:
        Groups named ``"orthonormal"`` (matrices of layers with ``method="manifold"``, which ``RiemannianAdam`` keeps
        orthonormal; also told by ``group["orthonormal"]``), ``"free"`` (other free tensors of weights of ours, and of
        any other parametrization), ``"decayed"`` and ``"other"`` (biases, factors, angles), without empty ones. They
        are dictionaries, so you can set another learning rate for a group.

    Raises:
        TypeError: if ``model`` is no module.

    >>> model = nn.Sequential(OrthoConv2d(3, 8, 3), MaxMin(), nn.Flatten(), nn.Linear(512, 10))
    >>> optimizer = torch.optim.AdamW(ts.parameter_groups(model, lr=1e-3, weight_decay=0.05))
    >>> [(group["name"], len(group["params"]), group["weight_decay"]) for group in optimizer.param_groups]
    [('free', 2, 0.0), ('decayed', 1, 0.05), ('other', 2, 0.0)]
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, not {type(model).__name__}")
    names = ("orthonormal", "free", "decayed", "other")
    kinds: dict[str, dict[Tensor, None]] = {name: {} for name in names}  # dictionaries as ordered sets
    for module in model.modules():
        ours = type(module).__module__.startswith("trysquare.")
        matrices = getattr(module[0], "orthonormal_count", 0) if isinstance(module, ParametrizationList) else 0
        for place, (name, parameter) in enumerate(module.named_parameters(recurse=False)):
            if place < matrices:
                kind = "orthonormal"
            elif isinstance(module, ParametrizationList) or (ours and name == "weight"):
                kind = "free"
            else:
                kind = "decayed" if parameter.ndim > 1 and not ours else "other"
            if parameter.requires_grad and not any(parameter in group for group in kinds.values()):
                kinds[kind][parameter] = None
    rate: Group = {} if lr is None else {"lr": lr}
    return [
        {
            "name": kind, "params": list(group), **rate,
            "weight_decay": weight_decay if kind == "decayed" else 0.0, "orthonormal": kind == "orthonormal",
        }
        for kind, group in kinds.items()
        if group
    ]  # fmt: skip


class ProjUNN(ByGroup):
    """ProjUNN-T (Kiani et al., 2022): gradient steps of low rank along the orthogonal or unitary group.

    A step approximates the gradient by a matrix of low rank, projects it to the tangent space at the parameter, and
    moves along the geodesic in that direction (the exponential map), at the cost of ``n²`` times the rank. Parameters
    stay orthogonal to rounding, whatever the step; what rounding adds up is removed every 100 steps. The vectors that
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

    def _check_group(self, group: Group) -> None:
        _check_options(**{name: group[name] for name in ("lr", "rank", "alpha")})
        for parameter in group["params"]:
            _check_orthogonal(parameter)

    def _step_group(self, group: Group) -> None:
        for parameter in group["params"]:
            if parameter.grad is not None:
                with full_precision(parameter):
                    self._update(parameter, group)

    def _update(self, parameter: Tensor, group: Group) -> None:
        state = self.state[parameter]
        state["step"] = state.get("step", 0) + 1
        gradient = self._scaled(parameter.grad, state, group)  # type: ignore[arg-type]
        # The same vectors on every rank of a distributed run, or the replicas would drift apart.
        left, right = low_rank_factors(gradient, min(group["rank"], parameter.shape[-1]), seed=state["step"])
        moved = rotate(parameter, left, right, group["lr"])
        parameter.copy_(polish(moved) if state["step"] % _POLISH_EVERY == 0 else moved)

    @staticmethod
    def _scaled(gradient: Tensor, state: Group, group: Group) -> Tensor:
        if not group["alpha"]:
            return gradient
        square = gradient.abs().square()
        mean = state.setdefault("square_mean", torch.zeros_like(square))
        mean.lerp_(square, 1 - group["alpha"])
        unbiased = mean / (1 - group["alpha"] ** state["step"])
        return gradient / (unbiased.sqrt() + group["eps"])


def _check_options(lr: float, rank: int, alpha: float) -> None:
    if not 0 <= number("lr", lr) < math.inf:
        raise ValueError(f"lr={lr!r} must be finite and not negative")
    positive("rank", rank)
    if not 0 <= number("alpha", alpha) < 1:
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


class Lookahead:
    """Every so many steps of an optimizer, go back to a place between where they began and where they led.

    As of Zhang et al. (2019). Where they began is part of the optimizer's ``state_dict``. Free tensors of orthogonal
    layers may be any matrix, so that a place between two of them is one too; what ``RiemannianAdam`` keeps orthonormal
    goes to the orthonormal matrix that is nearest to that place.

    Args:
        optimizer: any of torch's; it is used as before.
        every: steps.
        share: of the way, from where the steps began; 1 changes nothing.

    >>> x = nn.Parameter(torch.zeros(1))
    >>> optimizer = torch.optim.SGD([x], lr=1.0)
    >>> _ = ts.optim.Lookahead(optimizer, every=3, share=0.5)
    >>> for _ in range(3):
    ...     x.grad = torch.tensor([-1.0])
    ...     optimizer.step()
    >>> x.item()
    1.5
    """

    def __init__(self, optimizer: torch.optim.Optimizer, every: int = 5, share: float = 0.5) -> None:
        self.every, self.share = positive("every", every), _share("share", share)
        self._kept = _Kept(optimizer, "slow")
        optimizer.param_groups[0]["lookahead_steps"] = 0
        optimizer.register_step_post_hook(self._after_step)

    @torch.no_grad()
    def _after_step(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        group = optimizer.param_groups[0]
        group["lookahead_steps"] += 1
        for parameter, slow in self._kept.trained():
            if group["lookahead_steps"] % self.every == 0:
                orthonormal = is_known(parameter)
                _write(parameter, slow.lerp_(parameter, self.share), orthonormal)
                if orthonormal:
                    slow.copy_(parameter)


class MovingAverage:
    """The moving average of what an optimizer trains, to evaluate with. It is part of the optimizer's ``state_dict``.

    Buffers, such as the means of a centering, stay as they are. The average of what ``RiemannianAdam`` keeps
    orthonormal is the orthonormal matrix that is nearest to the mean.

    Args:
        optimizer: any of torch's; it is used as before.
        decay: of the average in one step, less in the first steps.

    >>> layer = OrthoLinear(4, 4)
    >>> optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    >>> average = ts.optim.MovingAverage(optimizer, decay=0.99)
    >>> layer(torch.ones(1, 4)).sum().backward()
    >>> optimizer.step()
    >>> trained = layer.weight.detach().clone()
    >>> with average.applied():
    ...     averaged = layer.weight.detach().clone()
    >>> torch.equal(averaged, trained), torch.equal(layer.weight, trained)
    (False, True)
    """

    def __init__(self, optimizer: torch.optim.Optimizer, decay: float = 0.999) -> None:
        self.decay = _share("decay", decay)
        self._kept = _Kept(optimizer, "average")
        optimizer.param_groups[0]["average_steps"] = 0
        optimizer.register_step_post_hook(self._after_step)

    @torch.no_grad()
    def _after_step(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        group = optimizer.param_groups[0]
        group["average_steps"] += 1
        decay = min(self.decay, (1 + group["average_steps"]) / (10 + group["average_steps"]))
        for parameter, average in self._kept.trained():
            average.lerp_(parameter, 1 - decay)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Put the averages in the places of the parameters, and afterwards these back, bit for bit."""
        pairs = self._kept.pairs()
        trained = [(parameter, parameter.detach().clone(), is_known(parameter)) for parameter, _ in pairs]
        with torch.no_grad():
            for (parameter, average), (*_, orthonormal) in zip(pairs, trained, strict=True):
                _write(parameter, average, orthonormal)
        try:
            yield
        finally:
            with torch.no_grad():
                for parameter, value, orthonormal in trained:
                    parameter.copy_(value)
                    if orthonormal:
                        mark(parameter)


class _Kept:
    """A tensor beside each parameter of an optimizer, in its state from the first step on that changes the parameter.

    Not earlier: optimizers take a state that is not empty for one of their own.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, name: str) -> None:
        self.optimizer, self.name = optimizer, name
        self._first = {parameter: parameter.detach().clone() for parameter in self._parameters()}

    def _parameters(self) -> list[Tensor]:
        return [parameter for group in self.optimizer.param_groups for parameter in group["params"]]

    def trained(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Parameters that the step before changed, each with what is kept."""
        for parameter in self._parameters():
            if parameter.grad is not None:
                state = self.optimizer.state[parameter]
                if self.name not in state:
                    state[self.name] = self._first.pop(parameter)
                yield parameter, state[self.name]

    def pairs(self) -> list[tuple[Tensor, Tensor]]:
        """Return all parameters that have been trained, each with what is kept."""
        states = self.optimizer.state
        return [(p, states[p][self.name]) for p in self._parameters() if p in states and self.name in states[p]]


def _write(parameter: Tensor, value: Tensor, orthonormal: bool) -> None:
    """Write a mean of values of a parameter, or the orthonormal matrix nearest to it, into the parameter."""
    if not orthonormal:
        parameter.copy_(value)
        return
    tall = value.shape[-2] > value.shape[-1]
    with full_precision(value):
        # Gram-Schmidt changes nothing but what is too far from orthonormal for the iteration.
        matrix = orthonormal_rows(nearest(value.mT if tall else value))
    parameter.copy_(matrix.mT if tall else matrix)
    mark(parameter)


def _share(name: str, value: float) -> float:
    if not isinstance(value, int | float) or not 0 < value <= 1:
        raise ValueError(f"{name}={value!r} must be a number above 0 and at most 1")
    return float(value)
