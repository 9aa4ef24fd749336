"""Data sets of strangers: nothing is started, waited for, or read from elsewhere, and no file takes all memory."""

import gzip
import os
import struct
import threading

import pytest
import torch
from PIL import Image

from tests.lab.data import writers
from trysquare.lab.data import FolderSet, Loader, check, load

IMAGE_SETS = {"imagenet": writers.write_imagenet, "tiny-imagenet": writers.write_tiny_imagenet}


def some_image(root, split):
    return sorted((root / split).rglob("*.JPEG"))[0]


def within_a_minute(function):
    """What it raises; a failure if it does not end."""
    caught = []

    def run():
        try:
            function()
        except Exception as error:
            caught.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(60)
    assert not thread.is_alive()
    return caught[0]


EPS = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n%%EndComments\n%%EOF\n"


def test_postscript_starts_nothing(tmp_path, monkeypatch):
    """Also under the name of another format, and whatever other formats Pillow has been told of."""
    Image.init()
    programs = tmp_path / "bin"
    programs.mkdir()
    for name in ("gs", "gswin64c"):
        (programs / name).write_text(f"#!/bin/sh\ntouch {tmp_path}/ran\nexit 1\n")
        (programs / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}{os.pathsep}{os.environ['PATH']}")
    writers.write_imagenet(tmp_path)
    for file in (tmp_path / "train" / "n01").iterdir():
        file.unlink()
    (tmp_path / "train" / "n01" / "x.png").write_bytes(EPS)
    images = load("imagenet", tmp_path, size=14)
    for use in (lambda: images[0], lambda: check("imagenet", tmp_path)):
        with pytest.raises(ValueError, match=r"x\.png: expected an image"):
            use()
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("kind", ["GIF", "TIFF", "ICO", "TGA", "PDF", "DDS"])
def test_formats_that_no_ending_claims_are_refused(tmp_path, kind):
    path = tmp_path / "x.png"
    Image.new("RGB", (16, 16)).save(path, format=kind)
    with pytest.raises(ValueError, match=r"x\.png: expected an image"):
        FolderSet((str(path),), torch.tensor([0]), ("a",), 8, 8)[0]


@pytest.mark.parametrize("ending", ["jpeg", "jpg", "png", "bmp", "webp", "ppm"])
def test_formats_of_all_endings_are_read(tmp_path, ending):
    path = tmp_path / f"x.{ending}"
    Image.new("RGB", (16, 16), (255, 0, 0)).save(path)
    pixels, _ = FolderSet((str(path),), torch.tensor([0]), ("a",), 8, 8)[0]
    assert pixels.float().mean((1, 2)).round(decimals=-1).tolist() == pytest.approx([255, 0, 0], abs=5)


@pytest.mark.parametrize("name", IMAGE_SETS)
@pytest.mark.parametrize("split", ["train", "val"])
def test_a_pipe_among_the_images_keeps_nobody_waiting(tmp_path, name, split):
    IMAGE_SETS[name](tmp_path)
    path = some_image(tmp_path, split)
    path.unlink()
    os.mkfifo(path)
    error = within_a_minute(lambda: check(name, tmp_path))
    assert isinstance(error, ValueError)
    assert path.name in str(error)
    images = FolderSet((str(path),), torch.tensor([0]), ("a",), 8, 8)
    assert path.name in str(within_a_minute(lambda: images[0]))


@pytest.mark.parametrize("name", IMAGE_SETS)
@pytest.mark.parametrize("split", ["train", "val"])
@pytest.mark.parametrize("depth", [0, 1], ids=["image", "folder"])
def test_links_that_lead_out_of_a_data_set_are_refused(tmp_path, name, split, depth):
    root = tmp_path / "set"
    IMAGE_SETS[name](root)
    path = some_image(root, split)
    linked = path if depth == 0 else path.parent
    linked.rename(tmp_path / "mine")
    linked.symlink_to(tmp_path / "mine")
    with pytest.raises(ValueError, match=f"{linked.name}: .* symbolic link to .*mine, out of"):
        load(name, root, "train" if split == "train" else "test")


@pytest.mark.parametrize("name", IMAGE_SETS)
def test_links_inside_of_a_data_set_and_to_all_of_it_are_followed(tmp_path, name):
    IMAGE_SETS[name](tmp_path / "set")
    for split in ("train", "val"):
        path = some_image(tmp_path / "set", split)
        path.rename(tmp_path / "set" / f"moved-{split}")
        path.symlink_to(tmp_path / "set" / f"moved-{split}")
    (tmp_path / "link").symlink_to(tmp_path / "set")
    (tmp_path / "roots").mkdir()
    (tmp_path / "roots" / name).symlink_to(tmp_path / "set")
    for root in ("set", "link", "roots"):
        assert "images of" in check(name, tmp_path / root)


@pytest.mark.parametrize(("split", "prefix", "most"), [("train", "train", 60_000), ("test", "t10k", 10_000)])
def test_mnist_has_no_more_images_than_there_are(tmp_path, split, prefix, most):
    writers.write_mnist(tmp_path)
    claim = struct.pack(">BBBBIII", 0, 0, 8, 3, most + 1, 28, 28)
    (tmp_path / f"{prefix}-images-idx3-ubyte.gz").write_bytes(gzip.compress(claim + bytes(1000)))
    with pytest.raises(ValueError, match=f"expected at most {most} items, .* header for {most + 1} items"):
        load("mnist", tmp_path, split)


def test_a_binary_file_without_end(tmp_path, monkeypatch):
    """One of 10 TB, which takes no room on the disk."""
    writers.expect_rows(monkeypatch, 4)
    writers.write_cifar10_binary(tmp_path)
    with (tmp_path / "data_batch_2.bin").open("r+b") as file:
        try:
            file.truncate(3073 * 10**9 if os.uname().sysname == "Linux" else 3073 * 10**5)
        except OSError:
            pytest.skip("this disk has no such files")
    with pytest.raises(ValueError, match=r"data_batch_2\.bin: expected 4 images, found 5"):
        load("cifar10", tmp_path)


def test_annotations_are_utf8_in_every_locale(tmp_path):
    writers.write_tiny_imagenet(tmp_path)
    name = "bild_ä.JPEG"
    (tmp_path / "val" / "images" / "val_0.JPEG").rename(tmp_path / "val" / "images" / name)
    annotations = tmp_path / "val" / "val_annotations.txt"
    annotations.write_text(annotations.read_text().replace("val_0.JPEG", name), encoding="utf-8")
    assert load("tiny-imagenet", tmp_path, "test").files[0].endswith(name)
    annotations.write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match="expected text in UTF-8"):
        load("tiny-imagenet", tmp_path, "test")


def test_threads_are_bounded():
    with pytest.raises(ValueError, match="workers from 0 to 256"):
        Loader(load("digits"), 8, workers=10**9)


@pytest.mark.parametrize("kind", ["webp", "png", "bmp", "ppm", "jpeg"])
def test_sparse_images_are_not_read(tmp_path, kind):
    """WebP is read whole by Pillow, and so is any chunk of a PNG."""
    for split in ("train", "val"):
        (tmp_path / split / "a").mkdir(parents=True)
        path = tmp_path / split / "a" / f"x.{kind}"
        Image.new("RGB", (8, 8)).save(path)
        with path.open("r+b") as file:
            file.truncate(2**40)
    images = load("imagenet", tmp_path, size=14)
    for use in (lambda: images[0], lambda: check("imagenet", tmp_path)):
        with pytest.raises(ValueError, match=rf"x\.{kind}: .*it has {2**40} bytes"):
            use()
