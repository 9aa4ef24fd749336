"""Find and read the files of a data set; what is missing or damaged is named."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Protocol

from trysquare.files import open_file

_GZIP_MAGIC = b"\x1f\x8b"
_PIECE = 1 << 20


class SupportsRead(Protocol):
    """A file, plain or gzipped."""

    def read(self, size: int, /) -> bytes:
        """At most that many bytes; none at the end."""
        ...


def nestings(name: str, *official: str) -> tuple[str, ...]:
    """Folders below the root in which a data set is looked for, the root itself last.

    Last, because MNIST and its relatives give the same names to their files.

    >>> nestings("cifar10", "cifar-10-batches-bin")
    ('cifar-10-batches-bin', 'cifar10/cifar-10-batches-bin', 'cifar10', '.')
    """
    return (*official, *(f"{name}/{folder}" for folder in official), name, ".")


def find_folder(root: Path, folders: Iterable[str], files: Sequence[str]) -> Path | None:
    """First of the folders below the root that holds one of the files."""
    for folder in folders:
        if any((root / folder / file).is_file() for file in files):
            return root / folder
    return None


def nothing_found(name: str, root: Path, folders: Iterable[str], wanted: str) -> ValueError:
    """Return the error for a root that holds nothing of the data set."""
    if not root.is_dir():
        return ValueError(f"{name}: the data root {root} is not a folder; give the one that holds {wanted}")
    places = ", ".join(str(root / folder) for folder in folders)
    return ValueError(f"{name}: expected {wanted}, found none of them in {places}")


def require_file(path: Path) -> Path:
    """Return the path, or raise ``ValueError`` if there is no file."""
    if not path.is_file():
        raise ValueError(f"{path}: expected this file, found none; the other files of the data set are there")
    return path


def read_start(path: Path, size: int) -> bytes:
    """At most ``size`` first bytes of a file, which may be gzipped (told by its content, not by its name)."""
    try:
        with open_file(path) as plain:
            packed = plain.read(2) == _GZIP_MAGIC
            plain.seek(0)
            return _read(gzip.GzipFile(fileobj=plain) if packed else plain, size)
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise ValueError(f"{path}: expected a whole gzip file, found a damaged one ({error})") from error


def _read(stream: SupportsRead, size: int) -> bytes:
    """By pieces: a damaged header may ask for more than the memory holds, and read(size) would allocate it."""
    pieces = []
    while size > 0 and (piece := stream.read(min(size, _PIECE))):
        pieces.append(piece)
        size -= len(piece)
    return b"".join(pieces)
