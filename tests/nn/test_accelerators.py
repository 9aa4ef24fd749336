"""The path that accelerators take, tried on a processor: what would stall a device, or does not exist on one."""

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

import trysquare as ts
from benchmarks import memory
from trysquare.nn.linalg import inverse, matrix_exponential, orthogonalize, orthonormal, projectors
from trysquare.nn.linalg.fourier import RESPONSES
from trysquare.nn.linalg.orthonormal import orthonormal_rows
from trysquare.nn.parametrizations import Parametrization


class Calls(TorchDispatchMode):
    """Counts the calls."""

    def __init__(self):
        super().__init__()
        self.number = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.number += 1
        return func(*args, **(kwargs or {}))


class Device(TorchDispatchMode):
    """A device without float64, on which a look at a value is an error."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert func not in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.is_nonzero.default), func
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves((args, kwargs, result)):
            assert not (isinstance(leaf, torch.Tensor) and leaf.dtype in (torch.float64, torch.complex128)), func
        return result


@pytest.fixture
def blind(monkeypatch):
    """Have the host look at nothing, as on an accelerator."""
    for module in (inverse, matrix_exponential, orthogonalize, orthonormal, projectors):
        monkeypatch.setattr(module, "host_can_look", lambda _: False)


def weight_and_gradient(layer):
    layer.weight.square().sum().backward()


LAYERS = {
    **{name: lambda name=name: ts.OrthoConv2d(8, 8, 3, method=name) for name in ts.METHODS},
    **{name: lambda name=name: ts.OrthoLinear(8, 6, orthogonalizer=name) for name in ts.linalg.ORTHOGONALIZERS},
    "strided": lambda: ts.OrthoConv2d(4, 16, 3, stride=2),
    "transposed": lambda: ts.OrthoConvTranspose2d(8, 4, 4, stride=2, groups=2),
}


@pytest.mark.parametrize("name", LAYERS)
def test_no_float64_and_no_look(name, blind):
    layer = LAYERS[name]()
    with Device():
        weight_and_gradient(layer)
        layer.parametrization.recondition({id(tensor) for tensor in layer.free_tensors})


@pytest.mark.parametrize("name", RESPONSES)
def test_no_float64_and_no_look_in_the_fourier_domain(name, blind):
    layer, x = ts.FourierOrthoConv2d(8, 8, 3, method=name), torch.randn(2, 8, 6, 6)
    with Device():
        layer(x).square().sum().backward()


@pytest.mark.parametrize("name", LAYERS)
def test_weights_are_those_of_a_processor(name, blind, monkeypatch):
    torch.manual_seed(0)
    layer = LAYERS[name]()
    weight_and_gradient(layer)
    found = [layer.weight.detach(), *(t.grad.clone() for t in layer.free_tensors)]
    monkeypatch.undo()
    layer.zero_grad()
    weight_and_gradient(layer)
    expected = [layer.weight.detach(), *(t.grad.clone() for t in layer.free_tensors)]
    for one, two in zip(found, expected, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-4, atol=2e-5)


def cases(h, c):
    """Rows that are hard to make orthonormal: condition numbers up to 1e8, scales, missing ranks, structure."""
    torch.manual_seed(h * c)
    for condition in (1, 1e2, 1e4, 1e6, 1e8):
        left, _ = torch.linalg.qr(torch.randn(h, h, dtype=torch.float64))
        right, _ = torch.linalg.qr(torch.randn(c, h, dtype=torch.float64))
        sizes = torch.logspace(0, -torch.tensor(condition).log10().item(), h, dtype=torch.float64)
        yield f"condition {condition:g}", (left * sizes) @ right.T
        near = torch.randn(h, c)
        near[1:] = near[:1] + torch.randn(h - 1, c) / condition
        yield f"parallel up to {1 / condition:g}", near
    for scale in (1e-30, 1e30):
        yield f"scale {scale:g}", scale * torch.randn(h, c)
    yield "every scale", torch.randn(h, c) * torch.logspace(-30, 30, h).unsqueeze(-1)
    yield "zeros", torch.zeros(h, c)
    yield "ones", torch.ones(h, c)
    yield "few values", (torch.rand(h, c) < 0.25).float()
    for missing in (1, 2, h // 2):
        yield f"{missing} zero rows", torch.randn(h, c) * (torch.arange(h) >= missing).unsqueeze(-1)
        yield f"{missing} zero columns", torch.randn(h, c) * (torch.arange(c) >= missing)
        rank = max(1, h - missing)
        yield f"rank {rank}", torch.randn(h, rank) @ torch.randn(rank, c)


@pytest.mark.parametrize("shape", [(1, 1), (2, 2), (3, 7), (12, 12), (64, 64), (64, 128), (256, 256)])
def test_exact_for_all_rows(shape, blind):
    for case, rows in cases(*shape):
        rows = rows.float()
        with Device():
            basis = orthonormal_rows(rows)
        basis = basis.double()
        missed = torch.linalg.matrix_norm(basis @ basis.T - torch.eye(shape[0], dtype=torch.float64), 2)
        assert missed < 1e-5, case


def test_gradients_at_poor_condition_are_those_in_float64(blind):
    torch.manual_seed(0)
    for condition in (1.0, 1e1, 1e3):
        left, _ = torch.linalg.qr(torch.randn(16, 16, dtype=torch.float64))
        right, _ = torch.linalg.qr(torch.randn(32, 16, dtype=torch.float64))
        exact = (left * torch.logspace(0, -torch.tensor(condition).log10().item(), 16, dtype=torch.float64)) @ right.T
        rows, exact = exact.float().requires_grad_(), exact.requires_grad_()
        direction = torch.randn(16, 32, dtype=torch.float64)
        (found,) = torch.autograd.grad(orthonormal_rows(rows), rows, direction.float())
        (expected,) = torch.autograd.grad(orthonormal_rows(exact), exact, direction)
        assert (found - expected).norm() < 2e-6 * condition * expected.norm() + 1e-5 * expected.norm()


def counted(build):
    """ATen calls, and FLOPs."""
    with FlopCounterMode(display=False) as flops:
        build()
    with Calls() as calls:
        build()
    return calls.number, flops.get_total_flops()


@pytest.mark.parametrize("channels", [32, 64, 256, 512])
def test_calls_and_flops_of_one_layer(channels):
    layer = ts.OrthoConv2d(channels, channels, 3, device="meta")

    def build():
        weight = layer.weight
        torch.autograd.backward(weight, torch.empty_like(weight))

    calls, flops = counted(build)
    assert calls <= 200
    assert flops <= 110 * channels**3


def test_calls_of_layers_that_are_alike():
    layers = nn.ModuleList(ts.OrthoConv2d(32, 32, 3, device="meta") for _ in range(8))

    def build():
        with ts.built(layers):
            weights = [layer.weight for layer in layers]
            torch.autograd.backward(weights, [torch.empty_like(weight) for weight in weights])

    assert counted(build)[0] <= 250
    layers.to_empty(device="cpu")
    for layer in layers:
        layer.reset_parameters()
    assert counted(build)[0] <= 208  # of which eight make the gradients


def test_calls_of_all_kernels_of_resnet34():
    with torch.device("meta"):
        model = ts.models.build("resnet34", (3, 224, 224), 1000)

    def build():
        with ts.built(model):
            weights = [module.weight for module in model.modules() if isinstance(module, ts.OrthoConv2d)]
            torch.autograd.backward(weights, [torch.empty_like(weight) for weight in weights])

    assert counted(build)[0] <= 2000


def test_a_block_takes_little_memory():
    peaks = memory.measure("meta", 32)["peaks"]
    assert peaks["together"] <= 1.02 * peaks["one by one"]


@pytest.mark.parametrize("backend", ["aot_eager"])
def test_compiled_without_a_break(backend):
    torch.manual_seed(0)
    model = nn.Sequential(ts.OrthoConv2d(4, 8, 3, stride=2), ts.MaxMin(), nn.Flatten(), ts.OrthoLinear(128, 5))
    x = torch.randn(2, 4, 8, 8)
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    compiled(x).square().sum().backward()
    found = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    model(x).square().sum().backward()
    for one, parameter in zip(found, model.parameters(), strict=True):
        torch.testing.assert_close(one, parameter.grad, rtol=1e-4, atol=1e-4)


@pytest.fixture
def builds(monkeypatch):
    """How often a weight was built."""
    seen = []
    built = Parametrization.built
    monkeypatch.setattr(Parametrization, "built", lambda self, free: seen.append(self) or built(self, free))
    return seen


def test_compiled_evaluation_builds_once(builds):
    torch.manual_seed(0)
    model = nn.Sequential(ts.OrthoConv2d(4, 4, 3), ts.MaxMin(), ts.OrthoConv2d(4, 4, 3)).eval()
    x = torch.randn(2, 4, 8, 8)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        first = compiled(x)
        assert len(builds) == 2
        torch.testing.assert_close(compiled(x), first)
        torch.testing.assert_close(model(x), first)
        assert len(builds) == 2
        nn.init.normal_(model[0].free_tensors[0])
        torch.testing.assert_close(compiled(x), model(x))
        assert len(builds) == 3
        assert not torch.allclose(compiled(x), first)


def test_a_frozen_layer_keeps_its_weight_in_every_mode(builds):
    model = nn.Sequential(ts.OrthoLinear(4, 4), ts.OrthoLinear(4, 4)).train()
    model[0].requires_grad_(False)
    optimizer = torch.optim.SGD(model[1].parameters(), lr=0.1)
    for _ in range(4):
        optimizer.zero_grad()
        model(torch.randn(2, 4)).square().sum().backward()
        optimizer.step()
    assert sum(part is model[0].parametrization for part in builds) == 1
    before = model[0].weight
    torch.optim.SGD([{"params": model[0].parameters()}, {"params": model[1].parameters()}], lr=0.1)
    nn.init.normal_(model[0].free_tensors[0])
    assert not torch.allclose(model[0].weight, before)


def test_optimizers_of_others_do_not_rebuild(builds):
    layer, other = ts.OrthoLinear(4, 4).eval(), nn.Linear(4, 4)
    mine, theirs = torch.optim.SGD(layer.parameters(), lr=0.1), torch.optim.SGD(other.parameters(), lr=0.1)
    with torch.no_grad():
        layer(torch.randn(2, 4))
        for optimizer in (theirs, mine):
            optimizer.step()
            layer(torch.randn(2, 4))
    assert len(builds) == 2


def degenerate(layer):
    """Make all free tensors nearly dependent, with the same weight."""
    with torch.no_grad():
        for tensor in layer.free_tensors:
            rows = tensor.shape[-2]
            tensor.copy_((torch.eye(rows) + 300 * torch.ones(rows, rows).tril(-1)) @ tensor)


def condition(tensor):
    return float(torch.linalg.cond(tensor.detach()).max())


@pytest.mark.parametrize("split", ["two optimizers", "one frozen"])
def test_reconditioning_when_tensors_do_not_share_an_optimizer(split):
    torch.manual_seed(0)
    layer = ts.OrthoConv2d(8, 8, 3)
    degenerate(layer)
    matrix, frames = layer.free_tensors
    expected = layer.weight.detach()
    torch.testing.assert_close(expected, layer.weight.detach())
    if split == "one frozen":
        frames.requires_grad_(False)
        optimizers = [torch.optim.SGD(layer.parameters(), lr=0.0)]
    else:
        optimizers = [torch.optim.SGD([tensor], lr=0.0) for tensor in (matrix, frames)]
    poor = condition(matrix), condition(frames)
    for _ in range(64):
        for optimizer in optimizers:
            optimizer.step()
    assert condition(matrix) < 0.1 * poor[0]
    assert (condition(frames) == poor[1]) == (split == "one frozen")
    torch.testing.assert_close(layer.weight.detach(), expected, rtol=0, atol=1e-4)
