"""The lower bound is a slope that the function really has."""

import pytest
import torch
from torch import nn
from torch.nn.utils import prune

import trysquare as ts
from tests.verify.lipschitz.networks import Fn


def test_what_autograd_says_and_the_function_does_not_is_not_reported():
    cancels = Fn(lambda m, x: x - torch.relu(x) + torch.relu(-x))
    assert ts.lipschitz_lower_bound(cancels, torch.zeros(1, 4)) < 1e-6
    detached = Fn(lambda m, x: x - x.detach())
    assert ts.lipschitz_lower_bound(detached, torch.randn(1, 4)) < 1e-6
    straight_through = Fn(lambda m, x: x + (x.sign() * 0.5 - x).detach())
    assert ts.lipschitz_lower_bound(straight_through, torch.ones(1, 4)) < 1e-6


def test_large_offsets_do_not_hide_as_slopes():
    offset = Fn(lambda m, x: x - x.detach() + 1e9)
    assert ts.lipschitz_lower_bound(offset, torch.randn(1, 4)) < 1e-3


def test_slopes_are_confirmed_next_to_kinks():
    steep = Fn(lambda m, x: torch.relu(3 * x))
    assert ts.lipschitz_lower_bound(steep, torch.full((1, 4), 1e-3)) == pytest.approx(3, rel=1e-6)


def test_inputs_and_outputs_that_have_no_slope_say_so():
    with pytest.raises(ValueError, match="floating point"):
        ts.lipschitz_lower_bound(nn.Embedding(3, 3), torch.zeros(1, 3, dtype=torch.long))
    with pytest.raises(ValueError, match="does not depend"):
        ts.lipschitz_lower_bound(Fn(lambda m, x: torch.zeros(x.shape)), torch.zeros(1, 3))
    with pytest.raises(ValueError, match="floating point"):
        ts.lipschitz_lower_bound(Fn(lambda m, x: x.argmax(1)), torch.zeros(1, 3))
    with pytest.raises(ValueError, match="not complex64"):
        ts.lipschitz_lower_bound(nn.Linear(3, 3, dtype=torch.complex64), torch.zeros(1, 3, dtype=torch.complex64))


def test_pruned_layers_are_copied():
    layer = nn.Linear(4, 4)
    prune.l1_unstructured(layer, "weight", 8)
    norm = float(torch.linalg.matrix_norm(layer.weight.detach().double(), 2))
    found = ts.lipschitz_lower_bound(layer, torch.randn(1, 4), power_steps=100)
    assert found == pytest.approx(norm, rel=1e-6)
    assert ts.audit(layer, (4,)).bound >= norm


class Raising(nn.Module):
    def forward(self, x):
        raise KeyError("a")


@pytest.mark.parametrize(
    ("model", "inputs"),
    [
        (torch.jit.script(nn.Linear(4, 3)), torch.randn(2, 4)),
        (nn.Linear(4, 3), torch.randn(2, 4, device="meta")),
        (nn.Linear(4, 3), torch.randn(2, 4).to_sparse()),
        (Raising(), torch.randn(2, 4)),
    ],
)
def test_what_has_no_slope_says_why(model, inputs):
    with pytest.raises((TypeError, ValueError), match=r"jit|meta|dense|differentiated"):
        ts.lipschitz_lower_bound(model, inputs)


def test_inputs_beyond_reason_are_refused():
    for shape in ((1, 10**9, 10**9), (1, 10**5, 10**5)):
        with pytest.raises(ValueError, match="too many to follow"):
            ts.lipschitz_bound(nn.Conv2d(1, 1, 3), shape)
