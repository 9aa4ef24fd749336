import copy

import pytest
import torch
from torch import nn

import trysquare as ts
from tests.jacobians import norms

MEAN, STD = (0.5, 0.4, 0.3), (0.25, 0.2, 0.5)


def test_scales_each_channel():
    x = torch.randn(2, 3, 4, 5)
    expected = torch.stack([(x[:, c] - MEAN[c]) / STD[c] for c in range(3)], 1)
    torch.testing.assert_close(ts.InputScaling(MEAN, STD)(x), expected)
    torch.testing.assert_close(ts.InputScaling(torch.tensor(MEAN), 0.5)(x)[:, 1], (x[:, 1] - 0.4) * 2)
    torch.testing.assert_close(ts.InputScaling(0.0, list(STD))(x[..., 0, 0]), x[..., 0, 0] / torch.tensor(STD))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_constant_is_that_of_the_numbers_used(dtype):
    layer = ts.InputScaling(MEAN, (0.3, 0.21, 0.7)).to(dtype)
    found = ts.lipschitz_bound(layer, (3, 2, 2))
    used = float(layer.std.double().min())
    assert 1 / used <= found <= 1 / used * (1 + 1e-12)
    exact = copy.deepcopy(layer).double()
    assert norms(exact, torch.randn(3, 2, 2, dtype=torch.float64))[1] <= found * (1 + 1e-12)


def test_numbers_are_saved_and_edits_are_seen():
    layer = ts.InputScaling(MEAN, STD)
    fresh = ts.InputScaling((0.0,) * 3, (1.0,) * 3)
    fresh.load_state_dict(layer.state_dict())
    assert ts.lipschitz_bound(fresh, (3, 2, 2)) == pytest.approx(5)
    fresh.std[0] = 0.0
    with pytest.raises(ValueError, match="divisor has a zero"):
        ts.lipschitz_bound(fresh, (3, 2, 2))


def test_audit_says_that_it_is_part_of_the_constant():
    model = nn.Sequential(ts.InputScaling(MEAN, STD), ts.OrthoConv2d(3, 4, 3))
    row, conv = ts.audit(model, (3, 4, 4)).layers
    assert row.bound == pytest.approx(5)
    assert "scaling by up to 5: part of the constant" in row.remark
    assert conv.bound_so_far == pytest.approx(5)
    x = torch.rand(2, 3, 4, 4)
    torch.testing.assert_close(ts.to_torch(model)(x), model(x))


def test_refuses():
    for mean, std, message in [
        (0.0, 0.0, "must be positive"),
        (0.0, (1.0, -1.0), "must be positive"),
        (float("nan"), 1.0, "must be a finite number"),
        ((), 1.0, "must be a finite number"),
        ((1.0, 2.0), (1.0, 2.0, 3.0), "mean has 2 numbers and std has 3"),
    ]:
        with pytest.raises(ValueError, match=message):
            ts.InputScaling(mean, std)
    with pytest.raises(ValueError, match=r"must be \(batch, 3, ...\)"):
        ts.InputScaling(MEAN, STD)(torch.randn(1, 2, 4, 4))


def test_repr():
    assert repr(ts.InputScaling((0.5, 0.25), 0.1)) == "InputScaling(mean=(0.5, 0.25), std=(0.1))"
    with torch.device("meta"):
        assert "?" in repr(ts.InputScaling(0.0, 1.0))
