"""Models in plain torch."""

from __future__ import annotations

import copy
from typing import Any

from torch import nn


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
