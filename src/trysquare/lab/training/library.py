"""Recipes by name or file, and overrides from the command line."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from trysquare.files import read_file
from trysquare.lab.training.recipe import Recipe, as_mapping, resolve, wants_text, yaml
from trysquare.naming import require_known, shown


def _packaged() -> dict[str, Path]:
    folder = Path(str(files("trysquare.lab"))) / "recipes"
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
        text = read_file(path).decode("utf-8")
        refuse_bombs(text)
        repeated = _repeated_key(parser.compose(text, Loader=parser.SafeLoader))
        content = parser.safe_load(text)
    except (parser.YAMLError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"{path} is not YAML: {' '.join(str(error).split())}") from error
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    if repeated:
        raise ValueError(f"{path}: {repeated}; leave one of them out")
    return as_mapping(content, str(path))


# Values that a recipe may stand for, written out.
_MOST_VALUES = 10_000


def refuse_bombs(text: str) -> None:
    """Refuse YAML of aliases: a few lines of them can stand for more than any memory holds.

    Raises:
        ValueError: if it stands for very many values, or for itself.
    """
    parser = yaml()
    sizes: dict[int, int] = {}

    def size(node: Any) -> int:
        if id(node) not in sizes:
            sizes[id(node)] = _MOST_VALUES + 1  # if it is met again inside of itself
            parts = node.value if isinstance(node, parser.CollectionNode) else []
            flat = [part for entry in parts for part in (entry if isinstance(entry, tuple) else (entry,))]
            sizes[id(node)] = 1 + sum(map(size, flat))
        return sizes[id(node)]

    root = parser.compose(text, Loader=parser.SafeLoader)
    if root is not None and size(root) > _MOST_VALUES:
        raise ValueError(f"it stands for more than {_MOST_VALUES} values, by aliases: write out what is meant")


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
        refuse_bombs(text)
        value = parser.safe_load(text)
    except (parser.YAMLError, RecursionError) as error:
        raise ValueError(f"{key}: {shown(text)} is not a value in YAML") from error
    except ValueError as error:  # what Python adds for programmers, after a semicolon, is left out
        raise ValueError(f"{key}={shown(text)} cannot be read: {str(error).split(';')[0]}") from error
    typed = wants_text(key.removeprefix("--")) and value is not None and not isinstance(value, str)
    return text if typed else value
