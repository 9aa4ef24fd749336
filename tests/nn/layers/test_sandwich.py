import pytest
import torch
from torch import nn

import trysquare as ts
from tests.jacobians import exact, norms, randomise

LAYERS = {
    "linear": (lambda: ts.SandwichLinear(8, 8, activation=nn.Identity()), (8,)),
    "cayley": (lambda: ts.SandwichLinear(8, 8, orthogonalizer="cayley", activation=nn.Identity()), (8,)),
    "aoc": (lambda: ts.SandwichAOCConv2d(4, 4, 3, activation=nn.Identity()), (4, 4, 4)),
    "aoc stride": (lambda: ts.SandwichAOCConv2d(4, 8, 3, 2, activation=nn.Identity()), (4, 4, 4)),
    "fourier": (lambda: ts.SandwichConv2d(4, 4, 3, activation=nn.Identity()), (4, 4, 4)),
    "fourier stride": (lambda: ts.SandwichConv2d(2, 8, 3, 2, activation=nn.Identity()), (2, 4, 4)),
}


@pytest.mark.parametrize(("make", "shape"), LAYERS.values(), ids=LAYERS)
def test_the_bound_is_tight_to_one_percent(make, shape):
    x = torch.zeros(shape, dtype=torch.float64)
    largest = max(norms(exact(make()), x)[1] for _ in range(5))
    assert 0.99 < largest <= 1 + 1e-9


@pytest.mark.parametrize("make", [lambda: ts.SandwichLinear(5, 4), lambda: ts.SandwichLinear(5, 4, hidden_features=12)])
def test_the_linear_pair_is_orthonormal(make):
    layer = randomise(make()).double()
    first, second = (kernel.detach() for kernel in layer.kernels)
    psi = (5 * torch.tanh(layer.free_tensors[-1].detach() / 5)).exp()
    both = torch.cat((second.T / psi[:, None], first * psi[:, None]), 1) / 2**0.5
    values = torch.linalg.svdvals(both)
    torch.testing.assert_close(values, torch.ones_like(values))


@torch.no_grad()
def matrix_before_activation(layer, shape):
    """Dense matrix of the part before the activation."""
    size, held = torch.Size(shape).numel(), []
    layer.activation.register_forward_hook(lambda module, args, out: held.append(out))
    layer(torch.zeros(1, *shape, dtype=torch.float64))
    layer(torch.eye(size, dtype=torch.float64).view(size, *shape))
    return (held[1] - held[0]).flatten(1).T


@pytest.mark.parametrize(
    "make",
    [
        lambda: ts.SandwichAOCConv2d(4, 4, 3, activation=nn.Identity()),
        lambda: ts.SandwichAOCConv2d(4, 8, 3, 2, activation=nn.Identity()),
        lambda: ts.SandwichConv2d(4, 4, 3, activation=nn.Identity()),
        lambda: ts.SandwichConv2d(4, 8, 3, 2, activation=nn.Identity()),
    ],
)
def test_the_convolution_pair_has_orthonormal_rows(make):
    layer, shape = exact(make()), (4, 4, 4)
    b = matrix_before_activation(layer, shape) / 2**0.5
    whole = torch.autograd.functional.jacobian(
        lambda x: layer(x.view(1, *shape)).flatten(), torch.zeros(64, dtype=torch.float64)
    )
    # With slopes 1 and Ψ = I the layer is 2 AᵀB. B is known and has full row rank, so A is known too.
    a = (whole @ torch.linalg.pinv(b) / 2).T
    torch.testing.assert_close(a @ a.T + b @ b.T, torch.eye(len(b), dtype=torch.float64), atol=1e-8, rtol=0)


def test_psi_changes_the_function_and_not_the_bound():
    layer = exact(ts.SandwichLinear(6, 6))
    x = torch.randn(3, 6, dtype=torch.float64)
    before = layer(x)
    layer.free_tensors[-1].normal_()
    assert not torch.allclose(layer(x), before)


def test_fourier_layer_follows_the_size_of_the_input():
    layer = ts.SandwichConv2d(3, 4, 3).eval()
    with torch.no_grad():
        small, large = torch.randn(1, 3, 4, 5), torch.randn(1, 3, 6, 4)
        first = layer(small)
        assert layer(large).shape == (1, 4, 6, 4)
        torch.testing.assert_close(layer(small), first)
        held = layer.response.cache.weight
        layer(small)
        assert layer.response.cache.weight is held
    # The layer commutes with shifts, as a convolution must.
    x = torch.randn(1, 3, 4, 5)
    torch.testing.assert_close(layer(x.roll((1, 2), (2, 3))), layer(x).roll((1, 2), (2, 3)), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("scale", [1e2, 1e5, 1e7, 1e20, 1e37])
@pytest.mark.parametrize("make", [lambda: ts.SandwichConv2d(4, 4, 3), lambda: ts.SandwichConvTranspose2d(8, 2, 3, 2)])
def test_large_free_kernels_make_contractions_too(make, scale):
    layer = make()
    with torch.no_grad():
        layer.response.free.normal_().mul_(scale)
    before, after = (kernel.detach().to(torch.complex128) for kernel in layer.response((4, 4)))
    values = torch.linalg.svdvals(torch.cat((after, before), -1) / 2**0.5)
    assert (values - 1).abs().max() < 1e-5
    x = torch.randn(2, layer.in_channels, 4, 4, requires_grad=True)
    layer(x).square().sum().backward()
    assert all(p.grad.isfinite().all() for p in layer.parameters())
    assert norms(exact(layer), x[0].detach())[1] <= 1 + 1e-5


def test_rows_are_orthonormal_to_rounding_in_float32():
    """A fifth of what the solution of the linear system leaves: a Newton step takes off the rest."""
    layer = ts.SandwichConv2d(32, 32, 3)
    with torch.no_grad():
        layer.response.free.mul_(100)
    both = torch.cat([kernel.detach().to(torch.complex128) for kernel in layer.response((6, 6))], -1) / 2**0.5
    eye = torch.eye(32, dtype=torch.complex128)
    assert (both @ both.mH - eye).abs().max() < 1e-6
