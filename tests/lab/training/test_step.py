import sys

import pytest
import torch
from torch import nn

import trysquare as ts
from trysquare.lab.training.step import OPTIMIZERS, Gradients, clip_layers, learning_rate
from trysquare.nn import building
from trysquare.nn.parametrizations.base import Parametrization


def batch(count=48):
    return torch.rand(count, 1, 8, 8), torch.randint(10, (count,))


def small(**options):
    return ts.models.build("tiny-digits", (1, 8, 8), widths=(4,), dense_width=16, dense_layers=2, **options)


def gradients_of(model, loss, images, labels, **options):
    model.zero_grad(set_to_none=True)
    counts = Gradients(model, loss, **options)(images, labels)
    return counts, [parameter.grad.clone() for parameter in model.parameters()]


@pytest.fixture
def builds(monkeypatch):
    """How often weights were built."""
    seen = []
    built, together = Parametrization.built, building._built_together
    monkeypatch.setattr(Parametrization, "built", lambda self, free: seen.append(self) or built(self, free))
    monkeypatch.setattr(building, "_built_together", lambda alike, frees: seen.extend(alike) or together(alike, frees))
    return seen


@pytest.mark.parametrize("loss", ["offset-cross-entropy", "emma", "certificate-regularizer"])
@pytest.mark.parametrize("parts", [1, 2, 3, 5])
@pytest.mark.parametrize("conv", ["aoc", "soc"])
def test_a_batch_in_parts_has_the_same_gradient_and_builds_weights_once(loss, parts, conv, builds):
    model, (images, labels) = small(conv=conv), batch()
    loss = ts.losses.make_loss(loss)
    options = {"head": model.head.weight} if loss.__class__.__name__ != "OffsetCrossEntropy" else {}
    value = loss(model(images), labels, **options)
    expected = torch.autograd.grad(value, list(model.parameters()))
    builds.clear()
    counts, found = gradients_of(model, loss, images, labels, parts=parts)
    # One convolution, which SOC trains without its weight, two linear layers, the head.
    assert len(builds) == len(set(map(id, builds))) == (4 if conv == "aoc" else 3)
    assert float(counts[0]) == pytest.approx(48 * float(value.detach()), rel=1e-5)
    assert int(counts[2]) == 48
    for one, other in zip(expected, found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


def test_parts_add_no_calls_that_build_weights(builds):
    """The work for eight parts grows by convolutions and products, not by factorizations."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Count(TorchDispatchMode):
        def __init__(self):
            super().__init__()
            self.factorizations = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            self.factorizations += "cholesky" in str(function) or "triangular" in str(function)
            return function(*args, **(kwargs or {}))

    model, (images, labels) = small(), batch()
    numbers = []
    for parts in (1, 8):
        with Count() as count:
            gradients_of(model, ts.losses.OffsetCrossEntropy(), images, labels, parts=parts)
        numbers.append(count.factorizations)
    assert numbers[0] == numbers[1] > 0


def test_bfloat16_computes_in_it_and_builds_weights_in_float32(builds):
    model, (images, labels) = small(), batch()
    seen = []
    hook = model.features[0].register_forward_hook(
        lambda layer, given, output: seen.append((output.dtype, layer.weight.dtype))
    )
    _, low = gradients_of(model, ts.losses.OffsetCrossEntropy(), images, labels, precision="bfloat16", parts=2)
    assert seen == [(torch.bfloat16, torch.float32)] * 2
    _, full = gradients_of(model, ts.losses.OffsetCrossEntropy(), images, labels)
    for one, other in zip(low, full, strict=True):
        assert one.dtype == torch.float32
        assert (one - other).norm() < 0.2 * other.norm() + 1e-3
    hook.remove()
    values = ts.singular_values(model.features[0], (1, 8, 8))
    assert (values - 1).abs().max() < 1e-5


def test_parameters_that_are_not_used_or_not_trained_are_left_alone():
    model, (images, labels) = small(), batch()
    model.unused = torch.nn.Parameter(torch.ones(2))
    model.head.bias.requires_grad_(False)
    Gradients(model, ts.losses.CosineLoss(), parts=2)(images, labels)
    assert model.head.bias.grad is None
    assert model.unused.grad is None


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


def test_one_cycle_goes_up_for_three_tenths_and_down_to_nothing():
    rate = learning_rate(1.0, 1000, 0, "one-cycle")
    assert rate(0) == pytest.approx(0.04)
    assert rate(150) == pytest.approx(0.52)
    assert max(range(1000), key=rate) == 300
    assert rate(300) == pytest.approx(1.0)
    assert rate(650) == pytest.approx(0.5)
    assert 0 <= rate(999) < 1e-4
    assert rate(1000) == 0


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


def test_layers_are_clipped_one_by_one():
    model = nn.Sequential(ts.OrthoConv2d(3, 4, 3), ts.MaxMin(), nn.Flatten(), nn.Linear(64, 2), nn.Linear(2, 2))
    model[4].requires_grad_(False)
    (1e3 * model(torch.randn(2, 3, 4, 4))).sum().backward()
    model[3].weight.grad.mul_(1e-9)
    model[3].bias.grad.mul_(1e-9)
    before = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    clip_layers(model, 0.5)
    conv = [p.grad.flatten() for p in model[0].parameters()]
    assert len(conv) == 3  # a bias, and the free tensors of the weight
    assert float(torch.cat(conv).norm()) == pytest.approx(0.5, rel=1e-4)
    for name, parameter in model[3].named_parameters():
        assert torch.equal(parameter.grad, before[f"3.{name}"])  # small ones stay
    for name, parameter in model[0].named_parameters():
        found, was = parameter.grad.flatten(), before[f"0.{name}"].flatten()
        torch.testing.assert_close(found / found.norm(), was / was.norm())
    root = ts.OrthoLinear(4, 4)
    root(torch.full((1, 4), 1e3)).sum().backward()
    clip_layers(root, 1.0)
    assert float(torch.cat([p.grad.flatten() for p in root.parameters()]).norm()) == pytest.approx(1, rel=1e-4)
