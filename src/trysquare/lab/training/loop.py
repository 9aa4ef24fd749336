"""The training loop: build everything that a recipe names, then take steps, evaluate and write checkpoints."""

from __future__ import annotations

import math
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

import torch
from torch import Tensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from trysquare.lab.data import Images, Loader, read_extra
from trysquare.lab.data.registry import check_images
from trysquare.lab.models import Classifier, build
from trysquare.lab.training.distribution import World, joined
from trysquare.lab.training.recipe import MARGINS, Recipe
from trysquare.lab.training.run import Run, evaluated_split, load_images, load_run, starting
from trysquare.lab.training.step import OPTIMIZERS, Gradients, clip_layers, loss_of, trained_by
from trysquare.naming import shown
from trysquare.nn.losses import Loss, make_loss, margin_for_radius
from trysquare.nn.parametrizations.base import continue_from, steps_taken
from trysquare.verify.certification import certified_radius, evaluating, radius_text
from trysquare.verify.lipschitz import analyse

# Of a recipe, when a run is resumed.
_MAY_CHANGE = (
    "train.epochs", "train.accumulate", "train.checkpoint_every", "train.device", "data.root", "data.workers",
    "evaluate.every", "evaluate.batch_size", "evaluate.epsilons",
)  # fmt: skip


class StoppedError(Exception):
    """Raised when a run was asked to stop; it has written a checkpoint."""


def train(recipe: Recipe, out: str | os.PathLike[str] | None = None, *, quiet: bool = False) -> Run:
    """Train by a recipe.

    Under ``torchrun`` each process calls this; the first of them writes.

    Args:
        recipe: from ``read_recipe`` or ``resolve``.
        out: directory of the run; ``runs/NAME-DATE-TIME`` unless given.
        quiet: show nothing.

    Raises:
        ValueError: if the data is missing or damaged, or the directory is in use.
        OSError: if the directory cannot be written to.
        FloatingPointError: if the loss or the gradient is not finite; the last checkpoint is from before that.
        StoppedError: after SIGINT or SIGTERM.

    >>> from tempfile import mkdtemp
    >>> recipe = ts.training.read_recipe("digits", {"train.epochs": 1})
    >>> run = ts.training.train(recipe, mkdtemp(), quiet=True)
    >>> run.metrics()[-1]["kind"], run.model()(torch.rand(1, 1, 8, 8)).shape
    ('evaluation', torch.Size([1, 10]))
    """
    with joined(recipe.train.device) as world:
        training = Training(recipe, world)
        with starting(recipe, out) if world.is_main else nullcontext() as own:
            run = world.shared(own)
            assert run is not None  # what the first process has made
            return training.run_to_the_end(run, quiet)


def resume(path: str | os.PathLike[str], overrides: Mapping[str, object] | None = None, *, quiet: bool = False) -> Run:
    """Continue a run from its last checkpoint, bit for bit as if it had not been stopped (on one process).

    Args:
        path: directory of the run.
        overrides: of its recipe, by dotted keys: more epochs, another place of the data.
        quiet: show nothing.

    Raises:
        ValueError: if there is no checkpoint, it is damaged, it is that of another model, or an override is about what
            the run has been trained with, or the run has done more epochs than it is to have.
    """
    for key in overrides or {}:
        if key not in _MAY_CHANGE:
            raise ValueError(f"{key} cannot change while a run is resumed; what can: {', '.join(_MAY_CHANGE)}")
    run = load_run(path, overrides)
    with joined(run.recipe.train.device) as world, run.locked() if world.is_main else nullcontext():
        state = run.read_state()  # before the model of the recipe is made, which may be a stranger's too
        training = Training(run.recipe, world)
        training.restore(state, run)
        if world.is_main:
            run.write("recipe.yaml", run.recipe.to_yaml())
        return training.run_to_the_end(run, quiet)


def build_loss(recipe: Recipe, model: Classifier, input_shape: tuple[int, ...]) -> Loss:
    """Return the loss; a radius becomes the margin that certifies it, by the initial model's Lipschitz constant."""
    name, options = recipe.loss.name, dict(recipe.loss.options)

    def constant() -> float:
        with evaluating(model), torch.no_grad():
            rows = model.head.weight
            # Losses take the √2 of orthonormal rows for granted.
            apart = float(torch.cdist(rows, rows).max()) / math.sqrt(2) if len(rows) > 1 else 1.0
            return analyse(model, input_shape, compare=False).features_bound * apart

    if "lipschitz" in options and options["lipschitz"] is None:
        options["lipschitz"] = constant()
    if name in MARGINS:
        radius = options.pop("radius")
        if radius is not None:
            options[MARGINS[name]] = margin_for_radius(radius, constant())
    return make_loss(name, **options)


@dataclass
class _Progress:
    """How far a run has come. A checkpoint holds all of it."""

    epoch: int = 0
    batch: int = 0
    step: int = 0
    seconds: float = 0.0
    # Of the present epoch: sum of losses, right answers, images, seconds.
    sums: list[float] = field(default_factory=lambda: [0.0] * 4)
    metrics_size: int = 0

    def __post_init__(self) -> None:
        """Refuse what no run can have written."""
        counts = (self.epoch, self.batch, self.step, self.metrics_size)
        if len(self.sums) != 4 or not all(isinstance(count, int) and count >= 0 for count in counts):
            raise ValueError(f"progress={shown(vars(self))} must be counts, at least 0")
        if not all(isinstance(number, int | float) for number in (self.seconds, *self.sums)):
            raise ValueError(f"progress={shown(vars(self))} must be numbers")


@dataclass(frozen=True)
class Evaluation:
    """Results on images that are not trained with, and the certified accuracy by radius."""

    loss: float
    accuracy: float
    certified: dict[float, float]
    split: str = "test"


def model_arguments(recipe: Recipe, images: Images) -> dict[str, Any]:
    """Return the arguments of ``ts.models.build`` for the model of a recipe that is trained with these images."""
    shape, classes = tuple(images[0][0].shape), len(images.classes)
    return {"name": recipe.model.name, "input_shape": shape, "classes": classes, **recipe.model.options}


class Training:
    """A training run: everything it works with, and how far it has come.

    Data on disk is checked on the way, by the first process for all.

    Attributes:
        model: with the weights of the recipe's seed.
        arguments: those of ``ts.models.build`` that made it.
        loss: with the margin of the recipe's radius.
        train: batches of this process.
        held_out: those of its share of the validation or test images, in order and not augmented.
        stepper: the optimizer, for all ``steps``.

    Raises:
        ValueError: if data is missing or damaged, or parts of the recipe do not fit it or each other.
    """

    run: Run
    """Where ``run_to_the_end`` writes."""

    def __init__(self, recipe: Recipe, world: World) -> None:
        self.recipe, self.world, self.progress = recipe, world, _Progress()
        settings, images = recipe.train, load_images(recipe, "train")
        held_out = load_images(recipe, evaluated_split(recipe))
        if world.is_main:
            for part in (images, held_out):
                check_images(part)
        self.arguments = model_arguments(recipe, images)
        classes, self.input_shape = len(images.classes), self.arguments["input_shape"]
        torch.manual_seed(settings.seed)
        self.model = build(**self.arguments).to(world.device)

        if settings.batch_size > len(images):
            raise ValueError(
                f"train.batch_size={settings.batch_size} is more than the {len(images)} training images: "
                f"lower it to at most {len(images)}"
            )
        if settings.batch_size % world.size:
            raise ValueError(
                f"train.batch_size={settings.batch_size} must be a multiple of the number of processes, {world.size}"
            )
        place: dict[str, Any] = {"rank": world.rank, "world_size": world.size, "device": world.device}
        place["workers"] = recipe.data.workers
        extra: dict[str, Any] = {}
        if recipe.data.extra is not None:
            extra = {"extra": read_extra(recipe.data.extra, images), "per_image": recipe.data.extra_per_image}
        self.train = Loader(
            images,
            settings.batch_size,
            recipe.data.augment,
            settings.seed,
            shuffle=True,
            drop_last=True,
            **place,
            **extra,
        )
        self.held_out = Loader(held_out, max(recipe.evaluate.batch_size, world.size), **place)
        self.steps = settings.epochs * len(self.train)

        self.loss = build_loss(recipe, self.model, self.input_shape)
        self._require_loss_of(classes)
        self.margin = MARGINS.get(recipe.loss.name, "radius")  # the attribute that holds it
        self.final_margin = None if settings.radius_start is None else float(getattr(self.loss, self.margin))
        trained = trained_by(recipe.optimizer.name, self.model)
        self.stepper = OPTIMIZERS[recipe.optimizer.name](trained, self.steps, **recipe.optimizer.options)
        self.parameters = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        self.gradients = Gradients(self.model, self.loss, settings.accumulate, settings.precision, world.group)

    def _require_loss_of(self, classes: int) -> None:
        """Refuse a loss that does not take a logit for each class, before a run finds out at its first step."""
        name, options = self.recipe.loss.name, shown(dict(self.recipe.loss.options))
        logits = torch.zeros(1, classes, device=self.world.device)
        try:
            with torch.no_grad():
                value = float(
                    loss_of(self.loss, self.model, logits, torch.zeros(1, dtype=torch.int64, device=logits.device))
                )
        except ValueError as error:
            raise ValueError(f"loss {name!r} does not take {classes} classes: {error}") from error
        if not math.isfinite(value):
            raise ValueError(
                f"loss {name!r} with {options} is {value} where all logits are 0: take numbers that are less extreme"
            )

    def run_to_the_end(self, run: Run, quiet: bool = False) -> Run:
        """Train what is left, epoch by epoch, and write into the directory of the run."""
        self.run, progress, epochs = run, self.progress, self.recipe.train.epochs
        epsilons, stream = (
            sorted(self.recipe.evaluate.epsilons),
            sys.stderr if self.world.is_main and not quiet else None,
        )
        self.display = Display(epochs, self.steps, progress.step, epsilons[len(epsilons) // 2], stream)
        self.display.say(f"run directory: {run.path}")
        self.model.train()
        with _stop_requests() as stop:
            while progress.epoch < epochs:
                began, spent, before = time.monotonic(), progress.seconds, progress.sums[3]
                for images, labels in self.train.epoch(progress.epoch, progress.batch):
                    stopping = self.step(images, labels, stop.is_set())
                    passed = time.monotonic() - began
                    progress.seconds, progress.sums[3] = spent + passed, before + passed
                    self.show()
                    if stopping:
                        self._stop()
                    if progress.step % (self.recipe.train.checkpoint_every or math.inf) == 0:
                        self.save()
                loss, right, images_seen, seconds = progress.sums
                speed = images_seen / seconds
                self._record("train", loss=loss / images_seen, accuracy=right / images_seen, images_per_second=speed)
                if progress.epoch + 1 == epochs or (progress.epoch + 1) % self.recipe.evaluate.every == 0:
                    self._evaluate_and_save()
                progress.epoch, progress.batch, progress.sums = progress.epoch + 1, 0, [0.0] * 4
                self.save()
        return run

    def step(self, images: Tensor, labels: Tensor, stop: bool) -> bool:
        """Take one step of the optimizer, and return whether any process wants to stop after it."""
        progress, optimizer = self.progress, self.stepper.optimizer
        self.set_radius(progress.step)
        optimizer.zero_grad(set_to_none=True)
        counts = self.gradients(images, labels)
        *sums, stops = self.world.total(torch.cat([counts, counts.new_tensor([float(stop)])])).tolist()
        norm = get_total_norm([parameter.grad for parameter in self.parameters if parameter.grad is not None])
        if not (math.isfinite(sums[0]) and math.isfinite(float(norm))):
            raise FloatingPointError(
                f"training stopped in epoch {progress.epoch + 1}, step {progress.step + 1}: the loss is {sums[0]} and "
                f"the norm of the gradient is {float(norm)}; {self._kept()}. Lower optimizer.lr or set train.clip"
            )
        if self.recipe.train.clip_layers is not None:
            clip_layers(self.model, self.recipe.train.clip_layers)
            if self.recipe.train.clip is not None:
                norm = get_total_norm([parameter.grad for parameter in self.parameters if parameter.grad is not None])
        if self.recipe.train.clip is not None:
            clip_grads_with_norm_(self.parameters, self.recipe.train.clip, norm)
        self.stepper.step(progress.step)
        progress.step, progress.batch = progress.step + 1, progress.batch + 1
        progress.sums[:3] = [total + new for total, new in zip(progress.sums, sums, strict=False)]
        return stops > 0

    def set_radius(self, step: int) -> None:
        """Give the loss its radius, or margin, for this step while it rises from ``train.radius_start``."""
        start = self.recipe.train.radius_start
        if start is not None and self.final_margin is not None:
            final = self.recipe.loss.options["radius"]
            share = min(step / max(1, math.ceil(self.recipe.train.radius_ramp * self.steps)), 1.0)
            setattr(self.loss, self.margin, self.final_margin * (start + (final - start) * share) / final)

    def show(self) -> None:
        """Show progress, if it is time for another line."""
        if self.display.due():
            progress = self.progress
            loss, right, images, seconds = progress.sums
            self.display.show(progress.epoch, progress.step, loss / images, right / images, images / seconds)

    @torch.no_grad()
    def evaluate(self) -> Evaluation:
        """Evaluate the weights as they are now, on the shares of all processes.

        Certified accuracies use the Lipschitz bound of these weights. They leave out what ``ts.certify`` does on top:
        it subtracts the error of evaluation, which is about 1e-6.
        """
        epsilons = self.recipe.evaluate.epsilons
        counts = torch.zeros(3 + len(epsilons), dtype=torch.float64)
        with evaluating(self.model):
            found = analyse(self.model, self.input_shape, compare=False)
            for images, labels in self.held_out.epoch(0):
                if len(labels):
                    logits = self.model(images)
                    loss = float(loss_of(self.loss, self.model, logits, labels)) * len(labels)
                    radii = certified_radius(logits, labels, found.features_bound, found.head_weight)
                    right = int((logits.argmax(1) == labels).sum())
                    counts += torch.tensor([loss, right, len(labels), *(int((radii > e).sum()) for e in epsilons)])
        loss, right, count, *certified = self.world.total(counts.to(self.world.device)).tolist()
        shares = {epsilon: number / count for epsilon, number in zip(epsilons, certified, strict=True)}
        return Evaluation(loss / count, right / count, shares, evaluated_split(self.recipe))

    def _evaluate_and_save(self) -> None:
        """Measure and save the weights that the optimizer evaluates with."""
        began = time.monotonic()
        with self.stepper.evaluation_weights():
            found: Evaluation = self.evaluate()
            if self.world.is_main:
                self.run.save_model(self.model, self.arguments)
        self.progress.seconds += time.monotonic() - began
        self.display.evaluated(self.progress.epoch, found)
        # Programs read these keys with ``float``, so they are decimals where people are shown 36/255.
        certified = {f"{epsilon:.6g}": share for epsilon, share in found.certified.items()}
        self._record("evaluation", split=found.split, loss=found.loss, accuracy=found.accuracy, certified=certified)

    def _record(self, kind: str, **numbers: object) -> None:
        progress = self.progress
        record = {"kind": kind, "epoch": progress.epoch + 1, "step": progress.step, **numbers}
        record |= {"seconds": round(progress.seconds, 3), "lr": self.stepper.learning_rate}
        if self.world.is_main:
            progress.metrics_size = self.run.append_metrics(record)

    def save(self) -> None:
        """Write a checkpoint, from which ``restore`` goes on."""
        if not self.world.is_main:
            return
        if not all(bool(parameter.isfinite().all()) for parameter in self.parameters):
            raise FloatingPointError(f"weights are not finite after step {self.progress.step}; {self._kept()}")
        self.run.save_state(
            {
                "model": self.model.state_dict(),
                "model_arguments": self.arguments,
                "optimizer": self.stepper.optimizer.state_dict(),
                "steps_seen": steps_taken(self.stepper.optimizer),
                "progress": vars(self.progress),
                "random": torch.get_rng_state(),
            }
        )

    def _kept(self) -> str:
        run: Run | None = getattr(self, "run", None)  # none where steps are taken only to measure something
        path = run.path / "checkpoint.pt" if run is not None else Path()
        return f"the last checkpoint is {path}" if path.is_file() else "there was no checkpoint yet"

    def restore(self, state: Mapping[str, Any], run: Run) -> None:
        """Go back to a checkpoint.

        Raises:
            ValueError: if it is not that of this model, or the run is to end before it.
        """
        path, optimizer, epochs = run.path / "checkpoint.pt", self.stepper.optimizer, self.recipe.train.epochs
        if (found := state.get("model_arguments")) != self.arguments:
            raise ValueError(f"{path} is of another model: {shown(found)}, the recipe has {shown(self.arguments)}")
        try:
            self.model.load_state_dict(state["model"])
            optimizer.load_state_dict(state["optimizer"])
            self.progress = _Progress(**state["progress"])
            continue_from(optimizer, int(state["steps_seen"]))
            torch.set_rng_state(state["random"])
        except (AttributeError, KeyError, TypeError, ValueError, RuntimeError) as error:
            raise ValueError(f"{path} does not fit the recipe: {error}") from error
        if epochs < (begun := self.progress.epoch + (self.progress.batch > 0)):
            raise ValueError(
                f"train.epochs={epochs}, but the run is in epoch {begun} already: it must be at least {begun}"
            )
        if self.world.is_main:
            run.cut_metrics(self.progress.metrics_size)
            for left_over in run.path.glob("*.tmp"):
                if not left_over.is_dir():
                    left_over.unlink()

    def _stop(self) -> None:
        self.save()
        # Nobody leaves before it is written: torchrun ends all processes when the first is gone.
        self.world.total(torch.zeros(1, device=self.world.device))
        place = f"epoch {self.progress.epoch + 1} after step {self.progress.step}"
        raise StoppedError(
            f"stopped in {place}; a checkpoint is written. Continue with: trysquare train --resume {self.run.path}"
        )


@contextmanager
def _stop_requests() -> Iterator[threading.Event]:
    """Yield an event that SIGINT and SIGTERM set, so that a step is always finished; a second signal acts at once."""
    requested = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield requested
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def note(number: int, frame: object) -> None:
        requested.set()
        signal.signal(number, before[signal.Signals(number)] or signal.SIG_DFL)

    for number in before:
        signal.signal(number, note)
    try:
        yield requested
    finally:
        for number, handler in before.items():
            signal.signal(number, handler or signal.SIG_DFL)


# Seconds between two changes of the line on a terminal, and between two lines elsewhere.
_REDRAW, _PLAIN = 0.2, 30.0


class Display:
    """Progress of a run.

    Args:
        epochs: of the whole run.
        steps: of the whole run.
        first: step at which it starts.
        shown: radius whose certified accuracy is shown.
        stream: where to; nowhere if ``None``.
    """

    def __init__(self, epochs: int, steps: int, first: int, shown: float, stream: TextIO | None = sys.stderr) -> None:
        self.epochs, self.steps, self.first, self.shown, self.stream = epochs, steps, first, shown, stream
        self.terminal = stream is not None and stream.isatty()
        self.began = self.last = time.monotonic()
        self.evaluation: Evaluation | None = None

    def due(self) -> bool:
        """Return whether it is time for another line."""
        wait = _REDRAW if self.terminal else _PLAIN
        return self.stream is not None and time.monotonic() - self.last >= wait

    def show(self, epoch: int, step: int, loss: float, accuracy: float, speed: float) -> None:
        """Show training after ``step`` steps."""
        elapsed = time.monotonic() - self.began
        left = elapsed / max(step - self.first, 1) * (self.steps - step)
        parts = [f"epoch {epoch + 1}/{self.epochs}", f"loss {loss:.4f}", f"accuracy {accuracy:.1%}"]
        if self.evaluation is not None:
            parts += [f"{self.evaluation.split} {self.evaluation.accuracy:.1%}"]
            share = self.evaluation.certified[self.shown]
            parts += [f"certified at {radius_text(self.shown)}: {share:.1%}"]
        self._write("  ".join([*parts, f"{speed:,.0f} images/s", f"{clock(left)} left"]), keep=not self.terminal)
        self.last = time.monotonic()

    def evaluated(self, epoch: int, evaluation: Evaluation) -> None:
        """Show, and keep on the screen, what was measured after an epoch."""
        self.evaluation = evaluation
        certified = ", ".join(f"{radius_text(epsilon)}: {share:.1%}" for epsilon, share in evaluation.certified.items())
        line = f"epoch {epoch + 1}/{self.epochs}  {evaluation.split} loss {evaluation.loss:.4f}"
        line += f"  accuracy {evaluation.accuracy:.1%}"
        self._write(f"{line}  certified at {certified}", keep=True)

    def say(self, text: str) -> None:
        """Show a line, and keep it on the screen."""
        self._write(text, keep=True)

    def _write(self, text: str, keep: bool) -> None:
        if self.stream is not None:
            start = "\r\x1b[K" if self.terminal else ""
            self.stream.write(f"{start}{text}" + "\n" * keep)
            self.stream.flush()


def clock(seconds: float) -> str:
    """Return seconds as hours, minutes and seconds.

    >>> from trysquare.lab.training.loop import clock
    >>> clock(62.5), clock(3723)
    ('1:02', '1:02:03')
    """
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
