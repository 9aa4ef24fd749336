"""CIFAR-10 and CIFAR-100, in the binary and the python layout."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from trysquare.files import open_file
from trysquare.lab.data.locating import find_folder, nestings, nothing_found, require_file
from trysquare.lab.data.sets import ImageSet, require_labels
from trysquare.lab.data.unpickle import read_pickled_dict
from trysquare.naming import shown

SHAPE = (3, 32, 32)
_PIXELS = 3 * 32 * 32


@dataclass(frozen=True)
class Cifar:
    """Where a CIFAR keeps its labels and files.

    Args:
        name: of the data set.
        stems: file names of each split, without ending.
        rows: images of each file of a split. Rows have no header, so that nothing else tells a file that was cut.
        binary: the official folder of the binary layout (rows of label bytes and 3072 pixel bytes, planes R, G, B).
        python: that of the python layout (pickled dictionaries).
        label_bytes: in front of each binary row; the last of them is the class.
        key: of the labels in a pickled dictionary.
        classes: names, in the order of the labels.
    """

    name: str
    stems: dict[str, tuple[str, ...]]
    rows: dict[str, int]
    binary: str
    python: str
    label_bytes: int
    key: str
    classes: tuple[str, ...]

    def read(self, root: Path, split: str) -> ImageSet:
        """Return all images of a split.

        Raises:
            ValueError: if a file is missing or damaged; it names the file, what was expected and what was found.
        """
        files = self._files(root, split)
        rows = self.rows[split]
        parts = [self._read_binary(f, rows) if f.suffix == ".bin" else self._read_python(f) for f in files]
        for file, (_, labels) in zip(files, parts, strict=True):
            require_labels(labels, len(self.classes), file)
            if len(labels) != self.rows[split]:
                raise ValueError(f"{file}: expected {self.rows[split]} images, found {len(labels)}; get the file again")
        images, labels = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
        return ImageSet(images.view(-1, *SHAPE), labels, self.classes)

    def counts(self) -> dict[str, int]:
        """Images of each split."""
        return {split: len(stems) * self.rows[split] for split, stems in self.stems.items()}

    def _files(self, root: Path, split: str) -> list[Path]:
        """Return files of the split: binary ones if there are any, else pickles."""
        for layout, ending in [(self.binary, ".bin"), (self.python, "")]:
            all_files = [stem + ending for stems in self.stems.values() for stem in stems]
            folder = find_folder(root, nestings(self.name, layout), all_files)
            if folder is not None:
                return [require_file(folder / f"{stem}{ending}") for stem in self.stems[split]]
        first = self.stems["train"][0]
        wanted = f"{first}.bin (binary layout) or {first} (python layout) and its companions"
        raise nothing_found(self.name, root, nestings(self.name, self.binary, self.python), wanted)

    def _read_binary(self, path: Path, rows: int) -> tuple[Tensor, Tensor]:
        row = self.label_bytes + _PIXELS
        with open_file(path) as file:
            # One row more than there should be tells a file that is too long, however long that is.
            content = np.frombuffer(bytearray(file.read((rows + 1) * row)), np.uint8)
        if not len(content) or len(content) % row:
            found = f"{len(content) // row} rows and {len(content) % row} bytes"
            raise ValueError(
                f"{path}: expected whole rows of {row} bytes, found {len(content)} bytes, which is {found}"
            )
        rows_of_bytes = torch.from_numpy(content).view(-1, row)
        return rows_of_bytes[:, self.label_bytes :], rows_of_bytes[:, self.label_bytes - 1].long()

    def _read_python(self, path: Path) -> tuple[Tensor, Tensor]:
        content = read_pickled_dict(path)
        pixels, labels = content.get("data"), content.get(self.key)
        if not isinstance(pixels, np.ndarray) or pixels.ndim != 2 or pixels.shape[1] != _PIXELS:
            found = f"shape {pixels.shape}" if isinstance(pixels, np.ndarray) else type(pixels).__name__
            raise ValueError(f"{path}: expected 'data' to be an array (n, {_PIXELS}), found {found}")
        if not isinstance(labels, list) or not all(isinstance(label, int) and abs(label) < 2**63 for label in labels):
            raise ValueError(
                f"{path}: expected {self.key!r} to be a list of numbers; keys found: {shown(list(content))}"
            )
        if len(labels) != len(pixels):
            raise ValueError(f"{path}: expected {len(pixels)} labels, one an image, found {len(labels)}")
        return torch.from_numpy(pixels.copy()), torch.tensor(labels, dtype=torch.int64)


CIFAR10 = Cifar(
    name="cifar10",
    stems={"train": tuple(f"data_batch_{i}" for i in range(1, 6)), "test": ("test_batch",)},
    rows={"train": 10_000, "test": 10_000},
    binary="cifar-10-batches-bin",
    python="cifar-10-batches-py",
    label_bytes=1,
    key="labels",
    classes=("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"),
)

CIFAR100 = Cifar(
    name="cifar100",
    stems={"train": ("train",), "test": ("test",)},
    rows={"train": 50_000, "test": 10_000},
    binary="cifar-100-binary",
    python="cifar-100-python",
    label_bytes=2,
    key="fine_labels",
    classes=(
        "apple", "aquarium_fish", "baby", "bear", "beaver", "bed", "bee", "beetle", "bicycle", "bottle", "bowl", "boy",
        "bridge", "bus", "butterfly", "camel", "can", "castle", "caterpillar", "cattle", "chair", "chimpanzee", "clock",
        "cloud", "cockroach", "couch", "crab", "crocodile", "cup", "dinosaur", "dolphin", "elephant", "flatfish",
        "forest", "fox", "girl", "hamster", "house", "kangaroo", "keyboard", "lamp", "lawn_mower", "leopard", "lion",
        "lizard", "lobster", "man", "maple_tree", "motorcycle", "mountain", "mouse", "mushroom", "oak_tree", "orange",
        "orchid", "otter", "palm_tree", "pear", "pickup_truck", "pine_tree", "plain", "plate", "poppy", "porcupine",
        "possum", "rabbit", "raccoon", "ray", "road", "rocket", "rose", "sea", "seal", "shark", "shrew", "skunk",
        "skyscraper", "snail", "snake", "spider", "squirrel", "streetcar", "sunflower", "sweet_pepper", "table", "tank",
        "telephone", "television", "tiger", "tractor", "train", "trout", "tulip", "turtle", "wardrobe", "whale",
        "willow_tree", "wolf", "woman", "worm",
    ),
)  # fmt: skip
