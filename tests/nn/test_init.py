"""Orthogonal weights of plain layers: dense matrices as the oracle."""

import pytest
import torch
from torch import nn

import trysquare as ts
from tests.oracle import distance_from_orthogonal

CASES = [
    (nn.Linear(6, 4), (6,), {}),
    (nn.Linear(3, 5), (3,), {}),
    (nn.Conv2d(4, 4, 3, padding=1, padding_mode="circular"), (4, 5, 6), {}),
    (nn.Conv2d(3, 8, 3, padding=1, padding_mode="circular"), (3, 5, 5), {}),
    (nn.Conv2d(4, 8, 4, stride=2, padding=1, padding_mode="circular"), (4, 6, 6), {"stride": 2}),
    (nn.Conv2d(8, 4, 3, 1, 2, 2, 2, padding_mode="circular"), (8, 7, 7), {"dilation": 2, "groups": 2}),
    (nn.Conv1d(4, 4, 5, padding=2, padding_mode="circular"), (4, 9), {}),
    (nn.Conv3d(2, 8, (1, 2, 2), stride=(1, 2, 2)), (2, 2, 4, 4), {"stride": (1, 2, 2)}),
    (nn.Conv2d(5, 5, 3, groups=5, padding=1, padding_mode="circular"), (5, 4, 4), {"groups": 5}),
    (nn.ConvTranspose2d(8, 2, 2, stride=2), (8, 3, 3), {"stride": 2}),
]  # fmt: skip


@pytest.mark.parametrize("gain", [1.0, 2.5, 0.0])
@pytest.mark.parametrize(("layer", "shape", "numbers"), CASES, ids=lambda value: str(value))
def test_the_layer_is_orthogonal_times_the_gain(layer, shape, numbers, gain):
    torch.manual_seed(0)
    layer = layer.double()
    assert ts.init.orthogonal_(layer.weight, gain=gain, **numbers) is layer.weight
    assert layer.weight.requires_grad
    if gain == 0:
        assert not layer.weight.any()
        return
    with torch.no_grad():
        layer.weight /= gain
    assert distance_from_orthogonal(layer, shape) < 1e-10


def test_torchs_own_makes_another_layer():
    torch.manual_seed(0)
    layer = nn.Conv2d(16, 16, 3, padding=1, padding_mode="circular", bias=False).double()
    nn.init.orthogonal_(layer.weight)
    assert ts.singular_values(layer, (16, 6, 6)).max() > 1.5
    ts.init.orthogonal_(layer.weight)
    torch.testing.assert_close(ts.singular_values(layer, (16, 6, 6)), torch.ones(576, dtype=torch.float64))


def test_a_generator_gives_the_same_weights_and_leaves_torchs_own_alone():
    layer, twin = nn.Conv2d(4, 4, 3), nn.Conv2d(4, 4, 3)
    torch.manual_seed(5)
    state = torch.random.get_rng_state()
    ts.init.orthogonal_(layer.weight, generator=torch.Generator().manual_seed(1))
    assert torch.equal(torch.random.get_rng_state(), state)
    torch.manual_seed(6)
    ts.init.orthogonal_(twin.weight, generator=torch.Generator().manual_seed(1))
    assert torch.equal(layer.weight, twin.weight)
    generator = torch.Generator().manual_seed(1)
    ts.init.orthogonal_(twin.weight, generator=generator)
    ts.init.orthogonal_(twin.weight, generator=generator)
    assert not torch.equal(layer.weight, twin.weight)
    torch.manual_seed(5)
    ts.init.orthogonal_(layer.weight)
    torch.manual_seed(5)
    ts.init.orthogonal_(twin.weight)
    assert torch.equal(layer.weight, twin.weight)


def test_weights_are_spread_over_all_directions():
    """Mean 0, and the squares of the entries of each column and row add up to the same on average."""
    torch.manual_seed(0)
    kernels = torch.stack([ts.init.orthogonal_(torch.empty(4, 4, 3, 3, dtype=torch.float64)) for _ in range(400)])
    assert kernels.mean(0).abs().max() < 0.06
    squares = kernels.square().sum((-1, -2)).mean(0)
    torch.testing.assert_close(squares, torch.full((4, 4), 0.25, dtype=torch.float64), atol=0.05, rtol=0)


def test_refusals():
    with pytest.raises(ValueError, match="no orthogonal kernel exists"):
        ts.init.orthogonal_(torch.empty(8, 4, 1, 1), stride=2)
    with pytest.raises(ValueError, match="at least two axes"):
        ts.init.orthogonal_(torch.empty(8))
    with pytest.raises(ValueError, match="floating point"):
        ts.init.orthogonal_(torch.empty(8, 8, dtype=torch.long))
    with pytest.raises(ValueError, match="groups=2"):
        ts.init.orthogonal_(torch.empty(8, 8), groups=2)
    with pytest.raises(ValueError, match="stride=2"):
        ts.init.orthogonal_(torch.empty(8, 8), stride=2)
    with pytest.raises(ValueError, match="generator must be"):
        ts.init.orthogonal_(torch.empty(8, 8), generator=3)
    with pytest.raises(ValueError, match="gain=inf"):
        ts.init.orthogonal_(torch.empty(8, 8), gain=float("inf"))
    with pytest.raises(ValueError, match="stride=0"):
        ts.init.orthogonal_(torch.empty(8, 8, 3, 3), stride=0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_short_dtypes(dtype):
    tensor = torch.empty(8, 8, 3, 3, dtype=dtype)
    ts.init.orthogonal_(tensor)
    exact = tensor.double()
    layer = nn.Conv2d(8, 8, 3, padding=1, padding_mode="circular", bias=False).double()
    with torch.no_grad():
        layer.weight.copy_(exact)
    assert (ts.singular_values(layer, (8, 5, 5)) - 1).abs().max() < 16 * torch.finfo(dtype).eps


@pytest.mark.filterwarnings("ignore:.*nested:UserWarning")
def test_tensors_that_cannot_be_filled():
    nested = torch.nested.nested_tensor([torch.ones(4), torch.ones(3)])
    for wrong in (torch.zeros(4, 4).to_sparse(), nested, torch.zeros(4, 1).expand(4, 4), torch.zeros(4), [[1.0]]):
        with pytest.raises((TypeError, ValueError), match="tensor"):
            ts.init.orthogonal_(wrong)
