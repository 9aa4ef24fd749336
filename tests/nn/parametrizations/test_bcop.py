"""What BCOP cannot reach, and what reaches it (the paper, appendix F)."""

import pytest
import torch

import trysquare as ts
from tests.oracle import distance_from_orthogonal
from trysquare.nn.linalg import compose
from trysquare.nn.linalg.orthonormal import random_orthonormal
from trysquare.nn.parametrizations.assignment import search_free_tensors


def two_tap(rows, axis):
    """``[N, I - N]`` along an axis."""
    projector = rows.T @ rows
    shape = (2, 1) if axis == 0 else (1, 2)
    taps = torch.stack([projector, torch.eye(len(projector), dtype=torch.float64) - projector], -1)
    return taps.view(*projector.shape, *shape)


def nearest(layer, kernel, starts=6):
    """Distance of the nearest kernel that a search finds, relative to the norm of the kernel."""
    build = layer.parametrization.build
    free, _ = search_free_tensors(build, (layer.parametrization.draw() for _ in range(starts)), kernel, 1e-6)
    return float((build(*free) - kernel).norm() / kernel.norm())


def mixed_orders():
    """Two channels filter along the first axis first, two along the second first: ``diag(P Q, Q P)``, 2x2, 4 channels.

    BCOP's ``P Q M`` has all its taps ``(0, ·)`` with columns in the image of one projector of rank 2. Here they span
    one dimension in the first pair of channels and two in the second: no such projector.
    """
    frames = [random_orthonormal(1, 2) for _ in range(4)]
    kernel = torch.zeros(4, 4, 2, 2, dtype=torch.float64)
    kernel[:2, :2] = compose(two_tap(frames[0], 0), two_tap(frames[1], 1))
    kernel[2:, 2:] = compose(two_tap(frames[2], 1), two_tap(frames[3], 0))
    return frames, kernel


@pytest.mark.parametrize("method", ["bcop", "aoc"])
def test_a_2x2_kernel_that_2x2_does_not_reach_and_3x3_does(method):
    """A 1x1 matrix in one of four taps.

    The determinant of ``K(z, w)`` is ``z^a w^b`` up to sign; half-rank projectors give ``a = b = (k - 1) c / 2``, so
    ``c / 2`` for 2x2 and ``c`` for 3x3. A lone tap has a determinant of ``(z^i w^j)^c``: it cannot be a tap of a 2x2
    kernel, but can be the middle tap of a 3x3 kernel.
    """
    lone = torch.zeros(4, 4, 2, 2, dtype=torch.float64)
    lone[:, :, 0, 0] = random_orthonormal(4, 4)
    small = ts.OrthoConv2d(4, 4, 2, method=method, dtype=torch.float64)
    assert nearest(small, lone) > 0.5
    large = ts.OrthoConv2d(4, 4, 3, method=method, dtype=torch.float64)
    large.weight = torch.nn.functional.pad(lone, (1, 0, 1, 0))
    torch.testing.assert_close(large.weight[:, :, 1:, 1:], lone, atol=1e-8, rtol=0)


@pytest.mark.parametrize("method", ["bcop", "sc-fac", "aoc", "bro"])
def test_mixed_orders_are_out_of_reach_of_2x2(method):
    _, kernel = mixed_orders()
    plain = torch.nn.Conv2d(4, 4, 2, padding="same", padding_mode="circular", dtype=torch.float64)
    with torch.no_grad():
        plain.weight.copy_(kernel)
    assert distance_from_orthogonal(plain, (4, 5, 5)) < 1e-12
    assert nearest(ts.OrthoConv2d(4, 4, 2, method=method, dtype=torch.float64), kernel, starts=4) > 0.05


def test_mixed_orders_are_a_part_of_a_3x3_kernel_with_twice_the_channels():
    """Four more channels make up what the projectors of the first four lack to half rank."""
    frames, kernel = mixed_orders()
    layer = ts.OrthoConv2d(8, 8, 3, method="bcop", dtype=torch.float64)
    eye = torch.eye(8, dtype=torch.float64)
    first, second = (torch.nn.functional.pad(f, (0, 6)) for f in frames[:2])
    third, fourth = (torch.nn.functional.pad(f, (2, 4)) for f in frames[2:])
    # Pairs along axes 0, 1, 0, 1. A projector that is the identity on a pair of channels leaves that pair alone.
    pair, other, spare = eye[:2], eye[2:4], eye[4:]
    rows = [
        torch.cat([first, other, spare[:1]]), torch.cat([second, third, spare[:2]]),
        torch.cat([pair, fourth, spare[:1]]), torch.cat([pair, other]),
    ]  # fmt: skip
    free = [eye[None], torch.stack(rows)[:, None]]
    built = layer.parametrization.build(*free)
    assert distance_from_orthogonal(layer, (8, 4, 4)) < 1e-11
    torch.testing.assert_close(built[:4, :4, :2, :2], kernel)
    assert built[:4, 4:].abs().max() < 1e-12
    assert built[:4, :4, 2].abs().max() < 1e-12


def test_separable_kernels_are_those_of_sc_fac():
    """The taps of an SC-Fac kernel as a matrix of blocks have the rank of one block: ``K_ij = A_i M B_j``."""

    def rank(method):
        kernel = ts.OrthoConv2d(4, 4, 3, method=method, dtype=torch.float64).weight.detach()
        return int(torch.linalg.matrix_rank(kernel.permute(0, 2, 1, 3).reshape(12, 12), atol=1e-9))

    assert rank("sc-fac") == 4
    assert rank("bcop") > 4


def test_bro_reaches_rotations_and_options_are_checked():
    layer = ts.OrthoConv2d(5, 5, 1, method="bro", dtype=torch.float64)
    rotation = random_orthonormal(5, 5)
    rotation = rotation * torch.linalg.det(rotation)
    layer.weight = rotation[..., None, None]
    torch.testing.assert_close(layer.weight[..., 0, 0], rotation, atol=1e-7, rtol=0)
    assert ts.OrthoConv2d(8, 8, 3, method="bro", rank=2).free_tensors[0].shape == (2, 1, 2, 8)
    with pytest.raises(ValueError, match="rank=8"):
        ts.OrthoConv2d(8, 8, 3, method="bro", rank=8)
    with pytest.raises(ValueError, match="nothing to learn"):
        ts.OrthoConv2d(1, 1, 1, method="bro")
