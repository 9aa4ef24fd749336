"""Numerical ground rules that all of ``linalg`` shares."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

_NOTHING = nullcontext()


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
    """Context in which autocast does not touch the operations on ``tensor``'s device."""
    return _NOTHING if autocast_dtype(tensor) is None else torch.autocast(tensor.device.type, enabled=False)


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

    On an accelerator a look is a synchronisation; in a compiled graph or under ``vmap`` there is nothing to look at.
    """
    if torch.compiler.is_compiling() or tensor.device.type != "cpu":
        return False
    return not torch._C._functorch.is_functorch_wrapped_tensor(tensor)
