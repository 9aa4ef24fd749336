import os
import sys
from functools import partial

import pytest
import torch
from benchmarks.measure import (
    ChildError,
    aten_calls,
    exponent,
    flops,
    in_child,
    interleaved,
    peak_bytes,
    ratio,
    saved_bytes,
    written_bytes,
)
from benchmarks.results import ROOT
from torch import nn

from benchmarks import measure


def test_calls_take_turns():
    order = []
    samples = interleaved({name: partial(order.append, name) for name in "abc"}, 20)
    turns = ["".join(order[start : start + 3]) for start in range(0, len(order), 3)]
    assert len(turns) == 21
    assert all(sorted(turn) == ["a", "b", "c"] for turn in turns)
    assert set(turns) == {"abc", "acb", "bac", "bca", "cab", "cba"}
    assert {name: len(seconds) for name, seconds in samples.items()} == {"a": 20, "b": 20, "c": 20}
    assert all(seconds >= 0 for row in samples.values() for seconds in row)


@pytest.fixture
def clock(monkeypatch):
    """A clock that calls put forward by the seconds that they return."""
    now = [0.0]
    monkeypatch.setattr(measure.time, "perf_counter", lambda: now[0])
    return lambda seconds: now.__setitem__(0, now[0] + seconds)


def test_calls_that_take_too_long_are_sampled_less(clock):
    calls = []
    slow = {"slow": lambda: clock(10.0) or calls.append("slow"), "fast": lambda: clock(1.0)}
    slow["slower"] = lambda: clock(30.0) or calls.append("slower")
    samples = interleaved(slow, 6, patience=20.0)
    assert {name: len(taken) for name, taken in samples.items()} == {"slow": 2, "slower": 1, "fast": 6}
    assert (calls.count("slow"), calls.count("slower")) == (3, 2)  # the first does not count
    assert len(interleaved(slow, 6, patience=20.0, always=("slower",))["slower"]) == 6


def test_a_first_run_that_builds_what_is_kept_is_no_sample(clock):
    seconds = iter([30.0, 1.0, 1.0, 1.0])
    assert interleaved({"cached": lambda: clock(next(seconds))}, 3, patience=20.0) == {"cached": [1.0, 1.0, 1.0]}


def test_a_ratio_is_within_turns():
    slow_for_a_while = [1.0, 10.0, 11.0]
    assert ratio([2.0, 20.0, 22.0], slow_for_a_while) == 2
    assert ratio([2.0], slow_for_a_while) == 2


@pytest.mark.parametrize("power", [3.0, -0.5, 0.0])
def test_exponent_of_a_power_is_found(power):
    x = [1.0, 2.0, 4.0, 10.0]
    assert exponent(x, [7 * value**power for value in x]) == pytest.approx(power, abs=1e-9)


def test_counts_of_a_product():
    a, b = torch.randn(3, 4), torch.randn(4, 5)
    assert flops(lambda: a @ b) == 2 * 3 * 4 * 5
    assert aten_calls(lambda: a @ b) == 1
    assert aten_calls(lambda: a + a + a) == 2
    assert written_bytes(lambda: (a @ b).t()) == 4 * 3 * 5
    assert written_bytes(lambda: torch.linalg.qr(b)) == 4 * (4 * 4 + 4 * 5)


def test_saved_bytes_count_a_storage_once():
    layer = nn.Linear(6, 6, bias=False)
    x = torch.randn(2, 6)
    assert saved_bytes(lambda: layer(layer(x.requires_grad_()))) == 4 * (36 + 12 + 12)


def test_peak_memory_sees_what_was_held():
    before = peak_bytes()
    block = bytearray(before + 50_000_000)
    block[::4096] = b"x" * len(block[::4096])
    assert peak_bytes() >= before + 40_000_000


def test_peak_memory_of_a_child_is_its_own(tmp_path, monkeypatch):
    (tmp_path / "small.py").write_text("from benchmarks.measure import peak_bytes; print(peak_bytes())")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), str(ROOT)]))
    before = in_child("small", [], 60)
    block = bytearray(peak_bytes() + 500_000_000)
    block[::4096] = b"x" * len(block[::4096])
    assert in_child("small", [], 60) < before + 50_000_000


def test_child_gives_json_or_says_why_not(tmp_path, monkeypatch):
    (tmp_path / "said.py").write_text("print('noise'); print('{\"a\": 1}')")
    (tmp_path / "failed.py").write_text("raise ValueError('no such layer')")
    (tmp_path / "slept.py").write_text("import time; time.sleep(60)")
    (tmp_path / "killed.py").write_text("import os, signal; os.kill(os.getpid(), signal.SIGKILL)")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert in_child("said", [], 60) == {"a": 1}
    with pytest.raises(ChildError, match="no such layer"):
        in_child("failed", [], 60)
    with pytest.raises(ChildError, match=r"not ready after 0\.2 s"):
        in_child("slept", [], 0.2)
    with pytest.raises(ChildError, match="signal 9"):
        in_child("killed", [], 60)


def test_too_much_memory_fails_instead_of_killing(tmp_path, monkeypatch):
    (tmp_path / "greedy.py").write_text(
        "import sys, torch\n"
        "from benchmarks.measure import limited_memory\n"
        "try:\n"
        "    with limited_memory(2):\n"
        "        torch.empty(10**9)\n"
        "except MemoryError as error:\n"
        "    sys.exit(str(error))\n"
    )
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *sys.path]))
    with pytest.raises(ChildError, match="needs more than 2 GB of memory"):
        in_child("greedy", [], 120)
