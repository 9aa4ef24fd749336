"""Kernels of the same shape in one batch."""

import copy

import pytest
import torch
from benchmarks.measure import aten_calls
from torch import nn
from torch.func import functional_call, vmap

import trysquare as ts


def network(**options):
    torch.manual_seed(0)
    return nn.Sequential(
        ts.OrthoConv2d(3, 8, 3),
        *(ts.OrthoConv2d(8, 8, 3, **options) for _ in range(3)),
        ts.OrthoConv2d(8, 16, 3, stride=2, **options),
        ts.OrthoConv2d(16, 16, 3, groups=4, **options),
        ts.OrthoConv2d(16, 16, 3, groups=4, **options),
        ts.OrthoConvTranspose2d(16, 16, 1, **options),
        ts.OrthoConvTranspose2d(16, 16, 1, **options),
    )


def gradients(model, x):
    model.zero_grad()
    model(x).square().sum().backward()
    return [parameter.grad.clone() for parameter in model.parameters()]


@pytest.fixture
def x():
    return torch.randn(2, 3, 8, 8, dtype=torch.float64)


@pytest.mark.parametrize("method", ["aoc", "rko", "bcop"])
@pytest.mark.parametrize("orthogonalizer", ["cholesky", "cayley"])
def test_same_function_and_gradients(x, method, orthogonalizer):
    one_by_one = network(method=method, orthogonalizer=orthogonalizer).double()
    together = ts.build_together(copy.deepcopy(one_by_one))
    torch.testing.assert_close(together(x), one_by_one(x), rtol=1e-12, atol=1e-12)
    for ours, theirs in zip(gradients(together, x), gradients(one_by_one, x), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)


def test_three_layers_for_the_calls_of_one():
    def calls(count):
        model = ts.build_together(nn.Sequential(*(ts.OrthoConv2d(4, 4, 3) for _ in range(count))))
        x = torch.randn(1, 4, 4, 4)
        return aten_calls(lambda: model(x).sum().backward())

    one, two, three = map(calls, (1, 2, 3))
    assert three - two < one / 3  # the convolution, and joining


def test_weights_are_forgotten_after_the_call(x):
    model = ts.build_together(network().double())
    model(x)
    first = model[1].weight
    with torch.no_grad():
        model[1].parametrizations.weight.original0.mul_(2).add_(0.1)
    assert not torch.equal(model[1].weight, first)
    with pytest.raises(RuntimeError):
        model(x[:, :2])
    assert all(m._ahead is None for m in model.modules() if hasattr(m, "_ahead"))


def test_training_is_the_same(x):
    models = [network().double(), ts.build_together(network().double())]
    for model in models:
        optimizer = torch.optim.Adam(model.parameters(), 0.05)
        for _ in range(70):  # beyond the step that looks at the condition of the free tensors
            optimizer.zero_grad()
            (model(x) - 1).square().sum().backward()
            optimizer.step()
    torch.testing.assert_close(models[1](x), models[0](x), rtol=1e-6, atol=1e-6)


def test_a_layer_that_runs_twice_is_built_once():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = ts.OrthoConv2d(4, 4, 3), ts.OrthoConv2d(4, 4, 3)

        def forward(self, x):
            assert self.first.weight is self.first.weight
            return self.first(self.second(self.first(x)))

    ts.build_together(Twice())(torch.randn(1, 4, 4, 4)).sum().backward()


def test_modes(x):
    model = ts.build_together(network().double()).eval()
    with torch.no_grad():
        torch.testing.assert_close(model(x), network().double().eval()(x))
        assert model[1].weight is model[1].weight  # kept as ever
    gradients(model, x)
    for parameter in model[1].parameters():
        parameter.requires_grad_(False)
    model.train()(x).sum().backward()
    assert model[1].parametrizations.weight.original0.grad is not None
    with torch.inference_mode():
        model(x)


def test_dtypes(x):
    model, plain = ts.build_together(network().bfloat16()), network().bfloat16()
    assert torch.equal(model(x.bfloat16()), plain(x.bfloat16()))
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(ts.build_together(network())(x.float()), network()(x.float()))


def test_other_tensors_in_the_place_of_parameters(x):
    model = ts.build_together(network().double())
    others = {name: torch.randn_like(p) for name, p in model.named_parameters()}
    plain = network().double()
    torch.testing.assert_close(functional_call(model, others, (x,)), functional_call(plain, others, (x,)))
    many = {name: torch.stack([p, torch.randn_like(p)]) for name, p in others.items()}
    found = vmap(lambda p: functional_call(model, p, (x,)))(many)
    torch.testing.assert_close(found[0], functional_call(plain, others, (x,)))


def test_copies_and_going_back(x):
    model = ts.build_together(ts.build_together(network().double()))
    again = copy.deepcopy(model)
    assert len(again._forward_pre_hooks) == len(again._forward_hooks) == 1
    torch.testing.assert_close(again(x), model(x))
    ts.build_together(again, False)
    assert len(again._forward_pre_hooks) == len(again._forward_hooks) == 0
    torch.testing.assert_close(again(x), model(x))
    assert len(model._forward_pre_hooks) == 1


def test_compiled_it_changes_nothing(x):
    model = ts.build_together(network().double())
    compiled = torch.compile(model, backend="aot_eager")
    torch.testing.assert_close(compiled(x), network().double()(x))


def test_blocks_take_part_as_they_are(x):
    blocks = nn.Sequential(*(ts.SLLAOCBlock2d(4, 4, 3) for _ in range(2)), ts.SandwichAOCConv2d(4, 4, 3)).double()
    x = torch.randn(1, 4, 6, 6, dtype=torch.float64)
    expected = blocks(x)
    torch.testing.assert_close(ts.build_together(blocks)(x), expected)
