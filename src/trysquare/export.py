"""Models in plain torch."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrize


def to_torch(model: nn.Module, *, keep: tuple[type[nn.Module], ...] = ()) -> nn.Module:
    """Copy a model with every layer of ours replaced by plain ``torch.nn`` layers of the same function.

    Replaced is every module that has a method ``as_torch``, which returns a plain module: layers
    and blocks whose weights are functions of free tensors. Activations, pooling and the like have
    no free tensors and no counterpart in ``torch.nn``, and are copied as they are.

    The original is not touched. Layers that occur several times stay shared. Plain circular padding
    cannot wrap around more than once, so the copy refuses feature maps smaller than the padding.

    Args:
        model: any model.
        keep: classes of ours that are copied as they are.

    Raises:
        ValueError: if the model holds a convolution whose kernel depends on the size of the image.

    >>> plain = to_torch(nn.Sequential(OrthoConv2d(4, 8, 3, stride=2), nn.ReLU()))
    >>> type(plain[0]).__name__
    'Conv2d'
    """
    modules: list[Any] = [m for m in model.modules() if not isinstance(m, keep)]
    # A copy that is given beforehand replaces the module wherever it occurs.
    replaced: dict[int, Any] = {id(m): m.as_torch() for m in modules if callable(getattr(m, "as_torch", None))}
    return copy.deepcopy(model, replaced)


def with_fixed_weights(model: nn.Module) -> nn.Module:
    """Copy a model with every parametrized tensor replaced by its present value, and no gradients for parameters.

    The layers stay what they are (``to_torch`` also makes them plain), so the copy computes the same function bit for
    bit, builds no weights, and can be cast to float64 without their being built anew. Fourier layers, whose weights
    depend on the image size, are copied as they are. The original is not touched.

    >>> copy = ts.export.with_fixed_weights(nn.Sequential(OrthoLinear(4, 4)))
    >>> [name for name, _ in copy.named_parameters()]
    ['0.bias', '0.weight']
    """
    with torch.no_grad():
        copied = copy.deepcopy(model)
        for original, twin in list(zip(model.modules(), copied.modules(), strict=True)):
            if parametrize.is_parametrized(original):
                names: Any = original.parametrizations
                _fix(twin, {name: getattr(original, name).detach().clone() for name in names})
    return copied.requires_grad_(False)


def _fix(module: Any, values: dict[str, torch.Tensor]) -> None:
    # Not torch's remove_parametrizations, which takes the property off the class that the original still needs.
    module.__class__ = type(module).__bases__[0]
    del module._modules["parametrizations"]
    for name, value in values.items():
        module.register_parameter(name, nn.Parameter(value))
