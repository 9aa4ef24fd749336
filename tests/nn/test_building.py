"""All weights of a model as one job: the same numbers as one by one, and nothing left behind."""

import copy
import threading
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
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
    trained = [parameter.requires_grad for parameter in model.parameters()]
    step(model)
    expected = grads(model)
    model.zero_grad()
    for parameter, flag in zip(model.parameters(), trained, strict=True):
        parameter.requires_grad_(flag)
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


def pass_with(model, seed):
    x = images(seed=seed).requires_grad_()
    model(x).square().sin().sum().backward()
    assert x.grad is not None


def freeze_for_a_pass(model):
    plain_step(model)
    model.requires_grad_(False)
    pass_with(model, 3)
    model.requires_grad_(True)
    pass_with(model, 5)


def freeze_a_tensor_for_a_pass(model):
    plain_step(model)
    model.first.free_tensors[0].requires_grad_(False)
    pass_with(model, 3)
    model.first.free_tensors[0].requires_grad_(True)


def freeze_for_good(model):
    plain_step(model)
    model.requires_grad_(False)
    pass_with(model, 3)


def thaw(model):
    model.requires_grad_(False)
    pass_with(model, 3)
    model.requires_grad_(True)
    plain_step(model)


@pytest.mark.parametrize("method", ["aoc", "soc"])
@pytest.mark.parametrize("step", [freeze_for_a_pass, freeze_a_tensor_for_a_pass, freeze_for_good, thaw])
def test_layers_that_are_frozen_in_the_block(step, method):
    torch.manual_seed(0)
    model = Branches(method)
    frozen = step in (freeze_for_good, thaw)
    if step is thaw:
        model.requires_grad_(False)
    assert_same(*two_ways(model, step))
    assert frozen == (step is thaw or not any(p.requires_grad for p in model.parameters()))


def test_gradients_of_some_parameters_only():
    torch.manual_seed(0)
    model = Branches()

    def step(m):
        some = [m.first.free_tensors[0], m.tail.free_tensors[0], m.down.bias]
        m(images()).square().sin().sum().backward(inputs=some)
        m(images()).square().sin().sum().backward(inputs=list(m.parameters()))

    assert_same(*two_ways(model, step))


def test_a_pass_that_is_differentiated_twice():
    torch.manual_seed(0)

    def step(m):
        loss = m(images()).square().sin().sum()
        loss.backward(retain_graph=True)
        loss.backward()

    assert_same(*two_ways(Branches(), step))


def test_a_loss_from_before_the_block():
    torch.manual_seed(0)
    model = Branches()
    plain_step(model)
    expected = grads(model)
    model.zero_grad()
    loss = model(images()).square().sin().sum()
    with ts.built(model):
        loss.backward()
    assert_same(grads(model), expected)


def test_images_of_several_sizes():
    torch.manual_seed(0)

    def step(m):
        for size in (4, 6, 4):
            m(images()[..., :1, :1] * torch.ones(size, size)).square().sin().sum().backward()

    assert_same(*two_ways(nn.Sequential(ts.FourierOrthoConv2d(4, 4, 3), ts.OrthoConv2d(4, 4, 3)), step))


class Double(nn.Module):
    def forward(self, weight):
        return 2 * weight


def test_tied_tensors_and_further_parametrizations():
    torch.manual_seed(0)
    layers = [
        ts.OrthoLinear(64, 64), ts.OrthoLinear(64, 64), ts.OrthoLinear(64, 64, orthogonalizer="cayley"),
        ts.OrthoLinear(64, 64),
    ]  # fmt: skip
    for layer in layers[1:3]:
        layer.parametrizations["weight"].original0 = layers[0].free_tensors[0]
    nn.utils.parametrize.register_parametrization(layers[3], "weight", Double(), unsafe=True)
    assert_same(*two_ways(nn.Sequential(nn.Flatten(), *layers), plain_step))


def test_torch_func():
    torch.manual_seed(0)
    model, x, direction = Branches().double(), images(dtype=torch.float64), images(seed=2, dtype=torch.float64)
    free = {name: parameter.detach() for name, parameter in model.named_parameters()}

    def by_parameters(values):
        return torch.func.functional_call(model, values, (x,)).square().sin().sum()

    def ask():
        return (
            torch.func.grad(by_parameters)(free),
            torch.func.grad(lambda x: model(x).square().sin().sum())(x),
            torch.func.vmap(lambda image: model(image[None])[0])(x),
            torch.func.jvp(model, (x,), (direction,)),
        )

    expected = ask()
    with ts.built(model):
        torch.testing.assert_close(ask(), expected)


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


@pytest.mark.parametrize("orthogonalizer", ["cholesky", "qr", "newton_schulz", "bjorck"])
def test_a_layer_in_poor_condition_does_not_change_those_of_its_batch(orthogonalizer):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), *(ts.OrthoLinear(64, 64, orthogonalizer=orthogonalizer) for _ in range(3)))
    model.double()
    with torch.no_grad():
        model[2].free_tensors[0].mul_(torch.logspace(0, -7, 64).unsqueeze(-1))
    weights = [layer.weight.detach() for layer in model[1:]]
    with ts.built(model):
        for layer, weight in zip(model[1:], weights, strict=True):
            torch.testing.assert_close(layer.weight.detach(), weight, rtol=0, atol=1e-9)
    found, expected = two_ways(model, lambda m: m(images(dtype=torch.float64)).square().sin().sum().backward())
    for name, value in expected.items():
        assert (found[name] - value).norm() <= 1e-6 * value.norm(), name


def test_a_layer_that_holds_no_numbers_does_not_change_those_of_its_batch():
    torch.manual_seed(0)
    layers = nn.ModuleList(ts.OrthoConv2d(4, 4, 3, bias=False) for _ in range(3))
    with torch.no_grad():
        layers[1].free_tensors[0][0, 0, 0] = float("nan")

    def step(m):
        for number in (0, 2):
            m[number].weight.square().sin().sum().backward()

    assert_same(*two_ways(layers, step))
    with ts.built(layers):
        assert layers[1].weight.isnan().any()


def test_a_block_that_cannot_be_entered():
    model = nn.Sequential(*(ts.OrthoLinear(8, 8, orthogonalizer="bjorck") for _ in range(3)))
    nn.init.zeros_(model[1].free_tensors[0])
    with pytest.raises(ArithmeticError, match="re-initialise"), ts.built(model):
        pass
    assert all(part.block is None for part in model.modules() if isinstance(part, Caching))
    model[1].reset_parameters()
    with ts.built(model):
        model(torch.randn(2, 8)).sum().backward()


def test_layers_of_a_batch_with_different_tensors_frozen():
    torch.manual_seed(0)
    model = nn.Sequential(*(ts.OrthoConv2d(4, 4, 3) for _ in range(3)))
    model[0].free_tensors[0].requires_grad_(False)
    model[2].free_tensors[1].requires_grad_(False)
    assert_same(*two_ways(model, plain_step))


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


def test_threads_that_do_not_know_of_the_block():
    """One uses the model while another opens and leaves blocks; and two open blocks of their own."""
    torch.manual_seed(0)
    model, stop, passes, errors = Branches().double(), threading.Event(), [], []

    def step(context=nullcontext):
        with context(model):
            model(images(dtype=torch.float64)).square().sin().sum().backward()
        passes.append(1)

    def run(context):
        try:
            while not stop.is_set():
                step(context)
        except Exception as error:
            errors.append(error)

    workers = [threading.Thread(target=run, args=(context,)) for context in (nullcontext, ts.built)]
    for worker in workers:
        worker.start()
    for _ in range(30):
        step(ts.built)
    stop.set()
    for worker in workers:
        worker.join()
    assert not errors
    found, count = grads(model), len(passes)
    model.zero_grad()
    step()
    assert_same(found, {name: None if value is None else count * value for name, value in grads(model).items()})


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


def initialise(model):
    nn.init.normal_(model.first.free_tensors[0])


def step_through_data(model):
    model.first.free_tensors[0].data.add_(1)
    torch.optim.SGD(model.first.free_tensors).step()


def replace_data(model):
    model.first.free_tensors[0].data = torch.randn_like(model.first.free_tensors[0])


def replace(model):
    model.first.parametrizations["weight"].original0 = nn.Parameter(torch.randn_like(model.first.free_tensors[0]))


def load(model):
    model.load_state_dict({name: value + 1 for name, value in model.state_dict().items()})


def load_by_assignment(model):
    model.load_state_dict({name: value + 1 for name, value in model.state_dict().items()}, assign=True)


@pytest.mark.parametrize("change", [
    initialise, step_through_data, replace_data, replace, load, load_by_assignment, nn.Module.double,
])  # fmt: skip
def test_a_free_tensor_changed_in_the_block_is_an_error(change):
    model = Branches()

    def step(passes):
        with ts.built(model):
            plain_step(model)
            change(model)
            for _ in range(passes):
                model(images().to(model.first.bias.dtype))

    for passes in (0, 1):  # told at the exit, or at the next use
        with pytest.raises(RuntimeError, match="changed in place inside of"):
            step(passes)
        model.float()
    model(images())


def test_a_weight_that_is_written_to_in_the_block_is_an_error_once():
    layers = nn.ModuleList(ts.OrthoLinear(4, 4) for _ in range(3))  # one batch
    x = torch.randn(2, 4)

    def step():
        with ts.built(layers):
            layers[2](layers[1](layers[0](x))).sum().backward()
            with torch.no_grad():
                layers[1].weight.mul_(2)

    with pytest.raises(RuntimeError, match="written to in place"):
        step()
    assert all(parameter.grad is None for layer in layers for parameter in layer.free_tensors)
    for layer in layers:
        layer(x)  # neither the layers beside it nor later passes are refused


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


def test_hooks_after_the_gradient():
    torch.manual_seed(0)
    model, seen = Branches(), []
    for tensor in model.first.free_tensors:
        tensor.register_post_accumulate_grad_hook(lambda tensor: seen.append(tensor.grad.clone()))
    plain_step(model)
    once = list(seen)
    seen.clear()
    model.zero_grad()
    with ts.built(model):
        plain_step(model)
        plain_step(model)
        assert not seen
    torch.testing.assert_close(seen, [2 * grad for grad in once], rtol=1e-4, atol=1e-5)


def test_an_optimizer_that_steps_in_the_backward_pass():
    found = []
    for context in (nullcontext, ts.built):
        torch.manual_seed(0)
        model = Branches()
        for parameter in model.parameters():
            optimizer = torch.optim.SGD([parameter], lr=0.01)

            def step(parameter, optimizer=optimizer):
                optimizer.step()
                optimizer.zero_grad()

            parameter.register_post_accumulate_grad_hook(step)
        for _ in range(3):
            with context(model):
                plain_step(model)
        found.append(model.state_dict())
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("options", [{"foreach": True}, {"foreach": False}, {"fused": True}])
def test_optimizers(options):
    found = []
    for context in (nullcontext, ts.built):
        torch.manual_seed(0)
        model = Branches().double()
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, **options)
        for number in range(4):
            optimizer.zero_grad(set_to_none=number != 2)
            with context(model):
                model(images(dtype=torch.float64)).square().sin().sum().backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        found.append(model.state_dict())
    torch.testing.assert_close(found[1], found[0], rtol=1e-6, atol=1e-8)
    with pytest.raises(RuntimeError, match="changed in place inside of"), ts.built(model):
        optimizer.step()


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


@pytest.mark.parametrize("method", ["aoc", "soc"])
def test_sums_of_gradients_may_be_larger_than_float16_can_say(method):
    torch.manual_seed(0)
    model = nn.Sequential(*(ts.OrthoConv2d(4, 4, 3, method=method, bias=False) for _ in range(2))).half()
    x = images().half()

    def step(m):
        for _ in range(8):
            (m(x).float().sum() * 500).backward()

    found, expected = two_ways(model, step)
    assert all(value.isfinite().all() for value in expected.values())
    assert_same(found, expected, atol=20.0)


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


@pytest.mark.parametrize("method", ts.METHODS)
def test_tensors_without_numbers(method):
    with FakeTensorMode():
        model = nn.Sequential(*(ts.OrthoConv2d(4, 4, 3, method=method) for _ in range(2)))
        images = torch.randn(2, 4, 6, 6)
        model(images).sum().backward()
        with ts.built(model):
            model(images).sum().backward()
    assert all(parameter.grad.shape == parameter.shape for parameter in model.parameters())
