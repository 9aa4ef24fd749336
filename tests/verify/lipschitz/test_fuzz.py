"""A short run of the fuzzer; ``python -m tests.fuzz`` runs for as long as one likes."""

import pytest

from tests.fuzz import Program, Tally, judge, largest_stretch


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("block", range(8))
def test_no_bound_of_a_random_network_is_below_what_differences_find(block):
    tally = Tally()
    for seed in range(40 * block, 40 * (block + 1)):
        judge(seed, tally)
    assert not tally.unsound, str(tally)
    assert not tally.raised, str(tally)
    assert tally.certified >= 25, str(tally)
    assert tally.tight >= 10, str(tally)


@pytest.mark.filterwarnings("ignore")
def test_the_fuzzer_would_see_a_wrong_bound(monkeypatch):
    monkeypatch.setattr(
        "trysquare.lipschitz_bound", lambda model, shape: 0.5 * largest_stretch(model, _shapes(model), 0)
    )
    tally = Tally()
    for seed in range(20):
        judge(seed, tally)
    assert len(tally.unsound) > 10


def _shapes(model: Program):
    return [shape for shape in (model.shape, model.second) if shape]
