"""Building kernels costs no more than it did: a guard that does not look at the clock."""

import json

import pytest
from benchmarks.counts import LAYERS, RECORDED, count, excess
from benchmarks.measure import aten_calls, flops
from benchmarks.networks import NETWORKS, REFERENCE, build
from benchmarks.steps import evaluation, images

HOW = "if the growth is meant, run python -m benchmarks counts --record"
LIMITS = json.loads(RECORDED.read_text())


def test_every_layer_is_recorded():
    assert LIMITS.keys() == LAYERS.keys(), HOW


@pytest.mark.parametrize("name", LAYERS)
def test_costs_have_not_grown(name):
    assert not excess(count(name), LIMITS[name]), HOW


@pytest.mark.parametrize("network", NETWORKS)
def test_an_evaluation_is_no_more_operations_than_with_plain_convolutions(network):
    x, _ = images(1, 32)
    plain, ours = (evaluation(build(network, 32, name), x) for name in (REFERENCE, "AOC"))
    ours()  # builds the kernels
    assert aten_calls(ours) <= aten_calls(plain)
    assert flops(ours) <= flops(plain)


def test_growth_is_seen():
    limit = {"flops": 1000, "calls": 100, "saved": 1000}
    assert not excess({"flops": 1010, "calls": 105, "saved": 1}, limit)
    assert excess({"flops": 1011, "calls": 106, "saved": 1000}, limit).keys() == {"flops", "calls"}
    assert excess({"flops": 1, "calls": 1, "saved": 1011}, limit).keys() == {"saved"}
