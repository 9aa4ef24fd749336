"""SOC's own claims: skewness, the certified norm, the truncation error and its bound."""

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import trysquare as ts
from tests.oracle import dense, distance_from_orthogonal
from trysquare.nn.linalg.norms import gram_norm_bound, kernel_norm_bound
from trysquare.nn.parametrizations.soc import enough_terms, truncation_error


def circulant(kernel, size=6):
    """Dense matrix of a centred stride-1 kernel on a circular domain."""
    c_out, c_in, *taps = kernel.shape
    plain = torch.nn.Conv2d(c_in, c_out, taps, padding="same", padding_mode="circular", bias=False).double()
    plain.weight = torch.nn.Parameter(kernel)
    return dense(plain, (c_in, size, size))


@pytest.mark.parametrize("shape", [(5, 5), (4, 9), (9, 4), (1, 1)])
def test_gram_bound_is_above_the_norm_and_close(shape):
    matrix = torch.randn(3, *shape, dtype=torch.float64)
    ratio = gram_norm_bound(matrix) / torch.linalg.matrix_norm(matrix, 2)
    assert ((ratio >= 1) & (ratio < min(shape) ** (1 / 64) + 1e-12)).all()
    assert gram_norm_bound(torch.zeros(shape)) < 1e-6


@pytest.mark.parametrize("shape", [(4, 4, 3, 3), (6, 6, 3, 1), (2, 2, 5, 3)])
def test_kernel_bound_is_above_the_norm(shape):
    kernel = torch.randn(shape, dtype=torch.float64)
    ratio = kernel_norm_bound(kernel, 2) / torch.linalg.matrix_norm(circulant(kernel), 2)
    assert 1 <= ratio < 3


@pytest.mark.parametrize("scale", [0.01, 1.0, 100.0])
def test_the_kernel_is_skew_and_its_norm_is_certified(scale):
    layer = ts.OrthoConv2d(4, 4, 3, method="soc", norm=2.0, dtype=torch.float64)
    skew = layer.parametrization.skew(scale * layer.free_tensors[0].detach())[0]
    matrix = circulant(skew)
    torch.testing.assert_close(matrix.T, -matrix)
    assert torch.linalg.matrix_norm(matrix, 2) <= 2.0


@pytest.mark.parametrize("terms", [1, 2, 4, 8, 14])
def test_truncation_error_is_within_its_bound_and_the_bound_is_not_idle(terms):
    layer = ts.OrthoConv2d(3, 3, 3, method="soc", terms=terms, dtype=torch.float64)
    skew = layer.parametrization.skew(layer.free_tensors[0].detach())[0]
    dense_skew = circulant(skew)
    error = torch.linalg.matrix_norm(dense(layer, (3, 6, 6)) - torch.linalg.matrix_exp(dense_skew), 2)
    angles = torch.linspace(-1, 1, 99, dtype=torch.float64)
    powers = [a * (1j * angles) ** j for j, a in enumerate(layer.parametrization.coefficients)]
    missed = float((sum(powers) - (1j * angles).exp()).abs().max())
    assert 0.5 * truncation_error(1.0, terms) - 1e-14 < missed < truncation_error(1.0, terms) + 1e-14
    assert error < layer.truncation_error + 1e-13
    assert distance_from_orthogonal(layer, (3, 6, 6)) < layer.truncation_error + 1e-13


def test_the_number_of_terms_and_the_size_that_the_layer_says():
    assert enough_terms(1.0) == 7
    assert enough_terms(1.0, 1e-12) == 12
    layer = ts.OrthoConv2d(4, 4, (3, 1), method="soc")
    assert layer.kernel_size == (15, 1)
    assert tuple(layer.weight.shape[2:]) == (15, 1)
    assert layer.truncation_error < 1e-6
    assert "kernel_size=(15, 1)" in repr(layer)
    assert "skew kernel (3, 1)" in repr(layer)
    assert ts.OrthoConv2d(4, 8, 3, stride=2, method="soc", terms=4).kernel_size == (10, 10)
    assert ts.OrthoConv2d(4, 4, 1, stride=2, method="soc").kernel_size == (1, 1)


def test_a_larger_norm_rotates_further():
    def turn(norm):
        torch.manual_seed(0)
        layer = ts.OrthoConv2d(4, 4, 1, method="soc", norm=norm, dtype=torch.float64)
        return float((layer.weight[..., 0, 0] - torch.eye(4)).detach().norm())

    assert turn(3.0) > 2 * turn(1.0)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"kernel_size": 2}, "must be odd"), ({"terms": 0}, "terms=0"), ({"terms": True}, "terms=True"),
        ({"norm": 0.0}, "norm=0"), ({"norm": 50.0}, "norm=50.0 must be a number above 0 and at most 8"),
        ({"norm": float("inf")}, "norm=inf"), ({"norm": float("nan")}, "norm=nan"), ({"norm": "a"}, "norm='a'"),
        ({"norm": True}, "norm=True"), ({"parsimonious": True}, "no parsimonious variant"),
    ],
)  # fmt: skip
def test_refusals(options, match):
    with pytest.raises(ValueError, match=match):
        ts.OrthoConv2d(4, 4, **{"kernel_size": 3, "method": "soc", **options})


@pytest.mark.parametrize("scale", [1e10, 1e25, 1e35])
def test_large_free_kernels_still_rotate(scale):
    layer = ts.OrthoConv2d(4, 4, 3, method="soc")
    with torch.no_grad():
        layer.free_tensors[0].normal_().mul_(scale)
    assert distance_from_orthogonal(layer, (4, 6, 6)) < 1e-5
    middle = layer.weight.detach()[..., 9, 9]
    assert (middle - torch.eye(4)).abs().max() > 0.01
    layer(torch.randn(1, 4, 6, 6)).square().sum().backward()
    assert layer.free_tensors[0].grad.isfinite().all()


def test_small_free_kernels_rotate_little():
    """The norm is only ever scaled down: a small kernel is a small rotation, and none is the identity."""
    layer = ts.OrthoConv2d(4, 4, 3, method="soc", dtype=torch.float64)
    small = layer.parametrization.skew(1e-3 * layer.free_tensors[0].detach())[0]
    assert torch.linalg.matrix_norm(circulant(small), 2) < 0.02
    with torch.no_grad():
        layer.free_tensors[0].zero_()
    torch.testing.assert_close(dense(layer, (4, 6, 6)), torch.eye(144, dtype=torch.float64))


@pytest.mark.parametrize("norm", [3.0, 8.0])
def test_the_largest_norm_is_within_its_error(norm):
    layer = ts.OrthoConv1d(3, 3, 3, method="soc", norm=norm, dtype=torch.float64)
    assert layer.truncation_error < 1e-6
    assert distance_from_orthogonal(layer, (3, 8)) < layer.truncation_error + 1e-10


def test_one_channel_learns_an_all_pass_filter():
    """The exponential of an odd filter has modulus 1 at every frequency, and is no shift."""
    layer = ts.OrthoConv1d(4, 4, 3, groups=4, method="soc", dtype=torch.float64)
    assert distance_from_orthogonal(layer, (4, 12)) < layer.truncation_error + 1e-12
    assert layer.weight.detach().abs().amax(-1).min() < 0.999
    x, y = torch.randn(8, 4, 12, dtype=torch.float64), torch.randn(8, 4, 12, dtype=torch.float64)
    optimizer = torch.optim.Adam(layer.parameters(), 0.05)
    losses = []
    for _ in range(20):
        optimizer.zero_grad()
        losses.append((layer(x) - y).square().mean())
        losses[-1].backward()
        optimizer.step()
    assert losses[-1] < losses[0]
    assert distance_from_orthogonal(layer, (4, 12)) < layer.truncation_error + 1e-12


@pytest.mark.parametrize("terms", [5, 7])
def test_a_training_step_costs_little_more_than_the_convolutions_of_its_terms(terms):
    layer, plain = ts.OrthoConv2d(64, 64, 3, method="soc", terms=terms), nn.Conv2d(64, 64, 3, padding=1)
    counts = []
    for each in (layer, plain):
        x = torch.randn(4, 64, 28, 28, requires_grad=True)
        with FlopCounterMode(display=False) as counter:
            each(x).sum().backward()
        counts.append(counter.get_total_flops())
    assert terms < counts[0] / counts[1] < terms + 0.1
