"""Pieces that several families of models share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any, NamedTuple, TypeVar

from torch import nn

from trysquare.nn.layers import (
    BatchCentering,
    GlobalL2NormPool,
    GlobalScaledAvgPool,
    LayerCentering,
    MaxMin,
    OrthoConv2d,
    OrthoLinear,
)
from trysquare.nn.parametrizations import METHODS

Shape = tuple[int, int, int]

K = TypeVar("K")
T = TypeVar("T")

_CENTERING: dict[str | None, Callable[[int], nn.Module] | None] = {
    None: None, "batch": BatchCentering, "layer": LayerCentering,
}  # fmt: skip
_POOLING: dict[str, Callable[..., nn.Module]] = {"average": GlobalScaledAvgPool, "l2": GlobalL2NormPool}


class Body(NamedTuple):
    """Everything in front of the head.

    Attributes:
        layers: from images to vectors.
        features: size of the vectors.
    """

    layers: list[nn.Module]
    features: int


def choose(option: str, value: K, known: Mapping[K, T]) -> T:
    """Entry of a table.

    Raises:
        ValueError: if there is none of that name; it lists those that there are.
    """
    if value not in known:
        raise ValueError(f"{option}={value!r} must be one of {', '.join(map(repr, known))}")
    return known[value]


def pad_to_multiple(shape: Shape, multiple: int) -> tuple[list[nn.Module], tuple[int, int]]:
    """Return what pads images with zeros up to a multiple of the total stride, and their size after that.

    Circular layers are orthogonal only where the stride divides the size. Zeros are an isometry, so a certificate about
    the padded image is one about the image.
    """
    height, width = (-(-size // multiple) * multiple for size in shape[1:])
    rows, columns = height - shape[1], width - shape[2]
    if rows == columns == 0:
        return [], (height, width)
    pad = nn.ZeroPad2d((columns // 2, columns - columns // 2, rows // 2, rows - rows // 2))
    return [pad], (height, width)


def convolution(
    conv: str, channels: tuple[int, int], kernel_size: int, stride: int = 1, mode: str = "circular", **options: Any
) -> nn.Conv2d:
    """Return a convolution by any of our methods, or torch's with the same geometry if ``conv="plain"``."""
    choose("conv", conv, {**METHODS, "plain": None})
    if conv != "plain":
        return OrthoConv2d(*channels, kernel_size, stride, padding_mode=mode, method=conv, **options)
    if options:
        raise ValueError(f"{', '.join(options)} has no meaning for conv='plain'; leave it out")
    padding = "same" if stride == 1 else max(0, -((stride - kernel_size) // 2))
    return nn.Conv2d(*channels, kernel_size, stride, padding, padding_mode=mode)  # type: ignore[arg-type]


def activation(channels: int, centering: str | None = None) -> list[nn.Module]:
    """``MaxMin``, after a centering if one is asked for."""
    if channels % 2:
        raise ValueError(f"{channels} channels cannot be sorted in pairs by MaxMin; use an even width")
    centre = choose("centering", centering, _CENTERING)
    return [MaxMin()] if centre is None else [centre(channels), MaxMin()]


def pool(pooling: str) -> nn.Module:
    """Global pooling to vectors."""
    return choose("pooling", pooling, _POOLING)(keepdim=False)


def dense(sizes: list[int], conv: str = "aoc") -> list[nn.Module]:
    """Orthogonal linear layers from each size to the next, each with an activation.

    Where convolutions are on the manifold (``conv="manifold"``), so are these.
    """
    layers: list[nn.Module] = []
    method = "manifold" if conv == "manifold" else "free"
    for before, after in pairwise(sizes):
        layers += [OrthoLinear(before, after, method=method), *activation(after)]
    return layers
