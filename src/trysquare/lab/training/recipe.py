"""Recipes: everything that a training run depends on, read from YAML and checked before it starts."""

from __future__ import annotations

import inspect
import math
import os
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields, is_dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, Union, get_args, get_origin, get_type_hints

from trysquare.files import LARGEST_RECIPE, read_file
from trysquare.lab.data import DATASETS, augmentations
from trysquare.lab.data.loader import MOST_WORKERS
from trysquare.lab.models import MODELS
from trysquare.lab.training.step import OPTIMIZERS
from trysquare.naming import pick, require_known, shown
from trysquare.nn.losses import LOSSES
from trysquare.verify.certification import EPSILONS

PRECISIONS = ("float32", "bfloat16")
_LARGEST_SEED = 2**63 - 1
LARGEST_COUNT = 10**9
# Squares of rates and decays, and their products with numbers of steps, must be far from the largest float.
LARGEST_RATE = 10**6
_LARGEST_SIZE = 10**4
# A file system takes 255 bytes, of which date and time are to have some.
_LONGEST_NAME = 200
S = TypeVar("S")


@dataclass(frozen=True)
class Data:
    """The data set, and how its images are prepared.

    Attributes:
        name: one of ``ts.data.DATASETS``.
        root: folder that holds its files.
        size: height and width in which folders of images are given.
        augment: augmentations of training images, with their parameters; see ``ts.data.AUGMENTATIONS``.
        workers: threads that prepare batches.
        validation: training images that are held out. Runs are then evaluated on these while they train, so that a
            recipe can be chosen without a look at the test images.
        extra: ``npz`` file of uint8 ``images`` and ``labels`` to train with too, such as generated ones; see
            ``ts.data.read_extra``. Epochs count the images of the data set.
        extra_per_image: how many of them are in a batch for each image of the data set.
    """

    name: str = "digits"
    root: str | None = None
    size: int | None = None
    augment: Mapping[str, Any] = field(default_factory=dict)
    workers: int = 1
    validation: int = 0
    extra: str | None = None
    extra_per_image: int = 1


@dataclass(frozen=True)
class Component:
    """An entry of a registry, by name, and all of its options."""

    name: str
    options: Mapping[str, Any]


@dataclass(frozen=True)
class Train:
    """The training loop.

    Attributes:
        epochs: passes over the data.
        batch_size: images of one step of the optimizer, over all processes.
        accumulate: parts in which a batch is computed, one after another, if it does not fit into memory. Weights are
            built once for all of them. A loss that is no mean over images, such as HKR, becomes the mean of those of
            the parts.
        precision: ``"float32"``, or ``"bfloat16"`` for everything but the building of weights.
        clip: largest norm of the gradient.
        clip_layers: largest norm of the gradient of each layer, which is clipped before the whole one.
        seed: of weights, order and augmentation.
        device: ``"auto"`` is a GPU if there is one.
        checkpoint_every: steps after which a checkpoint is written, besides the end of each epoch.
        radius_start: the loss's ``radius`` goes from here to its value along a line, if given.
        radius_ramp: share of the training in which it does.
    """

    epochs: int = 10
    batch_size: int = 128
    accumulate: int = 1
    precision: str = "float32"
    clip: float | None = None
    clip_layers: float | None = None
    seed: int = 0
    device: str = "auto"
    checkpoint_every: int | None = None
    radius_start: float | None = None
    radius_ramp: float = 0.5


@dataclass(frozen=True)
class Evaluate:
    """Evaluation during training.

    Attributes:
        every: epochs between two evaluations, on the images that are held out (``data.validation``) or else on the
            test images.
        batch_size: of the evaluation.
        epsilons: radii of the certified accuracy, in units of the pixels.
    """

    every: int = 1
    batch_size: int = 500
    epsilons: tuple[float, ...] = EPSILONS


@dataclass(frozen=True)
class Recipe:
    """Everything that a run depends on; each section of the YAML is an attribute.

    Attributes:
        name: of the recipe.
        summary: one line for the list.
        data: what is trained on.
        model: one of ``ts.models.MODELS``, with options.
        loss: one of ``ts.losses.LOSSES``, with options, or ``radius`` in place of its margin. A ``lipschitz`` that is
            not given is that of the model.
        optimizer: one of ``ts.training.OPTIMIZERS``, with options.
        train: how long, in what batches.
        evaluate: when, and at which radii.
    """

    name: str
    summary: str
    data: Data
    model: Component
    loss: Component
    optimizer: Component
    train: Train
    evaluate: Evaluate

    def to_mapping(self) -> dict[str, object]:
        """Return the recipe in plain types, as YAML has it."""
        return {part.name: _plain(getattr(self, part.name)) for part in fields(self)}

    def to_yaml(self) -> str:
        """Return the text that ``read_recipe`` reads."""
        return str(yaml().safe_dump(self.to_mapping(), sort_keys=False))


def _plain(value: object) -> object:
    if isinstance(value, Component):
        return {"name": value.name, **{key: _plain(item) for key, item in value.options.items()}}
    if is_dataclass(value):
        return {part.name: _plain(getattr(value, part.name)) for part in fields(value)}
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value


class Option(NamedTuple):
    """The type and the default of an option."""

    hint: object
    default: object


# Where a loss keeps the difference of logits that it asks for, which a recipe may give as a radius.
MARGINS = {
    "offset-cross-entropy": "margin",
    "logit-annealing": "offset",
    "hkr": "min_margin",
    "hkr-soft": "min_margin",
    "hkr-logsumexp": "min_margin",
}
_SCALE = float | Sequence[float] | None


def _options(section: str, name: str) -> dict[str, Option]:
    """Return the options of a model, loss or optimizer: those of its signature, and what a recipe may add."""
    if section == "model":
        builder = pick(MODELS, name, "model")
        hints = {**get_type_hints(builder.body), "mean": _SCALE, "std": _SCALE, "head": str}
        return {option: Option(hints[option], default) for option, default in builder.options.items()}
    if section == "optimizer":
        return _signature(pick(OPTIMIZERS, name, "optimizer"), {"parameters", "steps"})
    options = _signature(pick(LOSSES, name, "loss").__init__, {"self", "reduction"})
    added = ["lipschitz"] * ("lipschitz" in options) + ["radius"] * (name in MARGINS)
    return {**options, **dict.fromkeys(added, Option(float | None, None))}


def _signature(function: Callable[..., object], without: Iterable[str]) -> dict[str, Option]:
    hints, parameters = get_type_hints(function), inspect.signature(function).parameters
    return {name: Option(hints[name], parameters[name].default) for name in parameters if name not in without}


_SECTIONS: dict[str, type] = {"data": Data, "train": Train, "evaluate": Evaluate}
# Sections that name an entry of a registry, and the entry if they name none.
_REGISTRIES = {"model": "tiny-digits", "loss": "offset-cross-entropy", "optimizer": "schedule-free-adamw"}
_TEXTS = {"name": "unnamed", "summary": ""}


def resolve(content: Mapping[str, object], overrides: Mapping[str, object] | None = None) -> Recipe:
    """Return a recipe with every default filled in.

    Args:
        content: sections, as YAML has them.
        overrides: values by dotted keys, such as ``{"train.epochs": 20}``. Another ``model.name``, ``loss.name`` or
            ``optimizer.name`` starts from its own defaults.

    Raises:
        ValueError: if a key is not known (it names the nearest one), or a value is of the wrong type or out of range.

    >>> recipe = ts.training.resolve({"model": {"name": "tiny-digits"}}, {"optimizer.lr": 0.01})
    >>> recipe.optimizer.options["lr"], recipe.train.batch_size
    (0.01, 128)
    >>> ts.training.resolve({"evaluate": {"evry": 3}})
    Traceback (most recent call last):
    ValueError: unknown key of evaluate 'evry': did you mean 'every'? known: every, batch_size, epsilons
    """
    merged = _with_overrides(as_mapping(content, "a recipe"), overrides or {})
    for key in merged:
        require_known(key, [part.name for part in fields(Recipe)], "section of a recipe")
    sections = {name: as_mapping(merged.get(name), name) for name in (*_SECTIONS, *_REGISTRIES)}
    parts: dict[str, Any] = {name: _section(kind, name, sections[name]) for name, kind in _SECTIONS.items()}
    parts |= {name: _component(name, sections[name]) for name in _REGISTRIES}
    texts = {name: convert(merged.get(name, default), str, name) for name, default in _TEXTS.items()}
    recipe = Recipe(**texts, **parts)
    _check(recipe)
    return recipe


def wants_text(key: str) -> bool:
    """Return whether the value of a dotted key is always text or null.

    >>> from trysquare.lab.training.recipe import wants_text
    >>> wants_text("data.root"), wants_text("model.name"), wants_text("train.epochs")
    (True, True, False)
    """
    section, _, name = key.partition(".")
    if section in _REGISTRIES:
        return name == "name"
    return get_type_hints(_SECTIONS[section]).get(name) in (str, str | None) if section in _SECTIONS else False


def as_mapping(content: object, kind: str) -> dict[str, object]:
    """Return a copy of a mapping; ``None`` is an empty one.

    Raises:
        ValueError: if it is something else.
    """
    if content is not None and not isinstance(content, Mapping):
        raise ValueError(f"{kind} must be a mapping of names to values, found {shown(content)}")
    return dict(content or {})


def _with_overrides(content: dict[str, object], overrides: Mapping[str, object]) -> dict[str, object]:
    # Names first: they decide which options there are.
    for key, value in sorted(overrides.items(), key=lambda item: not item[0].endswith(".name")):
        section, _, rest = key.partition(".")
        if section in _REGISTRIES and rest == "name" and as_mapping(content.get(section), section).get("name") != value:
            content[section] = {}
        content = _replaced(content, key.split("."), value)
    return content


def _replaced(content: dict[str, object], path: Sequence[str], value: object) -> dict[str, object]:
    """Return a copy with the value at this path."""
    first, *rest = path
    return {**content, first: _replaced(as_mapping(content.get(first), first), rest, value) if rest else value}


def _section(kind: type[S], name: str, content: Mapping[str, object]) -> S:
    hints = get_type_hints(kind)
    for key in content:
        require_known(key, hints, f"key of {name}")
    return kind(**{key: convert(value, hints[key], f"{name}.{key}") for key, value in content.items()})


def _component(section: str, content: dict[str, object]) -> Component:
    name = convert(content.pop("name", _REGISTRIES[section]), str, f"{section}.name")
    options = _options(section, name)
    for key in content:
        require_known(key, ["name", *options], f"key of {section} {name!r}")
    given = {key: convert(value, options[key].hint, f"{section}.{key}") for key, value in content.items()}
    return Component(name, {key: given.get(key, option.default) for key, option in options.items()})


def _check(recipe: Recipe) -> None:
    """Refuse values that no run can use."""
    if any(character in recipe.name for character in "/\\\0") or len(recipe.name.encode()) > _LONGEST_NAME:
        raise ValueError(
            f"name={shown(recipe.name)} becomes that of a folder in runs/: leave slashes out, and take at most "
            f"{_LONGEST_NAME} bytes"
        )
    pick(DATASETS, recipe.data.name, "data set")
    augmentations(recipe.data.augment)
    require_known(recipe.train.precision, PRECISIONS, "precision")
    _check_radius(recipe)
    for key, (wanted, fits) in _RANGES.items():
        section, _, name = key.partition(".")
        part = getattr(recipe, section)
        value = part.options.get(name) if isinstance(part, Component) else getattr(part, name)
        if value == ():
            raise ValueError(f"{key}=[] must have at least one number")
        if isinstance(value, tuple) and not all(map(fits, value)):
            raise ValueError(f"{key}={shown(list(value))}: each must be {wanted}")
        if not isinstance(value, tuple) and value is not None and not fits(value):
            raise ValueError(f"{key}={shown(value)} must be {wanted}")


def _check_radius(recipe: Recipe) -> None:
    loss, radius = recipe.loss, recipe.loss.options.get("radius")
    if recipe.train.radius_start is not None and not radius:
        raise ValueError(
            f"train.radius_start needs a loss that has a radius above 0; that of {loss.name!r} is {radius}"
        )
    margin = MARGINS.get(loss.name)
    if margin is None or radius is None or loss.options[margin] == _options("loss", loss.name)[margin].default:
        return
    raise ValueError(
        f"loss.{margin}={loss.options[margin]} and loss.radius={radius} both set the margin: leave one out "
        f"(--loss.radius null takes the recipe's away)"
    )


Range = tuple[str, Callable[[float], bool]]


def _at_least(least: int, most: int = LARGEST_COUNT) -> Range:
    return f"at least {least} and at most {most}", lambda value: bool(least <= value <= most)


# Of numbers and of each number of a list. Comparisons are such that nan does not fit.
_POSITIVE: Range = "above 0 and finite", lambda value: 0 < value < math.inf
_NOT_NEGATIVE: Range = "at least 0 and finite", lambda value: 0 <= value < math.inf
_DECAY: Range = "at least 0 and below 1", lambda value: 0 <= value < 1

_RANGES: dict[str, Range] = {
    "data.workers": _at_least(0, MOST_WORKERS),
    "data.size": _at_least(1, _LARGEST_SIZE),
    "data.validation": _at_least(0),
    "data.extra_per_image": _at_least(1),
    "optimizer.lr": (f"above 0 and at most {LARGEST_RATE}", lambda value: 0 < value <= LARGEST_RATE),
    "optimizer.betas": _DECAY,
    "optimizer.momentum": _DECAY,
    "optimizer.weight_decay": (f"at least 0 and at most {LARGEST_RATE}", lambda value: 0 <= value <= LARGEST_RATE),
    "optimizer.warmup_steps": _at_least(0),
    "optimizer.lookahead": _at_least(0),
    "optimizer.average": _DECAY,
    "train.epochs": _at_least(1),
    "train.batch_size": _at_least(1),
    "train.accumulate": _at_least(1),
    "train.clip": (f"{_POSITIVE[0]}, or null", _POSITIVE[1]),
    "train.clip_layers": (f"{_POSITIVE[0]}, or null", _POSITIVE[1]),
    "train.seed": (f"from 0 to {_LARGEST_SEED}", lambda value: 0 <= value <= _LARGEST_SEED),
    "train.checkpoint_every": _at_least(1),
    "train.radius_start": _NOT_NEGATIVE,
    "train.radius_ramp": ("above 0 and at most 1", lambda value: 0 < value <= 1),
    "evaluate.every": _at_least(1),
    "evaluate.batch_size": _at_least(1),
    "evaluate.epsilons": _NOT_NEGATIVE,
}


def yaml() -> types.ModuleType:
    """Return PyYAML, if it is installed."""
    try:
        import yaml as module
    except ImportError as error:
        raise ImportError("recipes need PyYAML: pip install 'trysquare[train]'") from error
    return module


def _packaged() -> dict[str, Path]:
    folder = Path(str(files("trysquare.lab"))) / "recipes"
    return {path.stem: path for path in sorted(folder.glob("*.yaml"))}


def recipes() -> dict[str, str]:
    """Return the recipes of the package, with the summary of each.

    >>> print(ts.training.recipes()["digits"])
    the 8 x 8 digits of the package, on a processor in seconds
    """
    return {name: str(_read(path)["summary"]) for name, path in _packaged().items()}


def read_recipe(source: str | os.PathLike[str], overrides: Mapping[str, object] | None = None) -> Recipe:
    """Read a recipe of the package by its name, or one from a YAML file.

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


def _read(path: Path) -> dict[str, object]:
    try:
        return as_mapping(parse_yaml(read_file(path, LARGEST_RECIPE)), "its content")
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


# Values that a recipe may stand for, written out.
_MOST_VALUES = 10_000
_NOT_YAML = "it is not YAML"


def parse_yaml(text: str | bytes) -> object:
    """Return the values in a YAML text, which is checked as a graph of nodes before they are made.

    Raises:
        ValueError: if it is not YAML in UTF-8, has a key twice (YAML would take the last), or stands for very many
            values or for itself: a few lines of aliases can stand for more than any memory holds.
        ImportError: if PyYAML is not installed.
    """
    parser = yaml()
    try:
        loader = parser.SafeLoader(text.decode("utf-8") if isinstance(text, bytes) else text)
        root = loader.get_single_node()
        if root is None:
            return None
        if _size(root, {}) > _MOST_VALUES:
            raise ValueError(f"it stands for more than {_MOST_VALUES} values, by aliases: write out what is meant")
        if repeated := _repeated_key(root):
            raise ValueError(f"{repeated}; leave one of them out")
        return loader.construct_document(root)
    except (parser.YAMLError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"{_NOT_YAML}: {' '.join(str(error).split())}") from error


def _size(node: object, known: dict[int, int]) -> int:
    """Return how many values a node stands for with its aliases written out."""
    if id(node) not in known:
        known[id(node)] = _MOST_VALUES + 1  # if it is met again inside of itself
        parts = node.value if isinstance(node, yaml().CollectionNode) else []
        flat = [part for entry in parts for part in (entry if isinstance(entry, tuple) else (entry,))]
        known[id(node)] = 1 + sum(_size(part, known) for part in flat)
    return known[id(node)]


def _repeated_key(node: object, above: str = "") -> str:
    """Return where a mapping has a key twice, of which YAML would take the last; empty if none has."""
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


def split_overrides(arguments: Sequence[str]) -> tuple[list[str], dict[str, object]]:
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
        if not isinstance(argument, str):
            raise TypeError(f"arguments must be strings, as of a command line, not {shown(argument)}")
        key, equals, value = argument.partition("=")
        if not key.startswith("--") or "." not in key:
            left.append(argument)
            continue
        text = value if equals else next(waiting, None)
        if text is None:
            raise ValueError(f"{key} needs a value, such as {key} 20")
        overrides[key.removeprefix("--")] = _value(key, text)
    return left, overrides


def _value(key: str, text: str) -> object:
    try:
        value = parse_yaml(text)
    except ValueError as error:
        # What PyYAML says about lines and columns, and Python to programmers after a semicolon, helps nobody here.
        reason = _NOT_YAML if str(error).startswith(_NOT_YAML) else str(error).split(";")[0]
        raise ValueError(f"{key}={shown(text)} cannot be read: {reason}") from error
    typed = wants_text(key.removeprefix("--")) and value is not None and not isinstance(value, str)
    return text if typed else value


# Types are checked here and not by pydantic. With its adapters all tests of recipes passed, in as many lines as here:
# hints have to be rewritten first (numbers from 36/255 and 1e-3, no truth values as numbers), and what is most of this
# file stays: the options of what a recipe names, the nearest name, ranges, errors in one sentence. It would add four
# packages, and 0.2 s to ``import trysquare``.
def convert(value: object, hint: object, key: str) -> Any:
    """Convert a value to the type that the hint asks for.

    YAML reads ``1e-3`` and ``36/255`` as text; both are numbers where a number is wanted. A number is text where text
    is wanted, such as a folder ``2024``.

    Raises:
        ValueError: if it is of another type; it names key, value and type.

    >>> from trysquare.lab.training.recipe import convert
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


def _converted(value: object, hint: object) -> object:
    """Return the value, or raise ``TypeError``."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        for choice in arguments:
            with suppress(TypeError):
                return _converted(value, choice)
        raise TypeError
    if origin in (tuple, Sequence):
        pair = origin is tuple and Ellipsis not in arguments
        if not isinstance(value, list | tuple) or (pair and len(value) != len(arguments)):
            raise TypeError
        return tuple(_converted(item, arguments[0]) for item in value)
    if origin is Mapping:
        if value is not None and not isinstance(value, Mapping):
            raise TypeError
        return {str(key): item for key, item in (value or {}).items()}
    if hint is float and isinstance(value, int | float | str) and not isinstance(value, bool):
        try:
            return quotient(value) if isinstance(value, str) else float(value)
        except (ValueError, OverflowError, ZeroDivisionError) as error:
            raise TypeError from error
    if hint is str and isinstance(value, int | float) and not isinstance(value, bool):
        return str(value)
    if not isinstance(hint, type) or not isinstance(value, hint) or (isinstance(value, bool) and hint is not bool):
        raise TypeError
    return value


def quotient(text: str) -> float:
    """Read a number, or a quotient of two such as ``36/255``, at once however large it claims to be.

    Raises:
        ValueError: if it is neither.
    """
    above, slash, below = text.partition("/")
    return float(above) / float(below) if slash else float(text)


_WORDS: dict[object, str] = {
    int: "a whole number",
    float: "a number",
    str: "text",
    bool: "true or false",
    type(None): "null",
}


def described(hint: object) -> str:
    """Return the hint in words.

    >>> from trysquare.lab.training.recipe import described
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
