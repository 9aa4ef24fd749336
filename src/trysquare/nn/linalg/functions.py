"""Autograd functions that can be differentiated as often as one likes, and cost training nothing for that.

A gradient that is written as a formula has derivatives of its own only if autograd sees where everything in the formula
came from. That costs calls and memory, and training needs no second derivatives. So there are two ways through each
function: one for first derivatives, which keeps what its formula uses as plain numbers, and one that is differentiable
all the way. Where somebody differentiates the gradient of the first, it is computed again by way of the second.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad


def apply_function(function: Any, *args: Any) -> Any:
    """``function.apply(*args)``, all arguments given.

    Torch's own ``apply`` inspects the signature of ``forward`` at every call, to fill in defaults and for transforms of
    ``torch.func``: a tenth of the time that a small kernel takes to build. Without transforms its base class will do.
    """
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
        return function.apply(*args)
    return super(torch.autograd.Function, function).apply(*args)


def nothing_for(ctx: Any) -> tuple[None, ...]:
    """What backward returns if no output has a gradient: where who used them returned ``None``."""
    return (None,) * len(ctx.needs_input_grad)


def is_differentiated() -> bool:
    """Whether somebody may differentiate what backward computes now; compiled graphs refuse that."""
    return not torch.compiler.is_compiling() and (torch.is_grad_enabled() or forward_ad._current_level >= 0)


def is_traced() -> bool:
    """Whether what is computed now becomes a graph, for other values than those seen: by a compiler or ``make_fx``."""
    return (
        torch.compiler.is_compiling() or torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY) is not None
    )


def only_first_derivatives() -> bool:
    """Whether autograd alone will differentiate what is computed now: no compiler, transform or forward mode."""
    if is_traced() or torch._C._are_functorch_transforms_active():
        return False
    return forward_ad._current_level < 0


def refuse_nested_forward_mode() -> None:
    """Refuse forward mode inside of forward mode: torch loses what an autograd function adds there (torch 2.13).

    Raises:
        NotImplementedError: naming what to use instead.
    """
    stack = torch._C._functorch.get_interpreter_stack() or []
    levels = sum(each.key() == torch._C._functorch.TransformType.Jvp for each in stack)
    if levels + (levels == 0 and forward_ad._current_level >= 0) + (forward_ad._current_level >= 1) > 1:
        raise NotImplementedError(
            "orthogonal weights have no derivatives by forward mode within forward mode (jvp of jvp, "
            "jacfwd(jacfwd(f))): use torch.func.hessian, jacfwd(jacrev(f)) or hvp instead"
        )


def refuse_linearized_gradient(like: Tensor) -> None:
    """Refuse a gradient inside of ``torch.func.linearize`` where torch's formula for it writes into a view.

    ``linearize`` loses such writes (torch 2.13), whoever makes them. Our own operations make none in a traced graph;
    torch's gradients of real Fourier transforms do.

    Raises:
        NotImplementedError: naming what to use instead.
    """
    if torch.compiler.is_compiling() or not is_traced() or forward_ad._current_level < 0:
        return
    if torch._C._are_functorch_transforms_active() or (torch.is_grad_enabled() and like.requires_grad):
        raise NotImplementedError(
            "torch.func.linearize of a gradient loses what torch writes into views there, so that second derivatives "
            "of Fourier transforms would be wrong: use torch.func.jvp of the gradient instead"
        )


def keep_inputs(ctx: Any, *inputs: Any) -> None:
    """Keep the inputs of a function of first derivatives for ``gradient_again``.

    They are not saved for backward: they are free tensors, which live anyway, and training does not need them.
    """
    if not torch.compiler.is_compiling():
        ctx.inputs, ctx.versions = inputs, _versions(inputs)


def _versions(inputs: Any) -> list[int]:
    """How often each tensor was written to; those made in inference mode do not count that."""
    return [t._version for t in inputs if isinstance(t, Tensor) and not t.is_inference()]


def gradient_again(ctx: Any, function: Callable[..., Tensor], grad: Tensor) -> tuple[Tensor | None, ...]:
    """The gradients of all inputs that were kept, as differentiable functions of these and of ``grad``.

    Args:
        ctx: of a function of first derivatives.
        function: computes the same, and is differentiable all the way.
        grad: gradient of the result.
    """
    if ctx.versions != _versions(ctx.inputs):
        raise RuntimeError(
            "a free tensor of an orthogonal weight was changed in place after the weight was built, so that second "
            "derivatives of it cannot be computed any more: take them before the optimizer steps"
        )
    wanted = [t for t, needed in zip(ctx.inputs, ctx.needs_input_grad, strict=True) if needed]
    with torch.enable_grad():
        found = iter(torch.autograd.grad(function(*ctx.inputs), wanted, grad, create_graph=True, allow_unused=True))
    return tuple(next(found) if needed else None for needed in ctx.needs_input_grad)


def compiler_is_for_training() -> bool:
    """Whether the graph that is traced goes to AOTAutograd, which refuses to differentiate a gradient.

    Other backends run it under autograd, for which whatever an autograd function has saved is a constant there (torch
    2.13): second derivatives by our formulas would be wrong without a word, and torch's own of triangular factors are
    not right either. Those are ``"eager"``, which is for debugging, and some of users.
    """
    from torch._dynamo.backends.common import AotAutograd
    from torch._dynamo.symbolic_convert import InstructionTranslator

    try:
        backend: Any = InstructionTranslator.current_tx().output.compiler_fn
    except (AttributeError, LookupError):  # torch.export, whose graphs have no gradients
        return True
    given = getattr(getattr(backend, "_torchdynamo_orig_backend", backend), "compiler_fn", backend)
    name = getattr(backend, "__name__", "")
    return isinstance(given, AotAutograd) or name.startswith("aot") or name in ("inductor", "cudagraphs", "openxla")


compiler_is_for_training._dynamo_marked_constant = True  # type: ignore[attr-defined]  # asked while a graph is traced


@torch.compiler.disable(  # type: ignore[untyped-decorator]
    reason="orthogonal weights have second derivatives, which this backend would get wrong: they are left out of the "
    "graph, which fullgraph=True does not allow; use backend='inductor' or 'aot_eager'"
)
def outside_of_graphs(function: Callable[..., Tensor], *args: Any) -> Tensor:
    """``function(*args)`` as without a compiler."""
    return function(*args)


class Operation:
    """Both ways through an autograd function, and the choice between them.

    Args:
        function: differentiable all the way: it returns its result and whatever else its derivatives are made of,
            saves all of that (``keep_outputs``), and has formulas for the gradient and for forward mode.
    """

    def __init__(self, function: Any) -> None:
        self.function = function
        self.compiled: Any = _for_compilers(function)
        self.first: Any = _first_derivatives(function)

    def __call__(self, *args: Any) -> Tensor:
        """The result for these arguments, all of them given."""
        if torch.compiler.is_compiling():
            if not compiler_is_for_training():
                return outside_of_graphs(self, *args)
            return self.compiled.apply(*args)[0]  # type: ignore[no-any-return]
        if only_first_derivatives():
            return apply_function(self.first, *args)  # type: ignore[no-any-return]
        refuse_nested_forward_mode()
        return self.function.apply(*args)[0]  # type: ignore[no-any-return]


def keep_outputs(ctx: Any, output: tuple[Tensor, ...]) -> None:
    """Save all outputs, for backward and for forward mode."""
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*output)
    if not torch.compiler.is_compiling():
        ctx.save_for_forward(*output)


def _for_compilers(function: Any) -> Any:
    """A kind of a function that ``torch.compile`` traces."""

    class Compiled(function):  # type: ignore[misc]
        jvp = torch.autograd.Function.jvp  # functions with a rule of their own are refused

        @staticmethod
        def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
            ctx.mark_non_differentiable(*output[1:])
            function.setup_context(ctx, inputs, output)

        @staticmethod
        def backward(ctx: Any, grad: Tensor, *others: Any) -> Any:
            return function.backward(ctx, grad, *(None for _ in others))

    return Compiled


def _first_derivatives(function: Any) -> Any:
    class First(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *inputs: Any) -> Tensor:
            output = function.forward(*inputs)
            ctx.set_materialize_grads(False)
            ctx.save_for_backward(*output)
            ctx.others = (None,) * (len(output) - 1)
            keep_inputs(ctx, *inputs)
            return output[0]  # type: ignore[no-any-return]

        @staticmethod
        def backward(ctx: Any, grad: Tensor | None) -> Any:
            if grad is None:
                return nothing_for(ctx)
            if is_differentiated():
                return gradient_again(ctx, lambda *inputs: apply_function(function, *inputs)[0], grad)
            return function.backward(ctx, grad, *ctx.others)

    First.__name__ = First.__qualname__ = function.__name__
    return First
