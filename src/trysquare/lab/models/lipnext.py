"""LipNeXt (2026): orthogonal matrices at every pixel, and shifts of channels between pixels. No larger kernels."""

from __future__ import annotations

from torch import Tensor, nn

from trysquare.lab.models.common import Body, Shape, pad_to_multiple, pool
from trysquare.nn.layers import Abs, ChannelShift, InvertibleDownsampling2d, OrthoConv2d, Positions


class ShiftBlock(nn.Module):
    """``activation(M Rᵀ shift(R (x + positions)) + b)`` with orthogonal ``R`` and ``M``, 1-Lipschitz.

    ``R`` chooses the basis whose coordinates are shifted, and its transpose goes back.

    Args:
        shape: of an input: channels, height and width.
        shifted: share of the channels that is shifted each way.
        absolute: share of the channels of which the activation takes the absolute value.
        conv: method of the orthogonal matrices.

    >>> from trysquare.lab.models.lipnext import ShiftBlock
    >>> round(ts.lipschitz_bound(ShiftBlock((16, 8, 8)), (16, 8, 8)), 4)
    1.0
    """

    def __init__(self, shape: Shape, shifted: float = 0.125, absolute: float = 0.5, conv: str = "manifold") -> None:
        super().__init__()
        self.positions = Positions(shape)
        self.basis = OrthoConv2d(shape[0], shape[0], 1, bias=False, method=conv)
        self.back = self.basis.adjoint()
        self.shift = ChannelShift(shifted)
        self.mix = OrthoConv2d(shape[0], shape[0], 1, method=conv)
        self.activation = Abs(absolute)

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        """Positions, shifts in another basis, a mix of channels, the activation."""
        shifted = self.shift(self.basis(self.positions(input)))
        return self.activation(self.mix(self.back(shifted)))


def lipnext(
    input_shape: Shape,
    *,
    width: int = 1024,
    depth: int = 32,
    patch: int = 1,
    shifted: float = 0.125,
    absolute: float = 0.5,
    pooling: str = "l2",
    conv: str = "manifold",
) -> Body:
    """LipNeXt: 81.5 % on CIFAR-10, 71.2 % certified at 36/255, with ``width=1024`` and 64 M parameters.

    Those are the matrices, ``2 depth width²``, in units of 2²⁰. The positions, ``width`` numbers for each pixel in each
    block, are not counted there: 34 M more at 32 x 32 pixels, 8 M with ``patch=2``.

    Images become patches as channels, with channels of zeros up to the width, which is an isometry that need not be
    learned.

    Args:
        input_shape: channels, height and width of an image.
        width: channels of all blocks.
        depth: number of blocks.
        patch: height and width of the patches that become channels.
        shifted: share of the channels that is shifted each way.
        absolute: share of the channels of which the activation takes the absolute value.
        pooling: ``"l2"`` or ``"average"``, over all pixels.
        conv: method of the matrices: ``"manifold"`` for ``riemannian-adam``, as published, and like any other where
            another optimizer trains them.
    """
    layers, (height, columns) = pad_to_multiple(input_shape, patch)
    if patch > 1:
        layers.append(InvertibleDownsampling2d(patch))
    channels = input_shape[0] * patch**2
    if width < channels:
        raise ValueError(f"width={width} must be at least {channels}, the numbers of a patch")
    shape = width, height // patch, columns // patch
    layers.append(nn.ConstantPad3d((0, 0, 0, 0, 0, width - channels), 0.0))
    layers += [ShiftBlock(shape, shifted, absolute, conv) for _ in range(depth)]
    return Body([*layers, pool(pooling)], width)
