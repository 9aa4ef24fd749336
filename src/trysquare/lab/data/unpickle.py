"""Read arrays, lists, strings and numbers from a pickle without running what it names.

A pickle is a program: it may call whatever it can name. Here it can name what numpy writes for an array, its dtype, and
the encoding by which Python 3 writes bytes into old pickles; for each it gets a stand-in of ours.
"""

from __future__ import annotations

import math
import pickle
from pathlib import Path
from typing import Any

import numpy as np

from trysquare.files import read_file
from trysquare.lab.pickles import ENCODE, encode, read_pickle
from trysquare.naming import shown

# The largest official file, the training images of CIFAR-100, has 155 MB.
_LARGEST_FILE = 256 * 2**20


class _Dtype:
    """Stand-in of ``numpy.dtype``: its code, such as ``u1``."""

    def __init__(self, code: str | bytes, *_: object) -> None:
        if not isinstance(code, str | bytes):
            raise pickle.UnpicklingError(f"expected the code of a type of numbers, found {shown(code)}")
        self.code = code.decode("ascii") if isinstance(code, bytes) else code

    def __setstate__(self, state: object) -> None:
        """Byte order and alignment: nothing to say for the single bytes that are accepted."""


class _Array:
    """Stand-in of ``numpy.ndarray``, filled by the state that follows in the pickle."""

    values: np.ndarray[Any, Any] | None = None

    def __setstate__(self, state: tuple[int, tuple[int, ...], _Dtype, bool, bytes]) -> None:
        _, shape, dtype, column_major, content = state
        whole = isinstance(shape, tuple) and all(type(size) is int and 0 <= size < 2**40 for size in shape)
        if (
            not whole
            or len(shape) > 8
            or not isinstance(dtype, _Dtype)
            or not isinstance(content, bytes | bytearray | memoryview)
        ):
            raise pickle.UnpicklingError("expected the shape, type and bytes of an array, found something else")
        if dtype.code != "u1" or len(content) != math.prod(shape):
            found = f"{len(content)} of type {shown(dtype.code)}"
            raise pickle.UnpicklingError(f"expected {math.prod(shape)} unsigned bytes for shape {shape}, found {found}")
        order = "F" if column_major else "C"
        self.values = np.frombuffer(content, np.uint8).reshape(shape, order=order)  # type: ignore[call-overload]


def _reconstruct(*_: object) -> _Array:
    return _Array()


def _from_buffer(content: bytes, dtype: _Dtype, shape: tuple[int, ...], order: str) -> _Array:
    array = _Array()
    array.__setstate__((1, shape, dtype, order == "F", content))
    return array


_STAND_INS = {
    ("numpy.core.multiarray", "_reconstruct"): _reconstruct,
    ("numpy._core.multiarray", "_reconstruct"): _reconstruct,
    ("numpy.core.numeric", "_frombuffer"): _from_buffer,
    ("numpy._core.numeric", "_frombuffer"): _from_buffer,
    ("numpy", "ndarray"): _Array,
    ("numpy", "dtype"): _Dtype,
    ENCODE: encode,
}


def read_pickled_dict(path: Path) -> dict[str, Any]:
    """Return the dictionary in a pickle, with text keys; arrays are of unsigned bytes.

    Raises:
        ValueError: if the file is damaged, holds something else, or names anything but numpy's arrays. Nothing that it
            names is run.
    """
    try:
        content = read_pickle(read_file(path, _LARGEST_FILE), _STAND_INS)
    except Exception as error:  # a damaged pickle fails in every way that there is
        reason = str(error) or type(error).__name__
        raise ValueError(
            f"{path}: expected a pickle of arrays and lists, found one that cannot be read: {reason}"
        ) from error
    if not isinstance(content, dict) or not all(isinstance(key, bytes | str) for key in content):
        raise ValueError(f"{path}: expected a pickled dictionary with names as keys, found {type(content).__name__}")
    return {_text(key): value.values if isinstance(value, _Array) else value for key, value in content.items()}


def _text(key: object) -> str:
    return key.decode("latin1") if isinstance(key, bytes) else str(key)
