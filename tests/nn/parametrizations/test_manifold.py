"""The manifold method: kernels of AOC, with as many dimensions, for fewer products."""

import math

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import trysquare as ts
from tests.nn.test_methods import FEATURES, check_spectrum, make
from trysquare.nn.linalg.orthonormal import random_orthonormal
from trysquare.nn.parametrizations.manifold import cs_decomposition, rotation

EVEN = ["square", "odd channels", "fewer channels", "more channels", "stride", "stride, few", "stride, many", "groups"]
OTHERS = ["1-D", "1-D stride", "3-D", "transposed", "not square", "shortcut", "patches", "multiplier"]


def tangent_rank(layer):
    """Dimension of what a layer's weight can be moved to from where it is."""
    free = [tensor.detach() for tensor in layer.free_tensors]
    jacobian = torch.autograd.functional.jacobian(layer.parametrization.build, tuple(free))
    matrix = torch.cat([part.reshape(layer.weight.numel(), -1) for part in jacobian], 1)
    return int(torch.linalg.matrix_rank(matrix, rtol=1e-9))


@pytest.mark.parametrize("feature", EVEN + OTHERS)
def test_has_the_dimension_of_aoc(feature):
    torch.manual_seed(0)
    assert tangent_rank(make("manifold", feature)[0]) == tangent_rank(make("aoc", feature)[0])


@pytest.mark.parametrize("feature", FEATURES)
def test_reaches_the_kernels_of_aoc(feature):
    torch.manual_seed(0)
    theirs, shape = make("aoc", feature)
    ours, _ = make("manifold", feature)
    wanted = theirs.weight.detach()
    if ours.parametrization.solves:
        ours.weight = wanted
        torch.testing.assert_close(ours.weight, wanted, atol=1e-9, rtol=0)
    else:  # channels were cut off, which AOC's matrix and frames still know
        free = ours.parametrization._from_projectors([tensor.detach() for tensor in theirs.free_tensors])
        torch.testing.assert_close(ours.parametrization.build(*free), wanted)
    check_spectrum(ours, shape)


def test_reaches_kernels_at_the_edge():
    """Angles of 0 and of a right angle: projectors that are equal, or complements of each other."""
    theirs, ours = (ts.OrthoConv2d(6, 6, 3, method=name, dtype=torch.float64) for name in ("aoc", "manifold"))
    frame = torch.eye(6, dtype=torch.float64)[:3]
    with torch.no_grad():
        for number, rows in enumerate((frame, frame, frame.roll(3, -1), frame)):
            theirs.free_tensors[1][number, 0].copy_(rows)
    ours.weight = theirs.weight.detach()
    torch.testing.assert_close(ours.weight, theirs.weight)


@pytest.mark.parametrize(("c", "rank"), [(6, 3), (7, 3), (5, 1), (2, 1)])
def test_cs_decomposition(c, rank):
    special = torch.eye(c, dtype=torch.float64)
    for matrix in (random_orthonormal(4, c, c), special[None], special.roll(rank, -1)[None], special.flip(0)[None]):
        left, angles, right = cs_decomposition(matrix, rank)
        torch.testing.assert_close(left @ rotation(angles, c) @ right, matrix)
        for factor in (left, right):
            torch.testing.assert_close(factor @ factor.mT, special.expand_as(factor))
            assert not factor[..., :rank, rank:].any()
            assert not factor[..., rank:, :rank].any()
        assert (angles >= 0).all()
        assert (angles <= math.pi / 2 + 1e-12).all()


@pytest.mark.parametrize("axis_order", [(0, 1), (1, 0)])
def test_axis_order(axis_order):
    theirs, ours = (
        ts.OrthoConv2d(4, 4, (3, 2), method=name, axis_order=axis_order, dtype=torch.float64)
        for name in ("aoc", "manifold")
    )
    ours.weight = theirs.weight.detach()
    torch.testing.assert_close(ours.weight, theirs.weight)


def flops(call):
    with FlopCounterMode(display=False) as counter:
        call()
    return counter.get_total_flops()


@pytest.mark.parametrize(("kernel", "expected"), [(1, 0), (3, 48), (5, 240)])
def test_products(kernel, expected):
    """In units of c³, forward and backward: half of the taps that are there, three times."""
    c = 16
    layer = ts.OrthoConv2d(c, c, kernel, bias=False, method="manifold")
    optimizer = ts.optim.RiemannianAdam(ts.parameter_groups(layer), lr=0.01)
    assert flops(lambda: layer.weight.sum().backward()) == expected * c**3
    matrices = layer.free_tensors[0].numel() + sum(t.numel() for t in layer.free_tensors[1:] if t.shape[-1] == c)
    assert flops(optimizer.step) == 8 * c * matrices


def test_a_plain_optimizer_costs_the_products_of_a_parametrization():
    layer = ts.OrthoConv2d(16, 16, 3, bias=False, method="manifold")
    assert flops(lambda: layer.weight.sum().backward()) > 48 * 16**3


def test_linear_layers_know_their_method():
    layer = ts.OrthoLinear(6, 4, method="manifold")
    assert "method=manifold" in repr(layer)
    assert layer.adjoint().method == "manifold"
    assert "orthogonalizer=cholesky" in repr(ts.OrthoLinear(6, 4))
    with pytest.raises(ValueError, match="unknown method 'manifld': did you mean 'manifold'"):
        ts.OrthoLinear(4, 4, method="manifld")
    with pytest.raises(ValueError, match="orthogonalizer='qr' has no meaning for method='manifold'"):
        ts.OrthoLinear(4, 4, method="manifold", orthogonalizer="qr")


@pytest.mark.parametrize("shape", [(6, 4), (4, 6), (5, 5)])
def test_linear_layers_are_assigned_and_projected(shape):
    layer = ts.OrthoLinear(*shape, method="manifold", dtype=torch.float64)
    wanted = random_orthonormal(*reversed(shape))
    layer.weight = wanted
    torch.testing.assert_close(layer.weight, wanted)
    target = torch.randn(*reversed(shape), dtype=torch.float64)
    layer.project_(target)
    left, _, right = torch.linalg.svd(target, full_matrices=False)
    torch.testing.assert_close(layer.weight, left @ right)
