import os
import subprocess
import sys

import pytest
from benchmarks.__main__ import parser
from benchmarks.measure import ChildError
from benchmarks.overhead import Case, _add_memory, _worth_trying, describe, ratios
from benchmarks.report import Table
from benchmarks.results import ROOT
from torch import nn

from benchmarks import overhead

CASE = Case("resnet18", 4, 2)


@pytest.fixture
def started(monkeypatch):
    """Processes that are started for small networks: those for SOC fail, and those that evaluate Cayley."""
    found = []

    def child(module, arguments, limit):
        _, _, batch, variant, mode, *_ = arguments
        found.append((batch, variant))
        if variant == "SOC" or (variant == "Cayley" and mode == "eval"):
            raise ChildError("not ready")
        return {"peak": 2, "saved": 1}

    monkeypatch.setattr(overhead, "in_child", child)
    monkeypatch.setattr(overhead, "build", lambda *_: nn.Sequential(nn.Flatten(), nn.Linear(3 * 4 * 4, 10)))
    return found


def test_what_fails_has_no_times_and_what_can_only_be_trained_has_a_row(started, monkeypatch):
    monkeypatch.setattr(overhead, "QUICK", (CASE, CASE._replace(batch=4)))
    data = overhead.run(parser().parse_args(["overhead", "--quick", "--variants", "AOC", "SOC", "Cayley"]))
    assert [entry["batch"] for entry in data["resnet18"]] == [2, 4]
    for entry in data["resnet18"]:
        assert entry["rows"]["SOC"]["error"] == "not ready (batch 2)"
        assert "train" in entry["rows"]["Cayley"]
        assert "eval" not in entry["rows"]["Cayley"]
    assert [batch for batch, variant in started if variant == "SOC"] == [2]
    step, *_, failed = describe(data)
    assert isinstance(step, Table)
    assert [row[0] for row in step.rows] == ["Conv2d", "AOC", "Cayley"]
    assert "* SOC (resnet18, 4 x 4, batch 2): not ready (batch 2)" in failed
    assert "Cayley" not in ratios(data, "evaluation")[str(CASE)]


def test_what_takes_very_long_is_not_tried_with_a_larger_batch():
    smaller = [{"batch": 2, "rows": {"AOC": {"train": [overhead.SLOW_STEP + 1]}, "SOC": {"train": [1.0]}}}]
    assert _worth_trying("AOC", smaller) == {"error": "a step with batch 2 takes 31 s"}
    assert _worth_trying("SOC", smaller) == {}


@pytest.mark.parametrize(("variant", "processes"), [("BCOP, original style", 1), ("AOC", 3)])
def test_a_slow_variant_has_one_process_unless_it_is_compared(started, monkeypatch, variant, processes):
    monkeypatch.setattr(overhead, "PATIENCE", 0.0)
    row = {}
    for _ in range(3):
        _add_memory(row, CASE, variant, 1.0)
    assert len(row["memory_train"]) == len(row["memory_eval"]) == processes


@pytest.mark.parametrize("alive", [True, False])
def test_a_process_ends_with_the_one_that_started_it(alive):
    parent = os.getpid() if alive else -1
    line = f"import time; from benchmarks.overhead import end_with_parent; end_with_parent({parent}); time.sleep(1.5)"
    done = subprocess.run([sys.executable, "-c", f"{line}; exit(7)"], cwd=ROOT, check=False, timeout=60)
    assert done.returncode == (7 if alive else 1)
