"""Free tensors stay fit to train on, with any optimizer and no help from the user."""

import copy

import pytest
import torch
from torch import nn

import trysquare as ts
from tests.oracle import distance_from_orthogonal
from trysquare.nn.parametrizations import base


def condition(tensor):
    values = torch.linalg.svdvals(tensor.detach().double())
    return float((values[..., 0] / values[..., -1]).max())


@pytest.mark.parametrize("name", ["cholesky", "qr", "newton_schulz", "bjorck"])
@pytest.mark.parametrize("make", [lambda **o: ts.OrthoConv2d(6, 6, 3, **o), lambda **o: ts.OrthoLinear(4, 9, **o)])
def test_degenerate_tensors_are_replaced_and_the_weight_stays(name, make, monkeypatch):
    layer = make(orthogonalizer=name, dtype=torch.float64)
    with torch.no_grad():
        for tensor in layer.free_tensors:
            spread = torch.logspace(0, 4, min(tensor.shape[-2:]), dtype=torch.float64)
            tensor.mul_(spread[:, None] if tensor.shape[-2] <= tensor.shape[-1] else spread)
    before = layer.weight.detach().clone()
    scales = [float(t.detach().norm()) for t in layer.free_tensors]
    monkeypatch.setattr(base, "RECONDITION_EVERY", 1)
    for tensor in layer.free_tensors:
        tensor.grad = torch.zeros_like(tensor)
    torch.optim.SGD(layer.parameters(), 0.0).step()
    for tensor, scale in zip(layer.free_tensors, scales, strict=True):
        assert condition(tensor) < 1.01
        assert 0.9 < float(tensor.detach().norm()) / scale < 1.1
    torch.testing.assert_close(layer.weight, before)


def test_good_tensors_and_those_that_are_not_trained_are_left_alone(monkeypatch):
    monkeypatch.setattr(base, "RECONDITION_EVERY", 1)
    layer, frozen = ts.OrthoConv2d(6, 6, 3), ts.OrthoConv2d(6, 6, 3)
    with torch.no_grad():
        for tensor in frozen.free_tensors:
            tensor.fill_(1.0)
    before = [t.detach().clone() for t in (*layer.free_tensors, *frozen.free_tensors)]
    torch.optim.SGD(layer.parameters(), 0.0).step()
    assert all(map(torch.equal, before, (*layer.free_tensors, *frozen.free_tensors)))


def test_copies_are_reconditioned_too_and_reading_changes_nothing(monkeypatch):
    monkeypatch.setattr(base, "RECONDITION_EVERY", 1)
    layer = copy.deepcopy(ts.OrthoLinear(6, 6))
    with torch.no_grad():
        layer.free_tensors[0].mul_(torch.logspace(0, 4, 6)[:, None])
    for _ in range(200):
        layer.weight.sum()
    assert condition(layer.free_tensors[0]) > 1e3
    torch.optim.Adam(layer.parameters(), 0.0).step()
    assert condition(layer.free_tensors[0]) < 1.01


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["adam", "adamw", "sgd", "momentum"])
def test_thousands_of_steps_at_high_learning_rates(optimizer):
    model = nn.Sequential(
        ts.OrthoConv2d(3, 16, 3, bias=False), ts.OrthoConv2d(16, 32, 3, stride=2, bias=False), nn.Flatten(),
        ts.OrthoLinear(512, 64, bias=False), ts.OrthoLinear(64, 64, bias=False), ts.OrthoLinear(64, 10, bias=False),
    )  # fmt: skip
    make = {
        "adam": lambda p: torch.optim.Adam(p, 0.1),
        "adamw": lambda p: torch.optim.AdamW(p, 0.05, weight_decay=0.1),
        "sgd": lambda p: torch.optim.SGD(p, 1.0),
        "momentum": lambda p: torch.optim.SGD(p, 1.0, momentum=0.9),
    }[optimizer]
    step = make(model.parameters())
    x, y = torch.randn(256, 3, 8, 8), torch.randn(256, 10)
    for _ in range(5000):
        batch = torch.randint(256, (16,))
        step.zero_grad()
        (model(x[batch]) - y[batch]).square().mean().backward()
        step.step()
    for layer, shape in zip(
        (m for m in model if hasattr(m, "weight")), ((3, 8, 8), (16, 8, 8), (512,), (64,), (64,)), strict=True
    ):
        assert distance_from_orthogonal(layer, shape) < 1e-5
        assert all(condition(t) < 1e4 for t in layer.free_tensors)
