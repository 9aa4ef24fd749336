"""Building kernels costs no more than it did: a guard that does not look at the clock."""

import json

import pytest
import torch
from benchmarks.counts import LAYERS, RECORDED, count, excess
from benchmarks.measure import aten_calls, flops
from benchmarks.networks import NETWORKS, REFERENCE, build, evaluation, images

from benchmarks import results
from trysquare.nn.linalg import projectors

CONSTRAINT = (results.ROOT / "constraints.txt").read_text().strip().removeprefix("torch==")
HOW = "if the growth is meant, run python -m benchmarks counts --record"
LIMITS = json.loads(RECORDED.read_text())


def test_every_layer_is_recorded():
    assert LIMITS.keys() == LAYERS.keys(), HOW


@pytest.mark.skipif(not torch.__version__.startswith(CONSTRAINT), reason=f"recorded with torch {CONSTRAINT}")
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
    limit = {"flops": 1000, "calls": 100, "saved": 1000, "written": 5}
    assert not excess(limit, limit)
    assert excess({**limit, "flops": 1001, "calls": 101}, limit) == {"flops": "1001 > 1000", "calls": "101 > 100"}
    assert excess({"flops": 1, "calls": 1, "saved": 1, "written": 6}, limit).keys() == {"written"}


@pytest.mark.parametrize("what", [torch.linalg.svdvals, torch.clone])
def test_an_operation_more_is_seen(what, monkeypatch):
    grow = projectors._grow.forward

    def dearer(*arguments):
        result = grow(*arguments)
        what(result[0])
        return result

    monkeypatch.setattr(projectors._grow, "forward", staticmethod(dearer))
    assert excess(count("square, k3"), LIMITS["square, k3"]).keys() >= {"calls", "written"}
