import io
import sys

from trysquare import progress


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_quiet_unless_a_terminal_waits(monkeypatch):
    monkeypatch.setattr(progress, "_QUIET_SECONDS", 0.0)
    quiet = io.StringIO()
    monkeypatch.setattr(sys, "stderr", quiet)
    assert list(progress.track("abc", "letters", 3)) == ["a", "b", "c"]
    assert quiet.getvalue() == ""


def test_one_bar_at_a_time(monkeypatch):
    monkeypatch.setattr(progress, "_QUIET_SECONDS", 0.0)
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    for _ in progress.track(range(2), "outer", 2):
        list(progress.track(range(2), "inner", 2))
    shown = terminal.getvalue()
    assert "outer" in shown
    assert "1/2" in shown
    assert "inner" not in shown
    assert shown.endswith("\x1b[K")


def test_nothing_before_two_seconds(monkeypatch):
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    list(progress.track(range(3), "quick", 3))
    assert terminal.getvalue() == ""
