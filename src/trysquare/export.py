"""Models in plain torch."""

from __future__ import annotations

import copy
from typing import Any

from torch import nn

from trysquare.layers.base import ParametrizedWeight


def to_torch(model: nn.Module) -> nn.Module:
    """Copy a model with every layer of ours replaced by plain ``torch.nn`` layers of the same function.

    The original is not touched. Layers that occur several times stay shared. Plain circular padding
    cannot wrap around more than once, so the copy refuses feature maps smaller than the padding.

    >>> plain = to_torch(nn.Sequential(OrthoConv2d(4, 8, 3, stride=2), nn.ReLU()))
    >>> type(plain[0]).__name__
    'Conv2d'
    """
    replaced: dict[int, Any] = {id(m): m.as_torch() for m in model.modules() if isinstance(m, ParametrizedWeight)}
    return copy.deepcopy(model, replaced)
