"""What every model is, features and a linear head, and how options make one."""

from __future__ import annotations

import inspect
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, SupportsIndex

from torch import Tensor, nn

from trysquare.lab.models.common import Body, Shape, choose
from trysquare.naming import require_known, shown
from trysquare.nn.geometry import positive
from trysquare.nn.layers import InputScaling, OrthoLinear, UnitNormLinear

HEADS: dict[str, Callable[[int, int], nn.Linear]] = {
    "orthogonal": OrthoLinear,
    "unit-norm": UnitNormLinear,
    "plain": nn.Linear,
}


class Classifier(nn.Module):
    """``head(features(x))``: a network in two parts, because certificates know more about a linear head.

    The margin between two classes is as sensitive as ``‖w_i - w_j‖`` times the Lipschitz constant of ``features``.

    Args:
        features: from images to ``(batch, features)``.
        head: from features to logits.

    >>> model = ts.models.Classifier(nn.Sequential(nn.Flatten(), OrthoLinear(64, 32), MaxMin()), OrthoLinear(32, 10))
    >>> model(torch.randn(2, 1, 8, 8)).shape
    torch.Size([2, 10])
    """

    def __init__(self, features: nn.Sequential, head: nn.Linear) -> None:
        super().__init__()
        self.features = features
        self.head = head

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        """Logits ``(batch, classes)``."""
        return self.head(self.features(input))


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

    def __init__(self, body: Callable[..., Body], summary: str, head: str = "orthogonal", **defaults: object) -> None:
        self.body, self.summary = body, summary
        _, *own = inspect.signature(body).parameters.values()
        family = {parameter.name: parameter.default for parameter in own}
        self.options: dict[str, Any] = {**family, **defaults, "mean": None, "std": None, "head": head}

    def __call__(self, input_shape: Sequence[int] = (3, 32, 32), classes: int = 10, **options: object) -> Classifier:
        """Build the model; see ``build``."""
        for name in options:
            require_known(name, self.options, "option")
        chosen = {**self.options, **options}
        for name, value in chosen.items():
            _require_kind(name, value, self.options[name])
        _refuse_endless(chosen)
        shape, classes = _checked(input_shape), positive("classes", classes)
        if classes > _LARGEST:
            raise ValueError(f"classes={shown(classes)} must be at most {_LARGEST}")
        scaling = _scaling(chosen.pop("mean"), chosen.pop("std"))
        make_head = choose("head", chosen.pop("head"), HEADS)
        try:
            layers, features = self.body(shape, **chosen)
        except (MemoryError, RuntimeError) as error:
            if isinstance(error, MemoryError) or "allocate" in str(error) or "overflow" in str(error):
                raise ValueError(f"this machine has not enough memory for a model with {shown(options)}") from error
            raise
        return Classifier(nn.Sequential(*scaling, *layers), make_head(features, classes))


def _scaling(mean: Scale | None, std: Scale | None) -> list[nn.Module]:
    if mean is None and std is None:
        return []
    return [InputScaling(0.0 if mean is None else mean, 1.0 if std is None else std)]


# Of a list of widths or depths, and of any number in it; of all blocks of a model; of the numbers of an image.
_MOST_ENTRIES, _LARGEST = 64, 10**6
_MOST_BLOCKS = 2000
_LARGEST_INPUT = 2**31
_LONGEST_NAME = 80


def _require_kind(name: str, value: object, default: object) -> None:
    """Refuse a value that is not of the kind of the default, which may be text, a number or a list of integers."""
    if name in ("mean", "std"):
        numbers = value if isinstance(value, Sequence) and not isinstance(value, str) else [value]
        plain = all(isinstance(part, int | float) for part in numbers)
        fits, wanted = value is None or plain or hasattr(value, "__array__"), "a number, or several"
    elif default is None or isinstance(default, str):
        fits, wanted = value is None or (isinstance(value, str) and len(value) <= _LONGEST_NAME), "a name"
    elif isinstance(default, bool):
        fits, wanted = isinstance(value, bool), "true or false"
    elif isinstance(default, int):
        fits, wanted = _is_integer(value), "an integer"
    elif isinstance(default, float):
        fits, wanted = isinstance(value, int | float) and abs(value) <= sys.float_info.max, "a finite number"
    elif isinstance(default, Sequence):
        whole = isinstance(value, Sequence) and not isinstance(value, str) and all(map(_is_integer, value))
        fits, wanted = whole, "a list of integers"
    else:
        return
    if not fits:
        raise ValueError(f"{name}={shown(value)} must be {wanted}")


def _is_integer(value: object) -> bool:
    return isinstance(value, SupportsIndex) and not isinstance(value, bool)


def _refuse_endless(options: Mapping[str, Any]) -> None:
    """Refuse numbers that no machine could make a model of."""
    stages = 1
    for name, value in options.items():
        entries = value if isinstance(value, Sequence) and not isinstance(value, str) else [value]
        if len(entries) > _MOST_ENTRIES:
            raise ValueError(f"{name} has {len(entries)} entries, and a model has at most {_MOST_ENTRIES} stages")
        for entry in entries:
            if isinstance(entry, int) and entry > _LARGEST:
                raise ValueError(f"{name}={shown(entry)} must be at most {_LARGEST}")
        stages = max(stages, len(entries) if name == "widths" else 1)
    for name in options:
        if any(word in name for word in ("depth", "block", "layer")):
            # One number is that of each stage.
            blocks = options[name] if isinstance(options[name], Sequence) else [options[name]] * stages
            if sum(blocks) > _MOST_BLOCKS or any(number < 0 for number in blocks):
                raise ValueError(f"{name}={shown(options[name])} must be 0 to {_MOST_BLOCKS} blocks in all stages")


def _checked(input_shape: Sequence[int]) -> Shape:
    shape = tuple(input_shape) if isinstance(input_shape, Sequence) else ()
    if len(shape) != 3 or not all(_is_integer(size) and size > 0 for size in shape):
        raise ValueError(f"input_shape={shown(input_shape)} must be channels, height and width, all positive")
    if math.prod(shape) > _LARGEST_INPUT:
        raise ValueError(f"input_shape={shown(input_shape)} must be at most {_LARGEST_INPUT} numbers")
    return shape
