"""Images of the data inside of the page."""

from __future__ import annotations

import base64
import struct
import zlib
from pathlib import Path

import torch
from torch import Tensor

from trysquare.lab.data import DATASETS, Images, load
from trysquare.lab.report.reading import read_recipe
from trysquare.verify.certification import Certificate

_COLOURS = {1: 0, 3: 2}  # channels to the colour type of PNG


def png(image: Tensor) -> bytes:
    r"""An image as a PNG file.

    Args:
        image: uint8 ``(c, h, w)`` with 1 or 3 channels.

    >>> png(torch.zeros(1, 2, 2, dtype=torch.uint8))[:8]
    b'\x89PNG\r\n\x1a\n'
    """
    channels, height, width = image.shape
    pixels = image.permute(1, 2, 0).reshape(height, width * channels)
    rows = torch.cat([torch.zeros(height, 1, dtype=torch.uint8), pixels], 1)  # each begins with its filter: none
    header = struct.pack(">IIBBBBB", width, height, 8, _COLOURS[channels], 0, 0, 0)
    data = zlib.compress(rows.numpy().tobytes(), 9)
    return b"\x89PNG\r\n\x1a\n" + _chunk(b"IHDR", header) + _chunk(b"IDAT", data) + _chunk(b"IEND", b"")


def _chunk(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


def data_uri(image: Tensor, white: int) -> str:
    """A picture as an address that holds it; ``white`` is the brightest level, 255 in the picture."""
    levels = (image.double() * (255 / white)).round().clamp(0, 255).to(torch.uint8)
    return "data:image/png;base64," + base64.b64encode(png(levels)).decode()


def reason_not_to_show(images: Images, certificate: Certificate) -> str | None:
    """Why the images are not those of the certificate, or cannot be shown; ``None`` if they can.

    The certificate may be of the first of the images.
    """
    samples, labels = len(certificate.labels), images.labels[: len(certificate.labels)]
    if len(images) < samples:
        return f"The certificate is of {samples} images, the data has {len(images)}."
    if not torch.equal(labels, certificate.labels):
        different = int((labels != certificate.labels).nonzero()[0])
        return f"The images are not those of the certificate: the labels differ from image {different} on."
    if certificate.input_shape[:1] not in {(channels,) for channels in _COLOURS} or len(certificate.input_shape) != 3:
        return f"Inputs of shape {tuple(certificate.input_shape)} are not images of 1 or 3 channels."
    return None


def recipe_images(run: Path, root: str | None = None) -> tuple[Images | None, str]:
    """The test images of the data set that the recipe of a run names; or none, and why.

    Args:
        run: directory of the run.
        root: where the data is now, if not where the recipe says.

    Raises:
        ValueError: if the run has no recipe, or a damaged one.
    """
    _, sections = read_recipe(run)
    data = sections.get("data")
    if not isinstance(data, dict) or not isinstance(data.get("name"), str):
        return None, "The recipe does not name a data set."
    known = DATASETS.get(data["name"])
    size = data.get("size") if known is not None and known.resizable else None
    try:
        return load(data["name"], root or data.get("root"), "test", size=size), ""
    except (OSError, TypeError, ValueError) as error:
        return None, f"The data set of the recipe could not be read: {error}"
