"""Look a name up; a wrong one is told the nearest."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from typing import TypeVar

T = TypeVar("T")


def require_known(name: str, known: Iterable[str], kind: str) -> None:
    """Raise ``ValueError`` unless ``name`` is one of the ``known`` names of a ``kind`` of thing.

    >>> from trysquare.naming import require_known
    >>> require_known("AOC", ["aoc", "soc"], "method")
    Traceback (most recent call last):
    ValueError: unknown method 'AOC': did you mean 'aoc'? known: aoc, soc
    """
    names = list(known)
    if name in names:
        return
    lower = {other.lower(): other for other in names}
    near = get_close_matches(str(name).lower(), lower, n=1)
    guess = f"did you mean {lower[near[0]]!r}? " if near else ""
    raise ValueError(f"unknown {kind} {name!r}: {guess}known: {', '.join(names)}")


def pick(table: Mapping[str, T], name: str, kind: str) -> T:
    """Entry of that name.

    >>> from trysquare.naming import pick
    >>> pick({"flip": 1, "crop": 2}, "flop", "augmentation")
    Traceback (most recent call last):
    ValueError: unknown augmentation 'flop': did you mean 'flip'? known: flip, crop
    """
    require_known(name, table, kind)
    return table[name]
