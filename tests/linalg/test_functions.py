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
