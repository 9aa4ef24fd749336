"""Autograd functions whose first output is the result, and whose other outputs are what backward needs to know.

Torch lets a function of ``torch.func``'s kind save inputs and outputs only, so what forward found on its way must be an
output. Each function comes in three kinds, so that training does not pay for second derivatives:

* the function itself, with a formula for its gradient that takes what was found as constants. Compilers trace this one;
  they do not trace functions with a rule for forward mode.
* ``transformed``, a subclass, for transforms of ``torch.func``: outputs that the formula uses are differentiable too,
  so that the formula can be differentiated again; and it has a rule for forward mode.
* ``eager``, made of these two, for everything else: the first, unless somebody differentiates the gradient. Then it is
  computed again by way of the second.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad


def apply_function(function: Any, *args: Any) -> Any:
    """``function.apply(*args)`` for an autograd function with a ``setup_context``, all arguments given.

    Torch's own ``apply`` inspects the signature of ``forward`` at every call, to fill in defaults and for transforms of
    ``torch.func``: a tenth of the time that a small kernel takes to build. Without transforms its base class will do.
    """
    if torch.compiler.is_compiling():
        return function.apply(*args)
    if torch._C._are_functorch_transforms_active():
        return getattr(function, "transformed", function).apply(*args)
    return super(torch.autograd.Function, getattr(function, "eager", function)).apply(*args)


def keep(ctx: Any, output: tuple[Tensor, ...], differentiable: int, *others: Tensor) -> None:
    """Save ``others``, then all outputs but the first.

    Args:
        ctx: of the function.
        output: what it returned.
        differentiable: how many of the outputs have gradients, from the first on; no zeros are made for the rest.
        others: what else to save.
    """
    ctx.mark_non_differentiable(*output[differentiable:])
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*others, *output[1:])


def nothing_for(ctx: Any) -> tuple[None, ...]:
    """What backward returns if no output has a gradient: where who used them returned ``None``."""
    return (None,) * len(ctx.needs_input_grad)


def is_differentiated() -> bool:
    """Whether somebody may differentiate what backward computes now.

    Not in a compiled graph: AOT compilers refuse second derivatives. ``torch.compile(backend="eager")``, which is for
    debugging, does not, and takes what forward found for constants.
    """
    return not torch.compiler.is_compiling() and (torch.is_grad_enabled() or forward_ad._current_level >= 0)


def eager_kind(function: Any, transformed: Any) -> Any:
    """The third kind of a function (see above)."""

    class Eager(function):  # type: ignore[misc]
        @staticmethod
        def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
            function.setup_context(ctx, inputs, output)
            transformed.save_for_tangents(ctx, inputs, output)
            ctx.outputs = len(output)
            # Not saved for backward: they are free tensors, which live anyway, and training does not need them.
            ctx.given = inputs
            ctx.versions = _versions(inputs)

        @staticmethod
        def backward(ctx: Any, grad: Tensor | None, *_: Any) -> Any:
            if grad is None:
                return nothing_for(ctx)
            if is_differentiated():
                return _gradient_again(ctx, transformed, grad)
            return function.backward(ctx, grad, *(None,) * (ctx.outputs - 1))

        @staticmethod
        def jvp(ctx: Any, *tangents: Any) -> Any:
            return transformed.jvp(ctx, *tangents)[0], *(None,) * (ctx.outputs - 1)

    Eager.__name__ = Eager.__qualname__ = function.__name__
    return Eager


def _versions(tensors: Any) -> list[int]:
    """How often each of them was written to; those made in inference mode do not count."""
    return [t._version for t in tensors if isinstance(t, Tensor) and not t.is_inference()]


def _gradient_again(ctx: Any, transformed: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    """The gradients of all inputs, as differentiable functions of these and of ``grad``."""
    if ctx.versions != _versions(ctx.given):
        raise RuntimeError(
            "a free tensor of an orthogonal weight was changed in place after the weight was built, so that second "
            "derivatives of it cannot be computed any more: take them before the optimizer steps"
        )
    wanted = [t for t, needed in zip(ctx.given, ctx.needs_input_grad, strict=True) if needed]
    with torch.enable_grad():
        result = super(torch.autograd.Function, transformed).apply(*ctx.given)[0]
        found = iter(torch.autograd.grad(result, wanted, grad, create_graph=True, allow_unused=True))
    return tuple(next(found) if needed else None for needed in ctx.needs_input_grad)
