"""Numerical ground rules that all of ``linalg`` shares."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

import torch
from torch import Tensor

from trysquare.nn.linalg.functions import is_differentiated, is_traced, only_first_derivatives

_NOTHING = nullcontext()


# -- products of float32 matrices in TF32 or bfloat16, which a user may have switched on

# Backends that have a switch, and which one computes on a device. Before torch 2.9 there is one switch for all.
_SWITCHES = ("cuda", "mkldnn") if hasattr(torch._C, "_get_fp32_precision_getter") else ()
_OF_DEVICE = {"cpu": "mkldnn", "cuda": "cuda", "xpu": "mkldnn"}


def _switch(backend: str, operation: str) -> str:
    return torch._C._get_fp32_precision_getter(backend, operation)  # type: ignore[attr-defined,no-any-return]


def _set_switch(backend: str, operation: str, precision: str) -> None:
    torch._C._set_fp32_precision_setter(backend, operation, precision)  # type: ignore[attr-defined]


def is_reduced(device: str, operation: str = "matmul") -> bool:
    """Whether torch may compute float32 products (or convolutions, ``"conv"``) on a device with fewer digits."""
    backend = _OF_DEVICE.get(device)
    if backend is None:
        return False
    if not _SWITCHES:
        return torch.get_float32_matmul_precision() != "highest"
    own = _switch(backend, operation)
    return (own if own != "none" else _switch(backend, "all")) in ("tf32", "bf16")


is_reduced._dynamo_marked_constant = True  # type: ignore[attr-defined]  # asked when a graph is traced, which has a guard


def _older_switch() -> str | None:
    """The switch that there was before each backend had its own; ``None`` if these were thrown without it."""
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
                self._before = _older_switch(), {backend: _switch(backend, "matmul") for backend in _SWITCHES}
                # The older one first: torch refuses to compute where it and the newer ones disagree.
                if self._before[0] is not None:
                    torch.set_float32_matmul_precision("highest")
                for backend in _SWITCHES:
                    _set_switch(backend, "matmul", "ieee")
            self.inside += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self.inside -= 1
            if self.inside:
                return
            older, newer = self._before
            ours = [backend for backend in _SWITCHES if _switch(backend, "matmul") == "ieee"]
            if older is not None and len(ours) == len(_SWITCHES):
                torch.set_float32_matmul_precision(older)
            for backend in ours:
                _set_switch(backend, "matmul", newer[backend])


_FULL_PRODUCTS = _FullProducts()


def _user_reduces(tensor: Tensor) -> bool:
    """Whether products on the device of ``tensor`` have fewer digits unless they are protected."""
    # While another thread is inside, the switches do not say what the user has chosen.
    return is_reduced(tensor.device.type) or (not torch.compiler.is_compiling() and _FULL_PRODUCTS.inside > 0)


def protected(build: Callable[..., Tensor], tensors: Sequence[Tensor]) -> Tensor:
    """``build(*tensors)`` in full precision, and its derivatives too, whatever the user has switched on.

    The switches can be thrown around what autograd computes. In a compiled graph, in transforms of ``torch.func`` and
    in forward mode they cannot, so that all is computed in float64 there, which they do not touch.
    """
    like = tensors[0]
    if like.dtype == torch.float64 or not (_user_reduces(like) or autocast_dtype(like) is not None):
        return build(*tensors)
    if only_first_derivatives():
        if torch.is_grad_enabled():
            return _Protected.apply(lambda *inputs: (build(*inputs),), *tensors)[0]  # type: ignore[no-any-return]
    elif _user_reduces(like) or not torch.compiler.is_compiling():
        return build(*(tensor.double() for tensor in tensors)).to(like.dtype)
    with full_precision(like):
        return build(*tensors)


class _Protected(torch.autograd.Function):
    """A function with a graph of its own, which backward walks with the switches thrown."""

    @staticmethod
    def forward(ctx: Any, build: Callable[..., tuple[Tensor, ...]], *tensors: Tensor) -> tuple[Tensor, ...]:
        with full_precision(tensors[0]), torch.enable_grad():
            ctx.copies = [tensor.detach().requires_grad_(tensor.requires_grad) for tensor in tensors]
            ctx.results = build(*ctx.copies)
        ctx.build = build
        ctx.save_for_backward(*tensors)
        return tuple(result.detach() for result in ctx.results)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        needed = ctx.needs_input_grad[1:]
        if is_differentiated():  # the gradient is a function like any other, to be protected in turn
            found = iter(_Protected.apply(_gradient_of(ctx.build, needed), *ctx.saved_tensors, *grads))
        else:
            wanted = [copy for copy, need in zip(ctx.copies, needed, strict=True) if need]
            with full_precision(grads[0]):
                found = iter(torch.autograd.grad(ctx.results, wanted, grads, retain_graph=True, allow_unused=True))
        return None, *(next(found) if need else None for need in needed)


def _gradient_of(build: Callable[..., tuple[Tensor, ...]], needed: Sequence[bool]) -> Callable[..., tuple[Tensor, ...]]:
    """The function from the inputs of ``build`` and the gradients of its results to those of the needed inputs."""

    def gradient(*given: Tensor) -> tuple[Tensor, ...]:
        inputs, grads = given[: len(needed)], given[len(needed) :]
        wanted = [tensor for tensor, need in zip(inputs, needed, strict=True) if need]
        return torch.autograd.grad(build(*inputs), wanted, grads, create_graph=True, materialize_grads=True)

    return gradient


def autocast_dtype(tensor: Tensor) -> torch.dtype | None:
    """What autocast computes in on ``tensor``'s device; ``None`` where it is off."""
    device = tensor.device.type
    if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    return None


def as_autocast(tensor: Tensor) -> Tensor:
    """``tensor`` as autocast gives it to a product or convolution; it leaves float64 alone."""
    dtype = autocast_dtype(tensor)
    return tensor if dtype is None or tensor.dtype == torch.float64 else tensor.to(dtype)


def full_precision(tensor: Tensor) -> AbstractContextManager[Any]:
    """Context in which neither autocast nor the switches for fast products touch the operations on ``tensor``'s device.

    In a compiled graph only autocast, which is a part of it; see ``protected``.
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


def at_least_float32(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which kernels of a ``dtype`` layer are built."""
    return dtype if dtype == torch.float64 else torch.float32


def unwrapped(tensor: Tensor) -> Tensor:
    """The values behind ``vmap`` and other transforms of ``torch.func``; ``tensor`` itself in a compiled graph."""
    if not torch.compiler.is_compiling():
        while torch._C._functorch.is_functorch_wrapped_tensor(tensor):
            tensor = torch._C._functorch.get_unwrapped(tensor)
    return tensor


def host_can_look(tensor: Tensor) -> bool:
    """Whether Python may branch on a value of ``tensor`` for free: eagerly, and on the CPU.

    On an accelerator a look is a synchronisation; in a traced graph or under ``vmap`` there is nothing to look at.
    """
    if is_traced() or tensor.device.type != "cpu":
        return False
    return not torch._C._functorch.is_functorch_wrapped_tensor(tensor)
