"""Against Pillow, one image at a time.

Tolerances: Pillow rounds to 256 levels, once or twice an operation, hence 1/255 or 2/255; where it takes the
nearest pixel, a tie may go to the other one, hence 2 % of the pixels.
"""

import math

import numpy as np
import pytest
import torch
from PIL import Image, ImageEnhance, ImageOps

from trysquare.lab.data.randaugment import OPERATIONS, RandAugment, _apply
from trysquare.lab.data.randomness import Randomness

WIDTH, HEIGHT = 36, 32


def smooth_images(n, channels=3):
    """Random images with structure at all scales, that do not fill the range, on 256 levels."""
    generator = torch.Generator().manual_seed(7)
    coarse = torch.rand(n, channels, 4, 4, generator=generator)
    coarse = torch.nn.functional.interpolate(coarse, (HEIGHT, WIDTH), mode="bicubic")
    fine = torch.rand(n, channels, HEIGHT, WIDTH, generator=generator)
    return ((0.8 * coarse + 0.2 * fine).clamp(0.05, 0.9) * 255).round() / 255


def to_pillow(image):
    return Image.fromarray((image * 255).round().byte().permute(1, 2, 0).numpy())


def from_pillow(image):
    return torch.from_numpy(np.array(image)).permute(2, 0, 1) / 255


def affine(image, *coefficients):
    return image.transform(image.size, Image.Transform.AFFINE, coefficients, Image.Resampling.NEAREST)


def pixels(side, s):
    return math.floor(150 / 331 * side * s)


# From an image of Pillow, the strength and the sign.
ORACLES = {
    "identity": lambda im, s, sign: im,
    "shear_x": lambda im, s, sign: affine(im, 1, sign * 0.3 * s, 0, 0, 1, 0),
    "shear_y": lambda im, s, sign: affine(im, 1, 0, 0, sign * 0.3 * s, 1, 0),
    "translate_x": lambda im, s, sign: affine(im, 1, 0, sign * pixels(WIDTH, s), 0, 1, 0),
    "translate_y": lambda im, s, sign: affine(im, 1, 0, 0, 0, 1, sign * pixels(HEIGHT, s)),
    "rotate": lambda im, s, sign: im.rotate(sign * 30 * s, Image.Resampling.NEAREST),
    "brightness": lambda im, s, sign: ImageEnhance.Brightness(im).enhance(1 + sign * 0.9 * s),
    "color": lambda im, s, sign: ImageEnhance.Color(im).enhance(1 + sign * 0.9 * s),
    "contrast": lambda im, s, sign: ImageEnhance.Contrast(im).enhance(1 + sign * 0.9 * s),
    "sharpness": lambda im, s, sign: ImageEnhance.Sharpness(im).enhance(1 + sign * 0.9 * s),
    "posterize": lambda im, s, sign: ImageOps.posterize(im, 8 - round(4 * s)),
    "solarize": lambda im, s, sign: ImageOps.solarize(im, 255 * (1 - s)),
    "autocontrast": lambda im, s, sign: ImageOps.autocontrast(im),
    "equalize": lambda im, s, sign: ImageOps.equalize(im),
}
GEOMETRIC = {"shear_x", "shear_y", "rotate"}
EXACT = {"identity", "translate_x", "translate_y", "posterize", "equalize", "solarize"}


def test_every_operation_has_an_oracle():
    assert list(OPERATIONS) == list(ORACLES)
    assert len(OPERATIONS) == 14


@pytest.mark.parametrize("magnitude", [0, 1, 6, 9, 17, 30])
@pytest.mark.parametrize("name", OPERATIONS)
def test_operation_is_that_of_pillow(name, magnitude):
    images, strength = smooth_images(6), magnitude / 30
    signs = torch.tensor([1.0, -1, 1, -1, 1, -1])
    results = OPERATIONS[name](images, strength, signs)
    for image, sign, result in zip(images, signs.tolist(), results, strict=True):
        expected = from_pillow(ORACLES[name](to_pillow(image), strength, int(sign)))
        difference = (result - expected).abs()
        if name in GEOMETRIC:
            assert (difference > 1e-5).float().mean() < 0.02
        else:
            assert difference.max() <= (1e-5 if name in EXACT else 2.01 / 255)


def test_flat_images_stay():
    flat = torch.full((2, 3, 8, 8), 0.4)
    for name in ("autocontrast", "equalize"):
        torch.testing.assert_close(OPERATIONS[name](flat, 0.3, torch.ones(2)), flat)


def test_small_images_are_not_sharpened():
    tiny = torch.rand(2, 1, 2, 2)
    assert OPERATIONS["sharpness"](tiny, 0.3, torch.ones(2)) is tiny


@pytest.mark.parametrize("channels", [1, 3])
def test_each_image_gets_its_own_operation(channels):
    images = smooth_images(14, channels)
    signs = torch.ones(14)
    results = _apply(images, 0.3, torch.arange(14), signs)
    for number, (name, operation) in enumerate(OPERATIONS.items()):
        expected = operation(images[number : number + 1], 0.3, signs[:1])[0]
        torch.testing.assert_close(results[number], expected, rtol=0, atol=1e-6, msg=name)


def test_operations_are_drawn_evenly(monkeypatch):
    marks = {name: lambda images, strength, signs, i=i: images + i for i, name in enumerate(OPERATIONS)}
    monkeypatch.setattr("trysquare.lab.data.randaugment.OPERATIONS", marks)
    drawn = RandAugment(1, 9)(torch.zeros(14_000, 1, 1, 1), Randomness(torch.Generator().manual_seed(0), 14_000))
    counts = torch.bincount(drawn.flatten().long())
    assert len(counts) == 14
    assert (counts - 1000).abs().max() < 130  # more than four standard deviations


def test_no_operation_leaves_the_images():
    images = smooth_images(4)
    assert torch.equal(RandAugment(0, 9)(images, Randomness(torch.Generator(), 4)), images)


def test_images_are_not_changed_in_place():
    images = smooth_images(32)
    before = images.clone()
    RandAugment(3, 20)(images, Randomness(torch.Generator(), 32))
    assert torch.equal(images, before)


def test_some_images_only():
    images = torch.rand(200, 3, 8, 8)
    always, sometimes, never = (
        RandAugment(2, 9, probability)(images, Randomness(torch.Generator().manual_seed(0), 200))
        for probability in (1.0, 0.5, 0.0)
    )
    assert torch.equal(never, images)
    left = [torch.equal(one, other) for one, other in zip(sometimes, images, strict=True)]
    assert all(alone or torch.equal(one, other) for alone, one, other in zip(left, sometimes, always, strict=True))
    assert 60 < sum(left) < 150
    with pytest.raises(ValueError, match=r"probability from 0 to 1, found 1\.5"):
        RandAugment(probability=1.5)
