"""What a set of labelled images is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


class Images(Protocol):
    """Labelled images: those in memory (``ImageSet``) and those decoded when asked for (``FolderSet``)."""

    @property
    def labels(self) -> Tensor:
        """Classes of all images, int64 ``(n,)``."""
        ...

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of the classes; a label is a place in them."""
        ...

    @property
    def white(self) -> int:
        """The pixel value that becomes 1 in a batch."""
        ...

    def __len__(self) -> int: ...

    def __getitem__(self, row: int) -> tuple[Tensor, int]: ...

    def stack(self, rows: Tensor) -> Tensor:
        """Images of these rows, uint8 ``(len(rows), c, h, w)``."""
        ...


@dataclass(frozen=True, eq=False)
class ImageSet:
    """Labelled images in memory.

    Args:
        images: uint8 ``(n, c, h, w)``.
        labels: int64 ``(n,)``.
        classes: names of the classes; labels count them from 0.
        white: the pixel value that becomes 1 in a batch.

    Raises:
        ValueError: if types or shapes are others, or a label has no class.

    >>> ImageSet(torch.zeros(2, 1, 8, 8, dtype=torch.uint8), torch.tensor([0, 1]), ("no", "yes"))[1][1]
    1
    """

    images: Tensor
    labels: Tensor
    classes: tuple[str, ...]
    white: int = 255

    def __post_init__(self) -> None:
        if self.images.dtype != torch.uint8 or self.images.ndim != 4:
            found = f"{self.images.dtype} of shape {tuple(self.images.shape)}"
            raise ValueError(f"images are uint8 (n, c, h, w), found {found}")
        if self.labels.dtype != torch.int64 or self.labels.shape != self.images.shape[:1]:
            found = f"{self.labels.dtype} of shape {tuple(self.labels.shape)}"
            raise ValueError(f"labels are int64 ({len(self.images)},), one an image, found {found}")
        require_labels(self.labels, len(self.classes), "labels")

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, row: int) -> tuple[Tensor, int]:
        return self.images[row], int(self.labels[row])

    def stack(self, rows: Tensor) -> Tensor:
        """Images of these rows, uint8 ``(len(rows), c, h, w)``."""
        return self.images[rows]


def require_labels(labels: Tensor, classes: int, source: object) -> None:
    """Raise ``ValueError`` that names the ``source`` and the first label that is none of ``0 ... classes - 1``."""
    wrong = ((labels < 0) | (labels >= classes)).nonzero()
    if len(wrong):
        row = int(wrong[0])
        raise ValueError(
            f"{source}: expected labels from 0 to {classes - 1}, found {int(labels[row])} for image {row} "
            f"({len(wrong)} of {len(labels)} labels are out of range)"
        )


@dataclass(frozen=True, eq=False)
class Subset:
    """Some of the images of a set.

    Args:
        images: the set.
        rows: places in it, int64 ``(n,)``.
    """

    images: Images
    rows: Tensor

    @property
    def labels(self) -> Tensor:
        """Classes of these images."""
        return self.images.labels[self.rows]

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of the classes of the whole set."""
        return self.images.classes

    @property
    def white(self) -> int:
        """The pixel value that becomes 1 in a batch."""
        return self.images.white

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, row: int) -> tuple[Tensor, int]:
        return self.images[int(self.rows[row])]

    def stack(self, rows: Tensor) -> Tensor:
        """Images of these rows, uint8 ``(len(rows), c, h, w)``."""
        return self.images.stack(self.rows[rows])


class Mixed:
    """A set, and after its images those of another one of the same kind.

    Args:
        images: the set.
        extra: more images, such as generated ones.

    Raises:
        ValueError: if shapes, classes or pixel values differ.

    >>> sets = [ImageSet(torch.full((n, 1, 8, 8), n, dtype=torch.uint8), torch.zeros(n).long(), ("a",)) for n in (2, 3)]
    >>> Mixed(*sets).stack(torch.tensor([1, 4]))[:, 0, 0, 0].tolist()
    [2, 3]
    """

    def __init__(self, images: Images, extra: Images) -> None:
        for what, wanted, found in (
            ("shape", tuple(images[0][0].shape), tuple(extra[0][0].shape) if len(extra) else "no images"),
            ("classes", images.classes, extra.classes),
            ("white", images.white, extra.white),
        ):
            if wanted != found:
                raise ValueError(f"extra images must have {what} {wanted}, found {found}")
        self.images, self.extra = images, extra
        self.labels = torch.cat([images.labels, extra.labels])
        self.classes, self.white = images.classes, images.white

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, row: int) -> tuple[Tensor, int]:
        real = len(self.images)
        return self.images[row] if row < real else self.extra[row - real]

    def stack(self, rows: Tensor) -> Tensor:
        """Images of these rows, uint8 ``(len(rows), c, h, w)``."""
        real = rows < len(self.images)
        stacked = torch.empty(len(rows), *self.images[0][0].shape, dtype=torch.uint8)
        stacked[real] = self.images.stack(rows[real])
        stacked[~real] = self.extra.stack(rows[~real] - len(self.images))
        return stacked


def split_off(images: Images, count: int) -> tuple[Subset, Subset]:
    """Divide a set into what is left and ``count`` images, each class by its share, always the same ones.

    Raises:
        ValueError: if there are not more than ``count`` images.

    >>> labels = torch.arange(100) % 10
    >>> left, off = split_off(ImageSet(torch.zeros(100, 1, 8, 8, dtype=torch.uint8), labels, tuple("0123456789")), 20)
    >>> len(left), off.labels.bincount().tolist()
    (80, [2, 2, 2, 2, 2, 2, 2, 2, 2, 2])
    """
    if not 0 < count < len(images):
        raise ValueError(f"{count} images cannot be held out of {len(images)}: take at least 1 and leave at least 1")
    shuffled = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    by_class = shuffled[images.labels[shuffled].argsort(stable=True)]
    off = torch.zeros(len(images), dtype=torch.bool)
    off[by_class[torch.arange(count) * len(images) // count]] = True
    return Subset(images, (~off).nonzero()[:, 0]), Subset(images, off.nonzero()[:, 0])
