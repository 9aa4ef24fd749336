import pytest
from benchmarks.__main__ import parser
from benchmarks.measure import ChildError
from benchmarks.overhead import Case, _why_not, describe, ratios
from torch import nn

from benchmarks import overhead

CASE = Case("resnet18", 4, 2)


def test_what_fails_is_said_so_and_not_tried_with_a_larger_batch(monkeypatch):
    started = []

    def child(module, arguments, limit):
        _, _, batch, variant, _ = arguments
        started.append((batch, variant))
        if variant == "SOC":
            raise ChildError("not ready")
        return {"peak": 2}

    monkeypatch.setattr(overhead, "in_child", child)
    monkeypatch.setattr(overhead, "build", lambda *_: nn.Sequential(nn.Flatten(), nn.Linear(3 * 4 * 4, 10)))
    monkeypatch.setattr(overhead, "QUICK", (CASE, CASE._replace(batch=4)))
    monkeypatch.setattr(overhead, "QUICK_VARIANTS", ("Conv2d", "AOC", "SOC"))
    data = overhead.run(parser().parse_args(["overhead", "--quick"]))
    assert [entry["batch"] for entry in data["resnet18"]] == [2, 4]
    assert all(entry["rows"]["SOC"] == {"error": "not ready (batch 2)"} for entry in data["resnet18"])
    assert [batch for batch, variant in started if variant == "SOC"] == [2]
    table, failed = describe(data)
    assert [row[0] for row in table.rows] == ["Conv2d", "AOC"]
    assert "SOC (resnet18, 4 x 4, batch 2; resnet18, 4 x 4, batch 4): not ready (batch 2)" in failed
    assert "SOC" not in ratios(data, "evaluation")[str(CASE)]


def test_what_takes_very_long_is_not_tried_with_a_larger_batch():
    smaller = [{"batch": 2, "rows": {"AOC": {"train": [overhead.SLOW_STEP + 1]}, "SOC": {"train": [1.0]}}}]
    assert _why_not("AOC", smaller) == {"error": "a step with batch 2 takes 31 s"}
    assert _why_not("SOC", smaller) == {}


@pytest.mark.parametrize(("variant", "processes"), [("BCOP, original style", 1), ("AOC", 3)])
def test_what_is_compared_has_three_processes(monkeypatch, variant, processes):
    monkeypatch.setattr(overhead, "in_child", lambda *_: {"peak": 2})
    monkeypatch.setattr(overhead, "_add_times", lambda *_: None)
    monkeypatch.setattr(overhead, "FULL", (CASE,))
    data = overhead.run(parser().parse_args(["overhead"]))
    assert len(data["resnet18"][0]["rows"][variant]["memory_train"]) == processes
