"""More images to train with, such as generated ones, from a file of arrays."""

from __future__ import annotations

import math
import os
import zipfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trysquare.files import open_file
from trysquare.lab.data.sets import Images, ImageSet, require_labels

# Names under which files in circulation have the two arrays.
_IMAGES, _LABELS = ("images", "image"), ("labels", "label")
# How many times as large as its compressed form an array may be: images of all kinds are below 10, zeros are at 1000.
_MOST_COMPRESSION = 100


def read_extra(path: str | os.PathLike[str], beside: Images) -> ImageSet:
    """Read images and labels from an ``npz`` file, for training beside the images of a set.

    Args:
        path: file of uint8 images, ``(n, h, w, c)`` or ``(n, c, h, w)`` (or ``(n, h, w)`` of one channel), under the
            name ``images`` or ``image``, and integer labels ``(n,)`` under ``labels`` or ``label``. Nothing in it is
            unpickled.
        beside: the set that they go with, whose shape and classes they have.

    Raises:
        ValueError: if the file is damaged, or is not of this kind; it names the file, what was expected and found.
        OSError: if there is no such file.
    """
    path = Path(path)
    channels, height, width = beside[0][0].shape
    with open_file(path) as stream:
        try:
            with zipfile.ZipFile(stream) as archive:
                images, labels = (_array(path, archive, names) for names in (_IMAGES, _LABELS))
        except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError) as error:
            raise ValueError(
                f"{path}: expected an npz file of images and labels, found a damaged one ({error})"
            ) from error
    if images.dtype != np.uint8 or labels.dtype.kind not in "iu" or labels.shape != images.shape[:1]:
        raise ValueError(
            f"{path}: expected uint8 images and an integer label for each, found images {images.dtype} "
            f"{images.shape} and labels {labels.dtype} {labels.shape}"
        )
    pixels, classes = torch.from_numpy(images), torch.from_numpy(labels.astype(np.int64))
    require_labels(classes, len(beside.classes), path)
    if beside.white != 255:
        raise ValueError(f"{path}: images of 256 levels do not go with a set whose white is {beside.white}")
    return ImageSet(_channels_first(path, pixels, (channels, height, width)), classes, beside.classes)


def _array(path: Path, archive: zipfile.ZipFile, names: tuple[str, str]) -> np.ndarray[Any, Any]:
    """Return the array of one of these names, whose size is checked before it takes any memory."""
    entries = {entry.filename.removesuffix(".npy"): entry for entry in archive.infolist()}
    found = [name for name in names if name in entries]
    if not found:
        raise ValueError(f"{path}: expected an array called {' or '.join(names)}, found {', '.join(entries)}")
    entry = entries[found[0]]
    if entry.file_size > _MOST_COMPRESSION * max(entry.compress_size, 1024):
        raise ValueError(
            f"{path}: {entry.filename} has {entry.compress_size} bytes that claim to be {entry.file_size}: images are "
            "not so alike"
        )
    try:
        with archive.open(entry) as header:
            version = np.lib.format.read_magic(header)
            read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
            shape, _, dtype = read(header)
        if math.prod(shape) * dtype.itemsize > entry.file_size:
            raise ValueError(f"an array of shape {shape} and {dtype} is larger than the file")
        with archive.open(entry) as content:
            return np.lib.format.read_array(content, allow_pickle=False)
    except ValueError as error:
        raise ValueError(f"{path}: {entry.filename} is no array of numbers: {error}") from error


def _channels_first(path: Path, images: Tensor, shape: tuple[int, int, int]) -> Tensor:
    channels, height, width = shape
    found = tuple(images.shape[1:])
    if found == shape:
        return images
    if found == (height, width, channels):
        return images.permute(0, 3, 1, 2).contiguous()
    if found == (height, width) and channels == 1:
        return images[:, None]
    raise ValueError(f"{path}: expected images of shape {(height, width, channels)} or {shape}, found {found}")
