"""Tiny-ImageNet, ImageNet and other folders of images: listed at once, decoded with Pillow when asked for.

The folder of a data set may be a symbolic link. Links inside of it may lead to other places in it, not out of it: a
data set of somebody else would otherwise show pictures that are not its own.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from trysquare.files import open_file, read_file
from trysquare.lab.data.locating import nestings, nothing_found, require_file
from trysquare.naming import shown
from trysquare.progress import track

if TYPE_CHECKING:
    from PIL import Image

Box = Callable[[int, int, int], Sequence[int]]
"""From the place in the batch and the height and width of the image to top, left, height and width of a part."""

_ENDINGS = (".jpeg", ".jpg", ".png", ".bmp", ".webp", ".ppm")
# What the endings claim. Pillow tells formats by content, and starts other programs for some of them (EPS).
_FORMATS = ("JPEG", "PNG", "BMP", "WEBP", "PPM")
_HEADERS_PER_CLASS = 8
# What the last bytes of a whole file are: the end marker of JPEG, the last chunk of PNG.
_LAST_BYTES = (b"\xff\xd9", b"IEND\xaeB`\x82")
_HAVE_LAST_BYTES = (".jpeg", ".jpg", ".png")
CHECKED = (
    f"every file's size, the end of every JPEG and PNG, and the headers of {_HEADERS_PER_CLASS} images per class, "
    "not the pixels"
)


@dataclass(frozen=True, eq=False)
class FolderSet:
    """Labelled image files, decoded to RGB when asked for.

    Args:
        files: paths, one an image.
        labels: int64 ``(n,)``.
        classes: names of the classes; labels count them from 0.
        size: height and width of what is given.
        resize: the shorter side is resized to this before the middle ``size`` by ``size`` pixels are cut.
    """

    files: tuple[str, ...]
    labels: Tensor
    classes: tuple[str, ...]
    size: int
    resize: int
    white: int = 255

    def __post_init__(self) -> None:
        if not 1 <= self.size <= self.resize:
            raise ValueError(f"the middle is cut from the resized image: size={self.size} > resize={self.resize}")

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, row: int) -> tuple[Tensor, int]:
        return self.stack(torch.tensor([row]))[0], int(self.labels[row])

    def stack(self, rows: Tensor) -> Tensor:
        """Middles of the resized images, uint8 ``(len(rows), 3, size, size)``.

        Raises:
            ValueError: if a file is not a readable image; it names the file.
        """
        return self._decode(rows, lambda place, image: _middle(image, self.resize, self.size))

    def parts(self, rows: Tensor, box: Box) -> Tensor:
        """Parts of the images, each resized to ``size`` by ``size``: uint8 ``(len(rows), 3, size, size)``.

        Args:
            rows: which images.
            box: chooses the part.

        Raises:
            ValueError: if a file is not a readable image; it names the file.
        """

        def part(place: int, image: Image.Image) -> Image.Image:
            top, left, height, width = box(place, image.height, image.width)
            return _resized(image.crop((left, top, left + width, top + height)), self.size, self.size)

        return self._decode(rows, part)

    def _decode(self, rows: Tensor, fit: Callable[[int, Image.Image], Image.Image]) -> Tensor:
        images = torch.empty(len(rows), 3, self.size, self.size, dtype=torch.uint8)
        for place, row in enumerate(rows.tolist()):
            image = fit(place, _open(self.files[row], decode=True))
            images[place] = torch.from_numpy(np.array(image)).permute(2, 0, 1)
        return images


def read_tiny_imagenet(root: Path, split: str, size: int = 64) -> FolderSet:
    """Tiny-ImageNet: ``train/CLASS/images/*`` and ``val`` as published (one folder and a list) or a folder a class."""
    base = _base("tiny-imagenet", root, nestings("tiny-imagenet", "tiny-imagenet-200"))
    classes = _class_names(base / "train")
    annotations = base / "val" / "val_annotations.txt"
    if split == "test" and annotations.is_file():
        return _annotated(base, annotations, classes, size)
    return _by_class(base, "train" if split == "train" else "val", classes, size, size)


def read_imagenet(root: Path, split: str, size: int = 224) -> FolderSet:
    """ImageNet: ``train/CLASS/*`` and ``val/CLASS/*``; the shorter side is resized to 8/7 of ``size`` (256 for 224)."""
    base = _base("imagenet", root, nestings("imagenet", "ILSVRC/Data/CLS-LOC", "ILSVRC2012"))
    classes = _class_names(base / "train")
    return _by_class(base, "train" if split == "train" else "val", classes, size, round(size * 8 / 7))


def check_folder(images: FolderSet) -> None:
    """Raise ``ValueError`` that names a file which is empty, cut short, or (of some of each class) no image at all."""
    for file in track(images.files, "checking images", len(images)):
        _check_end(file)
    for row in track(_some_of_each_class(images), "checking headers", len(images.classes) * _HEADERS_PER_CLASS):
        _open(images.files[row], decode=False)


def _check_end(file: str) -> None:
    """Cheap for a whole file; one that does not end as its format does may still be whole, so it is decoded."""
    longest = max(map(len, _LAST_BYTES))
    try:
        with open_file(file) as content:
            size = content.seek(0, os.SEEK_END)
            content.seek(max(0, size - longest))
            end = content.read()
    except (OSError, ValueError) as error:
        raise ValueError(f"{file}: expected an image, found no file that can be read ({error})") from error
    if not size:
        raise ValueError(f"{file}: expected an image, found an empty file")
    if file.lower().endswith(_HAVE_LAST_BYTES) and not end.endswith(_LAST_BYTES):
        _open(file, decode=True)


def _some_of_each_class(images: FolderSet) -> Iterator[int]:
    for label in range(len(images.classes)):
        rows = (images.labels == label).nonzero()[:, 0]
        spread = torch.linspace(0, len(rows) - 1, min(len(rows), _HEADERS_PER_CLASS)).long()
        yield from rows[spread].tolist()


def _base(name: str, root: Path, folders: Sequence[str]) -> Path:
    for folder in folders:
        if (root / folder / "train").is_dir():
            return root / folder
    raise nothing_found(name, root, folders, "a folder 'train' with a folder of images for each class")


def _class_names(train: Path) -> tuple[str, ...]:
    with os.scandir(train) as entries:
        names = tuple(sorted(e.name for e in entries if e.is_dir() and not e.name.startswith(".")))
    if not names:
        raise ValueError(f"{train}: expected a folder of images for each class, found no folder")
    return names


def _by_class(base: Path, split: str, classes: tuple[str, ...], size: int, resize: int) -> FolderSet:
    """Return the folder of each class, which holds images itself or in a folder ``images``."""
    folder = base / split
    if not folder.is_dir():
        raise ValueError(f"{folder}: expected this folder with a folder of images for each class, found none")
    if strange := set(_class_names(folder)) - set(classes):
        raise ValueError(
            f"{folder / min(strange)}: expected only the {len(classes)} classes of 'train', found this one"
        )
    found = [_images_of(folder / name, base) for name in classes]
    labels = torch.repeat_interleave(torch.tensor([len(files) for files in found]))
    return FolderSet(tuple(file for files in found for file in files), labels, classes, size, resize)


def _images_of(folder: Path, base: Path) -> list[str]:
    inner = folder / "images"
    source = inner if inner.is_dir() else folder
    if not source.is_dir():
        raise ValueError(f"{folder}: expected images of this class ({', '.join(_ENDINGS)}), found none")
    _require_inside(source, base)
    with os.scandir(source) as entries:
        files = [_image(entry, base) for entry in entries if entry.name.lower().endswith(_ENDINGS)]
    if not files:
        raise ValueError(f"{folder}: expected images of this class ({', '.join(_ENDINGS)}), found none")
    return sorted(files)


def _image(entry: os.DirEntry[str], base: Path) -> str:
    """Its path; the list of its folder says what it is, so that only links cost a look at the disk."""
    if not entry.is_file():
        raise ValueError(
            f"{entry.path}: expected an image, found no file that can be read (a folder, a pipe, or a link to nothing)"
        )
    if entry.is_symlink():
        _require_inside(Path(entry.path), base)
    return entry.path


def _require_inside(path: Path, base: Path) -> None:
    """Raise ``ValueError`` if links lead out of the folder of the data set."""
    if not path.resolve().is_relative_to(base.resolve()):
        raise ValueError(
            f"{path}: expected a file of the data set, found a symbolic link to {path.resolve()}, out of {base}; copy "
            "what is meant, or make the folder of the whole data set the link"
        )


def _annotated(base: Path, annotations: Path, classes: tuple[str, ...], size: int) -> FolderSet:
    """Images in one folder, and a list of lines of file name, tab, class, tab, what else."""
    number = {name: label for label, name in enumerate(classes)}
    files, labels = [], []
    _require_inside(annotations, base)
    _require_inside(annotations.parent / "images", base)
    try:
        lines = read_file(annotations).decode("utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise ValueError(f"{annotations}: expected text in UTF-8, found something else ({error})") from error
    for count, line in enumerate(lines, 1):
        name, _, rest = line.partition("\t")
        wnid = rest.split("\t")[0]
        if wnid not in number:
            raise ValueError(f"{annotations}: expected a class of 'train' in line {count}, found {shown(wnid)}")
        if Path(name).name != name:
            raise ValueError(
                f"{annotations}: expected the name of a file in 'images' in line {count}, found {shown(name)}"
            )
        file = require_file(annotations.parent / "images" / name)
        if file.is_symlink():
            _require_inside(file, base)
        files.append(str(file))
        labels.append(number[wnid])
    if not files:
        raise ValueError(f"{annotations}: expected a line an image, found an empty file")
    return FolderSet(tuple(files), torch.tensor(labels), classes, size, size)


def _open(file: str, decode: bool) -> Image.Image:
    """Return the image as RGB, or only its header."""
    pillow = _pillow()
    try:
        with open_file(file) as content:
            size = os.fstat(content.fileno()).st_size
            if size > _LARGEST_FILE:  # before Pillow, which reads files of some formats whole
                raise ValueError(f"it has {size} bytes, and an image at most {_LARGEST_FILE}")
            with pillow.open(content, formats=_FORMATS) as image:
                _refuse_claims(size, *image.size)
                return image.convert("RGB") if decode else image
    except Exception as error:  # a damaged image fails in every way that there is
        raise ValueError(f"{file}: expected an image, found a file that Pillow cannot read ({error})") from error


def _refuse_claims(size: int, width: int, height: int) -> None:
    """Refuse an image whose header claims more pixels than a file of that size holds, however well compressed."""
    if 3 * width * height > _BEST_COMPRESSION * size + _SMALL_IMAGE:
        raise ValueError(f"it claims {width} x {height} pixels, which its {size} bytes cannot hold")
    if max(width, height) > _LONGEST * min(width, height):
        raise ValueError(f"it has {width} x {height} pixels: one side is more than {_LONGEST} times the other")


# No format of images compresses by more: deflate by 1032. Images below so many bytes are harmless.
_BEST_COMPRESSION = 2000
_SMALL_IMAGE = 1 << 20
# Of a file: as many bytes as 80 million pixels have. A sparse one may have any number.
_LARGEST_FILE = 256 * 2**20
# A side this many times the other would be resized to something enormous.
_LONGEST = 100


def _middle(image: Image.Image, resize: int, size: int) -> Image.Image:
    shorter = min(image.size)
    width, height = (round(side * resize / shorter) for side in image.size)
    left, top = (width - size) // 2, (height - size) // 2
    return _resized(image, width, height).crop((left, top, left + size, top + size))


def _resized(image: Image.Image, width: int, height: int) -> Image.Image:
    return image if image.size == (width, height) else image.resize((width, height), _pillow().Resampling.BILINEAR)


def _pillow() -> ModuleType:
    try:
        from PIL import Image
    except ImportError as error:
        raise ImportError("folders of images are decoded with Pillow: pip install 'trysquare[train]'") from error
    return Image
