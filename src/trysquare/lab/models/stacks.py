"""Stacks of convolutions, then linear layers, without pooling: small networks, and those after Li et al. (2019)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import nn

from trysquare.lab.models.common import Body, Shape, activation, choose, convolution, dense, pad_to_multiple
from trysquare.nn.layers import InvertibleDownsampling2d

_STRIDED = {"native": "one kernel", "parsimonious": "fewer parameters", "emulated": "invertible downsampling"}


class _Stage(NamedTuple):
    width: int
    kernel_size: int
    stride: int


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
    zeros: bool = False,
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
        zeros: the first convolution is not learned: patches become channels, and channels of zeros follow up to its
            width. That is an isometry too.
    """
    steps = [_Stage(width, kernel_size, 2) for width in widths]
    return _stack(input_shape, steps, [dense_width] * dense_layers, "native", conv, padding_mode, centering, zeros)


def bcop_small(
    input_shape: Shape,
    *,
    width: int = 32,
    dense_width: int = 512,
    dense_layers: int = 2,
    strided: str = "native",
    conv: str = "aoc",
    padding_mode: str = "circular",
    centering: str | None = None,
    zeros: bool = False,
) -> Body:
    """Four convolutions and two linear layers: 71.8 % on CIFAR-10 in the paper, 58.3 % certified at 36/255.

    The network that its appendix calls small, and Li et al. large: 72.2 % and 58.3 % there, with 2.6 M parameters. Here
    it has as many with ``strided="emulated"``, as theirs; native kernels of the same sizes need fewer, 2.4 M in all.

    Args:
        input_shape: channels, height and width of an image.
        width: channels of the first two convolutions; the others have twice as many.
        dense_width: features of the linear layers.
        dense_layers: number of linear layers in front of the head.
        strided: ``"native"`` kernels as the appendix has them without its simplification, ``"parsimonious"`` ones with
            it (fewer parameters, and 10 points less accurate in the paper), or ``"emulated"`` as Li et al. do:
            invertible downsampling, then a kernel of half the size on four times the channels.
        conv: method of the convolutions, one of ``ts.METHODS``, or ``"plain"``.
        padding_mode: ``"circular"`` or ``"zeros"``.
        centering: ``"batch"`` or ``"layer"`` centering in front of the activations of convolutions.
        zeros: channels of zeros in place of the first convolution.
    """
    steps = [_Stage(width, 3, 1), _Stage(width, 4, 2), _Stage(2 * width, 3, 1), _Stage(2 * width, 4, 2)]
    sizes = [dense_width] * dense_layers
    return _stack(input_shape, steps, sizes, strided, conv, padding_mode, centering, zeros)


def cifar10_robust(
    input_shape: Shape,
    *,
    width: int = 128,
    depth: int = 3,
    dense_width: int = 1024,
    dense_layers: int = 4,
    strided: str = "native",
    conv: str = "aoc",
    padding_mode: str = "circular",
    centering: str | None = None,
    zeros: bool = False,
) -> Body:
    """Sixteen convolutions and four linear layers: 74.0 % on CIFAR-10 in the paper, 64.3 % certified at 36/255.

    The paper says 41.3 M parameters. Its table has 8,192 features after a map of 1024 x 4 x 4, which has 16,384; with
    those, and kernels of 4 where there is a stride, as in the network that this one enlarges, there are 39.4 M. What
    the remaining 4.6 % are cannot be told from the table.

    Args:
        input_shape: channels, height and width of an image.
        width: channels of the first stage; each of the other three doubles them.
        depth: convolutions of a stage; the last one has one more.
        dense_width: features of the linear layers.
        dense_layers: number of linear layers in front of the head.
        strided: how strided convolutions are made; see ``bcop-small``.
        conv: method of the convolutions, one of ``ts.METHODS``, or ``"plain"``.
        padding_mode: ``"circular"`` or ``"zeros"``.
        centering: ``"batch"`` or ``"layer"`` centering in front of the activations of convolutions.
        zeros: channels of zeros in place of the first convolution.
    """
    steps = [_Stage(width, 3, 1)] * depth
    for stage in (2, 4, 8):
        steps += [_Stage(stage * width, 4, 2), *[_Stage(stage * width, 3, 1)] * depth]
    steps += [_Stage(8 * width, 3, 1)]
    sizes = [dense_width] * dense_layers
    return _stack(input_shape, steps, sizes, strided, conv, padding_mode, centering, zeros)


def _stack(
    input_shape: Shape,
    steps: list[_Stage],
    sizes: list[int],
    strided: str,
    conv: str,
    mode: str,
    centering: str | None,
    zeros: bool,
) -> Body:
    """Convolutions, a flattened map, linear layers; an activation after each."""
    choose("strided", strided, _STRIDED)
    stride = 2 ** sum(step.stride == 2 for step in steps)
    layers, (height, width) = pad_to_multiple(input_shape, stride)
    channels = input_shape[0]
    if zeros:
        layers += _widened(channels, steps[0])
        channels, steps = steps[0].width, steps[1:]
    for step in steps:
        layers += [*_convolutions(channels, step, strided, conv, mode), *activation(step.width, centering)]
        channels = step.width
    features = channels * (height // stride) * (width // stride)
    layers += [nn.Flatten(), *dense([features, *sizes], conv)]
    return Body(layers, sizes[-1] if sizes else features)


def _widened(channels: int, step: _Stage) -> list[nn.Module]:
    """Return what does a stage without learning: patches as channels, then channels of zeros."""
    unfolded = channels * step.stride**2
    if step.width < unfolded:
        raise ValueError(f"zeros=True needs a first width of at least {unfolded}, the numbers of a patch: {step.width}")
    patches: list[nn.Module] = [InvertibleDownsampling2d(step.stride)] if step.stride > 1 else []
    return [*patches, nn.ConstantPad3d((0, 0, 0, 0, 0, step.width - unfolded), 0.0)]


def _convolutions(channels: int, step: _Stage, strided: str, conv: str, mode: str) -> list[nn.Module]:
    if step.stride > 1 and strided == "emulated":
        unfolded = channels * step.stride**2
        kernel_size = step.kernel_size // step.stride
        return [
            InvertibleDownsampling2d(step.stride),
            convolution(conv, (unfolded, step.width), kernel_size, mode=mode),
        ]
    options = {"parsimonious": True} if step.stride > 1 and strided == "parsimonious" else {}
    return [convolution(conv, (channels, step.width), step.kernel_size, step.stride, mode, **options)]
