"""Autograd functions that return a result and what backward keeps."""

import pytest
import torch

import trysquare as ts
from trysquare.linalg.orthonormal import orthonormal_rows
from trysquare.linalg.projectors import grow
from trysquare.linalg.sorting import max_min


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
def test_second_derivatives_are_refused_by_transforms_too(name):
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
    with pytest.raises(RuntimeError, match="second derivatives"):
        torch.func.grad(lambda x: torch.func.grad(cubed)(x).sum())(inputs[0])
    with pytest.raises(RuntimeError, match="second derivatives"):
        torch.func.jacrev(torch.func.jacrev(cubed))(inputs[0])
    for transform in (torch.func.grad, torch.func.jacrev):
        with pytest.raises(RuntimeError, match="second derivatives"):
            torch.func.grad(lambda s, t=transform: t(cubed)(inputs[0], s).sum())(torch.tensor(1.0).double())
