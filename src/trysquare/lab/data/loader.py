"""Batches of images: shuffled, augmented, sharded and resumable, all from one seed."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor

from trysquare.lab.data.augment import Augmentation, RandomResizedCrop, augmentations
from trysquare.lab.data.folders import FolderSet
from trysquare.lab.data.randomness import Randomness, generator
from trysquare.lab.data.sets import Images, Mixed

Batch = tuple[Tensor, Tensor]
MOST_WORKERS = 256
"""Threads of one loader; each holds two batches. Decoding gains nothing from more of them than there are cores."""
_EXTRA = 2**31  # the stream of random numbers that orders extra images; batches have those from 1 on
S = TypeVar("S")
T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class Loader:
    """Batches ``(images, labels)``: float32 ``(n, c, h, w)`` in [0, 1] and int64 ``(n,)``.

    Order and augmentation of an image depend on seed, epoch and its place in the global batch alone: not on the batch
    at which the epoch starts, nor on the process that holds the image, nor on the number of workers.

    Args:
        images: what is loaded.
        batch_size: images of a global batch, over all processes.
        augment: names and parameters of augmentations, in order; see ``AUGMENTATIONS``.
        seed: of order and augmentation.
        shuffle: another order in each epoch; else that of the set.
        drop_last: leave out the images that do not fill a batch.
        rank: of this process, which gets one of ``world_size`` consecutive parts of each global batch. All parts, in
            order of rank, are the global batch. They are equal if ``world_size`` divides it; a last batch of few images
            leaves some of them empty.
        world_size: number of processes.
        workers: threads that prepare batches ahead; 0 prepares each when it is asked for. Folders of images want one
            a core.
        device: on which images are augmented and given.
        extra: more images, such as generated ones. An epoch is one pass over ``images`` all the same.
        per_image: how many of ``extra`` are beside each of ``images`` in a batch; those of all epochs together are
            passes over ``extra`` in random order.

    Raises:
        ValueError: if an augmentation is not known or a number is out of range.

    >>> loader = Loader(ts.data.load("digits"), 128, augment={"random_crop": {"padding": 1}}, shuffle=True)
    >>> images, labels = next(iter(loader.epoch(3)))
    >>> images.shape, len(loader)
    (torch.Size([128, 1, 8, 8]), 12)
    """

    images: Images
    batch_size: int
    augment: Mapping[str, Mapping[str, Any] | None] = field(default_factory=dict)
    seed: int = 0
    shuffle: bool = False
    drop_last: bool = False
    rank: int = 0
    world_size: int = 1
    workers: int = 1
    device: torch.device | str = "cpu"
    extra: Images | None = None
    per_image: int = 1
    _steps: tuple[Augmentation, ...] = field(init=False, repr=False)
    _all: Images = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.world_size <= self.batch_size:
            raise ValueError(
                "each process needs a part of the batch: expected 0 <= rank < world_size <= batch_size, "
                f"found rank={self.rank}, world_size={self.world_size}, batch_size={self.batch_size}"
            )
        if self.extra is not None:
            parts = 1 + self.per_image
            if self.per_image < 1 or self.batch_size % parts or not self.drop_last:
                raise ValueError(
                    f"with {self.per_image} extra images for each image, whole batches consist of {parts} equal parts: "
                    f"expected a batch_size that {parts} divides and drop_last=True, found batch_size={self.batch_size}"
                    f" and drop_last={self.drop_last}"
                )
            object.__setattr__(self, "_all", Mixed(self.images, self.extra))
        else:
            object.__setattr__(self, "_all", self.images)
        if self.seed < 0 or not 0 <= self.workers <= MOST_WORKERS:
            raise ValueError(
                f"seed is at least 0 and workers from 0 to {MOST_WORKERS}, found seed={self.seed}, "
                f"workers={self.workers}: give one a core"
            )
        if len(self) == 0:
            raise ValueError(f"no batch is left: batch_size={self.batch_size}, but there are {len(self.images)} images")
        steps = augmentations(self.augment)
        if isinstance(self.images, FolderSet) and any(isinstance(step, RandomResizedCrop) for step in steps[1:]):
            raise ValueError(
                "random_resized_crop cuts images while they are decoded: name it before other augmentations"
            )
        object.__setattr__(self, "_steps", steps)

    def __len__(self) -> int:
        """Batches of an epoch."""
        batches = len(self.images) / self._own
        return math.floor(batches) if self.drop_last else math.ceil(batches)

    @property
    def _own(self) -> int:
        """Images of a batch that are not extra ones."""
        return self.batch_size if self.extra is None else self.batch_size // (1 + self.per_image)

    def __iter__(self) -> Iterator[Batch]:
        return self.epoch(0)

    def epoch(self, epoch: int, start: int = 0) -> Iterator[Batch]:
        """Batches of an epoch from number ``start`` on; those before it cost nothing.

        Raises:
            ValueError: if ``start`` is not between 0 and the number of batches.
        """
        if not 0 <= start <= len(self) or epoch < 0:
            raise ValueError(f"epoch {epoch} has the batches 0 to {len(self) - 1}, it cannot start at {start}")
        order = self._order(epoch).split(self.batch_size)
        return ahead(lambda number: self._batch(epoch, number, order[number]), range(start, len(self)), self.workers)

    def _order(self, epoch: int) -> Tensor:
        order = torch.arange(len(self.images))
        if self.shuffle:
            order = torch.randperm(len(self.images), generator=generator(self.seed, epoch, 0))
        if self.extra is None:
            return order
        own = order[: len(self) * self._own]
        beside = len(self.images) + self._extra_order(epoch, len(own) * self.per_image)
        # One of the images, its extra ones, the next: each process has its share of both kinds.
        return torch.cat([own[:, None], beside.view(len(own), -1)], 1).flatten()

    def _extra_order(self, epoch: int, count: int) -> Tensor:
        """Places in ``extra`` of an epoch, which goes on where the one before has ended."""
        assert self.extra is not None
        size, first = len(self.extra), epoch * count
        passes = range(first // size, (first + count - 1) // size + 1)
        orders = [
            torch.randperm(size, generator=generator(self.seed, number, _EXTRA)) if self.shuffle else torch.arange(size)
            for number in passes
        ]
        return torch.cat(orders)[first - passes[0] * size :][:count]

    def _batch(self, epoch: int, number: int, rows: Tensor) -> Batch:
        part = slice(*(len(rows) * i // self.world_size for i in (self.rank, self.rank + 1)))
        random = Randomness(generator(self.seed, epoch, number + 1), len(rows), part, self.device)
        images, steps = self._read(rows[part], random)
        images = images.to(self.device).float() / self._all.white
        for step in steps:
            images = step(images, random)
        return images, self._all.labels[rows[part]].to(self.device)

    def _read(self, rows: Tensor, random: Randomness) -> tuple[Tensor, tuple[Augmentation, ...]]:
        """Pixels, and the augmentations that are left: files of any size are cut while they are decoded."""
        first = self._steps[0] if self._steps else None
        if not (isinstance(self._all, FolderSet) and isinstance(first, RandomResizedCrop)):
            return self._all.stack(rows), self._steps
        drawn = first.draw(random).cpu()
        pixels = self._all.parts(rows, lambda i, h, w: first.boxes(drawn[i : i + 1], h, w)[0].tolist())
        return pixels, self._steps[1:]


def ahead(make: Callable[[S], T], items: Iterable[S], workers: int) -> Iterator[T]:
    """``map(make, items)``, made by threads before it is asked for: in order, two items a worker ahead.

    >>> list(ahead(lambda x: x * x, range(4), workers=2))
    [0, 1, 4, 9]
    """
    if workers == 0:
        yield from map(make, items)
        return
    pool = ThreadPoolExecutor(workers, thread_name_prefix="trysquare-data")
    waiting: deque[Future[T]] = deque()
    try:
        for item in items:
            waiting.append(pool.submit(make, item))
            if len(waiting) > 2 * workers:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
