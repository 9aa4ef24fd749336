"""A progress bar for what takes long: on a terminal only, and only after two seconds."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")

_QUIET_SECONDS = 2.0
_WIDTH = 30


class _Bar:
    """One line on stderr. An outer bar hides the inner ones."""

    shown = False

    def __init__(self, label: str, total: int) -> None:
        self.label, self.total, self.started = label, total, time.monotonic()
        self.drawn = False

    def draw(self, done: int) -> None:
        """Show how much is done, if it is time to."""
        elapsed = time.monotonic() - self.started
        if elapsed < _QUIET_SECONDS or not sys.stderr.isatty() or (_Bar.shown and not self.drawn):
            return
        _Bar.shown = self.drawn = True
        filled = _WIDTH * done // max(self.total, 1)
        bar = "#" * filled + "-" * (_WIDTH - filled)
        sys.stderr.write(f"\r{self.label} [{bar}] {done}/{self.total}, {elapsed:.0f} s")
        sys.stderr.flush()

    def close(self) -> None:
        """Clear the line."""
        if self.drawn:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()
            _Bar.shown = False


def track(items: Iterable[T], label: str, total: int) -> Iterator[T]:
    """Iterate, and show progress on stderr if that is a terminal and two seconds have passed.

    >>> list(track([1, 2], "counting", 2))
    [1, 2]
    """
    bar = _Bar(label, total)
    try:
        for done, item in enumerate(items):
            bar.draw(done)
            yield item
    finally:
        bar.close()
