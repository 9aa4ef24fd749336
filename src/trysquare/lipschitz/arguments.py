"""Calls of functions: every way to write the arguments is bound to the names of one signature, here and only here."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from trysquare.lipschitz.registry import NoRuleError
from trysquare.lipschitz.upward import flatten

# What numpy calls torch's parameters; torch takes both.
_NUMPY = {"axis": "dim", "keepdims": "keepdim", "x": "input", "a": "input", "x1": "input", "x2": "other"}


@dataclass(frozen=True)
class SideBySide:
    """Constants of arguments that end up next to each other: the root of the sum of squares is their bound."""

    constants: dict[str, float]


# What a rule returns: the constant of the first argument, the only one that may depend on the input; or one for each
# argument, whose changes add up or lie side by side; or None for a fact about shapes and types, which is a constant.
Constants = float | dict[str, float] | SideBySide | None


@dataclass(frozen=True)
class Call:
    """One call of a function or method.

    Attributes:
        arguments: values by the names in the signature, defaults filled in.
        bounds: bounds by the same names, ``None`` (or a structure of it) for what does not depend on the input.
        result: what the call returned on a batch of random inputs.
    """

    arguments: dict[str, Any]
    bounds: dict[str, Any]
    result: Any

    def depends(self, name: str) -> bool:
        """Whether an argument depends on the network's input."""
        return any(True for _ in flatten(self.bounds.get(name)))


@dataclass(frozen=True)
class FunctionRule:
    """The Lipschitz constants of a function or method.

    Attributes:
        constants: gets the ``Call``, then the arguments by name.
        signature: names, order and defaults of the arguments, those of torch.
        variadic: whether integers may be given one by one where the second parameter is a tuple, as in
            ``x.permute(0, 2, 1)``.
    """

    constants: Callable[..., Constants]
    signature: inspect.Signature
    variadic: bool = False

    def call(self, args: Any, kwargs: Any, bounds: Any, keyword_bounds: Any, result: Any) -> Call:
        """Bind the arguments of a call, and their bounds with them.

        Raises:
            NoRuleError: if the signature has no such call.
        """
        values, value_bounds = self._bind(args, kwargs), self._bind(bounds, keyword_bounds)
        values.apply_defaults()
        return Call(values.arguments, value_bounds.arguments, result)

    def __call__(self, call: Call) -> Constants:
        """Constants for what depends on the input.

        Raises:
            NoRuleError: if something depends on the input that has no constant.
        """
        constants = self.constants(call, **call.arguments)
        if constants is None:
            return None
        first = next(iter(self.signature.parameters))
        if isinstance(constants, float | int):
            constants = {first: float(constants)}
        known = constants.constants if isinstance(constants, SideBySide) else constants
        for name in call.bounds:
            if name not in known and call.depends(name):
                raise NoRuleError(f"an argument besides {first!r} depends on the input: {name!r}")
        return constants

    def _bind(self, args: Any, kwargs: Any) -> inspect.BoundArguments:
        parameters = self.signature.parameters
        if self.variadic and len(args) > 1 and not isinstance(args[1], list | tuple):
            args = (args[0], tuple(args[1:]))
        named = {name if name in parameters else _NUMPY.get(name, name): value for name, value in kwargs.items()}
        try:
            return self.signature.bind(*args, **named)
        except TypeError as error:
            expected = ", ".join(parameters)
            raise NoRuleError(f"its arguments are not those of the rule ({error}): {expected}") from error


FUNCTIONS: dict[Any, FunctionRule] = {}


def on(
    *targets: Any, variadic: bool = False, like: Callable[..., Any] | None = None
) -> Callable[[Callable[..., Constants]], Callable[..., Constants]]:
    """Register the rule of functions, and of tensor methods by their names: a decorator.

    Args:
        targets: functions, or names of methods.
        variadic: see ``FunctionRule``.
        like: function whose signature the targets have, unless it is the rule's own after ``call``.
    """

    def register(function: Callable[..., Constants]) -> Callable[..., Constants]:
        signature = inspect.signature(like if like is not None else function)
        if like is None:
            signature = signature.replace(parameters=list(signature.parameters.values())[1:])
        FUNCTIONS.update(dict.fromkeys(targets, FunctionRule(function, signature, variadic)))
        return function

    return register


def shape_of(value: Any) -> tuple[int, ...]:
    """Shape of a tensor, or that of a number."""
    return tuple(value.shape) if isinstance(value, Tensor) else ()
