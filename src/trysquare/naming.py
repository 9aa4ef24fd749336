"""Look up names, with errors that suggest the nearest one."""

from __future__ import annotations

import reprlib
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from typing import TypeVar

T = TypeVar("T")

_LONGEST = 80


class _Short(reprlib.Repr):
    """A few levels deep and a few entries wide, so that it ends at once whatever the value holds."""

    def __init__(self) -> None:
        super().__init__()
        self.maxstring = self.maxother = _LONGEST
        self.maxlist = self.maxtuple = self.maxdict = self.maxset = self.maxfrozenset = 12

    def repr_int(self, x: int, level: int) -> str:  # which Python itself writes out up to 4300 digits only
        return repr(x) if x.bit_length() <= 3 * _LONGEST else f"<integer of {x.bit_length()} bits>"


_SHORT = _Short()


def shown(value: object) -> str:
    """Return a value as an error quotes it: whole if it is short, else its beginning and its length.

    >>> from trysquare.naming import shown
    >>> shown("digits"), shown([16, 32])
    ("'digits'", '[16, 32]')
    >>> shown("a" * 100_000)
    "'aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa...aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa' (100000 long)"
    """
    text = _SHORT.repr(value)
    if isinstance(value, str | bytes):
        return text if text == repr(value) else f"{text} ({len(value)} long)"
    longest = 3 * _LONGEST
    return text if len(text) <= longest else f"{text[:longest]}..."


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
    near = get_close_matches(str(name)[:_LONGEST].lower(), lower, n=1)
    guess = f"did you mean {lower[near[0]]!r}? " if near else ""
    raise ValueError(f"unknown {kind} {shown(name)}: {guess}known: {', '.join(names)}")


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
    """Return the entry of a table by its name, with an error as of ``require_known``.

    >>> from trysquare.naming import pick
    >>> pick({"flip": 1, "crop": 2}, "flop", "augmentation")
    Traceback (most recent call last):
    ValueError: unknown augmentation 'flop': did you mean 'flip'? known: flip, crop
    """
    require_known(name, table, kind)
    return table[name]
