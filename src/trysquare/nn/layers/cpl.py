"""Convex potential layers (Meunier et al., 2022): residual blocks made 1-Lipschitz by one norm."""

from __future__ import annotations

from trysquare.nn.layers.potential import PotentialConv, PotentialLinear
from trysquare.nn.parametrizations.spectral import NormContraction

__all__ = ["CPLBlock1d", "CPLBlock2d", "CPLBlock3d", "CPLLinear"]


class CPLLinear(PotentialLinear):
    """``x - (2 / ‖W‖) Wᵀ σ(W x / ‖W‖ + b)`` for vectors, 1-Lipschitz; ``‖W‖`` is bounded from above.

    Args:
        features: size of input and output.
        hidden_features: rows of ``W``; ``features`` if not given.
        bias: whether there is a learnable ``b``.
        device: device of the parameters.
        dtype: dtype of the weight; free tensors are kept in float32 or float64.
        activation: acts entry by entry with slopes between 0 and 1; ReLU if not given.
        steps: squarings in ``trysquare.linalg.norm_bound``, 4 if not given: the norm is then at least 0.9 of the bound.

    >>> CPLLinear(16, 32)(torch.randn(2, 16)).shape
    torch.Size([2, 16])
    """

    contraction = NormContraction
    _options = ("steps",)


class _CPLBlock(PotentialConv):
    contraction = NormContraction
    _options = ("steps",)


class CPLBlock1d(_CPLBlock):
    """The block in one dimension; see ``CPLBlock2d``."""

    dims = 1


class CPLBlock2d(_CPLBlock):
    """``x - (2 / ‖K‖) Kᵀ σ(K x / ‖K‖ + b)`` with a convolution ``K``, 1-Lipschitz.

    The norm is bounded from above on feature maps of every size (``trysquare.linalg.norm_bound``).
    The power iteration of the original method approaches it from below, and so does not certify.


    Args:
        channels: channels of input and output.
        hidden_channels: channels of ``K x``; ``channels`` if not given.
        kernel_size: size of the kernel.
        dilation: spacing of the taps.
        groups: number of independent groups of channels.
        bias: whether there is a learnable ``b``.
        padding_mode: ``"circular"`` or ``"zeros"``.
        device: device of the parameters.
        dtype: dtype of the weight; free tensors are kept in float32 or float64.
        activation: acts entry by entry with slopes between 0 and 1; ReLU if not given.
        steps: squarings and frequencies in ``trysquare.linalg.norm_bound``, 4 if not given: the norm is then about 0.9
            of the bound. More are tighter and cost more.

    >>> CPLBlock2d(8)(torch.randn(1, 8, 6, 6)).shape
    torch.Size([1, 8, 6, 6])
    """

    dims = 2


class CPLBlock3d(_CPLBlock):
    """The block in three dimensions; see ``CPLBlock2d``."""

    dims = 3
