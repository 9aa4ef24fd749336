"""What must hold for the followed graph to be the model's function: each guard refuses one way in which it is not.

A model that can be read (``refuse_unreadable``), whose forward pass is a fixed function (``fixed``) that leaves the
model as it is (``untouched``), with modules that compute what their class says (``refuse_hooks``), on real numbers that
can change continuously (``refuse_complex``, ``refuse_jumps``) and of each sample of a batch on its own
(``refuse_mixing``). That the graph and the model agree is seen on random inputs (``refuse_difference``).
"""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.nn.parameter import is_lazy
from torch.nn.utils.parametrizations import _SpectralNorm
from torch.nn.utils.spectral_norm import SpectralNorm

from trysquare.layers.centering import BatchCentering
from trysquare.linalg.precision import autocast_dtype
from trysquare.lipschitz.memory import tensors
from trysquare.lipschitz.registry import NoRuleError
from trysquare.operators import WEIGHT_HOOKS

_CHANCE = (_DropoutNd, nn.RReLU)
_STATISTICS = (_BatchNorm, BatchCentering)


def refuse_unreadable(model: nn.Module) -> None:
    """Refuse modules without Python code or numbers to look at, and training mode where it makes a difference.

    Raises:
        NoRuleError: naming the module, and what to do.
    """
    for name, module in model.named_modules():
        where = f"{type(module).__name__} at {name or 'model'!r}"
        if isinstance(module, torch.jit.ScriptModule):
            raise NoRuleError(f"{where} is TorchScript, which has no Python code to follow; pass the module it is from")
        for own, tensor in _own_tensors(module):
            _refuse_unreadable_tensor(tensor, f"{own!r} of {where}")
        if module.training and (reason := _training_matters(module)):
            raise NoRuleError(f"{where} is in training mode, where it {reason}; call model.eval()")


def _refuse_unreadable_tensor(tensor: Tensor, where: str) -> None:
    if is_lazy(tensor):
        raise NoRuleError(f"{where} has no shape yet: run the model on an input once")
    if tensor.is_meta:
        raise NoRuleError(f"{where} is on the meta device, which holds no numbers; load the weights first")
    if tensor.is_complex():
        raise NoRuleError(f"{where} is complex; only real networks have rules")


def _training_matters(module: nn.Module) -> str | None:
    if isinstance(module, _CHANCE):
        return "draws random numbers"
    if isinstance(module, _STATISTICS) or (isinstance(module, _InstanceNorm) and module.track_running_stats):
        return "mixes the samples of a batch or changes its statistics, and has no Lipschitz constant"
    if isinstance(module, _SpectralNorm) or any(isinstance(h, SpectralNorm) for h in _pre_hooks(module)):
        return "changes its weight at every pass"
    return None


def _pre_hooks(module: nn.Module) -> list[Any]:
    return list(module._forward_pre_hooks.values())


def refuse_hooks(module: nn.Module) -> None:
    """Refuse hooks, and a ``__call__`` of its own, on a module that is replaced by its rule."""
    unknown = [hook for hook in _pre_hooks(module) if not isinstance(hook, WEIGHT_HOOKS)]
    if unknown or module._forward_hooks:
        raise NoRuleError("it has forward hooks, which can change what it computes; remove them first")
    if torch_module._global_forward_hooks or torch_module._global_forward_pre_hooks:
        raise NoRuleError("hooks are registered for all modules, which can change what they compute; remove them first")
    if type(module).__call__ is not nn.Module.__call__:
        raise NoRuleError("it overrides __call__, which its rule may not know of; override forward instead")


def refuse_hooks_around(wrapper: nn.Module) -> None:
    """Refuse hooks on a wrapper that is taken off."""
    if wrapper._forward_hooks or wrapper._forward_pre_hooks:
        raise NoRuleError("the compiled model has forward hooks, which can change what it computes; remove them first")


def refuse_complex(value: Any) -> None:
    """Refuse values that are not real."""
    if any(tensor.is_complex() for tensor in tensors(value)):
        raise NoRuleError("it makes complex numbers; only real networks have rules")


def refuse_jumps(value: Any) -> None:
    """Refuse values that depend on the input and cannot change continuously."""
    for tensor in tensors(value):
        if not tensor.is_floating_point() or tensor.element_size() < 2:
            kind = str(tensor.dtype).removeprefix("torch.")
            raise NoRuleError(f"it rounds to {kind}: a value that jumps is not Lipschitz")


def refuse_rounding(value: Any, input_dtype: torch.dtype) -> None:
    """Refuse values that are coarser than the input of the network, unless autocast is what makes all of them so.

    Rounding jumps: two inputs closer than its step can be told apart by more than any constant allows. That of the
    network's own dtype is left to the evaluation error, which a comparison with float64 shows; one in the midst of it
    is in the float64 network too.
    """
    for tensor in tensors(value):
        if (
            autocast_dtype(tensor) is None
            and tensor.is_floating_point()
            and torch.finfo(tensor.dtype).eps > torch.finfo(input_dtype).eps
        ):
            kinds = [str(dtype).removeprefix("torch.") for dtype in (tensor.dtype, input_dtype)]
            raise NoRuleError(
                f"it rounds to {kinds[0]} in a network of {kinds[1]}: a value that jumps is not Lipschitz; cast the "
                f"whole model, model.{kinds[0]}() or so, or leave the cast out"
            )


def refuse_mixing(value: Any, batch: int) -> None:
    """Refuse values that depend on the input and do not have the samples on their first axis."""
    for tensor in tensors(value):
        if tensor.ndim == 0 or tensor.shape[0] != batch:
            shape = tuple(tensor.shape)
            raise NoRuleError(f"it moves or mixes the samples of a batch: it returns {shape} for a batch of {batch}")


def refuse_difference(found: Sequence[Tensor], expected: Sequence[Tensor], reason: str) -> None:
    """Refuse outputs that differ by more than their arithmetic can explain.

    The tolerance, four times the root of the dtype's precision, is that of rounding which a deep network amplifies. It
    need not be sharp: what it looks for is another function.
    """
    pairs = [(a.detach(), b.detach()) for a, b in zip(found, expected, strict=False)]
    same = len(found) == len(expected) and all(_close(*pair) for pair in pairs)
    if not same:
        raise NoRuleError(reason)


def _close(found: Tensor, expected: Tensor) -> bool:
    if found.shape != expected.shape or found.dtype != expected.dtype:
        return False
    if not found.is_floating_point():
        return torch.equal(found, expected)
    tolerance = 4 * torch.finfo(found.dtype).eps ** 0.5
    finite = expected[expected.isfinite()].abs().to(torch.float64)
    size = float(finite.max()) if finite.numel() else 0.0
    return torch.allclose(found.double(), expected.double(), rtol=0, atol=tolerance * size, equal_nan=True)


@contextmanager
def fixed(owner: str) -> Iterator[None]:
    """Context in which nothing may draw random numbers from a shared generator; their states are put back.

    Raises:
        NoRuleError: if something did.
    """
    before = _chance()
    try:
        yield
        if not _same_chance(before, _chance()):
            raise NoRuleError(f"the forward pass of {owner} draws random numbers: it is not a fixed function")
    finally:
        _put_chance_back(before)


def _chance() -> tuple[Tensor, Any, Any]:
    return torch.get_rng_state(), random.getstate(), np.random.get_state()


def _same_chance(before: tuple[Tensor, Any, Any], after: tuple[Tensor, Any, Any]) -> bool:
    arrays = before[2][1], after[2][1]
    return (
        torch.equal(before[0], after[0])
        and before[1] == after[1]
        and bool((arrays[0] == arrays[1]).all())
        and before[2][2:] == after[2][2:]
    )


def _put_chance_back(before: tuple[Tensor, Any, Any]) -> None:
    torch.set_rng_state(before[0])
    random.setstate(before[1])
    np.random.set_state(before[2])


def _own_tensors(module: nn.Module) -> list[tuple[str, Tensor]]:
    """Parameters, buffers and plain attributes of one module; sparse ones are not looked into."""
    named = {**module.__dict__, **module._buffers, **module._parameters}
    tensors = ((name, value) for name, value in named.items() if isinstance(value, Tensor))
    return [(name, value) for name, value in tensors if is_lazy(value) or value.layout == torch.strided]


class _Snapshot:
    """A module's attributes and the contents of its tensors."""

    def __init__(self, name: str, module: nn.Module) -> None:
        self.name, self.module = name, module
        self.attributes = dict(module.__dict__)
        held = (value for value in module.__dict__.values() if isinstance(value, list | dict | set))
        self.containers = [(container, copy.copy(container)) for container in held]
        self.contents = [
            (own, tensor, tensor.detach().clone(), tensor._version) for own, tensor in _own_tensors(module)
        ]

    def put_back(self) -> list[str]:
        """Undo what changed; the names of tensors that were written into."""
        attributes = self.module.__dict__
        attributes.clear()
        attributes.update(self.attributes)
        for container, held in self.containers:
            container.clear()
            container.extend(held) if isinstance(container, list) else container.update(held)
        written = []
        for own, tensor, content, version in self.contents:
            if tensor._version != version or not _same_bits(tensor, content):
                tensor.detach().copy_(content)
                written.append(f"{self.name}.{own}" if self.name else own)
        return written


def _same_bits(tensor: Tensor, content: Tensor) -> bool:
    return torch.equal(*(part.detach().reshape(-1).view(torch.uint8) for part in (tensor, content)))


@contextmanager
def untouched(model: nn.Module) -> Iterator[None]:
    """Context in which the forward pass may run: the model's tensors and attributes are put back afterwards.

    Attributes may be set on the way.

    Raises:
        NoRuleError: if a tensor of the model was written into: what it computes then depends on what it saw before.
    """
    snapshots = [_Snapshot(name, module) for name, module in model.named_modules()]
    failure: BaseException | None = None
    try:
        yield
    except Exception as error:
        failure = error
        raise
    finally:
        with torch.no_grad():
            written = [name for snapshot in snapshots for name in snapshot.put_back()]
        if written and not isinstance(failure, NoRuleError):
            raise NoRuleError(
                f"the forward pass of {type(model).__name__} writes into {written[0]!r}: it is not a fixed function"
            ) from failure
