import io
import os
import pty
import subprocess
import sys
import textwrap
import time

from trysquare import progress


class Terminal(io.StringIO):
    def isatty(self):
        return True


def wait_for(seconds=0.2):
    time.sleep(seconds)


def test_quiet_unless_a_terminal_waits(monkeypatch):
    monkeypatch.setattr(progress, "_QUIET_SECONDS", 0.0)
    quiet = io.StringIO()
    monkeypatch.setattr(sys, "stderr", quiet)
    assert list(progress.track("abc", "letters", 3)) == ["a", "b", "c"]
    with progress.busy("thinking"):
        wait_for(0.05)
    assert quiet.getvalue() == ""


def test_one_bar_at_a_time(monkeypatch):
    monkeypatch.setattr(progress, "_QUIET_SECONDS", 0.0)
    monkeypatch.setattr(progress, "_REDRAW_SECONDS", 0.01)
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    for _ in progress.track(range(2), "outer", 2):
        for _ in progress.track(range(2), "inner", 2):
            wait_for()
        with progress.busy("innermost"):
            wait_for()
    shown = terminal.getvalue()
    assert "outer" in shown
    assert "1/2" in shown
    assert "inner" not in shown
    assert shown.endswith("\x1b[K")
    terminal.truncate(0)
    wait_for()
    assert terminal.getvalue() == ""


def test_nothing_before_two_seconds(monkeypatch):
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    list(progress.track(range(3), "quick", 3))
    assert terminal.getvalue() == ""


def test_a_bar_is_left_by_an_exception(monkeypatch):
    monkeypatch.setattr(sys, "stderr", Terminal())
    for _ in progress.track(range(3), "left", 3):
        break
    try:
        with progress.busy("failing"):
            raise KeyboardInterrupt
    except KeyboardInterrupt:
        pass
    assert progress._Bar.shown is None


def on_a_terminal(code):
    """What a program shows on a terminal of its own."""
    ours, theirs = pty.openpty()
    program = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)], stdin=theirs, stdout=subprocess.DEVNULL, stderr=theirs
    )
    os.close(theirs)
    shown = b""
    try:
        while part := os.read(ours, 1024):
            shown += part
    except OSError:  # how Linux ends a terminal that nobody writes to
        pass
    os.close(ours)
    assert program.wait() == 0, shown
    return shown.decode()


def test_one_long_call_into_torch_shows_that_it_runs():
    shown = on_a_terminal(
        """
        import time, torch
        import trysquare as ts
        from trysquare import progress
        progress._QUIET_SECONDS = progress._REDRAW_SECONDS = 0.05
        def slow(function):
            def later(*args):
                time.sleep(0.6)
                return function(*args)
            return later
        torch.linalg.svdvals, torch.linalg.cholesky_ex = slow(torch.linalg.svdvals), slow(torch.linalg.cholesky_ex)
        padded = torch.nn.Conv2d(2, 2, 3, padding=1)
        ts.singular_values(padded, (2, 4, 4))
        ts.spectral_norm_bound(padded, (2, 4, 4))
        ts.spectral_norm_bound(torch.nn.Linear(4, 4))
        """
    )
    assert "dense singular values" in shown
    assert "dense bound" in shown
    assert "certified bound [" in shown
    assert shown.endswith("\r\x1b[K")
