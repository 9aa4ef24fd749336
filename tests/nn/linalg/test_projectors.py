import pytest
import torch
from benchmarks.measure import saved_bytes

import trysquare as ts
from trysquare.nn.linalg import compose, grow, orthonormal_rows, projectors
from trysquare.nn.linalg.projectors import peel


def frames(count, groups, rank, channels):
    return orthonormal_rows(torch.randn(count, groups, rank, channels, dtype=torch.float64))


def explicit(matrix, frame, axis, dims):
    """Compose with ``[N, I - N]`` formed in full."""
    projector = frame.mT @ frame
    taps = torch.stack([projector, torch.eye(len(projector), dtype=projector.dtype) - projector], -1)
    shape = [1] * dims
    shape[axis] = 2
    return compose(matrix, taps.reshape(*projector.shape, *shape))


@pytest.mark.parametrize("axes", [(0,), (0, 1), (0, 1, 0, 1), (1, 0, 0), (2, 0, 1)])
def test_grow_is_composition_with_two_tap_kernels(axes):
    dims = max(axes) + 1
    matrix = torch.randn(3, *(2, 1, 1)[:dims], 5, 4, dtype=torch.float64)
    bases = frames(len(axes), 3, 2, 4)
    grown = grow(matrix, bases, axes)
    for group in range(3):
        expected = matrix[group].movedim((-2, -1), (0, 1))
        for frame, axis in zip(bases[:, group], axes, strict=True):
            expected = explicit(expected, frame, axis, dims)
        torch.testing.assert_close(grown[group], expected)


@pytest.mark.parametrize("many", [0, 256], ids=["no kernels kept", "kernels kept"])
@pytest.mark.parametrize("axes", [(0,), (1, 1), (0, 1, 0), (0, 1, 0, 1, 0), (2, 0, 1, 0)])
def test_gradients(axes, many, monkeypatch):
    monkeypatch.setattr(projectors, "MANY_CHANNELS", many)
    dims = max(axes) + 1
    matrix = torch.randn(2, *(1, 2, 1)[:dims], 3, 4, dtype=torch.float64, requires_grad=True)
    rows = torch.randn(len(axes), 2, 2, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda m, f: grow(m, f, axes), (matrix, rows))


def test_large_kernels_keep_less():
    def kept(channels):
        layer = ts.OrthoConv2d(channels, channels, 3)
        return saved_bytes(lambda: layer.weight) / (4 * 9 * channels**2)

    assert kept(128) == pytest.approx(23.5 / 9)
    assert kept(256) == pytest.approx(11.5 / 9)


def test_peel_undoes_grow():
    matrix = orthonormal_rows(torch.randn(2, 6, 6, dtype=torch.float64)).view(2, 1, 1, 6, 6)
    bases = frames(4, 2, 3, 6)
    axes = (0, 1, 0, 1)
    rest, found = peel(grow(matrix, bases, axes).movedim((1, 2), (-2, -1)), 3, axes)
    torch.testing.assert_close(rest, matrix)
    torch.testing.assert_close(found.mT @ found, bases.mT @ bases)
