"""Choose what a recipe leaves open, on training images that are held out: ``trysquare sweep`` and ``find-lr``."""

from __future__ import annotations

import json
import math
import os
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, count, islice, product
from pathlib import Path
from typing import Any

import torch

from trysquare.files import inside, read_file, read_json, write_whole
from trysquare.lab.models import build
from trysquare.lab.training.distribution import World, joined
from trysquare.lab.training.loop import (
    Evaluation,
    StoppedError,
    Training,
    clock,
    model_arguments,
    resume,
    train,
)
from trysquare.lab.training.recipe import (
    LARGEST_COUNT,
    LARGEST_RATE,
    Recipe,
    as_mapping,
    convert,
    resolve,
    split_overrides,
)
from trysquare.lab.training.run import Run, load_images, load_run, locked
from trysquare.naming import shown
from trysquare.nn.geometry import number, positive
from trysquare.verify.certification import radius_text

_STATE, _BEST = "sweep.json", "best.yaml"
# A round keeps one of so many combinations, and trains each of these so many times as long.
_FACTOR = 3
_MOST_COMBINATIONS = 1000
# Thirty years; of these a sweep can still tell how many epochs they are.
_LONGEST_BUDGET = 10**9
# Images held out where the recipe does not say how many: so many at most, and at most this share.
_HELD_OUT, _HELD_OUT_SHARE = 5000, 0.1
# Steps that tell how fast a combination trains, behind some that warm up.
_TIMED_STEPS, _WARM_UP_STEPS = 20, 3


def with_validation(recipe: Recipe) -> Recipe:
    """Return the recipe with training images held out: a tenth, at most 5000, if it does not say how many."""
    if recipe.data.validation:
        return recipe
    images = len(load_images(recipe, "train"))
    held_out = max(1, min(_HELD_OUT, int(_HELD_OUT_SHARE * images)))
    return resolve(recipe.to_mapping(), {"data.validation": held_out})


@dataclass
class Trial:
    """A combination of values, and how far it got.

    Attributes:
        number: of the combination, from 1.
        values: by dotted keys.
        speed: epochs that it trains in a second.
        rounds: of each round that it took part in: epochs, accuracy, share certified, seconds. A run that failed has
            neither accuracy nor share.
    """

    number: int
    values: dict[str, object]
    speed: float = 0.0
    rounds: list[dict[str, float | None]] = field(default_factory=list)

    @property
    def name(self) -> str:
        """The values as text."""
        return " ".join(f"{key}={_text(value)}" for key, value in self.values.items())

    def score(self, place: int) -> tuple[float, float]:
        """Share certified and accuracy of a round; worse than all others if the run failed."""
        found = self.rounds[place]
        certified, accuracy = found["certified"], found["accuracy"]
        return (-1.0, -1.0) if certified is None or accuracy is None else (certified, accuracy)


@dataclass
class Sweep:
    """Combinations of values, trained in rounds: each keeps the best third, and trains it three times as long.

    The last round has at most three. What is best is certified best on images that are held out of training; the test
    images are not looked at. A round trains anew, so that each run has the schedule of its own length.

    Attributes:
        path: the directory; ``round-1/2`` in it is the run of the second combination in the first round.
        recipe: of all runs, but for the values and the epochs.
        budget: seconds of training of each run of the last round.
        radius: at which certified accuracy is compared.
        trials: the combinations.
    """

    path: Path
    recipe: Recipe
    budget: float
    radius: float
    trials: list[Trial]

    @property
    def sizes(self) -> list[int]:
        """How many combinations are in each round."""
        sizes = [len(self.trials)]
        while sizes[-1] > _FACTOR:
            sizes.append(math.ceil(sizes[-1] / _FACTOR))
        return sizes

    def kept(self, place: int) -> list[Trial]:
        """Return the combinations of a round, the best of the round before first."""
        if place == 0:
            return self.trials
        before = sorted(self.kept(place - 1), key=lambda trial: trial.score(place - 1), reverse=True)
        return before[: self.sizes[place]]

    def seconds(self, place: int) -> float:
        """Training time of a run of a round."""
        return self.budget / _FACTOR ** (len(self.sizes) - 1 - place)

    @property
    def ranked(self) -> list[Trial]:
        """All combinations, best first: by the last round that they were in, and their place in it."""
        return sorted(
            self.trials, key=lambda trial: (len(trial.rounds), trial.score(-1) if trial.rounds else ()), reverse=True
        )

    def best(self) -> Run:
        """Return the run that was certified best in the last round."""
        return load_run(self._folder(len(self.sizes) - 1, self.ranked[0]))

    def run(self) -> Iterator[str]:
        """Train what has not been trained yet; yields what happens, line by line.

        Raises:
            ValueError: if another process goes on with the sweep, every run of the last round failed, or a symbolic
                link is in the place of something that is to be written.
        """
        with locked(self.path):
            yield from self._run()

    def _run(self) -> Iterator[str]:
        total = sum(size * self.seconds(place) for place, size in enumerate(self.sizes))
        plan = ", then ".join(f"{size} x {clock(self.seconds(place))}" for place, size in enumerate(self.sizes))
        yield f"{self.path}: {plan}; {clock(total)} in all, evaluation not counted"
        for place, size in enumerate(self.sizes):
            for turn, trial in enumerate(self.kept(place), 1):
                if len(trial.rounds) <= place:
                    trial.rounds.append(self._trained(place, trial))
                    self.write()
                yield f"round {place + 1}, {turn}/{size}: {trial.name}  {self._result(trial, place)}"
        best = self.ranked[0]
        if best.score(-1)[0] < 0:
            raise ValueError(f"every run of the last round failed: see {self.path}")
        wanted = resolve(self._recipe(best).to_mapping(), {"train.epochs": best.rounds[-1]["epochs"]})
        write_whole(self.place(_BEST), wanted.to_yaml())

    def place(self, name: str) -> Path:
        """Return the path to which a file of the sweep is written.

        Raises:
            ValueError: if it, or a folder on the way to it, is a symbolic link, a pipe or a device.
        """
        return inside(self.path, name)

    def _result(self, trial: Trial, place: int) -> str:
        found = trial.rounds[place]
        if found["certified"] is None:
            return "failed: loss or gradient not finite"
        accuracy, certified = (f"{100 * (found[name] or 0.0):.1f} %" for name in ("accuracy", "certified"))
        return f"accuracy {accuracy}, certified at {radius_text(self.radius)}: {certified}"

    def _recipe(self, trial: Trial) -> Recipe:
        return resolve(self.recipe.to_mapping(), trial.values)

    def _folder(self, place: int, trial: Trial) -> Path:
        return self.place(f"round-{place + 1}/{trial.number}")

    def _trained(self, place: int, trial: Trial) -> dict[str, float | None]:
        """Train a combination for a round, or what a run that was stopped has left of it."""
        folder = self._folder(place, trial)
        if not trial.speed:
            trial.speed = _epochs_a_second(self._recipe(trial))
            self.write()
        epochs = max(1, round(self.seconds(place) * trial.speed))
        recipe = resolve(self._recipe(trial).to_mapping(), {"train.epochs": epochs})
        try:
            if (folder / "checkpoint.pt").is_file():
                run = resume(folder, quiet=True)
            else:
                shutil.rmtree(folder, ignore_errors=True)  # stopped before its first checkpoint
                run = train(recipe, folder, quiet=True)
        except StoppedError as stopped:
            raise StoppedError(f"stopped; go on with: trysquare sweep --resume {self.path}") from stopped
        except FloatingPointError:
            return {"epochs": epochs, "accuracy": None, "certified": None, "seconds": None}
        last = self._evaluations(run)[-1]
        return {"epochs": epochs, **{name: last[name] for name in ("accuracy", "certified", "seconds")}}

    def _evaluations(self, run: Run) -> list[dict[str, float]]:
        """Return what was measured while a run trained, with the share certified at the radius of the sweep."""
        lines = [line for line in run.metrics() if line["kind"] == "evaluation"]
        nearest = min(lines[0]["certified"], key=lambda radius: abs(float(radius) - self.radius))
        return [{**line, "certified": line["certified"][nearest]} for line in lines]

    def write(self) -> None:
        """Write what ``load_sweep`` reads."""
        content = {
            "recipe": self.recipe.to_mapping(), "budget": self.budget, "radius": self.radius,
            "trials": [vars(trial) for trial in self.trials],
        }  # fmt: skip
        write_whole(self.place(_STATE), json.dumps(content, indent=2) + "\n")

    def curves(self) -> dict[str, list[tuple[float, float]]]:
        """Seconds and share certified of each combination over its last run."""
        runs = {
            trial.name: load_run(self._folder(len(trial.rounds) - 1, trial))
            for trial in self.ranked
            if trial.rounds and trial.rounds[-1]["certified"] is not None
        }
        return {
            name: [(line["seconds"], line["certified"]) for line in self._evaluations(run)]
            for name, run in runs.items()
        }

    def __str__(self) -> str:
        rows = [("values", "rounds", "epochs", "seconds", "accuracy", f"certified at {radius_text(self.radius)}")]
        for trial in self.ranked:
            found = trial.rounds[-1] if trial.rounds else {}
            numbers = (found.get(name) for name in ("epochs", "seconds", "accuracy", "certified"))
            epochs, seconds, accuracy, certified = numbers
            rows.append((
                trial.name, str(len(trial.rounds)), _number(epochs, ".0f"), _number(seconds, ".0f"),
                _number(accuracy, ".1%"), _number(certified, ".1%"),
            ))  # fmt: skip
        widths = [max(len(row[k]) for row in rows) for k in range(len(rows[0]))]
        lines = (
            "  ".join([row[0].ljust(widths[0]), *(row[k].rjust(widths[k]) for k in range(1, len(row)))]) for row in rows
        )
        return "\n".join(line.rstrip() for line in lines)


def _number(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form)


def _text(value: object) -> str:
    return value if isinstance(value, str) and value.isprintable() else json.dumps(value)


def start_sweep(
    recipe: Recipe,
    choices: Mapping[str, Sequence[object]],
    budget: float,
    out: str | os.PathLike[str] | None = None,
    *,
    radius: float | None = None,
) -> Sweep:
    """Prepare a sweep over all combinations of values.

    Args:
        recipe: of all runs.
        choices: values by dotted keys of the recipe.
        budget: seconds of training of each run of the last round.
        out: a directory that is new or empty; ``sweeps/NAME-DATE-TIME`` unless given.
        radius: at which certified accuracy is compared; the first of the recipe unless given.

    Raises:
        ValueError: if a key or value does not fit the recipe, or the directory is not empty.

    >>> from tempfile import mkdtemp
    >>> choices = {"optimizer.lr": [0.01, 0.02], "loss.radius": [0.5, 1.0]}
    >>> sweep = ts.training.start_sweep(ts.training.read_recipe("digits"), choices, 60, mkdtemp())
    >>> sweep.sizes, [round(sweep.seconds(place)) for place in range(2)], sweep.trials[1].name
    ([4, 2], [20, 60], 'optimizer.lr=0.01 loss.radius=1.0')
    """
    _require_recipe(recipe)
    if not 0 < number("budget", budget) <= _LONGEST_BUDGET:
        raise ValueError(f"budget={shown(budget)} must be a number of seconds above 0 and at most {_LONGEST_BUDGET}")
    if not isinstance(choices, Mapping) or not all(isinstance(some, list | tuple) for some in choices.values()):
        raise TypeError("choices must be a mapping from keys of the recipe to lists of values")
    combinations = math.prod(map(len, choices.values()))
    if not 1 <= combinations <= _MOST_COMBINATIONS or not choices:
        raise ValueError(
            f"there are {combinations if choices else 0} combinations: name values to choose from, such as "
            f"optimizer.lr=1e-3,3e-3, for at most {_MOST_COMBINATIONS} of them"
        )
    if "train.epochs" in choices or "data.validation" in choices:
        raise ValueError("train.epochs and data.validation cannot be chosen: the first follows from the budget")
    recipe = with_validation(recipe)
    radius = recipe.evaluate.epsilons[0] if radius is None else radius
    if not _evaluates_at(recipe, radius):
        recipe = resolve(recipe.to_mapping(), {"evaluate.epsilons": [*recipe.evaluate.epsilons, radius]})
    values = [dict(zip(choices, taken, strict=True)) for taken in product(*choices.values())]
    _require_models([resolve(recipe.to_mapping(), chosen) for chosen in values])  # refused now, and not after hours
    path = Path(out or Path("sweeps") / f"{recipe.name}-{time.strftime('%Y%m%d-%H%M%S')}")
    path.mkdir(parents=True, exist_ok=True)
    if any(path.iterdir()):
        raise ValueError(f"{path} is not empty: give another directory, or go on with that sweep by --resume {path}")
    sweep = Sweep(path, recipe, float(budget), radius, [Trial(n, chosen) for n, chosen in enumerate(values, 1)])
    sweep.write()
    return sweep


def _require_models(recipes: Sequence[Recipe]) -> None:
    """Refuse models that cannot be made, without any memory for their numbers."""
    different = {json.dumps([chosen.to_mapping()[name] for name in ("data", "model")]): chosen for chosen in recipes}
    for recipe in different.values():
        arguments = model_arguments(recipe, load_images(recipe, "train"))
        with torch.device("meta"):
            build(**arguments)


def _evaluates_at(recipe: Recipe, radius: float) -> bool:
    return any(abs(radius - epsilon) <= 1e-6 for epsilon in recipe.evaluate.epsilons)


def load_sweep(path: str | os.PathLike[str]) -> Sweep:
    """Return the sweep in a directory, as far as it got.

    Raises:
        ValueError: if there is none, or its file is damaged.
    """
    folder = Path(path)
    if not (folder / _STATE).is_file():
        raise ValueError(f"{folder} is not the directory of a sweep: there is no {_STATE} in it")
    try:
        return read_json(
            read_file(folder / _STATE).decode(),
            "a sweep",
            lambda content: _read_sweep(folder, as_mapping(content, "it")),
        )
    except ValueError as error:
        raise ValueError(f"{folder / _STATE} is damaged: {error}") from error


def _read_sweep(folder: Path, content: Mapping[str, Any]) -> Sweep:
    """Return a sweep from what ``Sweep.write`` wrote, or somebody else: what is in it names folders, and is trained."""
    recipe = resolve(content["recipe"])
    numbers = {name: convert(content[name], float, name) for name in ("budget", "radius")}
    if not 0 < numbers["budget"] <= _LONGEST_BUDGET or not _evaluates_at(recipe, numbers["radius"]):
        raise ValueError(f"{shown(numbers)} must be a time above 0 and a radius at which the recipe evaluates")
    if not 1 <= len(content["trials"]) <= _MOST_COMBINATIONS:
        raise ValueError(f"it has {len(content['trials'])} combinations, and a sweep from 1 to {_MOST_COMBINATIONS}")
    trials = [_read_trial(recipe, number, trial) for number, trial in enumerate(content["trials"], 1)]
    return Sweep(folder, recipe, **numbers, trials=trials)


def _read_trial(recipe: Recipe, number: int, content: object) -> Trial:
    found = as_mapping(content, "a trial")
    if convert(found["number"], int, "number") != number:
        raise ValueError(f"combination {number} has the number {shown(found['number'])}")
    values, speed = as_mapping(found["values"], "values"), convert(found["speed"], float, "speed")
    resolve(recipe.to_mapping(), values)
    if not 0 <= speed < math.inf or not isinstance(found["rounds"], list):
        raise ValueError(f"speed={speed} must be a number from 0 on, and rounds={shown(found['rounds'])} a list")
    return Trial(number, values, speed, [_read_round(each) for each in found["rounds"]])


def _read_round(content: object) -> dict[str, float | None]:
    """Return what a combination came to in a round; all but its epochs may be missing."""
    found = as_mapping(content, "a round")
    measured = {name: convert(found[name], float | None, name) for name in ("accuracy", "certified", "seconds")}
    epochs = convert(found["epochs"], int, "epochs")
    if epochs < 1 or not all(value is None or 0 <= value < math.inf for value in measured.values()):
        raise ValueError(f"{shown(content)} must have numbers from 0 on, and at least 1 epoch")
    return {"epochs": epochs, **measured}


def split_choices(arguments: Sequence[str]) -> dict[str, Sequence[object]]:
    """Read choices such as ``optimizer.lr=1e-3,3e-3`` and ``model.widths=[16, 32],[32, 64]``.

    Raises:
        ValueError: if one is not a key with values.

    >>> from trysquare.lab.training.sweep import split_choices
    >>> split_choices(["train.clip=null,1", "model.widths=[16, 32],[8, 8]"])
    {'train.clip': [None, 1], 'model.widths': [[16, 32], [8, 8]]}
    """
    choices: dict[str, Sequence[object]] = {}
    for argument in arguments:
        key, equals, text = argument.partition("=")
        _, values = split_overrides([f"--{key}", f"[{text}]"])
        found = values.get(key)
        if not equals or not isinstance(found, list) or not found:
            raise ValueError(
                f"{shown(argument)} must be a key of the recipe and values, such as optimizer.lr=1e-3,3e-3"
            )
        if key in choices:
            raise ValueError(f"{key} is there twice: give all its values at once")
        choices[key] = found
    return choices


def _first_steps(training: Training, steps: int) -> Iterator[None]:
    """Take so many steps from the start, over as many epochs as they need."""
    training.model.train()
    batches = chain.from_iterable(training.train.epoch(epoch) for epoch in count())
    for images, labels in islice(batches, steps):
        training.step(images, labels, False)
        yield


def _epochs_a_second(recipe: Recipe) -> float:
    with joined(recipe.train.device) as world:
        _require_alone(world)
        training = Training(recipe, world)
        began = 0.0
        try:
            for number, _ in enumerate(_first_steps(training, _WARM_UP_STEPS + _TIMED_STEPS), 1):
                if number == _WARM_UP_STEPS:
                    began = time.monotonic()
        except FloatingPointError:
            return 1.0  # it will fail as soon when it is trained
        return _TIMED_STEPS / (time.monotonic() - began) / len(training.train)


def _require_alone(world: World) -> None:
    if world.size > 1:
        raise ValueError("sweep and find-lr run on one process: start one for each card with a directory of its own")


@dataclass(frozen=True)
class Rate:
    """What a learning rate came to: ``None`` if loss or gradient were not finite."""

    lr: float
    found: Evaluation | None


def find_lr(recipe: Recipe, *, steps: int = 500, start: float = 1e-4, factor: float = 2.0) -> Iterator[Rate]:
    """Raise the learning rate until the accuracy after some steps has stopped growing, twice in a row.

    Each rate starts from the same weights. The accuracy is that on images that are held out of training.

    Args:
        recipe: all but the rate.
        steps: of each training.
        start: first rate.
        factor: from a rate to the next, above 1.

    Returns:
        An iterator over what each rate came to; ``best_rate`` of all is the one to take.

    Raises:
        ValueError: at once, if a number is out of range.
    """
    _require_recipe(recipe)
    start, factor = number("start", start), number("factor", factor)
    if not 1 <= positive("steps", steps) <= LARGEST_COUNT:
        raise ValueError(f"steps={shown(steps)} must be from 1 to {LARGEST_COUNT}")
    if not 0 < start <= LARGEST_RATE or not 1 < factor <= LARGEST_RATE:
        raise ValueError(f"start={start} must be above 0, factor={factor} above 1, and both at most {LARGEST_RATE}")
    return _rates(with_validation(recipe), steps, start, factor)


def _require_recipe(recipe: object) -> None:
    if not isinstance(recipe, Recipe):
        raise TypeError(f"recipe must be what ts.training.read_recipe returns, not {type(recipe).__name__}")


def _rates(recipe: Recipe, steps: int, lr: float, factor: float) -> Iterator[Rate]:
    best, behind = -1.0, 0
    while lr <= LARGEST_RATE:
        rate = _after(recipe, lr, steps)
        yield rate
        accuracy = -1.0 if rate.found is None else rate.found.accuracy
        behind = 0 if accuracy > best else behind + 1
        best = max(best, accuracy)
        if behind == 2 or rate.found is None:
            return
        lr *= factor


def _after(recipe: Recipe, lr: float, steps: int) -> Rate:
    with joined(recipe.train.device) as world:
        _require_alone(world)
        training = Training(resolve(recipe.to_mapping(), {"optimizer.lr": lr}), world)
        try:
            for _ in _first_steps(training, steps):
                pass
        except FloatingPointError:
            return Rate(lr, None)
        with training.stepper.evaluation_weights():
            return Rate(lr, training.evaluate())


def best_rate(rates: Sequence[Rate]) -> Rate:
    """Return the rate with the best accuracy.

    Raises:
        ValueError: if all of them failed.
    """
    found = [rate for rate in rates if rate.found is not None]
    if not found:
        raise ValueError("loss or gradient are not finite at the first learning rate: start lower")
    return max(found, key=lambda rate: rate.found.accuracy if rate.found is not None else -1.0)
