"""Tiny data sets in the official layouts, and the images that a reader must find in them."""

import gzip
import pickle
import struct
from dataclasses import replace
from pathlib import Path

import numpy as np
from PIL import Image

from trysquare.lab.data import DATASETS
from trysquare.lab.data.cifar import CIFAR10, CIFAR100
from trysquare.lab.data.registry import _cifar

CIFAR10_FILES = [f"data_batch_{i}" for i in range(1, 6)] + ["test_batch"]


def expect_rows(monkeypatch, n):
    """Let CIFAR's files have ``n`` images each: with as many as the official ones a test would write 180 MB."""
    for cifar in (CIFAR10, CIFAR100):
        monkeypatch.setitem(DATASETS, cifar.name, _cifar(replace(cifar, rows={"train": n, "test": n})))


def random_images(seed, n, shape=(3, 32, 32), classes=10):
    rng = np.random.default_rng(seed)
    return rng.integers(0, 256, (n, *shape), np.uint8), rng.integers(0, classes, n)


def cifar_row(image, *labels):
    return bytes(int(label) for label in labels) + image.tobytes()


def write_cifar10_binary(folder: Path, n=4):
    """Returns images and labels of each file."""
    folder.mkdir(parents=True, exist_ok=True)
    content = {name: random_images(i, n) for i, name in enumerate(CIFAR10_FILES)}
    for name, (images, labels) in content.items():
        rows = [cifar_row(image, label) for image, label in zip(images, labels, strict=True)]
        (folder / f"{name}.bin").write_bytes(b"".join(rows))
    return content


def write_cifar10_python(folder: Path, n=4, protocol=2):
    folder.mkdir(parents=True, exist_ok=True)
    content = {name: random_images(i, n) for i, name in enumerate(CIFAR10_FILES)}
    for name, (images, labels) in content.items():
        batch = {b"data": images.reshape(n, -1), b"labels": labels.tolist(), b"batch_label": name.encode()}
        (folder / name).write_bytes(pickle.dumps(batch, protocol=protocol))
    return content


def write_cifar100(folder: Path, n=4, python=False):
    folder.mkdir(parents=True, exist_ok=True)
    content = {name: random_images(i, n, classes=100) for i, name in enumerate(["train", "test"])}
    for name, (images, fine) in content.items():
        coarse = fine % 20
        if python:
            batch = {b"data": images.reshape(n, -1), b"fine_labels": fine.tolist(), b"coarse_labels": coarse.tolist()}
            (folder / name).write_bytes(pickle.dumps(batch, protocol=2))
        else:
            rows = [cifar_row(image, *labels) for image, *labels in zip(images, coarse, fine, strict=True)]
            (folder / f"{name}.bin").write_bytes(b"".join(rows))
    return content


def idx(array):
    return struct.pack(">BBBB", 0, 0, 8, array.ndim) + struct.pack(f">{array.ndim}I", *array.shape) + array.tobytes()


def write_mnist(folder: Path, n=5, packed=True, pattern="{}-{}-idx{}-ubyte"):
    folder.mkdir(parents=True, exist_ok=True)
    content = {prefix: random_images(i, n, (28, 28)) for i, prefix in enumerate(["train", "t10k"])}
    for prefix, (images, labels) in content.items():
        for kind, array in [("images", images), ("labels", labels.astype(np.uint8))]:
            path = folder / pattern.format(prefix, kind, array.ndim)
            if packed:
                path.with_name(f"{path.name}.gz").write_bytes(gzip.compress(idx(array)))
            else:
                path.write_bytes(idx(array))
    return content


def write_image(path: Path, seed, size=(64, 64), mode="RGB"):
    """Of width and height ``size``; png files keep the pixels that are returned."""
    path.parent.mkdir(parents=True, exist_ok=True)
    shape = (size[1], size[0], 3) if mode == "RGB" else (size[1], size[0])
    pixels = np.random.default_rng(seed).integers(0, 256, shape, np.uint8)
    Image.fromarray(pixels).save(path)
    return pixels


def write_imagenet(root: Path, size=(40, 30)):
    for split in ("train", "val"):
        for k, name in enumerate(["n01", "n02", "n03"]):
            for i in range(2 + k):
                write_image(root / split / name / f"{name}_{i}.JPEG", 10 * k + i, size)


def write_tiny_imagenet(root: Path):
    for k, name in enumerate(["n01", "n02"]):
        for i in range(3):
            write_image(root / "train" / name / "images" / f"{name}_{i}.JPEG", 10 * k + i)
    lines = []
    for i, name in enumerate(["n02", "n01", "n02"]):
        write_image(root / "val" / "images" / f"val_{i}.JPEG", 100 + i, mode="L" if i == 0 else "RGB")
        lines.append(f"val_{i}.JPEG\t{name}\t0\t0\t62\t62\n")
    (root / "val" / "val_annotations.txt").write_text("".join(lines))
