"""Numerical ground rules that all of ``linalg`` shares."""

from __future__ import annotations

import torch
from torch import Tensor


def full_precision(tensor: Tensor) -> torch.autocast:
    """Context in which autocast does not touch the operations on ``tensor``'s device."""
    return torch.autocast(tensor.device.type, enabled=False)


def at_least_float32(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which kernels of a ``dtype`` layer are built."""
    return dtype if dtype == torch.float64 else torch.float32


def host_can_look(tensor: Tensor) -> bool:
    """Whether Python may branch on a value of ``tensor`` for free: eagerly, and on the CPU.

    On an accelerator a look is a synchronisation, and in a compiled graph there is nothing to look
    at.
    """
    return tensor.device.type == "cpu" and not torch.compiler.is_compiling()
