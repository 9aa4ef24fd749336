import time

import pytest
import torch
from benchmarks.measure import ChildError
from benchmarks.overhead import Case, Limits
from torch import nn

from benchmarks import overhead

LIMITS = Limits(rounds=1, processes=2, patience=1.0, seconds=1.0, gigabytes=1.0)


@pytest.fixture
def tried(monkeypatch):
    """Processes that are started for small networks, those for SOC in vain, the second for Cayley too."""
    started = []

    def child(module, arguments, limit):
        _, _, batch, variant, *_ = arguments
        started.append((batch, variant))
        if variant == "SOC" or (variant == "Cayley" and started.count((batch, variant)) > 2):
            raise ChildError("not ready")
        return {"peak": 2, "saved": 1}

    monkeypatch.setattr(overhead, "in_child", child)
    monkeypatch.setattr(overhead, "build", lambda *_: nn.Sequential(nn.Flatten(), nn.Linear(3 * 4 * 4, 10)))
    return started


def measured(*arguments):
    return [part() for part in overhead._by_batch(*arguments)]


def test_what_fails_with_a_batch_is_not_tried_with_a_larger_one(tried):
    cases = [Case("resnet34", 4, batch) for batch in (8, 2)]
    found = measured(cases, ["Conv2d", "SOC"], LIMITS)
    assert [entry["batch"] for entry in found] == [2, 8]
    assert [entry["rows"]["SOC"] for entry in found] == [{"error": "not ready (batch 2)"}] * 2
    assert [batch for batch, variant in tried if variant == "SOC"] == [2]


def test_what_takes_very_long_is_not_tried_with_a_larger_batch(tried, monkeypatch):
    monkeypatch.setattr(overhead, "SLOW_STEP", 0.0)
    cases = [Case("resnet34", 4, batch) for batch in (2, 8)]
    found = measured(cases, ["Conv2d"], LIMITS)
    assert "train" in found[0]["rows"]["Conv2d"]
    assert found[1]["rows"] == {"Conv2d": {"error": "a step with batch 2 takes 0 s"}}


def test_a_slow_variant_has_one_process_unless_targets_are_about_it(tried):
    for variant, processes in (("orthogonium AOC", 1), ("AOC", LIMITS.processes)):
        overhead._memory(Case("resnet34", 4, 2), [variant], LIMITS._replace(patience=1e-9), {})
        assert tried.count((2, variant)) == 2 * processes  # train and eval
    overhead._memory(Case("resnet34", 4, 4), ["orthogonium AOC"], LIMITS, {})
    assert tried.count((4, "orthogonium AOC")) == 2 * LIMITS.processes


def test_what_the_targets_are_about_has_more_turns():
    calls = dict.fromkeys(("Conv2d", "AOC", "SOC"), lambda: None)
    samples = overhead._timed(calls, (2, 3), 1.0, "some case")
    assert {name: len(taken) for name, taken in samples.items()} == {"Conv2d": 5, "AOC": 5, "SOC": 2}


def test_what_the_targets_compare_is_sampled_in_every_turn():
    calls = dict.fromkeys(("Conv2d", "orthogonium AOC, QR", "SOC"), lambda: time.sleep(0.001))
    samples = overhead._timed(calls, (3, 1), 1e-9, "some case")
    assert {name: len(taken) for name, taken in samples.items()} == {"Conv2d": 3, "orthogonium AOC, QR": 3, "SOC": 1}


def test_what_can_only_be_trained_has_a_row(monkeypatch, tried):
    def child(module, arguments, limit):
        if arguments[3] == "SOC" and arguments[4] == "eval":
            raise ChildError("not ready")
        return {"peak": 2, "saved": 1}

    monkeypatch.setattr(overhead, "in_child", child)
    data = {"resnet34": measured([Case("resnet34", 4, 2)], ["Conv2d", "SOC"], LIMITS)}
    table, missing, absent, spread, operations, plot, *_ = overhead.describe(data)
    assert "train" in data["resnet34"][0]["rows"]["SOC"]
    assert table.rows[1][0] == "SOC"
    assert table.rows[1][3:5] == ["", ""]
    assert "* SOC, evaluation: not ready (batch 2)" in missing
    assert absent.startswith("Not part of this run: Conv2d, our padding; AOC; ")
    assert spread == "Peaks of processes of one variant differ by up to 0% in training and 0% in evaluation."
    assert operations.startswith("Operations of torch in an evaluation: ")
    assert "with Conv2d (" in operations
    assert plot.series["evaluation"] == ([], [])
    assert not overhead.peer_wins(data)


def test_samples_that_were_taken_are_kept(tried):
    row = measured([Case("resnet34", 4, 2)], ["Conv2d", "Cayley"], LIMITS)[0]["rows"]["Cayley"]
    assert row["memory_train"] == row["memory_eval"] == [{"peak": 2, "saved": 1}]
    assert len(row["train"]) == 1


def test_two_kinds_that_are_the_same_network_are_measured_once(tried):
    rows = overhead._measure_case(Case("resnet34", 4, 2), ["Conv2d", "AOC", "AOC parsimonious"], LIMITS, {})
    assert "the network is that of AOC" in rows["AOC parsimonious"]["error"]
    assert "train" in rows["AOC"]


@pytest.mark.parametrize(("network", "same"), [("resnet18", True), ("bcop-small", False)])
def test_a_stride_that_keeps_the_channels_makes_them_two(network, same):
    with torch.device("meta"):
        assert overhead._same_network(Case(network, 32, 2), ["AOC", "AOC parsimonious"]) == same
