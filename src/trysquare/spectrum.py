"""Singular values of layers."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from trysquare.layers.conv import _OrthogonalConvolution
from trysquare.linalg.spectrum import circular_singular_values


@torch.no_grad()
def singular_values(layer: nn.Module, input_shape: tuple[int, ...]) -> Tensor:
    """Every singular value of a linear layer on inputs of a given shape.

    Circular convolutions, plain and transposed, are split by the Fourier transform; other layers
    are applied to every basis vector.

    Args:
        layer: a linear or convolution layer, of torch or ours. The bias is left out.
        input_shape: shape of one input without the batch, such as ``(64, 32, 32)``.

    Returns:
        Float64 vector, largest first.
    """
    if isinstance(layer, _OrthogonalConvolution) and layer._keeps_all_outputs:
        return _circular(layer, tuple(input_shape))
    return torch.linalg.svdvals(dense_matrix(layer, tuple(input_shape)))


def _circular(layer: _OrthogonalConvolution, input_shape: tuple[int, ...]) -> Tensor:
    geometry = layer.geometry
    channels, *sizes = input_shape
    if channels != layer.in_channels or len(sizes) != layer.dims:
        raise ValueError(f"input_shape={input_shape} must be ({layer.in_channels}, and {layer.dims} sizes)")
    if layer.in_channels != geometry.in_channels or isinstance(layer, nn.modules.conv._ConvTransposeNd):
        sizes = [size * stride for size, stride in zip(sizes, geometry.stride, strict=True)]
    geometry.check_circular_size(sizes)
    return circular_singular_values(layer.weight, tuple(sizes), geometry.stride, geometry.dilation, geometry.groups)


@torch.no_grad()
def dense_matrix(layer: nn.Module, input_shape: tuple[int, ...]) -> Tensor:
    """The layer's matrix in float64: a column for each basis vector, the bias left out."""
    import copy

    exact = copy.deepcopy(layer).double().eval()
    size = torch.Size(input_shape).numel()
    basis = torch.eye(size, dtype=torch.float64).view(size, *input_shape)
    zero = exact(basis.new_zeros(1, *input_shape))
    return (exact(basis) - zero).flatten(1).T
