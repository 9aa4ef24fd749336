"""Random numbers that depend on seed, epoch, batch and place in the batch, and on nothing else."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


def generator(seed: int, epoch: int, stream: int) -> torch.Generator:
    """Independent generator of each stream of each epoch: 0 orders the images, ``k + 1`` augments batch ``k``."""
    state = np.random.SeedSequence(seed, spawn_key=(epoch, stream)).generate_state(1, np.uint64)
    return torch.Generator().manual_seed(int(state[0] >> np.uint64(1)))


class Randomness:
    """Uniform numbers for some rows of a batch.

    Numbers are drawn for the whole batch and those of the rows are kept, so that an image is augmented the same way
    whichever process holds it.

    Args:
        source: consumed by every draw.
        total: images of the whole batch.
        rows: those that this process holds; default all.
        device: of what is drawn.

    >>> whole, part = (Randomness(generator(0, 0, 1), 8, rows) for rows in (slice(0, 8), slice(2, 4)))
    >>> torch.equal(whole.uniform(3)[2:4], part.uniform(3))
    True
    """

    def __init__(
        self, source: torch.Generator, total: int, rows: slice | None = None, device: torch.device | str = "cpu"
    ) -> None:
        self._source, self._total, self._device = source, total, device
        self._rows = slice(0, total) if rows is None else rows

    def uniform(self, *shape: int) -> Tensor:
        """Return numbers in [0, 1), ``(rows, *shape)``."""
        return torch.rand(self._total, *shape, generator=self._source)[self._rows].to(self._device)

    def integers(self, count: int) -> Tensor:
        """Integers from 0 to ``count - 1``, ``(rows,)``."""
        return (self.uniform() * count).long()

    def signs(self) -> Tensor:
        """-1 or 1 with equal chances, ``(rows,)``."""
        return 2.0 * self.integers(2) - 1
