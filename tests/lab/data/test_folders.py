import builtins
import shutil

import numpy as np
import pytest
import torch
from PIL import Image

from tests.lab.data import writers
from trysquare.lab.data import FolderSet, Loader, check, load


def test_imagenet_is_resized_and_cut(tmp_path):
    writers.write_imagenet(tmp_path)
    images = load("imagenet", tmp_path, "test", size=14)
    assert images.classes == ("n01", "n02", "n03")
    assert images.labels.tolist() == [0] * 2 + [1] * 3 + [2] * 4
    assert images.resize == 16
    with Image.open(tmp_path / "val" / "n02" / "n02_1.JPEG") as file:
        resized = file.convert("RGB").resize((21, 16), Image.Resampling.BILINEAR)  # 40x30, shorter side to 16
    expected = np.asarray(resized)[1:15, 3:17].transpose(2, 0, 1)
    image, label = images[3]
    assert label == 1
    assert np.array_equal(image.numpy(), expected)


def test_imagenet_default_size(tmp_path):
    writers.write_imagenet(tmp_path / "ILSVRC" / "Data" / "CLS-LOC", size=(300, 260))
    images = load("imagenet", tmp_path)
    assert (images.size, images.resize) == (224, 256)
    assert images[0][0].shape == (3, 224, 224)


def test_parts_are_cropped_then_resized(tmp_path):
    pixels = writers.write_image(tmp_path / "a.png", 0, (20, 10))
    images = FolderSet((str(tmp_path / "a.png"),), torch.tensor([0]), ("a",), 6, 6)
    part = images.parts(torch.tensor([0]), lambda place, h, w: (h - 8, w - 12, 8, 12))
    expected = Image.fromarray(pixels[2:, 8:]).resize((6, 6), Image.Resampling.BILINEAR)
    assert np.array_equal(part[0].permute(1, 2, 0).numpy(), np.asarray(expected))


@pytest.mark.parametrize("nesting", [".", "tiny-imagenet-200"])
def test_tiny_imagenet(tmp_path, nesting):
    writers.write_tiny_imagenet(tmp_path / nesting)
    train, test = load("tiny-imagenet", tmp_path), load("tiny-imagenet", tmp_path, "test")
    assert train.labels.tolist() == [0, 0, 0, 1, 1, 1]
    assert test.labels.tolist() == [1, 0, 1]
    with Image.open(tmp_path / nesting / "val" / "images" / "val_1.JPEG") as file:
        assert np.array_equal(test[1][0].permute(1, 2, 0).numpy(), np.asarray(file))
    assert test[0][0].shape == (3, 64, 64)  # a grey file


def test_tiny_imagenet_with_a_folder_a_class(tmp_path):
    writers.write_tiny_imagenet(tmp_path)
    shutil.rmtree(tmp_path / "val")
    shutil.copytree(tmp_path / "train", tmp_path / "val")
    assert load("tiny-imagenet", tmp_path, "test").labels.tolist() == [0, 0, 0, 1, 1, 1]


def test_check_says_what_it_looks_at(tmp_path):
    writers.write_imagenet(tmp_path)
    train, test = check("imagenet", tmp_path).splitlines()
    assert train == (
        "imagenet, train: 9 images of 3 classes; the official set has 1281167 of 1000 "
        "(checked: every file's size, the end of every JPEG and PNG, and the headers of 8 images per class, "
        "not the pixels)"
    )
    assert "9 images" in test


def cut(path):
    path.write_bytes(path.read_bytes()[:-200])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda root: shutil.rmtree(root / "train"),
            "expected a folder 'train' with a folder of images for each class",
        ),
        (lambda root: shutil.rmtree(root / "val"), "val: expected this folder"),
        (lambda root: shutil.rmtree(root / "val" / "n02"), "n02: expected images of this class .* found none"),
        (lambda root: (root / "val" / "n99").mkdir(), "n99: expected only the 3 classes of 'train'"),
        (lambda root: (root / "train" / "n01" / "n01_0.JPEG").write_bytes(b""), "n01_0.JPEG: .* an empty file"),
        (
            lambda root: (root / "train" / "n01" / "x.png").symlink_to(root / "nowhere"),
            "x.png: .* no file that can be read",
        ),
        (lambda root: (root / "train" / "n01" / "n01_0.JPEG").write_bytes(b"junk"), "n01_0.JPEG: .* cannot read"),
        (lambda root: cut(root / "train" / "n03" / "n03_2.JPEG"), "n03_2.JPEG: .* cannot read"),
        (lambda root: cut(root / "val" / "n03" / "n03_3.JPEG"), "n03_3.JPEG: .* cannot read"),
    ],
)
def test_damaged_imagenet(tmp_path, change, message):
    writers.write_imagenet(tmp_path)
    change(tmp_path)
    with pytest.raises(ValueError, match=message):
        check("imagenet", tmp_path)


def test_bytes_after_the_image_are_no_damage(tmp_path):
    writers.write_imagenet(tmp_path)
    writers.write_image(tmp_path / "train" / "n01" / "x.png", 0)
    for path in (tmp_path / "train" / "n01").iterdir():
        path.write_bytes(path.read_bytes() + bytes(100))
    assert "10 images" in check("imagenet", tmp_path)


def test_no_class_folder(tmp_path):
    (tmp_path / "train").mkdir()
    with pytest.raises(ValueError, match="train: expected a folder of images for each class, found no folder"):
        load("imagenet", tmp_path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("val_0.JPEG\tn77\t0\n", "expected a class of 'train' in line 1, found 'n77'"),
        ("val_0.JPEG\n", "line 1, found ''"),
        ("val_9.JPEG\tn01\t0\n", "val_9.JPEG: expected this file"),
        ("", "expected a line an image, found an empty file"),
    ],
)
def test_damaged_annotations(tmp_path, text, message):
    writers.write_tiny_imagenet(tmp_path)
    (tmp_path / "val" / "val_annotations.txt").write_text(text)
    with pytest.raises(ValueError, match=message):
        load("tiny-imagenet", tmp_path, "test")


def test_truncated_image_is_named_when_decoded(tmp_path):
    writers.write_imagenet(tmp_path)
    path = tmp_path / "train" / "n02" / "n02_0.JPEG"
    cut(path)
    with pytest.raises(ValueError, match=r"n02_0.JPEG: expected an image, found a file that Pillow cannot read"):
        list(Loader(load("imagenet", tmp_path, size=14), 4))


def test_size_is_at_most_resize():
    with pytest.raises(ValueError, match="size=8 > resize=7"):
        FolderSet((), torch.tensor([]), (), 8, 7)


def test_without_pillow(tmp_path, monkeypatch):
    writers.write_imagenet(tmp_path)
    original = builtins.__import__

    def without(name, *args):
        if name == "PIL":
            raise ImportError(name)
        return original(name, *args)

    images = load("imagenet", tmp_path, size=14)
    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ImportError, match=r"pip install 'trysquare\[train\]'"):
        images[0]
