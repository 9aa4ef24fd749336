"""Which Lipschitz constant a module has: one rule for each class."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeVar

import torch
from torch import nn

Shape = tuple[int, ...]
Rule = Callable[..., float | Sequence[float]]
R = TypeVar("R", bound=Rule)

_RULES: dict[type[nn.Module], Rule] = {}
# Methods that a forward pass of torch's layers or ours is made of: a subclass that overrides one is another function.
_FORWARD = ("__call__", "_call_impl", "forward", "_conv_forward", "_pool", "_mean", "_skip", "_convolved", "_filtered")
_INPUT_DTYPE: ContextVar[torch.dtype] = ContextVar("dtype of the input of the module that a rule is asked about")

_DIVIDES = "it divides by the deviation or norm of its input: its only Lipschitz constant is near 1 / sqrt(eps)"
_WHY_NOT: dict[type[nn.Module], str] = {
    nn.LayerNorm: _DIVIDES,
    nn.GroupNorm: _DIVIDES,
    nn.RMSNorm: _DIVIDES,
    nn.MultiheadAttention: "softmax attention multiplies its inputs with each other, which is not Lipschitz",
    nn.Threshold: "it jumps",
    nn.Hardshrink: "it jumps",
    nn.GLU: "it multiplies its inputs with each other",
    nn.Bilinear: "it multiplies its inputs with each other",
}


class NoRuleError(ValueError):
    """A module or function whose Lipschitz constant is not known."""


def rule(*classes: type[nn.Module]) -> Callable[[R], R]:
    """Register the Lipschitz constant of modules: a decorator.

    The function gets the module and the shape of its input, without the batch (as many shapes as the module has tensor
    inputs), and returns a certified upper bound on the l2 Lipschitz constant: a float, or one for each input (the
    changes of the inputs then add up). It holds for subclasses too, unless they override ``forward``. A later rule
    replaces an earlier one. Inputs must be given to the module as tensors, by position.

    >>> class Erf(nn.Module):
    ...     def forward(self, x):
    ...         return torch.erf(x)
    >>> @ts.lipschitz.rule(Erf)
    ... def erf(layer, input_shape):
    ...     return 1.1284
    >>> round(ts.lipschitz_bound(nn.Sequential(Erf(), nn.Flatten()), (3, 4)), 6)
    1.1284
    """

    def register(function: R) -> R:
        for cls in classes:
            _RULES[cls] = function
        return function

    return register


@contextmanager
def asked_for(dtype: torch.dtype) -> Iterator[None]:
    """Context in which rules are asked about inputs of ``dtype``."""
    token = _INPUT_DTYPE.set(dtype)
    try:
        yield
    finally:
        _INPUT_DTYPE.reset(token)


def input_dtype() -> torch.dtype:
    """Dtype of the input that a rule is asked about: what modules round their factors to."""
    return _INPUT_DTYPE.get(torch.get_default_dtype())


def find_rule(module: nn.Module) -> Rule | None:
    """The rule that describes what ``module`` computes: of its class, or of the one that its ``forward`` comes from."""
    if any(name in module.__dict__ for name in _FORWARD):
        return None
    cls = type(module)
    for base in cls.__mro__:
        if base in _RULES:
            same = all(getattr(cls, name) is getattr(base, name) for name in _FORWARD if hasattr(base, name))
            return _RULES[base] if same else None
    return None


def no_rule(module: nn.Module, name: str) -> NoRuleError:
    """The error for a module without a rule."""
    cls = next(c for c in type(module).__mro__ if not c.__name__.startswith("Parametrized"))
    why = next(
        (text for base, text in _WHY_NOT.items() if isinstance(module, base)), "its Lipschitz constant is not known"
    )
    return NoRuleError(f"no Lipschitz rule for {cls.__name__} at {name!r}: {why}. {way_out(cls.__name__)}")


def way_out(cls: str) -> str:
    """How to register a rule."""
    return (
        f"If you can prove a bound, register it: @trysquare.lipschitz.rule({cls}) on a function "
        "(layer, input_shape) -> float"
    )
