"""Recipes by name or file, and overrides from the command line."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from trysquare.naming import require_known
from trysquare.training.recipe import Recipe, as_mapping, resolve, yaml


def _packaged() -> dict[str, Path]:
    folder = Path(str(files("trysquare"))) / "recipes"
    return {path.stem: path for path in sorted(folder.glob("*.yaml"))}


def recipes() -> dict[str, str]:
    """Recipes of the package: name and summary.

    >>> print(ts.training.recipes()["digits"])
    the 8 x 8 digits of the package, on a processor in seconds
    """
    return {name: _read(path)["summary"] for name, path in _packaged().items()}


def read_recipe(source: str | os.PathLike[str], overrides: Mapping[str, Any] | None = None) -> Recipe:
    """A recipe of the package by its name, or one from a YAML file.

    Raises:
        ValueError: if there is neither, the file is not YAML, or ``resolve`` refuses it.

    >>> ts.training.read_recipe("digits", {"train.epochs": 3}).train.epochs
    3
    """
    path = Path(source)
    if str(source) not in _packaged() and not path.is_file():
        require_known(str(source), _packaged(), "recipe (and there is no such file)")
    path = _packaged().get(str(source), path)
    content = _read(path)
    try:
        return resolve({"name": path.stem, **content}, overrides)
    except ValueError as error:
        raise ValueError(f"{path.name}: {error}") from error


def _read(path: Path) -> dict[str, Any]:
    parser = yaml()
    try:
        return as_mapping(parser.safe_load(path.read_text()), str(path))
    except (parser.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not YAML: {' '.join(str(error).split())}") from error


def split_overrides(arguments: Sequence[str]) -> tuple[list[str], dict[str, Any]]:
    """Take overrides ``--section.key value`` out of the arguments of a command; values are read as YAML.

    Returns:
        The arguments that are left, and the values by dotted keys.

    Raises:
        ValueError: if a value is missing or not YAML.

    >>> ts.training.split_overrides(["train", "--train.epochs", "20", "digits", "--model.widths=[16, 32]"])
    (['train', 'digits'], {'train.epochs': 20, 'model.widths': [16, 32]})
    """
    left, overrides, waiting = [], {}, iter(arguments)
    for argument in waiting:
        key, equals, value = argument.partition("=")
        if not key.startswith("--") or "." not in key:
            left.append(argument)
            continue
        text = value if equals else next(waiting, None)
        if text is None:
            raise ValueError(f"{key} needs a value, such as {key} 20")
        overrides[key.removeprefix("--")] = _value(key, text)
    return left, overrides


def _value(key: str, text: str) -> Any:
    parser = yaml()
    try:
        return parser.safe_load(text)
    except parser.YAMLError as error:
        raise ValueError(f"{key}: {text!r} is not a value in YAML") from error
