"""Augmentations of a batch, by name: each image with random numbers of its own, all images at once."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from trysquare.lab.data.randaugment import RandAugment, away_from, grey
from trysquare.lab.data.randomness import Randomness
from trysquare.naming import pick, require_known

Augmentation = Callable[[Tensor, Randomness], Tensor]
"""From float images ``(n, c, h, w)`` in [0, 1] to others of the same shape and range."""

_PADDING_MODES = {"zeros": "constant", "reflect": "reflect"}
_TRIES = 10


@dataclass(frozen=True)
class RandomCrop:
    """Pads every side, then cuts a window of the original size at a random place.

    Args:
        padding: pixels on each side.
        mode: ``"zeros"`` or ``"reflect"``.
    """

    padding: int = 4
    mode: str = "zeros"

    def __post_init__(self) -> None:
        require_known(self.mode, _PADDING_MODES, "padding mode of random_crop")
        if self.padding < 0:
            raise ValueError(f"random_crop takes padding >= 0, found {self.padding}")

    def __call__(self, images: Tensor, random: Randomness) -> Tensor:
        """Cropped images."""
        n, _, h, w = images.shape
        if self.mode == "reflect" and self.padding >= min(h, w):
            raise ValueError(f"random_crop reflects less than an image: padding={self.padding}, but images are {h}x{w}")
        padded = F.pad(images, [self.padding] * 4, _PADDING_MODES[self.mode])
        windows = padded.unfold(2, h, 1).unfold(3, w, 1)  # a view: (n, c, places, places, h, w)
        places = 2 * self.padding + 1
        top, left = random.integers(places), random.integers(places)
        return windows[torch.arange(n, device=images.device), :, top, left]


@dataclass(frozen=True)
class Flip:
    """Mirrors left and right.

    Args:
        probability: of an image to be mirrored.
    """

    probability: float = 0.5

    def __post_init__(self) -> None:
        if not 0 <= self.probability <= 1:
            raise ValueError(f"flip takes a probability from 0 to 1, found {self.probability}")

    def __call__(self, images: Tensor, random: Randomness) -> Tensor:
        """Images, some of them mirrored."""
        mirrored = random.uniform(1, 1, 1) < self.probability
        return torch.where(mirrored, images.flip(-1), images)


@dataclass(frozen=True)
class RandomResizedCrop:
    """Cuts a random part and resizes it to the whole.

    Part and ratio are drawn up to ten times until the part fits into the image; an image into which none fits gives its
    largest middle part of a permitted ratio. Resizing is bilinear, with a wider filter where it shrinks.

    Args:
        scale: smallest share of the area; the share is uniform from there to 1.
        ratio: largest ratio of the sides; its logarithm is uniform from ``-log(ratio)`` to ``log(ratio)``.
    """

    scale: float = 0.08
    ratio: float = 4 / 3

    def __post_init__(self) -> None:
        if not 0 < self.scale <= 1 or self.ratio < 1:
            found = f"scale={self.scale} and ratio={self.ratio}"
            raise ValueError(f"random_resized_crop takes 0 < scale <= 1 and ratio >= 1, found {found}")

    def __call__(self, images: Tensor, random: Randomness) -> Tensor:
        """Images of the same size, each a part of the original."""
        h, w = images.shape[2:]
        top, left, height, width = self.boxes(self.draw(random), h, w).unbind(1)
        rows, columns = resampling(top, height, h, h), resampling(left, width, w, w)
        across = images.flatten(1, 2) @ columns.mT  # (n, c * h, w)
        return rows[:, None] @ across.view_as(images)

    def draw(self, random: Randomness) -> Tensor:
        """Return the numbers that ``boxes`` needs, ``(n, 10, 4)``."""
        return random.uniform(_TRIES, 4)

    def boxes(self, uniform: Tensor, height: int, width: int) -> Tensor:
        """Parts of an image of this size, int64 ``(n, 4)``: top, left, height, width."""
        area = height * width * (self.scale + (1 - self.scale) * uniform[..., 0])
        ratio = torch.exp(math.log(self.ratio) * (2 * uniform[..., 1] - 1))
        size = torch.stack([(area / ratio).sqrt(), (area * ratio).sqrt()], -1).round()  # (n, tries, 2)
        limit = size.new_tensor([height, width])
        fits = ((size >= 1) & (size <= limit)).all(-1)
        first = (fits * torch.arange(_TRIES, 0, -1, device=fits.device)).argmax(1)
        each = torch.arange(len(first), device=fits.device)
        start = (uniform[each, first, 2:] * (limit - size[each, first] + 1)).floor()
        found = torch.cat([start, size[each, first]], 1).long()
        return torch.where(fits.any(1, keepdim=True), found, found.new_tensor(self._middle(height, width)))

    def _middle(self, height: int, width: int) -> tuple[int, int, int, int]:
        inner = min(height, round(width * self.ratio)), min(width, round(height * self.ratio))
        return (height - inner[0]) // 2, (width - inner[1]) // 2, *inner


def resampling(start: Tensor, length: Tensor, size: int, target: int) -> Tensor:
    """Matrices ``(n, target, size)`` that resize the interval ``[start, start + length)`` of an axis, bilinearly.

    The triangle filter is as wide as a target pixel, or as a source pixel if that is wider, and sees nothing outside
    the interval.
    """
    start, length = start.view(-1, 1, 1), length.view(-1, 1, 1)
    step = length / target
    centre = start + (torch.arange(target, device=start.device).view(1, -1, 1) + 0.5) * step
    pixel = torch.arange(size, device=start.device) + 0.5
    weight = (1 - (pixel - centre).abs() / step.clamp(min=1)).clamp(min=0)
    weight = weight * ((pixel > start) & (pixel < start + length))
    return weight / weight.sum(-1, keepdim=True)


@dataclass(frozen=True)
class ColorJitter:
    """Changes brightness, then saturation, each by a factor of its own for each image.

    Args:
        brightness: factors are uniform from ``1 - brightness`` to ``1 + brightness``: away from black, or towards it.
        saturation: likewise, of grey of the same luminance.
    """

    brightness: float = 0.2
    saturation: float = 0.1

    def __post_init__(self) -> None:
        if not (0 <= self.brightness <= 1 and 0 <= self.saturation <= 1):
            found = f"brightness={self.brightness} and saturation={self.saturation}"
            raise ValueError(f"color_jitter takes numbers from 0 to 1, found {found}")

    def __call__(self, images: Tensor, random: Randomness) -> Tensor:
        """Images of other colours."""
        images = away_from(torch.zeros_like(images), images, 1 + self.brightness * (2 * random.uniform() - 1))
        return away_from(grey(images).expand_as(images), images, 1 + self.saturation * (2 * random.uniform() - 1))


AUGMENTATIONS: dict[
    str, type[RandomCrop] | type[Flip] | type[RandomResizedCrop] | type[ColorJitter] | type[RandAugment]
] = {
    "random_crop": RandomCrop,
    "flip": Flip,
    "color_jitter": ColorJitter,
    "random_resized_crop": RandomResizedCrop,
    "randaugment": RandAugment,
}


def augmentations(spec: Mapping[str, Mapping[str, Any] | None]) -> tuple[Augmentation, ...]:
    """Augmentations by name and parameters, in the order of the mapping.

    Raises:
        ValueError: if a name or a parameter is not known (the nearest is told), or a value is out of range.

    >>> augmentations({"random_crop": {"padding": 2}, "flip": {}})
    (RandomCrop(padding=2, mode='zeros'), Flip(probability=0.5))
    >>> augmentations({"random_crop": {"pading": 2}})
    Traceback (most recent call last):
    ValueError: unknown parameter of random_crop 'pading': did you mean 'padding'? known: padding, mode
    """
    return tuple(_build(name, parameters or {}) for name, parameters in spec.items())


def _build(name: str, parameters: Mapping[str, Any]) -> Augmentation:
    kind = pick(AUGMENTATIONS, name, "augmentation")
    defaults = {field.name: field.default for field in fields(kind)}
    if not isinstance(parameters, Mapping):
        raise ValueError(f"{name} takes parameters by name, such as {defaults}; found {parameters!r}")
    for parameter, value in parameters.items():
        default = pick(defaults, parameter, f"parameter of {name}")
        if not isinstance(value, int | float if isinstance(default, float) else type(default)):
            raise ValueError(
                f"{parameter} of {name} takes {type(default).__name__}, such as {default!r}; found {value!r}"
            )
    return kind(**parameters)
