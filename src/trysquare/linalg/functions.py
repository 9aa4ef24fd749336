"""Autograd functions whose first output is the result, and whose other outputs are what backward needs to know.

Torch lets a function of ``torch.func``'s kind save inputs and outputs only, so what forward found on its way must be an
output.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable as once_differentiable_by_graph


def apply_function(function: Any, *args: Any) -> Any:
    """``function.apply(*args)`` for an autograd function with a ``setup_context``, all arguments given.

    Torch's own ``apply`` inspects the signature of ``forward`` at every call, to fill in defaults and for transforms of
    ``torch.func``: a tenth of the time that a small kernel takes to build. Without transforms its base class will do.
    """
    if torch.compiler.is_compiling() or _transforms_are_active():
        return function.apply(*args)
    return super(torch.autograd.Function, function).apply(*args)


def _transforms_are_active() -> bool:
    return not torch.compiler.is_compiling() and torch._C._are_functorch_transforms_active()


def keep(ctx: Any, output: tuple[Tensor, ...], *others: Tensor) -> None:
    """Save ``others``, then all outputs but the first, which alone has a gradient; no zeros are made for the rest."""
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*others, *output[1:])


def backward_of_first(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Call ``backward(ctx, grad)`` with the gradient of the first output, unless that is ``None``.

    It is if the function that used the result returned ``None`` for its gradient. Must be the outermost decorator: the
    arguments that it drops are gradients too.
    """

    @wraps(backward)
    def of_first(ctx: Any, grad: Tensor | None, *_: Any) -> Any:
        return (None,) * len(ctx.needs_input_grad) if grad is None else backward(ctx, grad)

    return of_first


def once_differentiable(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Refuse derivatives of ``backward(ctx, grad)``, which knows its result but not how that depends on its inputs.

    As torch's decorator of that name, but under transforms of ``torch.func`` too, where that one gives zeros.
    """
    without_graph = once_differentiable_by_graph(backward)

    @wraps(backward)
    def once(ctx: Any, grad: Tensor) -> Any:
        if _transforms_are_active() and len(_differentiated_by(grad, *ctx.saved_tensors)) > 1:
            raise RuntimeError("second derivatives of orthogonal weights by torch.func are not available")
        return without_graph(ctx, grad)

    return once


def _differentiated_by(*tensors: Tensor) -> set[int]:
    """Levels of the transforms that differentiate any of the tensors; one number for all that have ended."""
    wrappers = torch._C._functorch
    levels = set()
    for tensor in tensors:
        while wrappers.is_functorch_wrapped_tensor(tensor):
            if wrappers.is_gradtrackingtensor(tensor):
                levels.add(wrappers.maybe_get_level(tensor))
            tensor = wrappers.get_unwrapped(tensor)
    return levels
