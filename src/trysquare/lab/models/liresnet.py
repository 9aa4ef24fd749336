"""LiResNet (Hu et al., 2023), BRONet (2025) and the paper's ``robust*``: one stack with other convolutions."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from trysquare.lab.models.common import Body, Shape, activation, convolution, dense, pad_to_multiple


class Amplified(nn.Sequential):
    """Layers, and a constant factor after them: part of the Lipschitz constant, as the audit shows.

    Args:
        layers: what is amplified.
        factor: by how much.

    >>> from trysquare.lab.models.liresnet import Amplified
    >>> round(ts.lipschitz_bound(Amplified(OrthoLinear(8, 8), factor=1.15), (8,)), 4)
    1.15
    """

    def __init__(self, *layers: nn.Module, factor: float) -> None:
        super().__init__(*layers)
        self.factor = factor

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        return super().forward(input) * self.factor

    def extra_repr(self) -> str:
        return f"factor={self.factor}"


def liresnet(
    input_shape: Shape,
    *,
    width: int = 512,
    depth: int = 12,
    dense_width: int = 2048,
    dense_layers: int = 4,
    factor: float = 1.15,
    conv: str = "aoc",
    strided_conv: str | None = None,
    residual: bool = False,
    padding_mode: str = "circular",
    centering: str | None = None,
    patch: int = 0,
) -> Body:
    """Return the paper's ``robust*``, LiResNet without residual connections: 85.3 % on CIFAR-10, 75.0 % at 36/255.

    As the paper says, the skip connections are gone and each of the ``depth`` convolutions is followed by a constant
    factor of 1.15. That factor makes the Lipschitz constant ``1.15 ** depth`` (5.35) instead of 1: certificates divide
    by it, and the same network with ``factor=1`` is 1-Lipschitz. The head has rows of norm 1, as in the original.

    The paper says 46.3 M parameters and not what they are. The original's eight linear layers would give 64 M; with
    four there are 47.5 M.

    LiResNet itself has linear residual blocks, ``x + conv(x)`` rescaled: a convolution that starts at the identity,
    here with AOL's scale in place of a power iteration. It has 83 M parameters, as published. BRONet has block
    reflectors, and ours 64 M parameters where 68 M are published: theirs are made in the frequency domain from 9 c²/2
    numbers for 3 x 3, ours from 3 c² (two reflectors and four projectors). For ImageNet both read patches of 14.

    Args:
        input_shape: channels, height and width of an image. Without ``patch``, the first linear layer reads an eighth
            of each side, so it outgrows everything else beyond 64 pixels.
        width: channels.
        depth: number of convolutions without stride.
        dense_width: features of the linear layers.
        dense_layers: number of linear layers of that size.
        factor: by which each of the convolutions is amplified.
        conv: method of the convolutions, one of ``ts.METHODS``, or ``"plain"``.
        strided_conv: method of those with stride, the first and the last; ``conv`` unless given.
        residual: convolutions without stride start at the identity.
        padding_mode: ``"circular"`` or ``"zeros"``.
        centering: ``"batch"`` or ``"layer"`` centering in front of the activations of convolutions.
        patch: kernel size and stride of the first convolution; 0 for 5 and 2.
    """
    kernel_size, stride = (patch, patch) if patch else (5, 2)
    layers, (height, columns) = pad_to_multiple(input_shape, 4 * stride)
    strided = conv if strided_conv is None else strided_conv
    first = convolution(strided, (input_shape[0], width), kernel_size, stride, padding_mode)
    layers += [first, *activation(width, centering)]
    for _ in range(depth):
        same = convolution(conv, (width, width), 3, mode=padding_mode)
        if residual and not same.weight.is_meta:
            same.weight = nn.init.dirac_(torch.empty_like(same.weight))
        layers += [same if factor == 1 else Amplified(same, factor=factor), *activation(width, centering)]
    patches = width * (height // (4 * stride)) * (columns // (4 * stride))
    layers += [convolution(strided, (width, width), 4, 4, padding_mode), nn.Flatten()]
    return Body([*layers, *dense([patches, *[dense_width] * (dense_layers + 1)], conv)], dense_width)
