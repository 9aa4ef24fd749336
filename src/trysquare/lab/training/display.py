"""What a person sees while training: one line that changes on a terminal, lines now and then elsewhere."""

from __future__ import annotations

import sys
import time
from typing import TextIO

from trysquare.lab.training.evaluation import Evaluation

# Seconds between two changes of the line on a terminal, and between two lines elsewhere.
_REDRAW, _PLAIN = 0.2, 30.0


class Display:
    """Progress of a run.

    Args:
        epochs: of the whole run.
        steps: of the whole run.
        first: step at which it starts.
        shown: radius, as a key, whose certified accuracy is shown.
        stream: where to; nowhere if ``None``.
    """

    def __init__(self, epochs: int, steps: int, first: int, shown: str, stream: TextIO | None = sys.stderr) -> None:
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
            parts += [f"certified at {self.shown}: {self.evaluation.certified[self.shown]:.1%}"]
        self._write("  ".join([*parts, f"{speed:,.0f} images/s", f"{_clock(left)} left"]), keep=not self.terminal)
        self.last = time.monotonic()

    def evaluated(self, epoch: int, evaluation: Evaluation) -> None:
        """Show, and keep on the screen, what was measured after an epoch."""
        self.evaluation = evaluation
        certified = ", ".join(f"{radius}: {accuracy:.1%}" for radius, accuracy in evaluation.certified.items())
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

    >>> from trysquare.lab.training.display import _clock
    >>> _clock(62.5), _clock(3723)
    ('1:02', '1:02:03')
    """
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
