"""Against slow code for one image, by slicing and by torch's own resizing."""

import pytest
import torch
import torch.nn.functional as F

from trysquare.lab.data.augment import (
    AUGMENTATIONS,
    ColorJitter,
    Flip,
    RandomCrop,
    RandomResizedCrop,
    augmentations,
    resampling,
)
from trysquare.lab.data.randomness import Randomness

IMAGES = torch.rand(64, 3, 9, 7, generator=torch.Generator().manual_seed(5))


def random(total=64, rows=None, seed=0):
    return Randomness(torch.Generator().manual_seed(seed), total, rows)


@pytest.mark.parametrize("mode", ["zeros", "reflect"])
def test_crop_is_a_window_of_the_padded_image(mode):
    cropped = RandomCrop(2, mode)(IMAGES, random())
    places = set()
    for image, result in zip(IMAGES, cropped, strict=True):
        padded = torch.zeros(3, 13, 11)
        for i in range(13):
            for j in range(11):
                y, x = i - 2, j - 2
                if mode == "reflect":
                    y, x = 8 - abs(8 - abs(y)), 6 - abs(6 - abs(x))
                if 0 <= y < 9 and 0 <= x < 7:
                    padded[:, i, j] = image[:, y, x]
        windows = [(i, j) for i in range(5) for j in range(5) if torch.equal(padded[:, i : i + 9, j : j + 7], result)]
        assert len(windows) == 1
        places |= set(windows)
    assert {i for i, _ in places} == {j for _, j in places} == set(range(5))


@pytest.mark.parametrize(("probability", "low", "high"), [(0, 0, 0), (0.5, 20, 44), (1, 64, 64)])
def test_flip_mirrors_some_images(probability, low, high):
    flipped = Flip(probability)(IMAGES, random())
    mirrored = 0
    for image, result in zip(IMAGES, flipped, strict=True):
        mirror = torch.stack([image[..., 6 - j] for j in range(7)], -1)
        assert torch.equal(result, image) or torch.equal(result, mirror)
        mirrored += torch.equal(result, mirror)
    assert low <= mirrored <= high


@pytest.mark.parametrize("scale", [0.08, 0.5, 1.0])
def test_resized_crop_is_a_crop_then_torchs_resizing(scale):
    augmentation = RandomResizedCrop(scale)
    boxes = augmentation.boxes(augmentation.draw(random()), 9, 7)
    results = augmentation(IMAGES, random())
    for image, (top, left, height, width), result in zip(IMAGES, boxes.tolist(), results, strict=True):
        part = image[None, :, top : top + height, left : left + width]
        assert part.shape[2:] == (height, width)
        expected = F.interpolate(part, (9, 7), mode="bilinear", antialias=True)[0]
        torch.testing.assert_close(result, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("target", [3, 5, 16, 33])
def test_resampling_shrinks_as_torch_does(target):
    line = torch.rand(1, 1, 1, 16)
    matrix = resampling(torch.tensor([3]), torch.tensor([11]), 16, target)[0]
    expected = F.interpolate(line[..., 3:14], (1, target), mode="bilinear", antialias=True)
    torch.testing.assert_close(line[0, 0, 0] @ matrix.mT, expected[0, 0, 0])


def test_boxes_have_the_drawn_area_and_ratio():
    boxes = RandomResizedCrop(0.25).boxes(random(4000).uniform(10, 4), 320, 400).double()
    top, left, height, width = boxes.unbind(1)
    share, ratio = height * width / (320 * 400), width / height
    assert share.min() > 0.245
    assert share.max() < 1
    assert share.max() > 0.9
    assert ratio.min() > 0.74
    assert ratio.max() < 1.35
    assert (top + height).max() == 320
    assert (left + width).max() == 400
    assert top.min() == left.min() == 0


@pytest.mark.parametrize(("size", "expected"), [((10, 100), (0, 43, 10, 13)), ((100, 10), (43, 0, 13, 10))])
def test_long_images_give_their_middle(size, expected):
    boxes = RandomResizedCrop(1.0).boxes(random(5).uniform(10, 4), *size)
    assert [tuple(box) for box in boxes.tolist()] == [expected] * 5


@pytest.mark.parametrize("name", AUGMENTATIONS)
@pytest.mark.parametrize("channels", [1, 3])
def test_rows_do_not_see_each_other(name, channels):
    (augmentation,) = augmentations({name: {}})
    images = torch.rand(12, channels, 8, 8)
    whole = augmentation(images, random(12))
    for rows in (slice(0, 5), slice(5, 12), slice(3, 3)):
        part = augmentation(images[rows], random(12, rows))
        torch.testing.assert_close(part, whole[rows], rtol=0, atol=1e-6)
    assert whole.shape == images.shape
    assert whole.min() >= 0
    assert whole.max() <= 1


def test_names_and_parameters():
    steps = augmentations({"flip": None, "random_crop": {"padding": 1}})
    assert steps == (Flip(), RandomCrop(1))
    with pytest.raises(ValueError, match="unknown augmentation 'random_crops': did you mean 'random_crop'"):
        augmentations({"random_crops": {}})
    with pytest.raises(ValueError, match="unknown parameter of randaugment 'magnitud': did you mean 'magnitude'"):
        augmentations({"randaugment": {"magnitud": 9}})
    with pytest.raises(ValueError, match="unknown augmentation 'xyz': known: random_crop"):
        augmentations({"xyz": {}})
    with pytest.raises(ValueError, match=r"random_crop takes parameters by name, such as .*; found 4"):
        augmentations({"random_crop": 4})
    with pytest.raises(ValueError, match=r"padding of random_crop takes int, such as 4; found '4'"):
        augmentations({"random_crop": {"padding": "4"}})
    assert augmentations({"random_resized_crop": {"scale": 1}}) == (RandomResizedCrop(1),)


def test_reflection_reaches_less_than_the_image():
    with pytest.raises(ValueError, match="padding=7, but images are 9x7"):
        RandomCrop(7, "reflect")(IMAGES, random())


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("random_crop", {"padding": -1}),
        ("random_crop", {"mode": "mirror"}),
        ("flip", {"probability": 1.5}),
        ("random_resized_crop", {"scale": 0}),
        ("random_resized_crop", {"ratio": 0.5}),
        ("randaugment", {"magnitude": 31}),
        ("randaugment", {"num_ops": -1}),
    ],
)
def test_values_out_of_range(name, parameters):
    with pytest.raises(ValueError, match=f"{name}|{next(iter(parameters))}"):
        augmentations({name: parameters})


def test_jitter_scales_from_black_then_from_grey():
    jittered = ColorJitter(0.2, 0.1)(IMAGES, random())
    again = random()
    bright, colourful = (1 + amount * (2 * again.uniform() - 1) for amount in (0.2, 0.1))
    for image, result, first, second in zip(IMAGES, jittered, bright, colourful, strict=True):
        expected = (image * first).clamp(0, 1)
        grey = (expected * torch.tensor([0.299, 0.587, 0.114]).view(3, 1, 1)).sum(0)
        torch.testing.assert_close(result, (grey + second * (expected - grey)).clamp(0, 1))
    assert bright.min() >= 0.8
    assert bright.max() <= 1.2
    assert len(bright.unique()) == len(IMAGES)  # each image has numbers of its own
    assert torch.equal(ColorJitter(0.0, 0.0)(IMAGES, random()), IMAGES)
    with pytest.raises(ValueError, match="from 0 to 1, found brightness=2"):
        ColorJitter(brightness=2)
