"""Models in plain torch."""

from __future__ import annotations

import copy
from typing import Any

from torch import nn

from trysquare.layers.base import ParametrizedWeight
from trysquare.layers.fourier import _FourierConvolution


def to_torch(model: nn.Module) -> nn.Module:
    """Copy a model with every layer of ours replaced by plain ``torch.nn`` layers of the same function.

    The original is not touched. Layers that occur several times stay shared. Plain circular padding
    cannot wrap around more than once, so the copy refuses feature maps smaller than the padding.

    Raises:
        ValueError: if the model holds a convolution whose kernel depends on the size of the image.

    >>> plain = to_torch(nn.Sequential(OrthoConv2d(4, 8, 3, stride=2), nn.ReLU()))
    >>> type(plain[0]).__name__
    'Conv2d'
    """
    for name, layer in model.named_modules():
        if isinstance(layer, _FourierConvolution):
            raise ValueError(
                f"{name or 'the layer'} is a {type(layer).__name__}, whose kernel is as large as the image: there is "
                "no plain layer for every size; replace it by layer.at_size(*sizes) first"
            )
    replaced: dict[int, Any] = {id(m): m.as_torch() for m in model.modules() if isinstance(m, ParametrizedWeight)}
    return copy.deepcopy(model, replaced)
