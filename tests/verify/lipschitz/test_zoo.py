"""Bounds of networks that others write are of use: within 1e-3 of the constant where that is known."""

import pytest
import torch

import trysquare as ts
from tests.verify.lipschitz.zoo import ZOO


@pytest.mark.parametrize("name", ZOO)
def test_bounds_of_what_others_write(name):
    make, shape, constant = ZOO[name]
    torch.manual_seed(0)
    model = make().eval()
    found = ts.lipschitz_bound(model, shape)
    lower = ts.lipschitz_lower_bound(model, torch.randn(4, *shape))
    assert lower <= found * (1 + 1e-6)
    if constant is not None:
        assert constant * (1 - 1e-6) <= found <= constant * (1 + 1e-3)
