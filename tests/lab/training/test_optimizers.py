import sys

import pytest
import torch
from torch import nn

from trysquare.lab.training.optimizers import OPTIMIZERS, learning_rate


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_learns_and_evaluating_leaves_no_trace(name):
    model, target = nn.Linear(4, 1), torch.randn(64, 1)
    images = torch.randn(64, 4)
    stepper = OPTIMIZERS[name](model.parameters(), 30, lr=0.05)
    losses = []
    for step in range(30):
        loss = (model(images) - target).square().mean()
        stepper.optimizer.zero_grad()
        loss.backward()
        stepper.step(step)
        losses.append(float(loss.detach()))
        before = model.weight.detach().clone()
        with stepper.evaluation_weights():
            inside = model.weight.detach().clone()
        assert torch.equal(model.weight, before)
    assert losses[-1] < losses[0]
    assert torch.equal(inside, before) != name.startswith("schedule-free")


def test_schedules():
    rate = learning_rate(2.0, 12, 2, "cosine")
    assert [rate(0), rate(1), rate(2)] == [1.0, 2.0, 2.0]
    assert rate(7) == pytest.approx(1.0)
    assert rate(12) == pytest.approx(0.0)
    assert learning_rate(2.0, 12, 0, "constant")(11) == 2.0
    with pytest.raises(ValueError, match="did you mean 'cosine'"):
        learning_rate(1.0, 10, 0, "cosin")


def test_the_learning_rate_is_told():
    stepper = OPTIMIZERS["adamw"](nn.Linear(1, 1).parameters(), 10, lr=1.0, schedule="linear", warmup_steps=2)
    stepper.step(0)
    assert stepper.learning_rate == 0.5


def test_missing_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "schedulefree", None)
    with pytest.raises(ImportError, match=r"trysquare\[train\]"):
        OPTIMIZERS["schedule-free-sgd"](nn.Linear(1, 1).parameters(), 1)
