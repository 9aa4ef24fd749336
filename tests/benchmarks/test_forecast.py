"""The forecast prices what is recorded as it says, and it gives the paper's table before anything else."""

import pytest
import torch
import torch.nn.functional as F
from benchmarks.forecast import (
    CARDS,
    HOST,
    KERNEL,
    LARGE,
    OURS,
    PAPER,
    PAPER_CARD,
    ROW,
    THEIRS,
    Call,
    Case,
    construction,
    data_parallel,
    forecast,
    owners,
    record,
)
from benchmarks.networks import PADDED, REFERENCE
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.utils.parametrize import is_parametrized

A100 = CARDS["A100"]


def meta(*shape, dtype=torch.float32):
    return torch.empty(*shape, dtype=dtype, device="meta")


def priced(call):
    """What the card takes for the one kernel of a call, besides a second of other work that keeps the host ahead."""
    (kernel,) = [entry for entry in record(call) if entry.bytes]
    return forecast([Call("other", bytes=2039 * 10**9), kernel], A100) - 1


@pytest.mark.parametrize(
    ("call", "seconds"),
    [
        (lambda: meta(4096, 4096) @ meta(4096, 4096), 2 * 4096**3 / 19.5e12),
        (lambda: meta(8192, 8192, dtype=torch.bfloat16) @ meta(8192, 8192, dtype=torch.bfloat16), 2 * 8192**3 / 312e12),
        (lambda: meta(2048, 2048, dtype=torch.float64) @ meta(2048, 2048, dtype=torch.float64), 2 * 2048**3 / 19.5e12),
        # TF32, as by default; 64 maps of 28 x 28.
        (lambda: F.conv2d(meta(64, 512, 30, 30), meta(512, 512, 3, 3)), 2 * 9 * 512**2 * 64 * 28**2 / 156e12),
        (lambda: meta(10**8) + meta(10**8), 3 * 4 * 10**8 / 2039e9),
        # An expanded operand is read once.
        (lambda: meta(10**4, 10**4) * meta(10**4).expand(10**4, -1), 4 * (2 * 10**8 + 10**4) / 2039e9),
        (lambda: torch.linalg.cholesky_ex(meta(8, 512, 512)), 512 * ROW["linalg_cholesky_ex"]),
        (
            lambda: torch.linalg.solve_triangular(meta(2, 256, 256), meta(2, 256, 512), upper=False),
            256 * ROW["linalg_solve_triangular"],
        ),
        (lambda: meta(4).neg(), KERNEL),
    ],
)
def test_a_call_takes_the_largest_of_its_prices(call, seconds):
    assert priced(call) == pytest.approx(seconds, rel=1e-5)


def test_views_take_time_of_the_host_alone():
    calls = record(lambda: [meta(4, 4).t().reshape(16)[2:].unsqueeze(0) for _ in range(50)])
    assert len(calls) >= 200
    assert forecast(calls, A100) == pytest.approx(HOST * len(calls))


@pytest.mark.parametrize("call", [lambda: torch.linalg.qr(meta(4, 4)), lambda: torch.linalg.svdvals(meta(4, 4))])
def test_what_has_no_price_is_refused(call):
    with pytest.raises(ValueError, match=r"aten\..* has no price"):
        record(call)


def test_an_operator_that_is_not_of_torch_is_refused():
    with torch.library._scoped_library("benchmarks_forecast", "FRAGMENT") as library:
        library.define("double(Tensor x) -> Tensor")
        library.impl("double", lambda x: x + x, "Meta")
        with pytest.raises(ValueError, match="benchmarks_forecast"):
            record(lambda: torch.ops.benchmarks_forecast.double(meta(4)))


def test_construction_and_the_network_make_the_step():
    case = Case("resnet34", 2)
    model = case.model(OURS)
    whole, network = case.step(model), case.step(case.model(PADDED))
    built = construction([layer for layer in model.modules() if is_parametrized(layer, "weight")], "one by one")
    assert len(whole) == pytest.approx(len(network) + len(built), rel=0.01)  # what accumulates gradients counts twice
    assert sum(call.flops for call in whole) == sum(call.flops for call in (*network, *built))
    assert forecast(whole, A100) == pytest.approx(forecast(network + built, A100), rel=0.01)


def test_the_large_network_has_a_billion_parameters():
    parameters = Case(LARGE, 1).model(PADDED).parameters()
    assert 1e9 <= sum(parameter.numel() for parameter in parameters) < 1.1e9


def test_gradients_travel_while_the_card_computes_and_kernels_do_not():
    calls, a_second = [Call("mm", flops=2 * 10**13, bytes=1, precision="float32")], 300e9 * 8 / 7 / 2
    alone = forecast(calls, A100)
    assert alone == pytest.approx(20 / 19.5)
    assert data_parallel(calls, A100, 1, reduced=a_second, exchanged=a_second) == alone
    assert data_parallel(calls, A100, 8, reduced=a_second) == alone
    assert data_parallel(calls, A100, 8, reduced=2 * a_second) == pytest.approx(2)
    assert data_parallel(calls, A100, 8, reduced=0, exchanged=a_second) == pytest.approx(alone + 1)


def test_the_fit_gives_the_two_figures_it_was_fitted_to():
    case = Case("resnet34", 512)
    theirs, plain = (case.step(case.model(name)) for name in (THEIRS, REFERENCE))
    assert 1e3 * HOST * len(theirs) == pytest.approx(PAPER[THEIRS][128], rel=0.005)  # as many calls at every batch
    added = 1e3 * (forecast(theirs, CARDS[PAPER_CARD]) - forecast(plain, CARDS[PAPER_CARD]))
    assert added == pytest.approx(PAPER[THEIRS][512] - PAPER[REFERENCE][512], rel=0.01)


@settings(deadline=None)
@given(st.lists(st.integers(1, 10**6), min_size=1, max_size=40), st.integers(1, 12))
def test_owners_share_everything_evenly(costs, ranks):
    shares = owners(costs, ranks)
    assert sorted(index for share in shares for index in share) == list(range(len(costs)))
    # No schedule of the largest first is further than this from the best, which is at least both of these.
    best = max(max(costs), sum(costs) / ranks)
    assert max(sum(costs[index] for index in share) for share in shares) <= best + max(costs) * (1 - 1 / ranks) + 1e-6
