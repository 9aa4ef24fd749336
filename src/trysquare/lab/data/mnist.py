"""MNIST and Fashion-MNIST: idx files, gzipped or not."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from trysquare.lab.data.locating import find_folder, nestings, nothing_found, read_start, require_file
from trysquare.lab.data.sets import ImageSet, require_labels

SIZE = 28
MNIST_CLASSES = tuple("0123456789")
FASHION_CLASSES = (
    "T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot",
)  # fmt: skip
_FOLDERS = {
    "mnist": nestings("mnist", "MNIST/raw", "raw"),
    "fashion-mnist": nestings("fashion-mnist", "FashionMNIST/raw", "raw", "fashion"),
}
COUNTS = {"train": 60_000, "test": 10_000}
_PREFIX = {"train": "train", "test": "t10k"}
_UINT8 = 8  # the code of the idx format for unsigned bytes


def read_mnist(name: str, root: Path, split: str) -> ImageSet:
    """Images and labels of a split, whose number the files agree on.

    Raises:
        ValueError: if a file is missing or damaged; it names the file, what was expected and what was found.
    """
    folder = find_folder(root, _FOLDERS[name], [f for s in _PREFIX for f in _spellings(s, "images", 3)])
    if folder is None:
        raise nothing_found(name, root, _FOLDERS[name], "train-images-idx3-ubyte and its companions (or .gz)")
    image_file, label_file = (_find(folder, split, *kind) for kind in [("images", 3), ("labels", 1)])
    most = COUNTS[split]
    images, labels = read_idx(image_file, (SIZE, SIZE), most), read_idx(label_file, (), most).long()
    if len(images) != len(labels):
        raise ValueError(f"{label_file}: expected {len(images)} labels as in {image_file.name}, found {len(labels)}")
    classes = MNIST_CLASSES if name == "mnist" else FASHION_CLASSES
    require_labels(labels, len(classes), label_file)
    return ImageSet(images[:, None], labels, classes)


def read_idx(path: Path, item: Sequence[int], most: int) -> Tensor:
    """Unsigned bytes of an idx file, ``(n, *item)`` with ``n`` at most ``most``: zeros are a thousandth when gzipped.

    The header is four bytes (two zeros, the type, the number of axes) and a big-endian 32-bit length of each axis.
    """
    magic = bytes([0, 0, _UINT8, 1 + len(item)])
    header = read_start(path, 4 + 4 * magic[3])
    if len(header) != 4 + 4 * magic[3] or header[:4] != magic:
        raise ValueError(f"{path}: expected an idx file that starts with {magic.hex(' ')}, found {header[:4].hex(' ')}")
    shape = np.frombuffer(header, ">u4", offset=4).tolist()
    if shape[1:] != list(item):
        raise ValueError(f"{path}: expected items of shape {tuple(item)}, found {tuple(shape[1:])}")
    if shape[0] > most:
        raise ValueError(
            f"{path}: expected at most {most} items, which the official file has, found a header for {shape[0]} items"
        )
    expected = len(header) + math.prod(shape)
    content = read_start(path, expected + 1)
    if len(content) != expected:
        found = f"only {len(content)}" if len(content) < expected else "more"
        raise ValueError(f"{path}: expected {expected} bytes for {shape[0]} items, found {found}")
    return torch.frombuffer(bytearray(content), dtype=torch.uint8, offset=len(header)).view(shape)


def _spellings(split: str, kind: str, axes: int) -> list[str]:
    stems = [f"{_PREFIX[split]}-{kind}{dot}idx{axes}-ubyte" for dot in "-."]
    return [stem + ending for stem in stems for ending in ("", ".gz")]


def _find(folder: Path, split: str, kind: str, axes: int) -> Path:
    """Return the file in any of its spellings; the official one if there is none."""
    names = _spellings(split, kind, axes)
    return require_file(folder / next((name for name in names if (folder / name).is_file()), names[0]))
