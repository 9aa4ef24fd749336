"""What a model must be before it is traced, and what is put back afterwards."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.nn.utils import parametrize
from torch.nn.utils.spectral_norm import SpectralNorm

from trysquare import torch_internals
from trysquare.nn.layers.centering import BatchCentering
from trysquare.nn.parametrizations.base import ParametrizedWeight
from trysquare.nn.sharing import refuse_sharded
from trysquare.verify.lipschitz.graph import NoRuleError, class_name


def input_like(model: nn.Module) -> Tensor:
    """Return a tensor of the dtype and device that the model's inputs should have: those of its first weight.

    Free tensors of our layers may be longer than the weight that is made of them, so they are asked last.
    """
    require_module(model)
    weights = (_own_weight(module) for module in model.modules())
    others = (t for t in (*model.parameters(), *model.buffers()))
    floats = (t for group in (weights, others) for t in group if t is not None and t.is_floating_point())
    return next(floats, torch.empty(0))


def _own_weight(module: nn.Module) -> Tensor | None:
    if isinstance(module, ParametrizedWeight) and parametrize.is_parametrized(module, "weight"):
        return module.parametrization.like
    return module._parameters.get("weight")


def require_dense(name: str, tensor: Tensor) -> None:
    """Refuse a tensor whose numbers are not there to be read.

    Raises:
        ValueError: if it is on the meta device, sparse, nested, quantized or in a layout or a format of its own.
    """
    if tensor.is_nested:
        raise ValueError(f"{name}: found a nested tensor, which has no shape; stack its parts, or pad them")
    if tensor.layout != torch.strided:
        raise ValueError(f"{name}: found a tensor of layout {tensor.layout}; give a dense one, {name}.to_dense()")
    if tensor.is_quantized or (tensor.is_floating_point() and tensor.element_size() < 2):
        raise ValueError(f"{name}: found {tensor.dtype}, in which nothing can be computed; convert it, {name}.float()")
    if tensor.is_meta:
        raise ValueError(f"{name}: found a tensor on the meta device, which holds no numbers; give one that does")


def require_module(model: object) -> None:
    """Refuse what is no module.

    Raises:
        TypeError: naming what it is.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, not {type(model).__name__}: put a function in a module")


def require_plain_module(model: Any) -> None:
    """Refuse what cannot be followed call by call.

    Raises:
        TypeError: if it is no module, or a part of it is a program of TorchScript.
        ValueError: if its weights are on the meta device.
    """
    require_module(model)
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            where = f"{name!r} of the model" if name else "the model"
            raise TypeError(
                f"{where} is scripted or traced by torch.jit, which cannot be followed: give the module itself"
            )
    for name, weight in (*model.named_parameters(), *model.named_buffers()):
        if weight.is_meta:
            raise ValueError(
                f"{name!r} of the model is on the meta device, which holds no numbers: load the weights first"
            )


def refuse_unreadable(model: nn.Module) -> None:
    """Refuse tensors without numbers, and training mode where it makes a difference.

    Raises:
        NoRuleError: naming the module, and what to do.
        ValueError: if the model is spread over processes.
    """
    refuse_sharded(model)
    for name, module in model.named_modules():
        where = f"{class_name(module)} at {name or 'model'!r}"
        if isinstance(module, torch.jit.ScriptModule):
            raise NoRuleError(f"{where} is TorchScript, whose calls cannot be watched; pass the module that it is from")
        for own, tensor in {**module.__dict__, **module._buffers, **module._parameters}.items():
            if not isinstance(tensor, Tensor):
                continue
            if is_lazy(tensor):
                raise NoRuleError(f"{own!r} of {where} has no shape yet: run the model on an input once")
            if tensor.is_meta:
                raise NoRuleError(f"{own!r} of {where} is on the meta device, which holds no numbers; load the weights")
        iterates = any(isinstance(hook, SpectralNorm) for hook in module._forward_pre_hooks.values())
        if module.training and (iterates or isinstance(module, _DIFFERENT_IN_TRAINING)):
            raise NoRuleError(
                f"{where} is in training mode, where it draws random numbers, uses and changes statistics of the "
                "batch, or changes its weight at every pass; call model.eval()"
            )


_DIFFERENT_IN_TRAINING = (*torch_internals.DIFFERENT_IN_TRAINING, nn.RReLU, BatchCentering)


@contextmanager
def unchanged(model: nn.Module) -> Iterator[None]:
    """Context in which a model may run: its attributes and the states of random generators are put back afterwards.

    Raises:
        NoRuleError: if random numbers were drawn: by Python's or numpy's generators, which no dispatch mode sees.
    """
    attributes = [(module.__dict__, dict(module.__dict__)) for module in model.modules()]
    held = [(part, copy.copy(part)) for _, kept in attributes for part in kept.values() if _is_container(part)]
    chance = torch.get_rng_state(), random.getstate(), np.random.get_state()
    try:
        yield
        after = random.getstate(), np.random.get_state()
        if (
            after[0] != chance[1]
            or repr(after[1]) != repr(chance[2])
            or not torch.equal(torch.get_rng_state(), chance[0])
        ):
            raise NoRuleError(
                f"the forward pass of {class_name(model)} draws random numbers: it is not a fixed function"
            )
    finally:
        for current, kept in attributes:
            current.clear()
            current.update(kept)
        for part, kept in held:
            part.clear()
            part.extend(kept) if isinstance(part, list) else part.update(kept)
        torch.set_rng_state(chance[0])
        random.setstate(chance[1])
        np.random.set_state(chance[2])


def _is_container(value: object) -> bool:
    return type(value) in (list, dict, set)
