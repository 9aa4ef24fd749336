"""Numerical ground rules that all of ``linalg`` shares: full precision, and derivatives of any order.

A gradient that is written as a formula has derivatives of its own only if autograd sees where everything in the formula
came from. That costs calls and memory, and training needs no second derivatives. So there are two ways through each
autograd function: one for first derivatives, which keeps what its formula uses as plain numbers, and one that is
differentiable all the way. Where somebody differentiates the gradient of the first, it is computed again by way of the
second.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any, Protocol

import torch
from torch import Tensor

from trysquare import torch_internals

_NOTHING = nullcontext()


class Context(Protocol):
    """What torch hands to the methods of an autograd function. Subclasses say what a function keeps there besides."""

    needs_input_grad: tuple[bool, ...]
    saved_tensors: tuple[Tensor, ...]

    def save_for_backward(self, *tensors: Tensor | None) -> None: ...
    def save_for_forward(self, *tensors: Tensor | None) -> None: ...
    def mark_non_differentiable(self, *tensors: Tensor) -> None: ...
    def set_materialize_grads(self, value: bool) -> None: ...


Gradients = tuple[Tensor | None, ...]
"""What backward returns: a gradient for each input, ``None`` where there is none."""


# -- products of float32 matrices in TF32 or bfloat16, which a user may have switched on

# Backends that have a switch, and which one computes on a device.
_SWITCHES = ("cuda", "mkldnn")
_OF_DEVICE = {"cpu": "mkldnn", "cuda": "cuda", "xpu": "mkldnn"}


@torch_internals.constant_when_traced  # a graph has a guard for the switches
def is_reduced(device: str, operation: str = "matmul") -> bool:
    """Whether torch may compute float32 products (or convolutions, ``"conv"``) on a device with fewer digits."""
    backend = _OF_DEVICE.get(device)
    return backend is not None and _is_reduced_by(backend, operation)


def _is_reduced_by(backend: str, operation: str = "matmul") -> bool:
    return torch_internals.precision_of(backend, operation) in ("tf32", "bf16")


def _older_switch() -> str | None:
    """Return the switch from before each backend had its own; ``None`` if the new ones were thrown without it."""
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:  # torch refuses to say where older and newer ones disagree
        return None


class _FullProducts:
    """Switches products to IEEE float32, for all threads that are inside, and back when the last of them leaves.

    The switches belong to the process. So the first one to enter keeps what the user had, and a switch that somebody
    else has moved away from IEEE in the meantime stays where it is.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.inside = 0
        self._before: tuple[str | None, dict[str, str]] = (None, {})

    def __enter__(self) -> None:
        with self._lock:
            if not self.inside:
                older = _older_switch()
                older = None if older == "highest" else older
                reduced = [backend for backend in _SWITCHES if older is not None or _is_reduced_by(backend)]
                self._before = older, {backend: _own_precision(backend) for backend in reduced}
                # The older one first: torch refuses to compute where it and the newer ones disagree.
                if older is not None:
                    torch.set_float32_matmul_precision("highest")
                for backend in reduced:
                    torch_internals.set_precision_of(backend, "matmul", "ieee")
            self.inside += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self.inside -= 1
            if self.inside:
                return
            older, newer = self._before
            ours = [backend for backend in newer if torch_internals.precision_of(backend, "matmul") == "ieee"]
            if older is not None and len(ours) == len(_SWITCHES):
                torch.set_float32_matmul_precision(older)
            for backend in ours:
                torch_internals.set_precision_of(backend, "matmul", newer[backend])


def _own_precision(backend: str) -> str:
    """What the switch for products on a backend was set to itself: ``"none"`` if it follows those of wider scope.

    Torch tells only what comes of it. Put back as its own, that would not follow the wider switches any more, and
    products would go on in TF32 after the user has switched it off. So it is tried whether it follows: towards IEEE,
    which does no harm to other threads.
    """
    seen, whole = torch_internals.precision_of(backend, "matmul"), torch_internals.precision_of(backend, "all")
    if whole != seen or not _is_reduced_by(backend):
        return seen
    wider = torch_internals.precision_of("generic", "all")
    if wider == whole and _follows(backend, "all", "generic", wider):
        whole = "none"
    return "none" if _follows(backend, "matmul", backend, whole) else seen


def _follows(backend: str, operation: str, wider: str, value: str) -> bool:
    """Whether a switch follows that of all operations of ``wider``, which is put back to ``value``."""
    torch_internals.set_precision_of(wider, "all", "ieee")
    followed = torch_internals.precision_of(backend, operation) == "ieee"
    torch_internals.set_precision_of(wider, "all", value)
    return followed


_FULL_PRODUCTS = _FullProducts()


def _user_reduces(tensor: Tensor) -> bool:
    """Whether products on the device of ``tensor`` have fewer digits unless they are protected."""
    # While another thread is inside, the switches do not say what the user chose.
    return is_reduced(tensor.device.type) or (not torch.compiler.is_compiling() and _FULL_PRODUCTS.inside > 0)


class _Local(threading.local):
    building = False  # whether this thread is inside of `protected`, which takes care of all


_LOCAL = _Local()


def protected(build: Callable[..., Any], tensors: Sequence[Tensor]) -> Any:
    """Return ``build(*tensors)`` in full precision, derivatives too, whatever the user has switched on.

    The switches can be thrown around what autograd computes. In a compiled graph, in transforms of ``torch.func`` and
    in forward mode they cannot, so everything is computed in float64 there, which they do not touch.

    Args:
        build: returns a tensor or a tuple of several.
        tensors: all that ``build`` is differentiated with respect to, of one dtype.
    """
    like = tensors[0]
    if torch.finfo(like.dtype).bits == 64:
        return build(*tensors)
    reduced = _user_reduces(like) or autocast_dtype(like) is not None
    if only_first_derivatives():
        if torch.is_grad_enabled():
            if _LOCAL.building:
                return build(*tensors)
            if reduced:
                found = _Protected.apply(lambda *inputs: _as_tuple(build(*inputs)), *tensors)
                return found if len(found) > 1 else found[0]
            return _guarded(_built(build, tensors), build, tensors)
    elif reduced and (_user_reduces(like) or not torch.compiler.is_compiling()):
        exact = _as_tuple(build(*(tensor.to(torch.promote_types(tensor.dtype, torch.float64)) for tensor in tensors)))
        return tuple(each.to(like.dtype) for each in exact) if len(exact) > 1 else exact[0].to(like.dtype)
    with full_precision(like):
        return build(*tensors)


def exactly(build: Callable[..., Tensor], tensors: Sequence[Tensor]) -> Tensor:
    """Return ``build(*tensors)`` in full precision, for who computes first derivatives within ``full_precision`` too.

    What ``protected`` keeps in order to see to those by itself is not kept.
    """
    if not only_first_derivatives():
        return protected(build, tensors)
    with full_precision(tensors[0]):
        return _built(build, tensors)


def _built(build: Callable[..., Any], tensors: Sequence[Tensor]) -> Any:
    before, _LOCAL.building = _LOCAL.building, True
    try:
        return build(*tensors)
    finally:
        _LOCAL.building = before


def _as_tuple(result: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return result if isinstance(result, tuple) else (result,)


class _BuildContext(Context, Protocol):
    build: Callable[..., tuple[Tensor, ...]]
    convolves: bool


class _KeepsInputs(Protocol):
    @property
    def inputs(self) -> Sequence[object]: ...

    versions: list[int]


class _ProtectedContext(_BuildContext, Protocol):
    copies: list[Tensor]
    results: tuple[Tensor, ...]


class _Protected(torch.autograd.Function):
    """A function with a graph of its own, which backward walks with the switches thrown."""

    @staticmethod
    def forward(
        ctx: _ProtectedContext, build: Callable[..., tuple[Tensor, ...]], *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        with full_precision(tensors[0]), torch.enable_grad():
            ctx.copies = [tensor.detach().requires_grad_(tensor.requires_grad) for tensor in tensors]
            ctx.results = _built(build, ctx.copies)
        ctx.build, ctx.convolves = build, not is_reduced(tensors[0].device.type, "conv")
        ctx.save_for_backward(*tensors)
        return tuple(result.detach() for result in ctx.results)

    @staticmethod
    def backward(ctx: _ProtectedContext, *grads: Tensor) -> Gradients:
        needed = ctx.needs_input_grad[1:]
        if is_differentiated() or _convolutions_are_reduced_now(ctx, grads[0]):
            found = iter(_gradients_anew(ctx.build, ctx.saved_tensors, needed, grads))
        else:
            wanted = [copy for copy, need in zip(ctx.copies, needed, strict=True) if need]
            with full_precision(grads[0]):
                found = iter(torch.autograd.grad(ctx.results, wanted, grads, retain_graph=True, allow_unused=True))
        return None, *(next(found) if need else None for need in needed)


def _guarded(result: Any, build: Callable[..., Any], tensors: Sequence[Tensor]) -> Any:
    """``result``, which is ``build(*tensors)``, with derivatives that stay exact if something is switched on later."""
    if isinstance(result, tuple):
        parts = [lambda *inputs, place=place: build(*inputs)[place] for place in range(len(result))]
        return tuple(_guarded(each, part, tensors) for each, part in zip(result, parts, strict=True))
    if type(result) is not Tensor or not result.requires_grad or torch_internals.jit_trace() is not None:
        return result
    return apply_function(_Guarded, lambda *inputs: (build(*inputs),), result, *tensors)


class _GuardedContext(_BuildContext, Protocol):
    inputs: tuple[Tensor, ...]
    versions: list[int]


class _Guarded(torch.autograd.Function):
    """A tensor as it is, with the graph that it has, which backward leaves where that would lose digits.

    So it is if backward, or backward of backward, runs under autocast or switches that were off when the tensor was
    built. What can be differentiated again is made such that its own derivatives are exact.
    """

    @staticmethod
    def forward(
        ctx: _GuardedContext, build: Callable[..., tuple[Tensor, ...]], result: Tensor, *tensors: Tensor
    ) -> Tensor:
        ctx.build, ctx.convolves = build, not is_reduced(result.device.type, "conv")
        ctx.inputs, ctx.versions = tensors, _versions(tensors)  # as in `for_first_derivatives`
        ctx.set_materialize_grads(False)
        return torch_internals.make_subclass(Tensor, result)  # not a call to any kernel

    @staticmethod
    def backward(ctx: _GuardedContext, grad: Tensor | None) -> Gradients:
        if grad is None:
            return nothing_for(ctx)
        needed = ctx.needs_input_grad[2:]
        reduced = _user_reduces(grad) or autocast_dtype(grad) is not None or _convolutions_are_reduced_now(ctx, grad)
        if not (only_first_derivatives() if torch.is_grad_enabled() else reduced):
            return None, grad, *(None for _ in needed)
        _refuse_changed(ctx)
        found = iter(_gradients_anew(ctx.build, ctx.inputs, needed, [grad]))
        return None, None, *(next(found) if need else None for need in needed)


def _convolutions_are_reduced_now(ctx: _BuildContext, grad: Tensor) -> bool:
    """Whether convolutions have fewer digits than they had when something was built, which may have used some."""
    return ctx.convolves and is_reduced(grad.device.type, "conv")


def _gradients_anew(
    build: Callable[..., tuple[Tensor, ...]], inputs: Sequence[Tensor], needed: Sequence[bool], grads: Sequence[Tensor]
) -> Sequence[Tensor]:
    """The gradients of the needed inputs of ``build``, which is called again, in full precision."""
    if torch.is_grad_enabled():  # the gradient is a function like any other, to be protected in turn
        return _Protected.apply(_gradient_of(build, needed), *inputs, *grads)
    with full_precision(grads[0]), torch.enable_grad():
        copies = [tensor.detach().requires_grad_(need) for tensor, need in zip(inputs, needed, strict=True)]
        wanted = [copy for copy, need in zip(copies, needed, strict=True) if need]
        return torch.autograd.grad(_built(build, copies), wanted, grads, materialize_grads=True)


def _gradient_of(build: Callable[..., tuple[Tensor, ...]], needed: Sequence[bool]) -> Callable[..., tuple[Tensor, ...]]:
    """Return the function from the inputs of ``build`` and gradients of its results to those of the needed inputs."""

    def gradient(*given: Tensor) -> tuple[Tensor, ...]:
        inputs, grads = given[: len(needed)], given[len(needed) :]
        wanted = [tensor for tensor, need in zip(inputs, needed, strict=True) if need]
        return torch.autograd.grad(build(*inputs), wanted, grads, create_graph=True, materialize_grads=True)

    return gradient


def autocast_dtype(tensor: Tensor) -> torch.dtype | None:
    """Return the dtype that autocast computes in on the device of ``tensor``; ``None`` where it is off."""
    device = tensor.device.type
    if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    return None


def coarsest_dtype(tensor: Tensor) -> torch.dtype:
    """Return the shortest dtype that products of ``tensor`` may be rounded to: its own, or by autocast or the switches.

    TF32 has the digits of float16.
    """
    dtypes = [tensor.dtype, autocast_dtype(tensor) or tensor.dtype]
    backend = _OF_DEVICE.get(tensor.device.type)
    if backend is not None and tensor.dtype == torch.float32:
        switched = {torch_internals.precision_of(backend, operation) for operation in ("matmul", "conv")}
        dtypes += [dtype for name, dtype in (("tf32", torch.float16), ("bf16", torch.bfloat16)) if name in switched]
    return max(dtypes, key=lambda dtype: torch.finfo(dtype).eps)


def as_autocast(tensor: Tensor) -> Tensor:
    """Return ``tensor`` as autocast gives it to a product or convolution; it leaves float64 alone."""
    dtype = autocast_dtype(tensor)
    return tensor if dtype is None or tensor.dtype == torch.float64 else tensor.to(dtype)


def each_as_autocast(*tensors: Tensor | None) -> list[Tensor | None]:
    """Return each tensor that there is ``as_autocast``."""
    return [None if tensor is None else as_autocast(tensor) for tensor in tensors]


def full_precision(tensor: Tensor) -> AbstractContextManager[object]:
    """Return a context in which neither autocast nor fast products touch operations on the device of ``tensor``.

    In a compiled graph it switches off autocast only, which is a part of the graph; see ``protected``.
    """
    device = tensor.device.type
    if torch.compiler.is_compiling():
        # Even where it is off while this is traced: the backward pass is traced with the state of the forward pass.
        return torch.autocast(device, enabled=False) if torch.amp.is_autocast_available(device) else _NOTHING
    plain = _NOTHING if autocast_dtype(tensor) is None else torch.autocast(device, enabled=False)
    if not _user_reduces(tensor):
        return plain
    stack = ExitStack()
    stack.enter_context(_FULL_PRODUCTS)
    stack.enter_context(plain)
    return stack


# -- what the user has switched on for all tensors, and is not about those that we make for ourselves

_DEFAULT: ContextVar[torch.device | None] = ContextVar("the device on which the user makes tensors by default")


@contextmanager
def own_tensors() -> Iterator[None]:
    """Context, or decorator, in which tensors are made on the processor and remember gradients.

    ``torch.set_default_device``, ``with torch.device(...)`` and ``torch.inference_mode`` are about the user's tensors.
    The user's model runs inside of ``users_device``.

    Raises:
        ValueError: if tensors are made without numbers.
    """
    if torch_internals.fake_mode() is not None:
        raise ValueError("FakeTensorMode is on, in which tensors hold no numbers: leave it first")
    device = torch.get_default_device()
    with ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))
        if device.type != "cpu":
            stack.callback(_DEFAULT.reset, _DEFAULT.set(device))
            stack.enter_context(torch.device("cpu"))
        yield


def users_device() -> AbstractContextManager[object]:
    """Context in which tensors are made where the user makes them by default."""
    return _DEFAULT.get(None) or nullcontext()


def at_least_float32(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which the weights of a ``dtype`` layer are built."""
    return dtype if dtype == torch.float64 else torch.float32


def unwrapped(tensor: Tensor) -> Tensor:
    """Return the values behind ``vmap`` and other transforms of ``torch.func``; in a compiled graph ``tensor``."""
    if not torch.compiler.is_compiling():
        while torch_internals.is_wrapped(tensor):
            tensor = torch_internals.unwrap(tensor)
    return tensor


def host_can_look(tensor: Tensor) -> bool:
    """Whether Python may branch on a value of ``tensor`` for free: eagerly, and on the CPU.

    On an accelerator a look is a synchronisation; in a traced graph, under ``vmap`` and in ``FakeTensorMode`` there is
    nothing to look at.
    """
    if is_traced() or tensor.device.type != "cpu" or torch_internals.fake_mode() is not None:
        return False
    return not torch_internals.is_wrapped(tensor)


# -- derivatives of any order


def apply_function(function: type[torch.autograd.Function], *args: object) -> Any:
    """Return ``function.apply(*args)``, all arguments given.

    Torch's own ``apply`` inspects the signature of ``forward`` at every call, to fill in defaults and for transforms of
    ``torch.func``: a tenth of the time that a small kernel takes to build. Without transforms its base class will do.
    """
    if torch.compiler.is_compiling() or torch_internals.transforms_are_active():
        return function.apply(*args)
    base: Any = super(torch.autograd.Function, function)
    return base.apply(*args)


def nothing_for(ctx: Context) -> tuple[None, ...]:
    """Return what backward returns if no output has a gradient, because those who used them returned ``None``."""
    return (None,) * len(ctx.needs_input_grad)


def is_differentiated() -> bool:
    """Whether somebody may differentiate what backward computes now; compiled graphs refuse that."""
    return not torch.compiler.is_compiling() and (torch.is_grad_enabled() or torch_internals.forward_mode_level() >= 0)


def is_traced() -> bool:
    """Whether a compiler or ``make_fx`` makes a graph, for other values, of what is computed now."""
    return torch.compiler.is_compiling() or torch_internals.graph_recorder() is not None


def only_first_derivatives() -> bool:
    """Whether autograd alone will differentiate what is computed now: no compiler, transform or forward mode."""
    if is_traced() or torch_internals.transforms_are_active():
        return False
    return torch_internals.forward_mode_level() < 0


def refuse_nested_forward_mode() -> None:
    """Refuse forward mode inside of forward mode: torch loses what an autograd function adds there (torch 2.13).

    Raises:
        NotImplementedError: naming what to use instead.
    """
    stack = torch_internals.transforms() or []
    levels = sum(each.key() == torch_internals.FORWARD_MODE for each in stack)
    if (
        levels
        + (levels == 0 and torch_internals.forward_mode_level() >= 0)
        + (torch_internals.forward_mode_level() >= 1)
        > 1
    ):
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
    if torch.compiler.is_compiling() or not is_traced() or torch_internals.forward_mode_level() < 0:
        return
    if torch_internals.transforms_are_active() or (torch.is_grad_enabled() and like.requires_grad):
        raise NotImplementedError(
            "torch.func.linearize of a gradient loses what torch writes into views there, so that second derivatives "
            "of Fourier transforms would be wrong: use torch.func.jvp of the gradient instead"
        )


@torch_internals.constant_when_traced
def compiler_is_for_training() -> bool:
    """Whether the graph that is traced goes to AOTAutograd, which refuses to differentiate a gradient.

    Other backends run it under autograd, for which whatever an autograd function has saved is a constant there (torch
    2.13): second derivatives by our formulas would be wrong without a word, and torch's own of triangular factors are
    not right either. Those are ``"eager"``, which is for debugging, and some of users.
    """
    return torch_internals.goes_to_aot_autograd()


@torch.compiler.disable(  # type: ignore[untyped-decorator]
    reason="orthogonal weights have second derivatives, which this backend would get wrong: they are left out of the "
    "graph, which fullgraph=True does not allow; use backend='inductor' or 'aot_eager'"
)
def outside_of_graphs(function: Callable[..., Tensor], *args: object) -> Tensor:
    """Return ``function(*args)``, computed as without a compiler."""
    return function(*args)


class _FirstContext(Context, Protocol):
    inputs: tuple[object, ...]
    versions: list[int]
    others: tuple[None, ...]


class Operation:
    """Both ways through an autograd function, and the choice between them; both in full precision.

    Args:
        function: differentiable all the way: it returns its result and whatever else its derivatives are made of,
            saves all of that (``keep_outputs``), and has formulas for the gradient and for forward mode.
    """

    def __init__(self, function: type[torch.autograd.Function]) -> None:
        self.function = function
        self.compiled = _for_compilers(function)

        def compute(ctx: _FirstContext, *inputs: object) -> Tensor:
            output: tuple[Tensor, ...] = function.forward(*inputs)
            ctx.save_for_backward(*output)
            ctx.others = (None,) * (len(output) - 1)
            return output[0]

        def gradient(ctx: _FirstContext, grad: Tensor) -> Gradients:
            return function.backward(ctx, grad, *ctx.others)

        def again(*inputs: object) -> Tensor:
            return apply_function(function, *inputs)[0]

        self.first = for_first_derivatives(function.__name__, compute, gradient, again)

    def __call__(self, tensor: Tensor, *args: object) -> Tensor:
        """Return the result for these arguments, all of them given."""
        if torch.compiler.is_compiling() and not compiler_is_for_training():
            return outside_of_graphs(self, tensor, *args)
        with full_precision(tensor):
            if torch.compiler.is_compiling():
                return self.compiled.apply(tensor, *args)[0]
            if only_first_derivatives():
                return apply_function(self.first, tensor, *args)
            refuse_nested_forward_mode()
            return self.function.apply(tensor, *args)[0]


class _Once(threading.local):
    inside = False


_ONCE = _Once()


@contextmanager
def differentiated_once() -> Iterator[None]:
    """Context whose results have first derivatives only, in exchange for which they keep no inputs alive."""
    before, _ONCE.inside = _ONCE.inside, True
    try:
        yield
    finally:
        _ONCE.inside = before


def for_first_derivatives(
    name: str,
    compute: Callable[..., Tensor],
    gradient: Callable[..., Gradients],
    again: Callable[..., Tensor],
) -> type[torch.autograd.Function]:
    """Return an autograd function whose gradient is a formula on plain numbers.

    Args:
        name: what autograd's graph calls it.
        compute: called with the context and the inputs; keeps in the context what the formula needs.
        gradient: the formula: called with the context and the gradient of the result, in full precision.
        again: the same function of the inputs, differentiable all the way, for who differentiates the gradient.
    """

    class First(torch.autograd.Function):
        @staticmethod
        def forward(ctx: _FirstContext, *inputs: object) -> Tensor:
            # The inputs are not saved for backward: they are free tensors, which live anyway, and training does not
            # need them. They are for `gradient_again`.
            if not torch.compiler.is_compiling() and not _ONCE.inside:
                ctx.inputs, ctx.versions = inputs, _versions(inputs)
            ctx.set_materialize_grads(False)
            return compute(ctx, *inputs)

        @staticmethod
        def backward(ctx: _FirstContext, grad: Tensor | None) -> Gradients:
            if grad is None:
                return nothing_for(ctx)
            if is_differentiated():
                return gradient_again(ctx, again, grad)
            with full_precision(grad):
                return gradient(ctx, grad)

    First.__name__ = First.__qualname__ = name
    return First


def _versions(inputs: Sequence[object]) -> list[int]:
    """Return how often each tensor was written to; those made in inference mode do not count that."""
    return [t._version for t in inputs if isinstance(t, Tensor) and not t.is_inference()]


def _refuse_changed(ctx: _KeepsInputs) -> None:
    if ctx.versions != _versions(ctx.inputs):
        raise RuntimeError(
            "a free tensor of an orthogonal weight was changed in place after the weight was built, so that its "
            "derivatives (second ones, or any under autocast that was off then) cannot be computed any more: take them "
            "before the optimizer steps"
        )


def gradient_again(ctx: _FirstContext, function: Callable[..., Tensor], grad: Tensor) -> Gradients:
    """Return the gradients of all inputs that were kept, as differentiable functions of these and of ``grad``.

    Args:
        ctx: of a function of first derivatives.
        function: computes the same, and is differentiable all the way.
        grad: gradient of the result.
    """
    _refuse_changed(ctx)
    pairs = zip(ctx.inputs, ctx.needs_input_grad, strict=True)
    wanted = [tensor for tensor, needed in pairs if needed and isinstance(tensor, Tensor)]
    with torch.enable_grad(), full_precision(grad):
        found = iter(torch.autograd.grad(function(*ctx.inputs), wanted, grad, create_graph=True, allow_unused=True))
    return tuple(next(found) if needed else None for needed in ctx.needs_input_grad)


def keep_outputs(ctx: Context, output: tuple[Tensor, ...]) -> None:
    """Save all outputs, for backward and for forward mode."""
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*output)
    if not torch.compiler.is_compiling():
        ctx.save_for_forward(*output)


def _for_compilers(function: type[torch.autograd.Function]) -> type[torch.autograd.Function]:
    """Return a kind of the function that ``torch.compile`` traces, where second derivatives are refused."""

    class Compiled(function):  # type: ignore[misc,valid-type]
        jvp = torch.autograd.Function.jvp  # functions with a rule of their own are refused

        @staticmethod
        def setup_context(ctx: Context, inputs: tuple[object, ...], output: tuple[Tensor, ...]) -> None:
            ctx.mark_non_differentiable(*output[1:])
            function.setup_context(ctx, inputs, output)

        @staticmethod
        def backward(ctx: Context, grad: Tensor, *others: Tensor | None) -> Gradients:
            return function.backward(ctx, grad, *(None for _ in others))

    return Compiled
