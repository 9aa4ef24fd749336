"""Pairs in order, with the permutation as derivative."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from trysquare import torch_internals
from trysquare.nn.linalg.precision import Context, Gradients, apply_function, nothing_for, only_first_derivatives


def _swapped(pairs: Tensor, swap: Tensor, dim: int) -> Tensor:
    """Swap the pairs on axis ``dim`` where ``swap`` is true; its own inverse and adjoint.

    Interpolation with weights 0 and 1 is exact where the difference of a pair is finite, and several times as fast as
    ``torch.where`` on a CPU.
    """
    first, second = pairs.unbind(dim)
    weight = swap.to(pairs.dtype)
    return torch.stack((torch.lerp(first, second, weight), torch.lerp(second, first, weight)), dim)


def _ordered(first: Tensor, second: Tensor, dim: int) -> Tensor:
    return torch.stack((torch.maximum(first, second), torch.minimum(first, second)), dim)


class _MaxMinContext(Context, Protocol):
    dim: int


class _MaxMin(torch.autograd.Function):
    """Sorted pairs, and which of them were swapped.

    Torch's own derivatives of maximum and minimum halve the gradient at ties, which is no permutation.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(pairs: Tensor, dim: int) -> tuple[Tensor, Tensor]:
        first, second = pairs.unbind(dim)
        return _ordered(first, second, dim), second > first  # a byte a pair is all that is kept

    @staticmethod
    def setup_context(ctx: _MaxMinContext, inputs: tuple[Tensor, int], output: tuple[Tensor, Tensor]) -> None:
        ctx.dim = inputs[1]
        ctx.mark_non_differentiable(output[1])
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(output[1])
        ctx.save_for_forward(output[1])

    @staticmethod
    def backward(ctx: _MaxMinContext, grad: Tensor | None, *_: object) -> Gradients:
        return nothing_for(ctx) if grad is None else (_swapped(grad, ctx.saved_tensors[0], ctx.dim), None)

    @staticmethod
    def jvp(ctx: _MaxMinContext, tangent: Tensor, _: None) -> tuple[Tensor, None]:
        return _swapped(tangent, ctx.saved_tensors[0], ctx.dim), None


def max_min(pairs: Tensor, dim: int) -> Tensor:
    """Return the larger of each pair first, along axis ``dim`` of size 2. The Jacobian is a permutation, at ties too.

    >>> from trysquare.nn.linalg.sorting import max_min
    >>> max_min(torch.tensor([[1.0, 2.0], [4.0, 3.0]]), -1)
    tensor([[2., 1.],
            [4., 3.]])
    """
    first, second = pairs.unbind(dim)
    if torch_internals.jit_trace() is not None or not only_first_derivatives():
        # Compilers do not trace functions with a rule for forward mode, and nested forward mode is wrong with them.
        swap = second > first
        return torch.stack((torch.where(swap, second, first), torch.where(swap, first, second)), dim)
    if not torch.is_grad_enabled():
        return _ordered(first, second, dim)
    ordered: Tensor = apply_function(_MaxMin, pairs, dim)[0]
    return ordered
