"""Where our own tensors are made, whatever the user has switched on for all tensors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from contextvars import ContextVar

import torch

from trysquare import torch_internals

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
