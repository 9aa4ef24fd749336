"""The training loop: steps, evaluations, checkpoints, progress on the screen, and stopping."""

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

from trysquare.lab.training.build import Setup, build_setup, radius_schedule
from trysquare.lab.training.distribution import joined
from trysquare.lab.training.recipe import Recipe
from trysquare.lab.training.run import Run, load_run, starting
from trysquare.lab.training.step import Gradients, takes_head
from trysquare.naming import shown
from trysquare.nn.parametrizations.base import continue_from, steps_taken
from trysquare.verify.certification import certified_radius, evaluating, radius_text
from trysquare.verify.lipschitz import analyse

# Of a recipe, when a run is resumed.
_MAY_CHANGE = (
    "train.epochs", "train.accumulate", "train.checkpoint_every", "train.device", "data.root", "data.workers",
    "evaluate.every", "evaluate.batch_size", "evaluate.epsilons",
)  # fmt: skip


class StoppedError(Exception):
    """A run that was asked to stop, and has written a checkpoint."""


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
        setup = build_setup(recipe, world)
        with starting(recipe, out) if world.leads else nullcontext() as own:
            run: Any = world.shared(own)
            return _Training(setup, run, quiet).run_to_the_end()


def resume(path: str | os.PathLike[str], overrides: Mapping[str, Any] | None = None, *, quiet: bool = False) -> Run:
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
    with joined(run.recipe.train.device) as world, run.locked() if world.leads else nullcontext():
        state = run.read_state()  # before the model of the recipe is made, which may be a stranger's too
        training = _Training(build_setup(run.recipe, world), run, quiet)
        training.restore(state)
        if world.leads:
            run.write("recipe.yaml", run.recipe.to_yaml())
        return training.run_to_the_end()


@dataclass
class _Progress:
    """Where a run is; all of it is in a checkpoint."""

    epoch: int = 0
    batch: int = 0
    step: int = 0
    seconds: float = 0.0
    # Of the present epoch: sum of losses, right answers, images, seconds.
    sums: list[float] = field(default_factory=lambda: [0.0] * 4)
    metrics_size: int = 0

    def check(self) -> None:
        """Refuse what no run can have written.

        Raises:
            ValueError: if something is no number, or negative.
        """
        counts = (self.epoch, self.batch, self.step, self.metrics_size)
        numbers = (self.seconds, *self.sums)
        if len(self.sums) != 4 or not all(isinstance(count, int) and count >= 0 for count in counts):
            raise ValueError(f"progress={shown(vars(self))} must be counts, at least 0")
        if not all(isinstance(number, int | float) for number in numbers):
            raise ValueError(f"progress={shown(vars(self))} must be numbers")


class _Training:
    """A run under way."""

    def __init__(self, setup: Setup, run: Run, quiet: bool) -> None:
        self.setup, self.run, self.world, self.recipe = setup, run, setup.world, setup.recipe
        self.progress = _Progress()
        wrapped = self.world.wrapped(setup.model)
        settings = self.recipe.train
        self.gradients = Gradients(wrapped, setup.loss, settings.accumulate, settings.precision)
        self.set_radius = radius_schedule(self.recipe, setup.loss, setup.steps)
        self.parameters = [parameter for parameter in setup.model.parameters() if parameter.requires_grad]
        self.stream = None if quiet or not self.world.leads else sys.stderr

    def run_to_the_end(self) -> Run:
        """Train what is left."""
        settings, progress = self.recipe.train, self.progress
        shown = sorted(self.recipe.evaluate.epsilons)[len(self.recipe.evaluate.epsilons) // 2]
        self.display = Display(settings.epochs, self.setup.steps, progress.step, shown, self.stream)
        self.display.say(f"run directory: {self.run.path}")
        self.setup.model.train()
        with _stop_requests() as stop:
            while progress.epoch < settings.epochs:
                self._epoch(stop)
        return self.run

    def _epoch(self, stop: threading.Event) -> None:
        progress, began = self.progress, time.monotonic()
        spent = progress.seconds, progress.sums[3]

        def clock() -> None:
            passed = time.monotonic() - began
            progress.seconds, progress.sums[3] = spent[0] + passed, spent[1] + passed

        for images, labels in self.setup.train.epoch(progress.epoch, progress.batch):
            stopping = self._step(images, labels, stop.is_set())
            clock()
            self._show()
            if stopping:
                self._stop()
            if progress.step % (self.recipe.train.checkpoint_every or math.inf) == 0:
                self._checkpoint()
        clock()
        self._end_epoch()

    def _step(self, images: Tensor, labels: Tensor, stop: bool) -> bool:
        """One step of the optimizer; whether any process wants to stop after it."""
        progress, optimizer = self.progress, self.setup.stepper.optimizer
        self.set_radius(progress.step)
        optimizer.zero_grad(set_to_none=True)
        counts = self.gradients(images, labels)
        *sums, stops = self.world.total(torch.cat([counts, counts.new_tensor([float(stop)])])).tolist()
        norm = get_total_norm([parameter.grad for parameter in self.parameters if parameter.grad is not None])
        self._require_finite(sums[0], float(norm))
        if self.recipe.train.clip is not None:
            clip_grads_with_norm_(self.parameters, self.recipe.train.clip, norm)
        self.setup.stepper.step(progress.step)
        progress.step, progress.batch = progress.step + 1, progress.batch + 1
        progress.sums[:3] = [total + new for total, new in zip(progress.sums, sums, strict=False)]
        return stops > 0

    def _require_finite(self, loss: float, norm: float) -> None:
        if not (math.isfinite(loss) and math.isfinite(norm)):
            raise FloatingPointError(
                f"training stopped in epoch {self.progress.epoch + 1}, step {self.progress.step + 1}: the loss is "
                f"{loss} and the norm of the gradient is {norm}; {self._kept()}. Lower optimizer.lr or set train.clip"
            )

    def _kept(self) -> str:
        if (self.run.path / "checkpoint.pt").is_file():
            return f"the last checkpoint is {self.run.path / 'checkpoint.pt'}"
        return "there was no checkpoint yet"

    def _show(self) -> None:
        if self.display.due():
            progress = self.progress
            loss, right, images, seconds = progress.sums
            self.display.show(progress.epoch, progress.step, loss / images, right / images, images / seconds)

    def _end_epoch(self) -> None:
        progress, settings = self.progress, self.recipe.train
        loss, right, images, seconds = progress.sums
        self._record("train", loss=loss / images, accuracy=right / images, images_per_second=images / seconds)
        last = progress.epoch + 1 == settings.epochs
        if last or (progress.epoch + 1) % self.recipe.evaluate.every == 0:
            self._evaluate()
        progress.epoch, progress.batch, progress.sums = progress.epoch + 1, 0, [0.0] * 4
        self._checkpoint()

    def _evaluate(self) -> None:
        """Measure and save the weights that the optimizer evaluates with."""
        began = time.monotonic()
        with self.setup.stepper.evaluation_weights():
            found: Evaluation = evaluate(self.setup)
            if self.world.leads:
                self.run.save_model(self.setup.model, self.setup.arguments)
        self.progress.seconds += time.monotonic() - began
        self.display.evaluated(self.progress.epoch, found)
        # Programs read these keys with ``float``, so they are decimals where people are shown 36/255.
        certified = {f"{epsilon:.6g}": share for epsilon, share in found.certified.items()}
        self._record("evaluation", loss=found.loss, accuracy=found.accuracy, certified=certified)

    def _record(self, kind: str, **numbers: Any) -> None:
        progress = self.progress
        record = {"kind": kind, "epoch": progress.epoch + 1, "step": progress.step, **numbers}
        record |= {"seconds": round(progress.seconds, 3), "lr": self.setup.stepper.learning_rate}
        if self.world.leads:
            progress.metrics_size = self.run.append_metrics(record)

    def _checkpoint(self) -> None:
        if not self.world.leads:
            return
        if not all(bool(parameter.isfinite().all()) for parameter in self.parameters):
            raise FloatingPointError(f"weights are not finite after step {self.progress.step}; {self._kept()}")
        self.run.save_state(
            {
                "model": self.setup.model.state_dict(),
                "model_arguments": self.setup.arguments,
                "optimizer": self.setup.stepper.optimizer.state_dict(),
                "steps_seen": steps_taken(self.setup.stepper.optimizer),
                "progress": vars(self.progress),
                "random": torch.get_rng_state(),
            }
        )

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go back to a checkpoint.

        Raises:
            ValueError: if it is not that of this model, or the run is to end before it.
        """
        if state.get("model_arguments") != self.setup.arguments:
            found, wanted = state.get("model_arguments"), self.setup.arguments
            raise ValueError(
                f"{self.run.path / 'checkpoint.pt'} is of another model: {shown(found)}, the recipe has {shown(wanted)}"
            )
        try:
            self.setup.model.load_state_dict(state["model"])
            self.setup.stepper.optimizer.load_state_dict(state["optimizer"])
            self.progress = _Progress(**state["progress"])
            self.progress.check()
            continue_from(self.setup.stepper.optimizer, int(state["steps_seen"]))
            torch.set_rng_state(state["random"])
        except (AttributeError, KeyError, TypeError, ValueError, RuntimeError) as error:
            raise ValueError(f"{self.run.path / 'checkpoint.pt'} does not fit the recipe: {error}") from error
        self._require_not_past_the_end()
        if self.world.leads:
            self.run.cut_metrics(self.progress.metrics_size)
            for left_over in Path(self.run.path).glob("*.tmp"):
                if not left_over.is_dir():
                    left_over.unlink()

    def _require_not_past_the_end(self) -> None:
        epochs, begun = self.recipe.train.epochs, self.progress.epoch + (self.progress.batch > 0)
        if epochs < begun:
            raise ValueError(f"train.epochs={epochs}, but the run is in epoch {begun} already: give at least {begun}")

    def _stop(self) -> None:
        self._checkpoint()
        # Nobody leaves before it is written: torchrun ends all processes when the first is gone.
        self.world.total(torch.zeros(1, device=self.world.device))
        place = f"epoch {self.progress.epoch + 1} after step {self.progress.step}"
        raise StoppedError(
            f"stopped in {place}; a checkpoint is written. Continue with: trysquare train --resume {self.run.path}"
        )


@contextmanager
def _stop_requests() -> Iterator[threading.Event]:
    """Set by SIGINT and SIGTERM, so that a step is never torn; a second signal acts at once."""
    requested = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield requested
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def note(number: int, frame: Any) -> None:
        requested.set()
        signal.signal(number, before[signal.Signals(number)] or signal.SIG_DFL)

    for number in before:
        signal.signal(number, note)
    try:
        yield requested
    finally:
        for number, handler in before.items():
            signal.signal(number, handler or signal.SIG_DFL)


@dataclass(frozen=True)
class Evaluation:
    """What was measured; certified accuracy by radius."""

    loss: float
    accuracy: float
    certified: dict[float, float]


@torch.no_grad()
def evaluate(setup: Setup) -> Evaluation:
    """Evaluate the weights as they are now, on the shares of all processes.

    Certified accuracies use the Lipschitz bound of these weights. They leave out what ``ts.certify`` does on top: it
    takes off the error of evaluation, which is about 1e-6.
    """
    model, epsilons = setup.model, setup.recipe.evaluate.epsilons
    counts = torch.zeros(3 + len(epsilons), dtype=torch.float64)
    with evaluating(model):
        found = analyse(model, setup.input_shape, compare=False)
        options = {"head": model.head.weight} if takes_head(setup.loss) else {}
        for images, labels in setup.test.epoch(0):
            if len(labels):
                logits = model(images)
                loss = float(setup.loss(logits, labels, **options)) * len(labels)
                radii = certified_radius(logits, labels, found.features_bound, found.head_weight)
                right = int((logits.argmax(1) == labels).sum())
                counts += torch.tensor([loss, right, len(labels), *(int((radii > e).sum()) for e in epsilons)])
    loss, right, count, *certified = setup.world.total(counts.to(setup.world.device)).tolist()
    return Evaluation(
        loss / count,
        right / count,
        {epsilon: number / count for epsilon, number in zip(epsilons, certified, strict=True)},
    )


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
        """Whether it is time for another line."""
        wait = _REDRAW if self.terminal else _PLAIN
        return self.stream is not None and time.monotonic() - self.last >= wait

    def show(self, epoch: int, step: int, loss: float, accuracy: float, speed: float) -> None:
        """Show training after ``step`` steps."""
        elapsed = time.monotonic() - self.began
        left = elapsed / max(step - self.first, 1) * (self.steps - step)
        parts = [f"epoch {epoch + 1}/{self.epochs}", f"loss {loss:.4f}", f"accuracy {accuracy:.1%}"]
        if self.evaluation is not None:
            parts += [f"test {self.evaluation.accuracy:.1%}"]
            share = self.evaluation.certified[self.shown]
            parts += [f"certified at {radius_text(self.shown)}: {share:.1%}"]
        self._write("  ".join([*parts, f"{speed:,.0f} images/s", f"{_clock(left)} left"]), keep=not self.terminal)
        self.last = time.monotonic()

    def evaluated(self, epoch: int, evaluation: Evaluation) -> None:
        """Show, and keep on the screen, what was measured after an epoch."""
        self.evaluation = evaluation
        certified = ", ".join(f"{radius_text(epsilon)}: {share:.1%}" for epsilon, share in evaluation.certified.items())
        line = f"epoch {epoch + 1}/{self.epochs}  test loss {evaluation.loss:.4f}  accuracy {evaluation.accuracy:.1%}"
        self._write(f"{line}  certified at {certified}", keep=True)

    def say(self, text: str) -> None:
        """A line of its own."""
        self._write(text, keep=True)

    def _write(self, text: str, keep: bool) -> None:
        if self.stream is not None:
            start = "\r\x1b[K" if self.terminal else ""
            self.stream.write(f"{start}{text}" + "\n" * keep)
            self.stream.flush()


def _clock(seconds: float) -> str:
    """``1:02:03``.

    >>> from trysquare.lab.training.loop import _clock
    >>> _clock(62.5), _clock(3723)
    ('1:02', '1:02:03')
    """
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
