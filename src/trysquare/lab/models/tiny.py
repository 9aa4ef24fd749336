"""Small networks that train on two processor cores."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from trysquare.lab.models.parts import Body, Shape, activation, convolution, dense, entrance


def tiny(
    input_shape: Shape,
    *,
    widths: Sequence[int] = (16,),
    dense_width: int = 128,
    dense_layers: int = 3,
    kernel_size: int = 3,
    conv: str = "aoc",
    padding_mode: str = "circular",
    centering: str | None = None,
) -> Body:
    """Strided convolutions, then linear layers.

    A convolution with stride 2 keeps norms if it has four times as many outputs as inputs. Then nothing that tells two
    classes apart is lost before the head, which certificates depend on.

    Args:
        input_shape: channels, height and width of an image.
        widths: channels of the convolutions, each with stride 2.
        dense_width: features of the linear layers.
        dense_layers: number of linear layers in front of the head.
        kernel_size: of the convolutions.
        conv: method of the convolutions, one of ``ts.METHODS``, or ``"plain"``.
        padding_mode: ``"circular"`` or ``"zeros"``.
        centering: ``"batch"`` or ``"layer"`` centering in front of the activations of convolutions.
    """
    stride = 2 ** len(widths)
    layers, (height, columns) = entrance(input_shape, stride)
    channels = input_shape[0]
    for width in widths:
        layers += [convolution(conv, (channels, width), kernel_size, 2, padding_mode), *activation(width, centering)]
        channels = width
    features = channels * (height // stride) * (columns // stride)
    layers += [nn.Flatten(), *dense([features, *[dense_width] * dense_layers])]
    return Body(layers, dense_width if dense_layers else features)
