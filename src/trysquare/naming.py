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


def refuse_arguments(owner: str, names: Iterable[str], known: Iterable[str] = (), **why: str) -> None:
    """Raise ``TypeError`` if one of the keyword arguments ``names`` is not ``known``, with the reason if there is one.

    >>> from trysquare.naming import refuse_arguments
    >>> refuse_arguments("SLLBlock2d", ["stride"], stride="use SLLAOCBlock2d")
    Traceback (most recent call last):
    TypeError: SLLBlock2d got an unexpected keyword argument 'stride': use SLLAOCBlock2d
    """
    for name in names:
        if name not in known:
            reason = why.get(name, "there is no such argument")
            raise TypeError(f"{owner} got an unexpected keyword argument {name!r}: {reason}")


def pick(table: Mapping[str, T], name: str, kind: str) -> T:
    """Entry of that name.

    >>> from trysquare.naming import pick
    >>> pick({"flip": 1, "crop": 2}, "flop", "augmentation")
    Traceback (most recent call last):
    ValueError: unknown augmentation 'flop': did you mean 'flip'? known: flip, crop
    """
    require_known(name, table, kind)
    return table[name]
