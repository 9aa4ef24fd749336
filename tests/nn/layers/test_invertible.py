"""Adjoints and inverses of layers, and chains that recompute activations, against dense matrices and plain passes."""

import contextlib
import copy
import math

import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

import trysquare as ts

INVERTIBLE = {
    "linear": (lambda: ts.OrthoLinear(6, 6), (6,)),
    "linear, no bias": (lambda: ts.OrthoLinear(6, 6, bias=False, orthogonalizer="cayley"), (6,)),
    "linear, transposed": (lambda: ts.OrthoLinearTranspose(6, 6, bias=True), (6,)),
    "convolution": (lambda: ts.OrthoConv2d(4, 16, 3, stride=2), (4, 4, 6)),
    "transposed": (lambda: ts.OrthoConvTranspose1d(8, 4, 3, stride=2), (8, 3)),
    "terms": (lambda: ts.OrthoConv1d(4, 4, 3, method="soc", terms=16), (4, 8)),
    "fourier": (lambda: ts.FourierOrthoConv2d(2, 8, 3, stride=2), (2, 4, 6)),
    "fourier lot": (lambda: ts.FourierOrthoConv1d(4, 4, 3, groups=2, method="lot"), (4, 5)),
    "fourier eco": (lambda: ts.FourierOrthoConv1d(4, 4, 3, method="eco"), (4, 6)),
    "fourier up": (lambda: ts.FourierOrthoConvTranspose1d(4, 2, 3, stride=2), (4, 3)),
    "down": (lambda: ts.InvertibleDownsampling2d((1, 2)), (2, 3, 4)),
    "up": (lambda: ts.InvertibleUpsampling3d((1, 2, 1)), (4, 2, 2, 3)),
    "shuffle": (lambda: ts.ChannelShuffle(3), (6, 2)),
    "shift": (lambda: ts.ChannelShift(0.25), (9, 4, 3)),
    "positions": (lambda: ts.Positions((3, 1)), (3, 4)),
    "unshuffle": (lambda: ts.ChannelUnshuffle(3), (6, 2)),
    "scaling": (lambda: ts.InputScaling((0.5, 0.1), (0.2, 0.4)), (2, 3)),
    "chain": (lambda: ts.InvertibleSequential(ts.OrthoConv1d(4, 4, 3), ts.InputScaling(0.0, 2.0)), (4, 5)),
}


def random_bias(layer):
    for name, tensor in layer.named_parameters():
        if name.endswith("bias"):
            nn.init.normal_(tensor)
    return layer.double()


@pytest.mark.parametrize("name", INVERTIBLE)
def test_the_inverse_undoes_the_layer_and_the_volume_is_that_of_its_matrix(name):
    make, shape = INVERTIBLE[name]
    layer = random_bias(make())
    inverse, x = layer.inverse(), torch.randn(3, *shape, dtype=torch.float64)
    y = layer(x)
    torch.testing.assert_close(inverse(y), x, rtol=0, atol=1e-10)
    torch.testing.assert_close(layer(inverse(torch.ones_like(y))), torch.ones_like(y), rtol=0, atol=1e-10)
    again = inverse.inverse()
    torch.testing.assert_close(again(x), y, rtol=0, atol=1e-10)
    assert {id(p) for p in inverse.parameters()} == {id(p) for p in layer.parameters()}
    jacobian = torch.autograd.functional.jacobian(lambda x: layer(x.unsqueeze(0)).flatten(), x[0]).flatten(1)
    volume = torch.linalg.slogdet(jacobian)[1].expand(3)
    torch.testing.assert_close(layer.log_abs_det(x), volume, rtol=0, atol=1e-8)
    torch.testing.assert_close(inverse.log_abs_det(y), -volume, rtol=0, atol=1e-8)


def dense(layer, shape):
    """The matrix of the layer without its bias."""
    linear = lambda x: layer(x.unsqueeze(0)).flatten()  # noqa: E731
    return torch.autograd.functional.jacobian(linear, torch.zeros(shape, dtype=torch.float64)).flatten(1)


ADJOINT = {name: case for name, case in INVERTIBLE.items() if name not in ("scaling", "positions", "chain")} | {
    "wide": (lambda: ts.OrthoLinear(6, 4), (6,)),
    "tall": (lambda: ts.OrthoLinear(4, 6), (4,)),
    "fourier, wide": (lambda: ts.FourierOrthoConv2d(4, 2, 3, stride=2), (4, 4, 6)),
    "fourier up, wide": (lambda: ts.FourierOrthoConvTranspose2d(8, 1, 3, stride=2, groups=1), (8, 2, 3)),
}


@pytest.mark.parametrize("name", ADJOINT)
def test_the_adjoint_is_the_transpose_of_the_dense_matrix(name):
    make, shape = ADJOINT[name]
    layer = random_bias(make())
    adjoint, image = layer.adjoint(), tuple(layer(torch.zeros(1, *shape, dtype=torch.float64)).shape[1:])
    torch.testing.assert_close(dense(adjoint, image), dense(layer, shape).T, rtol=0, atol=1e-12)
    torch.testing.assert_close(dense(adjoint.adjoint(), shape), dense(layer, shape), rtol=0, atol=1e-12)


@pytest.mark.parametrize("make", [lambda: ts.OrthoLinear(6, 4), lambda: ts.FourierOrthoConv2d(3, 4, 3)])
def test_the_adjoint_trains_what_the_layer_trains(make):
    layer = make()
    adjoint = layer.adjoint()
    shape = (2, 4) if isinstance(layer, nn.Linear) else (2, 4, 5, 5)
    adjoint(torch.randn(shape)).square().sum().backward()
    free = [tensor for name, tensor in layer.named_parameters() if not name.endswith("bias")]
    assert all(tensor.grad is not None for tensor in free)
    with torch.no_grad():
        layer.eval(), adjoint.eval()
        x = torch.randn(shape)
        before = adjoint(x)
        for tensor in free:
            tensor.add_(torch.randn_like(tensor))
        after = adjoint(x)
    assert not torch.allclose(before, after)
    torch.testing.assert_close(after, layer.adjoint()(x))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ts.OrthoLinear(6, 4), "in_features=6 and out_features=4"),
        (lambda: ts.OrthoLinear(6, 4).adjoint(), "in_features=4 and out_features=6"),
        (lambda: ts.FourierOrthoConv2d(4, 8, 3, stride=2), "would need 16 at stride"),
        (lambda: ts.OrthoConv2d(4, 4, 3, method="aol"), "not orthogonal"),
    ],
)
def test_what_has_no_inverse_says_why(make, message):
    with pytest.raises(ValueError, match=message):
        make().inverse()
    with pytest.raises(ValueError, match=message):
        make().log_abs_det(torch.zeros(1, 4))
    with pytest.raises(ValueError, match=message):
        ts.InvertibleSequential(make())


def test_the_adjoint_of_a_linear_layer_is_a_layer_like_any_other():
    layer = ts.OrthoLinear(6, 4)
    adjoint, x = layer.adjoint(), torch.randn(5, 4)
    assert (ts.singular_values(adjoint, (4,)) - 1).abs().max() < 1e-6
    assert ts.lipschitz_bound(adjoint, (4,)) == pytest.approx(1, abs=1e-5)
    assert type(ts.to_torch(adjoint)) is nn.Linear
    torch.testing.assert_close(ts.to_torch(adjoint)(x), adjoint(x))
    square = ts.OrthoLinear(4, 4)
    torch.testing.assert_close(ts.to_torch(square.inverse())(x), square.inverse()(x))
    assert copy.deepcopy(adjoint).double()(x.double()).dtype == torch.float64


class Coupling(nn.Module):
    """An affine coupling layer, as users write it."""

    def __init__(self, net, undo=False):
        super().__init__()
        self.net, self.undo = net, undo

    def _factors(self, x):
        first, second = x.chunk(2, 1)
        scale, shift = self.net(first).chunk(2, 1)
        return first, second, scale.tanh(), shift

    def forward(self, x):
        first, second, scale, shift = self._factors(x)
        second = (second - shift) * (-scale).exp() if self.undo else second * scale.exp() + shift
        return torch.cat([first, second], 1)

    def inverse(self):
        return Coupling(self.net, not self.undo)

    def log_abs_det(self, x):
        volume = self._factors(x)[2].flatten(1).sum(1)
        return -volume if self.undo else volume


def flow(depth=2, **options):
    middle = []
    for _ in range(depth):
        net = nn.Sequential(ts.OrthoConv2d(8, 8, 3), nn.Tanh(), nn.Conv2d(8, 16, 3, padding=1))
        middle += [ts.OrthoConv2d(16, 16, 3), ts.ChannelShuffle(4), Coupling(net), ts.FourierOrthoConv2d(16, 16, 3)]
    shared = ts.OrthoConv2d(4, 4, 3)
    return ts.InvertibleSequential(shared, shared, ts.InvertibleDownsampling2d(2), *middle, **options).double()


def gradients(model, x, loss, block=False):
    model.zero_grad()
    x = x.clone().requires_grad_()
    with ts.built(model) if block else contextlib.nullcontext():
        loss(model, x).backward()
    return [x.grad, *(p.grad for p in model.parameters())]


def likelihood(model, x):
    y, volume = model.with_log_abs_det(x)
    return y.square().sum() / 2 - volume.sin().sum()


LOSSES = {"output": lambda model, x: model(x).sin().sum(), "likelihood": likelihood}


@pytest.mark.parametrize("block", [False, True])
@pytest.mark.parametrize("loss", LOSSES)
def test_gradients_are_those_of_the_plain_pass(loss, block):
    model, x = flow(), torch.randn(2, 4, 4, 6, dtype=torch.float64)
    model[3].bias.requires_grad_(False)
    model[6].weight.requires_grad_(False)
    model[7].free_tensors[0].requires_grad_(False)
    found = gradients(model, x, LOSSES[loss], block)
    model.recompute = False
    expected = gradients(model, x, LOSSES[loss])
    assert sum(g is None for g in expected) == 3
    for one, other in zip(found, expected, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-11)


def test_gradients_are_those_of_finite_differences():
    model, x = flow(1), torch.randn(1, 4, 4, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(model, x)
    assert torch.autograd.gradcheck(model.log_abs_det, x)


def test_evaluating_before_training_in_the_same_mode_takes_no_gradient_away():
    model, x = flow().eval(), torch.randn(2, 4, 4, 4, dtype=torch.float64)
    with torch.no_grad():
        model(x)
    found = gradients(model, x, LOSSES["output"])
    model.recompute = False
    for one, other in zip(found, gradients(model, x, LOSSES["output"]), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-11)


def test_works_within_a_checkpoint_and_for_some_gradients_only():
    model, x = flow(), torch.randn(2, 4, 4, 4, dtype=torch.float64)
    expected = gradients(model, x, LOSSES["output"])
    checkpointed = lambda model, x: checkpoint(model, x, use_reentrant=False).sin().sum()  # noqa: E731
    for one, other in zip(gradients(model, x, checkpointed), expected, strict=True):
        torch.testing.assert_close(one, other)
    inputs = list(model.parameters())[:3]
    for one, other in zip(torch.autograd.grad(model(x).sin().sum(), inputs), expected[1:], strict=False):
        torch.testing.assert_close(one, other)


def test_parameters_that_are_replaced_for_one_call_get_their_gradients():
    model, x = flow(1), torch.randn(2, 4, 4, 4, dtype=torch.float64)
    others = {name: torch.randn_like(p).requires_grad_() for name, p in model.named_parameters()}
    torch.func.functional_call(model, others, (x,)).sin().sum().backward()
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(others[name])
    for found, p in zip(gradients(model, x, LOSSES["output"])[1:], others.values(), strict=True):
        torch.testing.assert_close(p.grad, found, rtol=1e-8, atol=1e-10)


def kept(depth, recompute):
    """Bytes that autograd keeps in a pass, weights and what was there before apart."""
    layers = [m for _ in range(depth) for m in (ts.OrthoConv2d(4, 4, 3), ts.ChannelShuffle(2), ts.OrthoConv2d(4, 4, 1))]
    model = ts.InvertibleSequential(*layers, recompute=recompute)
    x, seen = torch.randn(8, 4, 16, 16, requires_grad=True), {}

    def keep(tensor):
        if tensor.shape[0] == 8:
            storage = tensor.untyped_storage()
            seen[storage.data_ptr()] = storage.nbytes()
        return tensor

    with ts.built(model), saved_tensors_hooks(keep, lambda tensor: tensor):
        model(x)
    return sum(seen.values())


def test_memory_of_activations_does_not_depend_on_the_depth():
    one = 8 * 4 * 16 * 16 * 4
    assert [kept(depth, True) for depth in (1, 2, 4, 8, 16)] == [2 * one] * 5  # the input and the output
    plain = [kept(depth, False) for depth in (1, 2, 4, 8, 16)]
    assert plain == [2 * depth * one for depth in (1, 2, 4, 8, 16)]


def test_weights_are_built_once_for_both_passes(monkeypatch):
    model, x, built = flow(1), torch.randn(2, 4, 4, 4, dtype=torch.float64), []
    for part in model.modules():
        if isinstance(part, ts.parametrizations.Parametrization) and part.slots:
            build = part.build
            monkeypatch.setattr(
                part, "build", lambda *free, build=build, part=part: (built.append(part), build(*free))[1]
            )
    model(x).sum().backward()
    assert len(built) == len(set(built)) == 3


def test_what_cannot_be_recomputed_is_refused():
    model, x = flow(1).float(), torch.randn(2, 4, 4, 4)
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(RuntimeError, match="autocast"):
        model(x)
    with pytest.raises(RuntimeError, match="bfloat16"):
        copy.deepcopy(model).bfloat16()(x.bfloat16())
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        model(x)
        model.eval()(x)
    model.train().recompute = False
    with torch.autocast("cpu", torch.bfloat16):
        model(x).sum().backward()

    class Lossy(nn.Module):
        def forward(self, x):
            return x * torch.tensor([1.0, 1e-9])

        def inverse(self):
            return nn.Identity()

    y = ts.InvertibleSequential(Lossy())(torch.randn(3, 2, requires_grad=True))
    with pytest.raises(RuntimeError, match="inverses recompute differs"):
        y.sum().backward()
    with pytest.raises(TypeError, match="Lossy has no method log_abs_det"):
        ts.InvertibleSequential(Lossy()).log_abs_det(torch.ones(1, 2))
    with pytest.raises(TypeError, match="ReLU has no method inverse"):
        ts.InvertibleSequential(nn.ReLU())
    x.requires_grad_()
    first = torch.autograd.grad(flow(1).float()(x).sin().sum(), x, create_graph=True)[0]
    with pytest.raises(RuntimeError, match="once_differentiable"):
        first.sum().backward()


def test_a_chain_with_fixed_weights_is_the_same_function():
    model, x = flow(1), torch.randn(2, 4, 4, 4, dtype=torch.float64, requires_grad=True)
    fixed = ts.export.with_fixed_weights(model)
    for original, chain in ((model, fixed), (model[:4], ts.to_torch(model[:4]))):
        assert isinstance(original, ts.InvertibleSequential)
        original(x).sin().sum().backward()
        expected, x.grad = x.grad, None
        chain(x).sin().sum().backward()
        torch.testing.assert_close(x.grad, expected)
        x.grad = None


def test_a_weight_changed_before_the_backward_pass_is_an_error():
    model, x = flow(1), torch.randn(2, 4, 4, 4, dtype=torch.float64)
    y = model(x)
    with torch.no_grad():
        model[0].bias.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_inverse_chain_trains_and_takes_outputs_directly():
    model, x = flow(1), torch.randn(2, 4, 4, 4, dtype=torch.float64)
    y = model(x)
    torch.testing.assert_close(model.inverse(y), x, rtol=0, atol=1e-10)
    undo = model.inverse()
    found = gradients(undo, y.detach(), LOSSES["output"])
    undo.recompute = False
    for one, other in zip(found, gradients(undo, y.detach(), LOSSES["output"]), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-11)
    volume = model.log_abs_det(x).detach()
    torch.testing.assert_close(undo.log_abs_det(y).detach(), -volume, rtol=0, atol=1e-9)
    jacobian = torch.autograd.functional.jacobian(lambda x: model(x[None]).flatten(), x[0]).flatten(1)
    assert float(volume[0]) == pytest.approx(float(torch.linalg.slogdet(jacobian)[1]), abs=1e-8)
    assert math.isfinite(float(volume.sum()))
