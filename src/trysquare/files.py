"""Files that are written as a whole or not at all, and numbers that JSON does not have."""

from __future__ import annotations

import hashlib
import json
import math
import os
import secrets
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from io import BufferedReader
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

T = TypeVar("T")

LARGEST_RECIPE, LARGEST_TEXT, LARGEST_MODEL = 2**20, 256 * 2**20, 16 * 2**30
"""Most bytes of a recipe, of other text (measurements, reports), and of the weights of a model.

Files may be sparse: a terabyte of zeros takes no room on a disk, and all memory of whoever reads it.
"""

DIGEST = "model_sha256"
"""Name under which a file about a model holds the digest of the model's file."""


@contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """A file to write to that takes the place of ``path`` at the end, in one step.

    If anything goes wrong, an interrupt included, the old file stays as it was. What is no file, such as a pipe, is
    written to directly.

    Raises:
        OSError: if it cannot be written (disk full, folder read-only); it names the file.
    """
    target = Path(path).resolve()
    if target.exists() and not target.is_file():
        with target.open("wb") as file:
            yield file
        return
    temporary = target.with_name(f".{target.name}.{secrets.token_hex(4)}.tmp")
    try:
        with temporary.open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)
    except OSError as error:
        _remove(temporary)
        reason = f"cannot write {target}: {error.strerror or error}; what was there before is untouched"
        raise OSError(error.errno, reason) from error
    except BaseException:
        _remove(temporary)
        raise


def _remove(path: Path) -> None:
    try:
        path.unlink(missing_ok=True)
    except OSError:  # a folder that turned read-only keeps it; the first error is the one to tell
        return


def write_whole(path: str | os.PathLike[str], content: bytes | str) -> None:
    """Write a file in one step: whoever reads it sees the old or the new content, whatever happens meanwhile.

    Raises:
        OSError: if it cannot be written; it names the file, which is as it was.
    """
    with replacing(path) as file:
        file.write(content.encode("utf-8") if isinstance(content, str) else content)


def inside(folder: Path, name: str) -> Path:
    """Return the path of a file in a folder that somebody else may have made, to write to.

    Raises:
        ValueError: if it, or a folder on the way to it, is a symbolic link, which may lead out of the folder or onto
            another file in it; or if it is a pipe or a device, which may keep a writer waiting for ever.
    """
    path = folder / name
    for depth in range(1, len(Path(name).parts) + 1):
        part = folder.joinpath(*Path(name).parts[:depth])
        if part.is_symlink():
            raise ValueError(
                f"{part} leads to {part.resolve()} by a symbolic link: nothing is written there; remove the link"
            )
    if path.exists() and not path.is_file() and not path.is_dir():
        raise ValueError(f"{path} is a pipe or a device, not a file to write to: remove it")
    return path


def open_file(path: str | os.PathLike[str]) -> BufferedReader:
    """Open a regular file to read bytes from; at once, where opening a pipe would wait for somebody to write.

    Raises:
        ValueError: if it is something else than a file.
        OSError: if there is none, or it cannot be read.
    """
    # Without O_NONBLOCK the call itself would wait. It changes nothing about regular files.
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise ValueError(f"{os.fspath(path)} is a folder, a pipe or a device, not a file that can be read")
    return os.fdopen(descriptor, "rb")


def read_file(path: str | os.PathLike[str], most: int = LARGEST_TEXT) -> bytes:
    """Return all bytes of a regular file.

    Raises:
        ValueError: if it is something else than a file, or has more than ``most`` bytes; it names the file.
        OSError: if there is none, or it cannot be read.
    """
    with open_file(path) as file:
        size = os.fstat(file.fileno()).st_size
        _require_size(path, size, most)
        try:
            return file.read(size)  # no more of a file that grows meanwhile
        except MemoryError as error:
            raise ValueError(f"{os.fspath(path)} has {size} bytes, more than there is memory for") from error


def sha256(path: str | os.PathLike[str], most: int = LARGEST_MODEL) -> str:
    """Digest of a file, in hexadecimal.

    Raises:
        ValueError: if it is something else than a file, or has more than ``most`` bytes; it names the file.
        OSError: if there is none, or it cannot be read.
    """
    with open_file(path) as file:
        _require_size(path, os.fstat(file.fileno()).st_size, most)
        return hashlib.file_digest(file, "sha256").hexdigest()


def _require_size(path: str | os.PathLike[str], size: int, most: int) -> None:
    if size > most:
        raise ValueError(f"{os.fspath(path)} has {size} bytes, and a file of its kind at most {most}")


def check_writable(path: str | os.PathLike[str]) -> None:
    """Refuse a file that could not be written, before the work of which it is to hold the result.

    Raises:
        ValueError: if the folder is missing or not writable, or the path is a folder.
    """
    target = Path(path).resolve()
    probe = target.with_name(f".{target.name}.{secrets.token_hex(4)}.tmp")
    try:
        if target.is_dir():
            raise IsADirectoryError("it is a folder")
        if not target.exists() or target.is_file():
            probe.touch(exist_ok=False)
            probe.unlink()
    except OSError as error:
        raise ValueError(f"cannot write {path}: {error.strerror or error}") from error


# -- JSON: results on disk, which have infinite numbers

JsonObject = dict[str, Any]
"""A JSON object as Python reads it."""


def without_infinities(value: object) -> object:
    """Return the same with ``None`` for numbers that JSON does not have, in dictionaries, lists and tuples."""
    if isinstance(value, dict):
        return {name: without_infinities(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [without_infinities(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def or_infinite(value: float | None) -> float:
    """Return a number from JSON, where infinity is ``null``."""
    return math.inf if value is None else float(value)


def read_json(text: str, what: str, make: Callable[[JsonObject], T]) -> T:
    """Return what ``make`` makes of a JSON object.

    Raises:
        ValueError: if the text is not JSON, or ``make`` misses something in it; ``what`` names what it should be.
    """
    try:
        return make(json.loads(text))
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        raise ValueError(f"this is not {what} in JSON: {error!r}") from error
