"""The oracle: a dense matrix in float64 from the response to every basis vector."""

import math

import torch
from torch import Tensor, nn

import trysquare as ts

CONV = {1: ts.OrthoConv1d, 2: ts.OrthoConv2d, 3: ts.OrthoConv3d}
CONV_TRANSPOSE = {1: ts.OrthoConvTranspose1d, 2: ts.OrthoConvTranspose2d, 3: ts.OrthoConvTranspose3d}


@torch.no_grad()
def dense(layer: nn.Module, shape: tuple[int, ...]) -> Tensor:
    """Matrix of an affine layer's linear part, computed in the layer's own dtype, returned in float64."""
    dtype = next((p.dtype for p in layer.parameters() if p is layer.bias), layer.weight.dtype)
    size = math.prod(shape)
    basis = torch.eye(size, dtype=dtype).view(size, *shape)
    zero = layer(torch.zeros(1, *shape, dtype=dtype)).double()
    return (layer(basis).double() - zero).flatten(1).T


def spectrum(layer: nn.Module, shape: tuple[int, ...]) -> Tensor:
    return torch.linalg.svdvals(dense(layer, shape))


def distance_from_orthogonal(layer: nn.Module, shape: tuple[int, ...]) -> float:
    return float((spectrum(layer, shape) - 1).abs().max())
