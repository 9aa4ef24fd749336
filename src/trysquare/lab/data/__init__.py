"""Data sets read from disk, and batches of them.

>>> train = ts.data.load("digits")
>>> batches = ts.data.Loader(train, 64, augment={"random_crop": {"padding": 1}}, seed=0, shuffle=True)
>>> for images, labels in batches.epoch(0):
...     pass
"""

from trysquare.lab.data.augment import AUGMENTATIONS, augmentations
from trysquare.lab.data.extra import read_extra
from trysquare.lab.data.folders import FolderSet
from trysquare.lab.data.loader import Loader
from trysquare.lab.data.randaugment import RandAugment
from trysquare.lab.data.registry import DATASETS, DataSet, check, load
from trysquare.lab.data.sets import Images, ImageSet

__all__ = [
    "AUGMENTATIONS",
    "DATASETS",
    "DataSet",
    "FolderSet",
    "ImageSet",
    "Images",
    "Loader",
    "RandAugment",
    "augmentations",
    "check",
    "load",
    "read_extra",
]
