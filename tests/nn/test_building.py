"""All weights of a model as one job: the same numbers as one by one, and nothing left behind."""

import copy
import threading

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import trysquare as ts
from trysquare.nn.linalg.fourier import RESPONSES
from trysquare.nn.parametrizations.base import Caching


class Branches(nn.Module):
    """Layers of every kind of this library, some alike, one shared, one used twice."""

    def __init__(self, method="aoc"):
        super().__init__()
        self.first = ts.OrthoConv2d(4, 4, 3, method=method)
        self.second = ts.OrthoConv2d(4, 4, 3, method=method)
        self.third = ts.OrthoConv2d(4, 4, 3, method=method)
        self.down = ts.OrthoConv2d(4, 8, 3, stride=2, method=method)
        self.up = ts.OrthoConvTranspose2d(8, 4, 3, stride=2, method=method)
        self.flat = ts.OrthoLinear(64, 6)
        self.tail = ts.OrthoLinear(6, 6)

    def forward(self, x):
        x = self.second(self.first(x).abs())
        x = self.third(self.third(x).abs())
        x = self.up(self.down(x).abs())
        return self.tail(self.flat(x.flatten(1)).abs())


def images(count=4, seed=1, **options):
    return torch.randn(count, 4, 4, 4, generator=torch.Generator().manual_seed(seed)).to(**options)


def grads(model):
    return {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}


def assert_same(found, expected, atol=2e-5):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        if value is None:
            assert found[name] is None, name
        else:
            torch.testing.assert_close(
                found[name], value, rtol=1e-4, atol=atol, msg=lambda text, name=name: f"{name}: {text}"
            )


def two_ways(model, step):
    """The gradients of ``step(model)`` without a block, and in one."""
    model.zero_grad()
    step(model)
    expected = grads(model)
    model.zero_grad()
    with ts.built(model):
        step(model)
    assert all(part.block is None for part in model.modules() if isinstance(part, Caching))
    return grads(model), expected


def plain_step(model):
    model(images()).square().sin().sum().backward()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("method", ts.METHODS)
def test_weights_and_gradients_are_those_of_layers_built_one_by_one(method, dtype):
    torch.manual_seed(0)
    model = Branches(method).to(dtype)
    expected = {name: m.weight.detach() for name, m in model.named_modules() if hasattr(m, "parametrizations")}
    with ts.built(model):
        for name, weight in expected.items():
            torch.testing.assert_close(model.get_submodule(name).weight.detach(), weight, rtol=0, atol=1e-5)
            assert model.get_submodule(name).weight is model.get_submodule(name).weight
    found, expected = two_ways(model, lambda m: m(images().to(dtype)).square().sin().sum().backward())
    assert_same(found, expected)


@pytest.mark.parametrize("orthogonalizer", ts.linalg.ORTHOGONALIZERS)
def test_every_orthogonalizer(orthogonalizer):
    torch.manual_seed(0)
    model = nn.Sequential(*(ts.OrthoConv2d(4, 4, 3, orthogonalizer=orthogonalizer) for _ in range(3)))
    assert_same(*two_ways(model, plain_step))


@pytest.mark.parametrize("make", [
    *(lambda name=name: ts.FourierOrthoConv2d(4, 4, 3, method=name) for name in RESPONSES),
    lambda: ts.SLLBlock2d(4, 4, 3), lambda: ts.SandwichConv2d(4, 4, 3), lambda: ts.OrthoConv2d(4, 8, 3, groups=2),
    lambda: ts.OrthoConv2d(4, 4, 3, dilation=3, bias=False), lambda: ts.OrthoConv2d(4, 4, 1),
    lambda: nn.Conv2d(4, 4, 3),
])  # fmt: skip
def test_other_layers(make):
    torch.manual_seed(0)
    model = nn.Sequential(make(), nn.Tanh())
    assert_same(*two_ways(model, plain_step))


def builds(model, step):
    """How often the weights of the model's parametrizations were built."""
    seen = []
    for part in model.modules():
        if isinstance(part, ts.parametrizations.Parametrization):
            original = part.build
            part.build = lambda *free, original=original: (seen.append(1), original(*free))[1]
    step()
    return len(seen)


def test_several_passes_build_once_and_gradients_gather():
    torch.manual_seed(0)
    model = Branches()

    def step(m):
        for seed in range(3):
            m(images(2, seed)).square().sin().sum().backward()

    assert_same(*two_ways(model, step))

    def in_block():
        with ts.built(model):
            step(model)

    # Five shapes: three convolutions are alike.
    assert builds(model, in_block) == 5


def test_a_recurrent_loop():
    torch.manual_seed(0)
    cell = ts.OrthoLinear(64, 64)

    def step(m):
        state = images().flatten(1)
        for _ in range(5):
            state = m(state).tanh()
        state.square().sum().backward()

    assert_same(*two_ways(cell, step))


def test_gradients_add_to_those_that_are_there_and_none_stays_none():
    torch.manual_seed(0)
    model = Branches()
    model.tail.requires_grad_(False)
    model.unused = ts.OrthoConv2d(4, 4, 3)  # alike the first ones
    plain_step(model)
    once = grads(model)
    with ts.built(model):
        plain_step(model)
    assert_same(grads(model), {name: value if value is None else 2 * value for name, value in once.items()})
    assert model.unused.free_tensors[0].grad is None
    assert model.tail.free_tensors[0].grad is None


def test_adjoints_and_shared_layers():
    torch.manual_seed(0)
    down = ts.OrthoConv2d(4, 8, 3, stride=2)
    model = nn.Sequential(down, nn.Tanh(), down.adjoint(), nn.Tanh(), down)
    assert_same(*two_ways(model, plain_step))


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("method", ["aoc", "soc", "aol"])
def test_checkpoints(method, reentrant):
    torch.manual_seed(0)
    model = Branches(method)

    def step(m):
        x = images().requires_grad_()
        checkpoint(m, x, use_reentrant=reentrant).square().sin().sum().backward()

    assert_same(*two_ways(model, step))


def test_gradient_penalty():
    torch.manual_seed(0)
    model = Branches()

    def step(m):
        x = images().requires_grad_()
        score = m(x).square().sum()
        (grad,) = torch.autograd.grad(score, x, create_graph=True)
        (score + (grad.flatten(1).norm(dim=1) - 1).square().sum()).backward()

    assert_same(*two_ways(model, step), atol=1e-3)


def test_second_derivatives_by_parameters():
    torch.manual_seed(0)
    model = Branches().double()
    free = list(model.parameters())

    def second():
        loss = model(images(dtype=torch.float64)).square().sin().sum()
        first = torch.autograd.grad(loss, free, create_graph=True)
        return torch.autograd.grad(sum(g.sin().sum() for g in first), free)

    expected = second()
    with ts.built(model):
        found = second()
        gathering = torch.autograd.grad(model(images(dtype=torch.float64)).square().sin().sum(), free)
    plain = torch.autograd.grad(model(images(dtype=torch.float64)).square().sin().sum(), free)
    for one, two in zip((*found, *gathering), (*expected, *plain), strict=True):
        torch.testing.assert_close(one, two)
    assert all(p.grad is None for p in free)


def test_backward_with_create_graph():
    torch.manual_seed(0)
    model = Branches().double()

    def step(m):
        m(images(dtype=torch.float64)).square().sin().sum().backward(create_graph=True)

    with pytest.warns(UserWarning, match="create_graph"):
        found, expected = two_ways(model, step)
    assert_same(found, expected)
    assert model.first.free_tensors[0].grad.requires_grad
    model.zero_grad()


def test_a_loss_that_outlives_the_block():
    torch.manual_seed(0)
    model = Branches()
    plain_step(model)
    expected = grads(model)
    model.zero_grad()
    with ts.built(model):
        loss = model(images()).square().sin().sum()
    assert all(p.grad is None for p in model.parameters())
    loss.backward()
    assert_same(grads(model), expected)


def test_a_failing_pass_leaves_nothing_behind():
    torch.manual_seed(0)
    model = Branches()
    plain_step(model)
    expected = grads(model)
    model.zero_grad()

    def step():
        with ts.built(model):
            plain_step(model)
            raise ValueError("half way")

    with pytest.raises(ValueError, match="half way"):
        step()
    assert all(tensor.grad is None for m in model.modules() if hasattr(m, "free_tensors") for tensor in m.free_tensors)
    model.zero_grad()
    plain_step(model)
    assert_same(grads(model), expected)


@pytest.mark.parametrize("method", ["aoc", "soc"])
def test_gradients_are_not_kept_beyond_the_block(method):
    model = Branches(method)
    with ts.built(model):
        weight = model.first.weight
        loss = model(images()).sum() + weight.sum()
        loss.backward()
    node = weight.grad_fn
    assert node.weight.__dict__.keys().isdisjoint({"exact", "handed", "gathered"})


def test_nested_blocks():
    torch.manual_seed(0)
    model = Branches()

    def step(m):
        with ts.built(m.down):
            plain_step(m)
        with ts.built(m):
            plain_step(m)

    assert_same(*two_ways(model, step))


def test_threads():
    torch.manual_seed(0)
    model = Branches()

    def step(m):
        workers = [threading.Thread(target=plain_step, args=(m,)) for _ in range(4)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()

    assert_same(*two_ways(model, step))


def test_without_gradients():
    torch.manual_seed(0)
    model = Branches()
    expected = model(images()).detach()
    for mode in (True, False):
        model.train(mode)
        for context in (torch.no_grad, torch.inference_mode):
            with context(), ts.built(model):
                torch.testing.assert_close(model(images()), expected, rtol=0, atol=1e-5)
            with ts.built(model), context():
                assert not model(images()).requires_grad


def test_gradients_in_a_block_that_was_entered_without():
    torch.manual_seed(0)
    model = Branches()
    plain_step(model)
    expected = grads(model)
    model.zero_grad()
    with torch.inference_mode(), ts.built(model), torch.inference_mode(False), torch.enable_grad():
        plain_step(model)
    assert_same(grads(model), expected)


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("make", [
    lambda: ts.OrthoConv2d(4, 4, 3), lambda: ts.OrthoConv2d(4, 4, 3, method="soc"),
    lambda: ts.FourierOrthoConv2d(4, 4, 3), lambda: ts.SLLBlock2d(4, 4, 3),
])  # fmt: skip
def test_a_first_pass_without_gradients_in_a_block(make, context):
    torch.manual_seed(0)
    model = nn.Sequential(make(), nn.Tanh())

    def step(m):
        with context():
            assert not m(images()).requires_grad
        plain_step(m)

    assert_same(*two_ways(model, step))


@pytest.mark.parametrize("change", [
    torch.nn.init.normal_, lambda tensor: tensor.data.add_(1) is None or torch.optim.SGD([tensor]).step()
])  # fmt: skip
def test_a_free_tensor_changed_in_the_block_is_an_error(change):
    model = Branches()

    def step(passes):
        with ts.built(model):
            plain_step(model)
            change(model.first.free_tensors[0])
            for _ in range(passes):
                model(images())

    for passes in (0, 1):  # told at the exit, or at the next use
        with pytest.raises(RuntimeError, match="changed in place inside of"):
            step(passes)
    model(images())


def test_another_optimizer_may_step_inside():
    model, other = Branches(), nn.Linear(2, 2)
    with ts.built(model):
        plain_step(model)
        other(torch.randn(3, 2)).sum().backward()
        torch.optim.SGD(other.parameters(), lr=0.1).step()
        plain_step(model)


def test_hooks_of_free_tensors_see_the_sum_once():
    torch.manual_seed(0)
    model, seen = Branches(), []
    model.first.free_tensors[0].register_hook(lambda grad: seen.append(grad.clone()))
    plain_step(model)
    (once,) = seen
    seen.clear()
    with ts.built(model):
        plain_step(model)
        plain_step(model)
        assert not seen
        with pytest.raises(RuntimeError, match="create_graph=True"):
            model(images()).sum().backward(create_graph=True)
    torch.testing.assert_close(seen, [2 * once], rtol=1e-4, atol=1e-5)


def test_copies_are_not_in_the_block():
    model = Branches()
    with ts.built(model):
        model(images())
        twin = copy.deepcopy(model)
    plain_step(twin)
    assert twin.first.free_tensors[0].grad is not None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_short_dtypes_gather_in_float32(dtype):
    torch.manual_seed(0)
    model = nn.Sequential(ts.OrthoLinear(64, 64), ts.OrthoLinear(64, 64)).to(dtype)
    x = images().flatten(1).to(dtype)
    with ts.built(model):
        for _ in range(300):
            model(x).float().square().sum().mul(1 / 300).backward()
    found = grads(model)
    model.zero_grad()
    model(x).float().square().sum().backward()
    expected = grads(model)
    for name in ("0.parametrizations.weight.original0", "1.parametrizations.weight.original0"):
        assert (found[name] - expected[name]).norm() < 0.1 * expected[
            name
        ].norm()  # half is lost where 300 terms add up in bfloat16


def test_autocast_and_switches(monkeypatch):
    torch.manual_seed(0)
    model = Branches()
    exact = model.first.weight.detach()
    torch.set_float32_matmul_precision("medium")
    try:
        with torch.autocast("cpu", torch.bfloat16), ts.built(model):
            torch.testing.assert_close(model.first.weight.detach(), exact, rtol=0, atol=1e-5)
            plain_step(model)
    finally:
        torch.set_float32_matmul_precision("highest")
    assert all(p.grad is not None for p in model.parameters())


def test_what_is_no_module_is_refused():
    with pytest.raises(TypeError, match=r"torch.nn.Module, not list"), ts.built([1]):
        pass
