"""Values of a recipe against the types that they must have."""

from __future__ import annotations

import types
from collections.abc import Mapping, Sequence
from typing import Any, Union, get_args, get_origin

from trysquare.naming import shown


def convert(value: Any, hint: Any, key: str) -> Any:
    """A value as the type that the hint asks for.

    YAML reads ``1e-3`` and ``36/255`` as text; both are numbers where a number is wanted. A number is text where text
    is wanted, such as a folder ``2024``.

    Raises:
        ValueError: if it is of another type; it names key, value and type.

    >>> from trysquare.lab.training.values import convert
    >>> convert(["36/255", 1], Sequence[float], "evaluate.epsilons")
    (0.1411764705882353, 1.0)
    >>> convert("many", int, "train.epochs")
    Traceback (most recent call last):
    ValueError: train.epochs='many' must be a whole number
    """
    try:
        return _converted(value, hint)
    except TypeError as error:
        raise ValueError(f"{key}={shown(value)} must be {described(hint)}") from error


def _converted(value: Any, hint: Any) -> Any:
    """The value, or ``TypeError``."""
    origin, arguments = get_origin(hint), get_args(hint)
    if hint is Any:
        return value
    if origin in (Union, types.UnionType):
        return _first_of(value, arguments)
    if origin is tuple and Ellipsis not in arguments:
        return tuple(map(_converted, _listed(value, len(arguments)), arguments))
    if origin in (tuple, Sequence):
        return tuple(_converted(item, arguments[0]) for item in _listed(value))
    if origin is Mapping:
        return _mapped(value)
    if hint is float:
        return _number(value)
    if hint is str and isinstance(value, int | float) and not isinstance(value, bool):
        return str(value)
    if not isinstance(value, hint) or (isinstance(value, bool) and hint is not bool):
        raise TypeError
    return value


def _first_of(value: Any, hints: Sequence[Any]) -> Any:
    for hint in hints:
        try:
            return _converted(value, hint)
        except TypeError:
            continue
    raise TypeError


def _listed(value: Any, length: int | None = None) -> Sequence[Any]:
    if not isinstance(value, list | tuple) or length not in (None, len(value)):
        raise TypeError
    return value


def _mapped(value: Any) -> dict[str, Any]:
    if value is not None and not isinstance(value, Mapping):
        raise TypeError
    return {str(key): item for key, item in (value or {}).items()}


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise TypeError
    try:
        return quotient(value) if isinstance(value, str) else float(value)
    except (ValueError, OverflowError, ZeroDivisionError) as error:
        raise TypeError from error


def quotient(text: str) -> float:
    """A number, or a quotient of two such as ``36/255``; at once, however large it claims to be.

    Raises:
        ValueError: if it is neither.
    """
    above, slash, below = text.partition("/")
    return float(above) / float(below) if slash else float(text)


_WORDS = {int: "a whole number", float: "a number", str: "text", bool: "true or false", type(None): "null"}


def described(hint: Any) -> str:
    """The hint in words.

    >>> from trysquare.lab.training.values import described
    >>> described(Sequence[int] | None)
    'a list (each a whole number) or null'
    """
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return " or ".join(words for words in map(described, arguments) if words)
    if origin is tuple and Ellipsis not in arguments:
        return f"a list of {len(arguments)} (each {described(arguments[0])})"
    if origin in (tuple, Sequence):
        return f"a list (each {described(arguments[0])})"
    if origin is Mapping:
        return "a mapping of names"
    return _WORDS.get(hint, "")
