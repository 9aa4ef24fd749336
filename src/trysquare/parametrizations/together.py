"""Kernels of the same shape built in one batch.

Small kernels cost little arithmetic and much overhead. The methods that take all groups of a layer in one batch take
those of several layers as well.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterator
from typing import Any, TypeVar

import torch
from torch import nn

from trysquare.parametrizations.base import Parametrization

M = TypeVar("M", bound=nn.Module)
_HANDLES = "_handles_of_build_together"


def build_together(model: M, together: bool = True) -> M:
    """Build kernels of the same shape in one batch whenever ``model`` is called and they have to be built.

    Worth it for many layers of up to 128 channels on the CPU, and where launching kernels is what takes time on a GPU.
    The weights are the same up to rounding. They are built before the first layer runs, and their gradients when all of
    them are there, so a network of large kernels needs more memory. Layers take part by the methods ``"aoc"`` and
    ``"rko"``. Not under ``torch.compile``, where nothing changes, and not together with activation checkpointing, which
    would find the weights gone when it repeats a part of the network.

    Args:
        model: changed in place; its layers may change later.
        together: ``False`` to go back to one by one.

    Returns:
        The model.

    >>> model = nn.Sequential(*(ts.OrthoConv2d(32, 32, 3) for _ in range(6)))
    >>> ts.build_together(model)(torch.randn(1, 32, 8, 8)).shape
    torch.Size([1, 32, 8, 8])
    """
    for handle in model.__dict__.pop(_HANDLES, ()):
        handle.remove()
    if together:
        model.__dict__[_HANDLES] = (
            model.register_forward_pre_hook(_build),
            model.register_forward_hook(_forget, always_call=True),
        )
    return model


def _parametrizations(model: nn.Module) -> Iterator[Parametrization]:
    return (module for module in model.modules() if isinstance(module, Parametrization))


def _build(model: nn.Module, args: Any) -> None:
    if torch.compiler.is_compiling():
        return
    same: defaultdict[Hashable, list[Parametrization]] = defaultdict(list)
    for parametrization in _parametrizations(model):
        if _needs_building(parametrization):
            same[_kind(parametrization)].append(parametrization)
    for members in same.values():
        if len(members) > 1:
            _build_joined(members)


def _needs_building(parametrization: Parametrization) -> bool:
    free = parametrization.free
    if not free or parametrization.joint is None or any(tensor.is_inference() for tensor in free):
        return False
    return not parametrization.keeps_weight


def _kind(parametrization: Parametrization) -> Hashable:
    """Equal for those that can be built in one batch."""
    looks = tuple((tensor.dtype, tensor.device, tensor.requires_grad) for tensor in parametrization.free)
    return type(parametrization), parametrization.joint, parametrization.like.dtype, looks


def _build_joined(members: list[Parametrization]) -> None:
    assert members[0].joint is not None
    _, axes = members[0].joint
    each = zip(*(member.free for member in members), strict=True)
    joined = [torch.cat(same, axis) for same, axis in zip(each, axes, strict=True)]
    for member, weight in zip(members, members[0].built(joined).chunk(len(members)), strict=True):
        member.hand_ahead(weight)


def _forget(model: nn.Module, args: Any, result: Any) -> None:
    for parametrization in _parametrizations(model):
        parametrization.hand_ahead(None)
