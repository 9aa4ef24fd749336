"""Autograd functions that return a result and what backward keeps."""

import pytest
import torch

import trysquare as ts
from trysquare.nn.linalg.orthonormal import orthonormal_rows
from trysquare.nn.linalg.projectors import grow
from trysquare.nn.linalg.sorting import max_min


class _Stop(torch.autograd.Function):
    """Has no gradient to give, and says so by ``None``."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return None


MATRICES = (3, 4, 4)
FUNCTIONS = {
    "grow": (lambda matrix, rows: grow(matrix, rows, (0, 0)), (3, 1, 4, 4), (2, 3, 2, 4)),
    "orthonormal rows": (orthonormal_rows, MATRICES),
    "polar": (ts.linalg.ORTHOGONALIZERS["bjorck"].apply, MATRICES),
    "max min": (lambda pairs: max_min(pairs, -1), (3, 2)),
}


def called(name):
    function, *shapes = FUNCTIONS[name]
    inputs = [torch.randn(shape, requires_grad=True) for shape in shapes]
    return inputs, function(*inputs)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_no_gradient_comes_of_none(name):
    inputs, result = called(name)
    _Stop.apply(result).sum().backward()
    assert all(tensor.grad is None for tensor in inputs)


@pytest.mark.parametrize("name", ["grow", "orthonormal rows", "polar"])
def test_derivatives_of_any_order_by_transforms(name):
    function, *shapes = FUNCTIONS[name]
    inputs = [torch.randn(shape, dtype=torch.float64) for shape in shapes]

    def cubed(first, scale=1.0):
        return (scale * function(first, *inputs[1:])).pow(3).sum()

    gradient = torch.func.grad(cubed)(inputs[0])
    torch.testing.assert_close(torch.func.jacrev(cubed)(inputs[0]), gradient)
    both = torch.func.vmap(torch.func.grad(cubed))(torch.stack([inputs[0]] * 2))
    torch.testing.assert_close(both[1], gradient)
    both = torch.func.grad(lambda x: torch.func.vmap(cubed)(x).sum())(torch.stack([inputs[0]] * 2))
    torch.testing.assert_close(both[1], gradient)
    first = inputs[0]
    direction, step = torch.randn_like(first), 1e-5
    expected = (torch.func.grad(cubed)(first + step * direction) - torch.func.grad(cubed)(first - step * direction)) / (
        2 * step
    )
    size = expected.abs().max()

    def along(x):
        return (torch.func.grad(cubed)(x) * direction).sum()

    for found in (
        torch.func.grad(along)(first),
        torch.func.jvp(torch.func.grad(cubed), (first,), (direction,))[1],
        torch.func.jacrev(torch.func.jacrev(cubed))(first).flatten(first.ndim).matmul(direction.flatten()),
        torch.func.hessian(cubed)(first).flatten(first.ndim).matmul(direction.flatten()),
        torch.func.vmap(torch.func.grad(along))(torch.stack([first] * 2))[1],
    ):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-6 * float(size))
    # Of the gradient, which is linear in a factor of the function.
    for transform in (torch.func.grad, torch.func.jacrev):
        scaled = torch.func.grad(lambda s, t=transform: t(cubed)(first, s).sum())(torch.tensor(1.0).double())
        torch.testing.assert_close(scaled, 3 * gradient.sum())


@pytest.mark.parametrize("name", ["grow", "orthonormal rows", "polar"])
def test_gradients_of_gradients_by_autograd(name):
    function, *shapes = FUNCTIONS[name]
    inputs = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    assert torch.autograd.gradcheck(function, inputs, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(function, inputs, check_fwd_over_rev=True)


def test_free_tensors_that_have_moved_on_are_noticed():
    matrix = torch.randn(1, 2, 3, requires_grad=True)
    (gradient,) = torch.autograd.grad(FUNCTIONS["orthonormal rows"][0](matrix).pow(3).sum(), matrix, create_graph=True)
    gradient.sum().backward(retain_graph=True)
    result = FUNCTIONS["orthonormal rows"][0](matrix).pow(3).sum()
    with torch.no_grad():
        matrix.add_(1.0)
    with pytest.raises(RuntimeError, match="before the optimizer steps"):
        torch.autograd.grad(result, matrix, create_graph=True)
