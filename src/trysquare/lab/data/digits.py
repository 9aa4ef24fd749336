"""The digits that come with the package: 1,797 real images of 8x8 pixels and 17 grey levels.

They are scikit-learn's copy of the test part of UCI's "Optical Recognition of Handwritten Digits"; see
``digits.LICENSE.txt``. The split is fixed and stratified: of each class, in the order of the file, every fifth image is
for testing (1,442 to train, 355 to test). The same 13 writers occur in both parts.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from trysquare.lab.data.sets import ImageSet

WHITE = 16
_EVERY = 5


def read_digits(split: str) -> ImageSet:
    """Return the images of ``"train"`` or ``"test"``; levels 0 to 16, so that batches hold exact sixteenths."""
    with np.load(Path(__file__).with_name("digits.npz")) as file:
        images, labels = torch.from_numpy(file["images"]), torch.from_numpy(file["labels"]).long()
    rows = (_is_test(labels) == (split == "test")).nonzero()[:, 0]
    return ImageSet(images[rows, None], labels[rows], tuple("0123456789"), WHITE)


def _is_test(labels: Tensor) -> Tensor:
    """Whether an image is the 5th, 10th, 15th, ... of its class."""
    of_class = labels[:, None] == labels.unique()
    return (of_class.cumsum(0) % _EVERY == 0)[of_class]
