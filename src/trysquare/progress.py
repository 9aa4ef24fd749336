"""A progress bar for what takes long: on a terminal only, and only after two seconds."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from threading import Event, Thread
from typing import TypeVar

T = TypeVar("T")

_QUIET_SECONDS = 2.0
_REDRAW_SECONDS = 0.5
_WIDTH = 30


class _Bar:
    """One line on stderr, drawn by a thread of its own, so that it also moves while one call into torch takes long."""

    # The outermost bar; those inside of it are not drawn.
    shown: _Bar | None = None

    def __init__(self, label: str, total: int | None) -> None:
        self.label, self.total, self.done = label, total, 0
        self.started, self.drawn = time.monotonic(), False
        self.closed = Event()
        self.thread = Thread(target=self._keep_drawing, daemon=True)
        if _Bar.shown is None and sys.stderr is not None and sys.stderr.isatty():
            _Bar.shown = self
            self.thread.start()

    def _keep_drawing(self) -> None:
        wait = _QUIET_SECONDS
        while not self.closed.wait(wait):
            self._draw()
            wait = _REDRAW_SECONDS

    def _draw(self) -> None:
        self.drawn = True
        elapsed = f"{time.monotonic() - self.started:.0f} s"
        sys.stderr.write(f"\r\x1b[K{self.label} {self._filled()}{elapsed}")
        sys.stderr.flush()

    def _filled(self) -> str:
        if self.total is None:
            return ""
        filled = _WIDTH * self.done // max(self.total, 1)
        return f"[{'#' * filled}{'-' * (_WIDTH - filled)}] {self.done}/{self.total}, "

    def close(self) -> None:
        """Clear the line."""
        self.closed.set()
        if _Bar.shown is not self:
            return
        self.thread.join()
        _Bar.shown = None
        if self.drawn:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()


def track(items: Iterable[T], label: str, total: int) -> Iterator[T]:
    """Iterate, and show progress on stderr if that is a terminal and two seconds have passed.

    >>> list(track([1, 2], "counting", 2))
    [1, 2]
    """
    bar = _Bar(label, total)
    try:
        for done, item in enumerate(items):
            bar.done = done
            yield item
    finally:
        bar.close()


@contextmanager
def busy(label: str) -> Iterator[None]:
    """Show that one long call is still running, in the same way and under the same conditions as ``track``.

    >>> with busy("adding"):
    ...     1 + 1
    2
    """
    bar = _Bar(label, None)
    try:
        yield
    finally:
        bar.close()
