"""Networks of residual depthwise blocks: the paper's CIFAR-10 accurate and both of its ImageNet networks."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from torch import nn

from trysquare.lab.models.common import Body, Shape, activation, convolution, pad_to_multiple, pool
from trysquare.nn.layers import DepthwiseResidualBlock2d

# The paper only says that the head sees 2,048 features and that there are 53.1 M parameters. These widths reach it.
IMAGENET_WIDTHS = (64, 256, 512, 1152, 2048)


def cifar10_accurate(
    input_shape: Shape,
    *,
    width: int = 256,
    depth: int = 16,
    kernel_size: int = 3,
    padding_mode: str = "zeros",
    pooling: str = "average",
) -> Body:
    """Strided convolution, residual depthwise blocks, average pooling: 91.5 % on CIFAR-10 in the paper.

    The paper says 2.3 M parameters; counted in its way there are 2.24 M.

    Args:
        input_shape: channels, height and width of an image.
        width: channels of the blocks.
        depth: number of blocks.
        kernel_size: of the depthwise convolutions.
        padding_mode: ``"zeros"`` or ``"circular"``.
        pooling: ``"average"`` or ``"l2"``.
    """
    layers, _ = pad_to_multiple(input_shape, 2)
    layers += [convolution("aoc", (input_shape[0], width), 3, 2, padding_mode)]
    layers += _blocks(width, depth, kernel_size, padding_mode)
    return Body([*layers, pool(pooling), *activation(width)], width)


def imagenet(
    input_shape: Shape,
    *,
    widths: Sequence[int] = IMAGENET_WIDTHS,
    depth: int = 3,
    kernel_size: int = 3,
    padding_mode: str = "zeros",
    pooling: str = "average",
) -> Body:
    """Four stages of residual depthwise blocks: the paper's networks for ImageNet.

    Accurate (these defaults): 68.2 %. Robust (circular padding, L2 pooling): 42.1 %, and 26.3 % certified at 36/255.

    The paper's table leaves open how 112 positions become 56 in front of the first block, and the widths. Here a second
    strided convolution does the first (64 to 256 channels, so that both strided layers keep norms), and ``widths`` are
    chosen so that there are 53.1 M parameters.

    Args:
        input_shape: channels, height and width of an image.
        widths: channels after the first convolution, and of each stage.
        depth: blocks of each stage.
        kernel_size: of the depthwise convolutions; the paper has larger ones in the robust network.
        padding_mode: ``"zeros"`` or ``"circular"``.
        pooling: ``"average"`` or ``"l2"``.
    """
    stem, *stages = widths
    if not stages:
        raise ValueError(f"widths={tuple(widths)} must have the stem's width, then that of at least one stage")
    layers, _ = pad_to_multiple(input_shape, 2 ** len(widths))
    layers += [convolution("aoc", (input_shape[0], stem), 5, 2, padding_mode), *activation(stem)]
    for before, after in pairwise(widths):
        layers += [convolution("aoc", (before, after), 3, 2, padding_mode)]
        layers += _blocks(after, depth, kernel_size, padding_mode)
    return Body([*layers, pool(pooling)], stages[-1])


def _blocks(width: int, depth: int, kernel_size: int, padding_mode: str) -> list[nn.Module]:
    return [DepthwiseResidualBlock2d(width, kernel_size, padding_mode=padding_mode) for _ in range(depth)]
