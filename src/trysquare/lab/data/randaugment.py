"""RandAugment (Cubuk, Zoph, Shlens and Le, 2020), each image with operations of its own, all images of a batch at once.

Of 14 operations, ``num_ops`` are drawn for each image, with repetition, and applied one after another with the same
magnitude ``m`` of 0 to 30; the strength is ``s = m / 30``. Signs are drawn for each image.

=============  ================================  =========================================================
operation      amount                            what it does
=============  ================================  =========================================================
identity       none                              nothing
shear_x        ±0.3 s                            shifts rows by their distance from the top times the amount
shear_y        ±0.3 s                            shifts columns likewise
translate_x    ±150/331 s of the width           shifts by whole pixels, rounded towards zero
translate_y    ±150/331 s of the height          likewise
rotate         ±30° s                            about the middle
brightness     1 ± 0.9 s                         away from, or towards, black
color          1 ± 0.9 s                         ... grey of the same luminance
contrast       1 ± 0.9 s                         ... the mean luminance of the image
sharpness      1 ± 0.9 s                         ... a smoothed image
posterize      8 - round(4 s) bits               drops the low bits of the 256 levels
solarize       threshold 1 - s                   inverts what is not below it
autocontrast   none                              stretches every channel to [0, 1]
equalize       none                              flattens the histogram of every channel
=============  ================================  =========================================================

Geometric operations take the nearest pixel, and black from outside the image.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from trysquare.lab.data.randomness import Randomness
from trysquare.nn.geometry import number, per_axis

MAX_MAGNITUDE = 30
_LEVELS = 255
_LUMINANCE = (0.299, 0.587, 0.114)

Operation = Callable[[Tensor, float, Tensor], Tensor]
"""Of images ``(n, c, h, w)`` in [0, 1], the strength, and signs ``(n,)``."""


@dataclass(frozen=True)
class RandAugment:
    """Random operations on every image; see the table of this module.

    Args:
        num_ops: how many, one after another.
        magnitude: 0 to 30.
        probability: of an image to be augmented at all.

    Raises:
        ValueError: if ``num_ops`` is negative, or ``magnitude`` or ``probability`` is out of range.
    """

    num_ops: int = 2
    magnitude: int = 9
    probability: float = 1.0

    def __post_init__(self) -> None:
        per_axis("num_ops", self.num_ops, 1, least=0)
        number("magnitude", self.magnitude)
        if self.num_ops < 0 or not 0 <= self.magnitude <= MAX_MAGNITUDE:
            raise ValueError(
                f"randaugment takes num_ops >= 0 and magnitude from 0 to {MAX_MAGNITUDE}, "
                f"found num_ops={self.num_ops} and magnitude={self.magnitude}"
            )
        if not 0 <= self.probability <= 1:
            raise ValueError(f"randaugment takes a probability from 0 to 1, found {self.probability}")

    def __call__(self, images: Tensor, random: Randomness) -> Tensor:
        """Augmented images; ``images`` are float ``(n, c, h, w)`` in [0, 1]."""
        original = images
        for _ in range(self.num_ops):
            images = _apply(images, self.magnitude / MAX_MAGNITUDE, random.integers(len(OPERATIONS)), random.signs())
        if self.probability < 1:
            images = torch.where(random.uniform(1, 1, 1) < self.probability, images, original)
        return images


def _apply(images: Tensor, strength: float, chosen: Tensor, signs: Tensor) -> Tensor:
    """Return each image under its chosen operation."""
    result = images.clone()
    for position, operation in enumerate(OPERATIONS.values()):
        rows = (chosen == position).nonzero()[:, 0]
        if len(rows) and operation is not identity:
            result[rows] = operation(images[rows], strength, signs[rows])
    return result


def identity(images: Tensor, strength: float, signs: Tensor) -> Tensor:
    """Return the images."""
    return images


def shear_x(images: Tensor, strength: float, signs: Tensor) -> Tensor:
    """Rows shifted in proportion to their distance from the top."""
    amount = 0.3 * strength * signs
    return _warp(images, [[1, amount], [0, 1]], [amount * images.shape[2] / 2, 0])


def shear_y(images: Tensor, strength: float, signs: Tensor) -> Tensor:
    """Columns shifted in proportion to their distance from the left."""
    amount = 0.3 * strength * signs
    return _warp(images, [[1, 0], [amount, 1]], [0, amount * images.shape[3] / 2])


def translate_x(images: Tensor, strength: float, signs: Tensor) -> Tensor:
    """Shifted sideways by whole pixels."""
    return _warp(images, [[1, 0], [0, 1]], [signs * math.floor(150 / 331 * images.shape[3] * strength), 0])


def translate_y(images: Tensor, strength: float, signs: Tensor) -> Tensor:
    """Shifted up or down by whole pixels."""
    return _warp(images, [[1, 0], [0, 1]], [0, signs * math.floor(150 / 331 * images.shape[2] * strength)])


def rotate(images: Tensor, strength: float, signs: Tensor) -> Tensor:
    """Rotated about the middle, counter-clockwise for a positive sign."""
    angle = torch.deg2rad(30 * strength * signs)
    return _warp(images, [[angle.cos(), -angle.sin()], [angle.sin(), angle.cos()]], [0, 0])


def brightness(images: Tensor, strength: float, signs: Tensor) -> Tensor:
    """Away from black or towards it."""
    return _away_from(torch.zeros_like(images), images, strength, signs)


def color(images: Tensor, strength: float, signs: Tensor) -> Tensor:
    """Away from grey or towards it."""
    return _away_from(grey(images), images, strength, signs)


def contrast(images: Tensor, strength: float, signs: Tensor) -> Tensor:
    """Away from the mean luminance or towards it."""
    return _away_from(grey(images).mean((1, 2, 3), keepdim=True), images, strength, signs)


def sharpness(images: Tensor, strength: float, signs: Tensor) -> Tensor:
    """Away from a smoothed image or towards it; its border is not smoothed."""
    if min(images.shape[2:]) < 3:
        return images
    channels = images.shape[1]
    kernel = images.new_ones(channels, 1, 3, 3) / 13
    kernel[:, :, 1, 1] = 5 / 13
    smooth = images.clone()
    smooth[:, :, 1:-1, 1:-1] = F.conv2d(images, kernel, groups=channels)
    return _away_from(smooth, images, strength, signs)


def posterize(images: Tensor, strength: float, signs: Tensor) -> Tensor:
    """Without the low bits of the 256 levels."""
    step = 2 ** round(4 * strength)
    return (images * _LEVELS).round().div(step).floor() * step / _LEVELS


def solarize(images: Tensor, strength: float, signs: Tensor) -> Tensor:
    """Return the inverses of what is not below a threshold."""
    return torch.where(images >= 1 - strength, 1 - images, images)


def autocontrast(images: Tensor, strength: float, signs: Tensor) -> Tensor:
    """Every channel stretched to [0, 1]; one of a single value stays."""
    low, high = images.amin((2, 3), keepdim=True), images.amax((2, 3), keepdim=True)
    return torch.where(high > low, (images - low) / (high - low).clamp(min=torch.finfo(images.dtype).tiny), images)


def equalize(images: Tensor, strength: float, signs: Tensor) -> Tensor:
    """Every channel with a flat histogram of 256 levels, as far as its levels allow."""
    levels = (images * _LEVELS).round().long().flatten(2)  # (n, c, pixels)
    counts = levels.new_zeros(*levels.shape[:2], _LEVELS + 1)
    counts.scatter_add_(2, levels, torch.ones_like(levels))
    step = (levels.shape[2] - counts.gather(2, levels.amax(2, keepdim=True))) // _LEVELS
    below = counts.cumsum(2) - counts
    table = ((below + step // 2) // step.clamp(min=1)).clamp(max=_LEVELS)
    table = torch.where(step > 0, table, torch.arange(_LEVELS + 1, device=images.device))
    return (table.gather(2, levels) / _LEVELS).view_as(images).to(images.dtype)


OPERATIONS: dict[str, Operation] = {
    function.__name__: function
    for function in (
        identity, shear_x, shear_y, translate_x, translate_y, rotate, brightness, color, contrast, sharpness, posterize,
        solarize, autocontrast, equalize,
    )
}  # fmt: skip


def _away_from(other: Tensor, images: Tensor, strength: float, signs: Tensor) -> Tensor:
    return away_from(other, images, 1 + 0.9 * strength * signs)


def away_from(other: Tensor, images: Tensor, factor: Tensor) -> Tensor:
    """On the line from other images through these, at factors ``(n,)``: 0 are the others, 1 these."""
    return torch.lerp(other, images, factor.view(-1, 1, 1, 1)).clamp(0, 1)


def grey(images: Tensor) -> Tensor:
    """Luminance ``(n, 1, h, w)``; an image without three colours is its own mean over the channels."""
    if images.shape[1] != 3:
        return images.mean(1, keepdim=True)
    weights = images.new_tensor(_LUMINANCE).view(1, 3, 1, 1)
    return (images * weights).sum(1, keepdim=True)


def _warp(images: Tensor, matrix: list[list[Tensor | float]], shift: list[Tensor | float]) -> Tensor:
    """Images that take at ``p`` the nearest pixel to ``matrix @ p + shift``, in pixels (x, y) from the middle."""
    half = (images.shape[3] / 2, images.shape[2] / 2)
    theta = images.new_zeros(len(images), 2, 3)
    for i in range(2):
        theta[:, i, 2] = shift[i] / half[i]
        for j in range(2):
            theta[:, i, j] = matrix[i][j] * half[j] / half[i]
    grid = F.affine_grid(theta, list(images.shape), align_corners=False)
    return F.grid_sample(images, grid, mode="nearest", align_corners=False)
