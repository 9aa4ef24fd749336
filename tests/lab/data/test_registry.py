import re
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.lab.data import writers
from trysquare.lab import data
from trysquare.lab.data import DATASETS, ImageSet, check, load


def test_digits_are_split_by_class():
    train, test = load("digits"), load("digits", split="test")
    assert (len(train), len(test)) == (1442, 355)
    counts = torch.bincount(train.labels) + torch.bincount(test.labels)
    assert counts.tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]
    assert torch.equal(torch.bincount(test.labels), counts // 5)
    assert train.images.shape[1:] == (1, 8, 8)
    assert train.images.max() == train.white == 16
    as_bytes = [set(map(bytes, part.images.flatten(1).numpy())) for part in (train, test)]
    assert not as_bytes[0] & as_bytes[1]


def test_digits_test_images_are_every_fifth_of_their_class():
    with np.load(Path(data.__file__).with_name("digits.npz")) as file:
        images, labels = file["images"], file["labels"]
    seen = dict.fromkeys(range(10), 0)
    expected = []
    for image, label in zip(images, labels, strict=True):
        seen[int(label)] += 1
        if seen[int(label)] % 5 == 0:
            expected.append(image)
    assert np.array_equal(load("digits", split="test").images[:, 0].numpy(), np.stack(expected))


@pytest.mark.parametrize("name", DATASETS)
def test_official_numbers(name):
    dataset = DATASETS[name]
    assert len(dataset.shape) == 3
    assert set(dataset.counts) == {"train", "test"}
    if dataset.embedded:
        images = load(name)
        assert images[0][0].shape == dataset.shape
        assert len(images.classes) == dataset.classes
    else:
        with pytest.raises(ValueError, match=f"{name} is read from files: give the folder"):
            load(name)


def test_wrong_names():
    with pytest.raises(ValueError, match="unknown data set 'cifar_10': did you mean 'cifar10'"):
        load("cifar_10")
    with pytest.raises(ValueError, match="unknown split 'val'"):
        load("digits", split="val")
    with pytest.raises(ValueError, match=re.escape("the images of digits have the size (8, 8)")):
        load("digits", size=32)


def test_check_tells_an_unofficial_number(tmp_path):
    writers.write_mnist(tmp_path)
    train, test = check("mnist", tmp_path).splitlines()
    assert train == "mnist, train: 5 images of 10 classes; the official set has 60000 of 10 (checked: all of it)"
    assert test.startswith("mnist, test: 5 images")


def test_check_finds_damage(tmp_path, monkeypatch):
    writers.expect_rows(monkeypatch, 4)
    writers.write_cifar10_binary(tmp_path)
    (tmp_path / "test_batch.bin").write_bytes(b"short")
    with pytest.raises(ValueError, match=r"test_batch.bin"):
        check("cifar10", tmp_path)


def test_image_set_refuses_what_does_not_fit():
    images, labels = torch.zeros(2, 1, 4, 4, dtype=torch.uint8), torch.tensor([0, 1])
    assert ImageSet(images, labels, ("a", "b"))[1][1] == 1
    with pytest.raises(ValueError, match=r"uint8 \(n, c, h, w\), found torch.float32"):
        ImageSet(images.float(), labels, ("a", "b"))
    with pytest.raises(ValueError, match=r"int64 \(2,\), one an image, found torch.int64 of shape \(1,\)"):
        ImageSet(images, labels[:1], ("a", "b"))
    with pytest.raises(ValueError, match=r"from 0 to 0, found 1 for image 1 \(1 of 2"):
        ImageSet(images, labels, ("a",))
