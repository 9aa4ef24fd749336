"""Numbers of parameters, in our way and in the paper's."""

from __future__ import annotations

from math import prod

from torch import nn

from trysquare.nn.geometry import ConvGeometry, flag
from trysquare.nn.layers.conv import OrthogonalConvolution
from trysquare.verify.lipschitz.checks import require_module


def count_parameters(model: nn.Module, as_paper: bool = False) -> int:
    """Return the number of parameters that an optimizer trains.

    The paper's library has other free tensors than ours for the same kernel. Without a stride it makes the 1x1 matrix
    in a kernel from two more ``c x c/2`` factors: as many numbers as our matrix for ``c -> c``, more where channels
    change. With a stride it has those two factors besides the strided matrix, where ours needs none. A pointwise layer
    is one matrix in both.

    Args:
        model: any model; on the meta device too.
        as_paper: whether to count each orthogonal convolution as the paper's library would.

    >>> with torch.device("meta"):
    ...     model = ts.models.build("cifar10-accurate")
    >>> ts.models.count_parameters(model), ts.models.count_parameters(model, as_paper=True)
    (2222874, 2235162)
    """
    require_module(model)
    as_paper = flag("as_paper", as_paper)
    total = sum(parameter.numel() for parameter in model.parameters())
    if not as_paper:
        return total
    layers = [layer for layer in model.modules() if isinstance(layer, OrthogonalConvolution)]
    ours = sum(tensor.numel() for layer in layers for tensor in layer.free_tensors)
    return total - ours + sum(_papers_kernel(layer.geometry) for layer in layers)


def _papers_kernel(geometry: ConvGeometry) -> int:
    """Return numbers that the paper's library trains for one kernel."""
    missing = sum(k - r for k, r in zip(geometry.kernel_size, geometry.reach, strict=True))
    if missing == 0:
        return prod(geometry.matrix_shape)
    factors = geometry.groups * (missing + 2) * geometry.inner_channels * geometry.frame_rank
    return factors + (prod(geometry.matrix_shape) if prod(geometry.reach) > 1 else 0)
