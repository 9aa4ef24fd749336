"""Recipes by name or file, and overrides from the command line."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from trysquare.naming import require_known
from trysquare.training.recipe import Recipe, as_mapping, resolve, wants_text, yaml


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
        text = path.read_text()
        repeated = _repeated_key(parser.compose(text, Loader=parser.SafeLoader))
        content = parser.safe_load(text)
    except (parser.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not YAML: {' '.join(str(error).split())}") from error
    if repeated:
        raise ValueError(f"{path}: {repeated}; leave one of them out")
    return as_mapping(content, str(path))


def _repeated_key(node: Any, above: str = "") -> str:
    """Where a mapping of nodes below this one has a key twice; YAML would take the last. Empty if none has."""
    if not isinstance(node, yaml().MappingNode):
        return ""
    lines: dict[str, int] = {}
    for key, value in node.value:
        name, line = f"{above}{key.value}", key.start_mark.line + 1
        if name in lines:
            return f"the key {name} is there twice, in lines {lines[name]} and {line}"
        lines[name] = line
        if found := _repeated_key(value, f"{name}."):
            return found
    return ""


def split_overrides(arguments: Sequence[str]) -> tuple[list[str], dict[str, Any]]:
    """Take overrides ``--section.key value`` out of the arguments of a command; values are read as YAML.

    Where a recipe wants text, such as ``data.root``, numbers and dates are left as they were typed.

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
        value = parser.safe_load(text)
    except parser.YAMLError as error:
        raise ValueError(f"{key}: {text!r} is not a value in YAML") from error
    typed = wants_text(key.removeprefix("--")) and value is not None and not isinstance(value, str)
    return text if typed else value
