"""Singular values are 1 whatever happened to the free tensors."""

import pytest
import torch
from torch import nn

import trysquare as ts
from tests.oracle import dense, distance_from_orthogonal, spectrum

TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-11}
LAYERS = {
    "square": (lambda **o: ts.OrthoConv2d(8, 8, 3, **o), (8, 4, 4)),
    "odd": (lambda **o: ts.OrthoConv2d(5, 7, 3, **o), (5, 4, 4)),
    "wide": (lambda **o: ts.OrthoConv2d(12, 4, (3, 2), **o), (12, 4, 4)),
    "tall": (lambda **o: ts.OrthoConv2d(3, 16, 3, **o), (3, 4, 4)),
    "strided square": (lambda **o: ts.OrthoConv2d(4, 16, 3, stride=2, **o), (4, 6, 6)),
    "strided wide": (lambda **o: ts.OrthoConv2d(4, 6, 4, stride=2, **o), (4, 6, 6)),
    "strided tall": (lambda **o: ts.OrthoConv2d(3, 30, 3, stride=2, **o), (3, 6, 6)),
    "shortcut": (lambda **o: ts.OrthoConv2d(8, 8, 1, stride=2, **o), (8, 4, 4)),
    "grouped": (lambda **o: ts.OrthoConv2d(8, 16, 3, groups=4, dilation=2, **o), (8, 4, 4)),
    "transposed": (lambda **o: ts.OrthoConvTranspose2d(16, 4, 3, stride=2, **o), (16, 3, 3)),
    "1d": (lambda **o: ts.OrthoConv1d(6, 6, 5, **o), (6, 8)),
    "3d": (lambda **o: ts.OrthoConv3d(4, 4, 2, **o), (4, 3, 3, 3)),
    "linear": (lambda **o: ts.OrthoLinear(16, 16, **o), (16,)),
    "linear wide": (lambda **o: ts.OrthoLinear(24, 10, **o), (24,)),
    "linear tall": (lambda **o: ts.OrthoLinear(10, 24, **o), (10,)),
}


@pytest.fixture(params=[torch.float32, torch.float64], ids=["float32", "float64"])
def dtype(request):
    return request.param


@pytest.fixture(params=LAYERS)
def case(request, dtype):
    make, shape = LAYERS[request.param]
    return make(dtype=dtype), shape


def exact(layer, shape, dtype):
    """Distance in float64 arithmetic of the weight that the layer really uses."""
    assert dtype == layer.weight.dtype
    return distance_from_orthogonal(ts.to_torch(layer).double(), shape) if shape else None


def check(layer, shape, dtype):
    assert distance_from_orthogonal(layer, shape) < TOLERANCE[dtype]
    for tensor in layer.free_tensors:
        tensor.grad = None
    layer(torch.randn(2, *shape, dtype=dtype)).square().sum().backward()
    assert all(tensor.grad.isfinite().all() for tensor in layer.free_tensors)


def test_at_initialisation(case, dtype):
    check(*case, dtype)


@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
def test_after_200_steps(case, dtype, optimizer):
    layer, shape = case
    x = torch.randn(4, *shape, dtype=dtype)
    y = torch.randn_like(layer(x)).detach()
    step = {"adam": lambda p: torch.optim.Adam(p, 0.1), "sgd": lambda p: torch.optim.SGD(p, 1.0)}
    optimizer = step[optimizer](layer.parameters())
    for _ in range(200):
        optimizer.zero_grad()
        (layer(x) - y).square().mean().backward()
        optimizer.step()
    check(layer, shape, dtype)


def conditioned(tensor):
    left, _, right = torch.linalg.svd(torch.randn_like(tensor), full_matrices=False)
    return (left * torch.logspace(0, -6, left.shape[-1], dtype=tensor.dtype)) @ right


@pytest.mark.parametrize(
    "write",
    [
        torch.randn_like,
        lambda t: 1e6 * t,
        lambda t: 1e-6 * t,
        conditioned,
        lambda t: t.index_fill(-1, torch.tensor([0]), 0.0),
        lambda t: t.index_fill(-2, torch.tensor([0]), 0.0),
        torch.zeros_like,
        torch.ones_like,
    ],
    ids=["normal", "x1e6", "x1e-6", "condition 1e6", "zero column", "zero row", "zero", "ones"],
)
def test_with_hostile_free_tensors(case, dtype, write):
    layer, shape = case
    with torch.no_grad():
        for tensor in layer.free_tensors:
            tensor.copy_(write(tensor))
    check(layer, shape, dtype)


def test_zero_padding_never_amplifies(dtype):
    for make, shape in LAYERS.values():
        if len(shape) == 1:
            continue
        layer = make(dtype=dtype, padding_mode="zeros")
        assert spectrum(layer, shape).max() <= 1 + TOLERANCE[dtype]


def test_feature_maps_smaller_than_the_kernel(dtype):
    for layer, shape in (
        (ts.OrthoConv2d(4, 4, 7, dtype=dtype), (4, 2, 1)),
        (ts.OrthoConv1d(4, 8, 6, stride=2, dilation=3, dtype=dtype), (4, 2)),
        (ts.OrthoConvTranspose2d(8, 4, 7, stride=2, dtype=dtype), (8, 1, 1)),
    ):
        assert distance_from_orthogonal(layer, shape) < TOLERANCE[dtype]


@pytest.mark.parametrize("name", ts.linalg.ORTHOGONALIZERS)
def test_every_orthogonalizer_makes_an_orthogonal_layer_with_right_gradients(name):
    layer = ts.OrthoConv2d(2, 6, 2, stride=2, orthogonalizer=name, dtype=torch.float64)
    assert distance_from_orthogonal(layer, (2, 4, 4)) < 1e-11
    free = [tensor.detach().clone().requires_grad_() for tensor in layer.free_tensors]
    assert torch.autograd.gradcheck(layer.parametrization.build, free)


@pytest.mark.parametrize("name", ["square", "odd", "strided wide", "strided tall", "tall", "grouped", "3d"])
def test_gradients_of_the_kernel(name):
    small = {
        "square": ts.OrthoConv2d(4, 4, 3),
        "odd": ts.OrthoConv2d(3, 3, 2),
        "strided wide": ts.OrthoConv2d(2, 3, 3, stride=2),
        "strided tall": ts.OrthoConv1d(2, 6, 3, stride=2),
        "tall": ts.OrthoConv1d(2, 5, 3),
        "grouped": ts.OrthoConv1d(4, 8, 3, groups=2),
        "3d": ts.OrthoConv3d(2, 2, 2),
    }[name].double()
    free = [tensor.detach().clone().requires_grad_() for tensor in small.free_tensors]
    assert torch.autograd.gradcheck(small.parametrization.build, free)


def test_up_undoes_down():
    down = ts.OrthoConv2d(4, 16, 3, stride=2, dtype=torch.float64)
    x = torch.randn(2, 4, 8, 8, dtype=torch.float64)
    torch.testing.assert_close(down.inverse()(down(x)), x)
    assert down.inverse().bias is down.bias
    plain = ts.OrthoConv2d(4, 16, 3, stride=2, bias=False, dtype=torch.float64)
    torch.testing.assert_close(plain.inverse()(plain(x)), x)
    up = ts.OrthoConvTranspose2d(16, 4, 3, stride=2, dtype=torch.float64)
    torch.testing.assert_close(up.inverse()(up(down(x))), down(x))


def test_inverse_of_what_has_none():
    with pytest.raises(ValueError, match="only a square layer"):
        ts.OrthoConv2d(4, 8, 3).inverse()
    with pytest.raises(ValueError, match="loses what falls past the border"):
        ts.OrthoConv2d(4, 4, 3, padding_mode="zeros").inverse()
    with pytest.raises(ValueError, match="loses"):
        ts.OrthoConv2d(4, 4, 3, padding=0).inverse()


def test_adjoint_shares_parameters_and_trains_with_them():
    down = ts.OrthoConv2d(4, 8, 3, stride=2)
    up = down.adjoint()
    assert isinstance(up, nn.ConvTranspose2d)
    assert {id(p) for p in up.parameters()} == {id(p) for p in down.free_tensors}
    with torch.no_grad():
        down.free_tensors[0].normal_()
    torch.testing.assert_close(up.weight, down.weight)
    torch.testing.assert_close(dense(up.adjoint(), (4, 4, 4)), dense(down, (4, 4, 4)), atol=1e-6, rtol=0)
