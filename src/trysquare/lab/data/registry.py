"""The data sets by name."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from trysquare.lab.data.cifar import CIFAR10, CIFAR100, SHAPE, Cifar
from trysquare.lab.data.digits import read_digits
from trysquare.lab.data.folders import CHECKED, FolderSet, check_folder, read_imagenet, read_tiny_imagenet
from trysquare.lab.data.mnist import COUNTS, SIZE, read_mnist
from trysquare.lab.data.sets import Images, Subset
from trysquare.naming import pick, require_known

SPLITS = ("train", "test")


@dataclass(frozen=True)
class DataSet:
    """A data set by its official numbers.

    Args:
        shape: of an image: channels, height, width.
        classes: how many.
        counts: images of each split.
        read: from the root, the split, and (folders of images only) the size to the images.
        embedded: comes with the package and needs no root.
        resizable: a folder of images, given in any size.
    """

    shape: tuple[int, int, int]
    classes: int
    counts: Mapping[str, int]
    read: Callable[..., Images]
    embedded: bool = False
    resizable: bool = False


def _digits(root: Path, split: str) -> Images:
    return read_digits(split)


def _cifar(cifar: Cifar) -> DataSet:
    return DataSet(SHAPE, len(cifar.classes), cifar.counts(), cifar.read)


def _mnist(name: str) -> DataSet:
    return DataSet((1, SIZE, SIZE), 10, COUNTS, partial(read_mnist, name))


DATASETS: dict[str, DataSet] = {
    "digits": DataSet((1, 8, 8), 10, {"train": 1442, "test": 355}, _digits, embedded=True),
    "mnist": _mnist("mnist"),
    "fashion-mnist": _mnist("fashion-mnist"),
    "cifar10": _cifar(CIFAR10),
    "cifar100": _cifar(CIFAR100),
    "tiny-imagenet": DataSet(
        (3, 64, 64), 200, {"train": 100_000, "test": 10_000}, read_tiny_imagenet, resizable=True
    ),
    "imagenet": DataSet(
        (3, 224, 224), 1000, {"train": 1_281_167, "test": 50_000}, read_imagenet, resizable=True
    ),
}  # fmt: skip
"""Data sets by name."""


def load(
    name: str, root: str | os.PathLike[str] | None = None, split: str = "train", *, size: int | None = None
) -> Images:
    """Images of a data set.

    Sets of small images are read into memory and checked as they are; ``tiny-imagenet`` and ``imagenet`` are listed and
    decoded later. The validation images of these two are their ``"test"`` split. Pickles of CIFAR's python layout are
    read without running what they name. Symbolic links that lead out of a folder of images are refused; the folder of
    the data set itself may be one.

    Args:
        name: a key of ``DATASETS``.
        root: the folder that holds the files, or one above it under the usual names (such as
            ``cifar-10-batches-bin``). ``digits`` needs none.
        split: ``"train"`` or ``"test"``.
        size: height and width in which a folder of images is given; by default 64 and 224.

    Raises:
        ValueError: if a name is not known, or a file is missing or damaged; it names the file, what was expected and
            what was found.

    >>> train = load("digits")
    >>> len(train), train[0][0].shape, len(train.classes)
    (1442, torch.Size([1, 8, 8]), 10)
    """
    dataset = pick(DATASETS, name, "data set")
    require_known(split, SPLITS, "split")
    if root is None and not dataset.embedded:
        raise ValueError(f"{name} is read from files: give the folder that holds them as root")
    if size is not None and not dataset.resizable:
        raise ValueError(f"the images of {name} have the size {dataset.shape[1:]}; only folders of images take a size")
    options = {} if size is None else {"size": size}
    return dataset.read(Path(root or "."), split, **options)


def check(name: str, root: str | os.PathLike[str] | None = None) -> str:
    """Verify a data set on disk before it is used for long.

    Sets of small images are read whole: sizes, headers, labels. Of folders of images, all class folders are listed,
    every file must have bytes and end as JPEG and PNG do, and of each class the headers of eight images are read;
    pixels are decoded only when they are used. Pixel values are not compared with the published ones.

    Returns:
        What was found and what was checked, a line for each split. A number of images or classes that is not the
        official one is told, not refused: a part of a data set is one too (of CIFAR, whose files do not say how many
        images they have, it is refused).

    Raises:
        ValueError: as ``load``.

    >>> print(check("digits"))
    digits, train: 1442 images of 10 classes (checked: all of it)
    digits, test: 355 images of 10 classes (checked: all of it)
    """
    return "\n".join(_check(name, root, split) for split in SPLITS)


def _check(name: str, root: str | os.PathLike[str] | None, split: str) -> str:
    images, official = load(name, root, split), DATASETS[name]
    checked = check_images(images)
    found, usual = (len(images), len(images.classes)), (official.counts[split], official.classes)
    note = "" if found == usual else f"; the official set has {usual[0]} of {usual[1]}"
    return f"{name}, {split}: {found[0]} images of {found[1]} classes{note} (checked: {checked})"


def check_images(images: Images) -> str:
    """Check what ``load`` has left unchecked, which is nothing of sets that are in memory.

    Returns:
        What is checked now.

    Raises:
        ValueError: if a file is damaged; it names the file.
    """
    if isinstance(images, Subset):
        return check_images(images.images)
    if not isinstance(images, FolderSet):
        return "all of it"
    check_folder(images)
    return CHECKED
