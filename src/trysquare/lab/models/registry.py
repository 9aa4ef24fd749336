"""From a name and options to a model."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from difflib import get_close_matches
from typing import Any

from torch import nn

from trysquare.lab.models.classifier import HEADS, Classifier
from trysquare.lab.models.parts import Body, Shape, choose
from trysquare.nn.geometry import positive
from trysquare.nn.layers import InputScaling

Scale = float | Sequence[float]


class Builder:
    """Makes a ``Classifier``: scaling of the data if asked for, a family's body, a head.

    Attributes:
        body: function ``(input_shape, *, options) -> Body`` of the family.
        summary: what the model is, in one line.
        options: every option with its default.

    Args:
        body: as above.
        summary: as above.
        head: the head if none is asked for.
        defaults: options whose default is not that of the family.

    >>> ts.models.MODELS["imagenet-robust"].options["pooling"]
    'l2'
    """

    def __init__(self, body: Callable[..., Body], summary: str, head: str = "orthogonal", **defaults: Any) -> None:
        self.body, self.summary = body, summary
        _, *own = inspect.signature(body).parameters.values()
        family = {parameter.name: parameter.default for parameter in own}
        self.options: dict[str, Any] = {**family, **defaults, "mean": None, "std": None, "head": head}

    def __call__(self, input_shape: Sequence[int] = (3, 32, 32), classes: int = 10, **options: Any) -> Classifier:
        """Build the model; see ``build``."""
        chosen = {**self.options, **self._known(options)}
        for name, value in chosen.items():
            _refuse_endless(name, value)
        scaling = _scaling(chosen.pop("mean"), chosen.pop("std"))
        make_head = choose("head", chosen.pop("head"), HEADS)
        try:
            layers, features = self.body(_checked(input_shape), **chosen)
        except (MemoryError, RuntimeError) as error:
            if isinstance(error, MemoryError) or "allocate" in str(error):
                raise ValueError(f"this machine has not enough memory for a model with {options}") from error
            raise
        return Classifier(nn.Sequential(*scaling, *layers), make_head(features, positive("classes", classes)))

    def _known(self, options: dict[str, Any]) -> dict[str, Any]:
        for name in options:
            if name not in self.options:
                raise ValueError(f"{unknown('option', name, self.options)}; there are {', '.join(self.options)}")
        return options


def unknown(kind: str, name: str, known: Iterable[str]) -> str:
    """What to say about a name that does not exist: which one it looks like."""
    near = get_close_matches(name, list(known), n=1, cutoff=0.4)
    return f"unknown {kind} {name!r}" + (f", did you mean {near[0]!r}?" if near else "")


def _scaling(mean: Scale | None, std: Scale | None) -> list[nn.Module]:
    if mean is None and std is None:
        return []
    return [InputScaling(0.0 if mean is None else mean, 1.0 if std is None else std)]


# Of a list of widths or depths, and of any number in it; of numbers of blocks.
_MOST_ENTRIES, _LARGEST = 64, 10**6
_MOST_BLOCKS = 2000


def _refuse_endless(name: str, value: Any) -> None:
    """Refuse numbers that no machine could make a model of."""
    entries = value if isinstance(value, Sequence) and not isinstance(value, str) else [value]
    if len(entries) > _MOST_ENTRIES:
        raise ValueError(f"{name} has {len(entries)} entries, and a model has at most {_MOST_ENTRIES} stages")
    most = _MOST_BLOCKS if any(word in name for word in ("depth", "block", "layer")) else _LARGEST
    for entry in entries:
        if isinstance(entry, int) and entry > most:
            raise ValueError(f"{name}={entry} must be at most {most}")


def _checked(input_shape: Sequence[int]) -> Shape:
    shape = tuple(input_shape)
    if len(shape) != 3 or not all(isinstance(size, int) and size > 0 for size in shape):
        raise ValueError(f"input_shape={input_shape!r} must be channels, height and width, all positive")
    return shape
