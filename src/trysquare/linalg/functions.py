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


def apply_function(function: Any, *args: Any) -> Any:
    """``function.apply(*args)`` for an autograd function with a ``setup_context``, all arguments given.

    Torch's own ``apply`` inspects the signature of ``forward`` at every call, to fill in defaults and for transforms of
    ``torch.func``: a tenth of the time that a small kernel takes to build. Without transforms its base class will do.
    """
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
        return function.apply(*args)
    return super(torch.autograd.Function, function).apply(*args)


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
