"""Shifts of channels, and learned positions."""

import pytest
import torch
from torch import nn

import trysquare as ts
from tests.jacobians import assert_isometric


@pytest.mark.parametrize("shape", [(9, 5), (16, 3, 5), (13, 2, 3, 4)])
@pytest.mark.parametrize("back", [False, True])
def test_each_group_moves_by_one_place(shape, back):
    share = {2: 1 / 9, 3: 0.125, 4: 2 / 13}[len(shape)]
    layer, x = ts.ChannelShift(share, len(shape) - 1, back), torch.randn(2, *shape)
    y, size, expected = layer(x), int(share * shape[0]), x.clone()
    for place, (axis, step) in enumerate((axis, step) for axis in range(2, x.ndim) for step in (1, -1)):
        group = slice(place * size, (place + 1) * size)
        # By index: what is at i + 1 afterwards was at i.
        places = (torch.arange(x.shape[axis]) - (-step if back else step)) % x.shape[axis]
        expected[:, group] = x[:, group].index_select(axis, places)
    assert torch.equal(y, expected)
    assert torch.equal(layer.inverse()(y), x)
    assert_isometric(layer, shape)
    assert ts.lipschitz_bound(layer, shape) == pytest.approx(1, abs=1e-9)


def test_shares_that_do_not_fit():
    for share in (0, -1, 0.3, "a", None):
        with pytest.raises(ValueError, match=r"above 0, and at most 0\.25 for 4 groups"):
            ts.ChannelShift(share)
    with pytest.raises(ValueError, match="of 8 channels is none"):
        ts.ChannelShift(0.1)(torch.randn(1, 8, 3, 3))
    for shape in ((2, 8), (2, 8, 3)):
        with pytest.raises(ValueError, match="dims says how many"):
            ts.ChannelShift()(torch.randn(shape))


def test_shifts_are_exported_and_compiled(tmp_path):
    model, x = nn.Sequential(ts.ChannelShift(0.25), ts.Abs(0.5)), torch.randn(2, 8, 4, 4)
    assert torch.equal(ts.to_torch(model)(x), model(x))
    assert torch.equal(torch.compile(model, backend="aot_eager")(x), model(x))
    assert torch.equal(torch.export.export(model, (x,)).module()(x), model(x))


def test_positions_are_learned_and_shared():
    layer, x = ts.Positions((3, 1, 4)), torch.randn(2, 3, 5, 4)
    assert torch.equal(layer(x), x)
    layer(x).sum().backward()
    assert torch.equal(layer.bias.grad, torch.full((3, 1, 4), 10.0))
    nn.init.normal_(layer.bias)
    assert torch.equal(layer(x), x + layer.bias)
    torch.testing.assert_close(layer.inverse()(layer(x)), x)
    assert layer.inverse().inverse() is layer
    assert layer(x.bfloat16()).dtype == torch.bfloat16
    assert ts.lipschitz_bound(layer, (3, 5, 4)) == pytest.approx(1, abs=1e-9)
    for wrong in ((2, 3, 5), (2, 3, 5, 5), (2, 4, 5, 4)):
        with pytest.raises(ValueError, match="do not fit an input of shape"):
            layer(torch.zeros(wrong))
    for wrong in ((), (0,), 1.5, (-1, 2)):
        with pytest.raises((TypeError, ValueError)):
            ts.Positions(wrong)
