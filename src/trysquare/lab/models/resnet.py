"""The ResNet-34 with which the paper measures what orthogonal layers cost."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from torch import nn

from trysquare.lab.models.common import Body, Shape, activation, convolution, pad_to_multiple, pool
from trysquare.nn.layers import LearnableResidual, LipschitzMaxPool2d


def resnet34(
    input_shape: Shape,
    *,
    conv: str = "aoc",
    width: int = 64,
    depths: Sequence[int] = (3, 4, 6, 3),
    padding_mode: str = "circular",
    pooling: str = "average",
    centering: str | None = None,
) -> Body:
    """ResNet-34 whose transition blocks are one strided convolution, for any method or torch's own convolutions.

    So that it is 1-Lipschitz, skip connections have the paper's learnable factor, the pooling in front does not
    overlap, and there is no batch normalisation; ``conv="plain"`` is the same network with ``nn.Conv2d``, the baseline.

    Args:
        input_shape: channels, height and width of an image.
        conv: method of the convolutions, one of ``ts.METHODS``, or ``"plain"``.
        width: channels of the first stage; each of the others doubles them.
        depths: blocks of each stage, the transition included.
        padding_mode: ``"circular"`` or ``"zeros"``.
        pooling: ``"average"`` or ``"l2"``.
        centering: ``"batch"`` or ``"layer"`` centering in front of the activations.
    """
    layers, _ = pad_to_multiple(input_shape, 2 ** (len(depths) + 1))
    layers += [convolution(conv, (input_shape[0], width), 7, 2, padding_mode), *activation(width, centering)]
    layers += [LipschitzMaxPool2d(2)]
    widths = [width * 2**stage for stage in range(len(depths))]
    layers += _blocks(conv, width, depths[0], padding_mode, centering)
    for (before, after), depth in zip(pairwise(widths), depths[1:], strict=True):
        layers += [convolution(conv, (before, after), 3, 2, padding_mode), *activation(after, centering)]
        layers += _blocks(conv, after, depth - 1, padding_mode, centering)
    return Body([*layers, pool(pooling)], widths[-1])


def _blocks(conv: str, width: int, depth: int, mode: str, centering: str | None) -> list[nn.Module]:
    layers: list[nn.Module] = []
    for _ in range(depth):
        first, second = (convolution(conv, (width, width), 3, mode=mode) for _ in range(2))
        branch = nn.Sequential(first, *activation(width, centering), second)
        layers += [LearnableResidual(branch), *activation(width, centering)]
    return layers
