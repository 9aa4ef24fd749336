"""Measurements in parts: what is finished stays in a file until all is, so that an interrupt loses one part only.

A plan is a result that is not measured yet: the same tree of dictionaries and lists, with calls in the place of parts.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks import results
from benchmarks.results import RESUME

_BETWEEN = " / "


class Parts:
    """Finished parts of one measurement, by their place in the plan.

    Args:
        path: of the result; the parts are in a file next to it.
        about: what the result will say of its command, machine and versions.
    """

    def __init__(self, path: Path, about: dict[str, Any]) -> None:
        self.path = path.with_name(f"{path.name}.parts")
        self.finished: dict[str, Any] = {}
        self.seconds = 0.0
        self._about = about

    def read(self, resume: bool) -> None:
        """Take over what an interrupted run has left.

        Raises:
            ValueError: if that is not to be taken over, or is of another command, machine or version; it says how.
        """
        if not self.path.exists():
            return
        if not resume:
            raise ValueError(f"{self.path} holds parts of an interrupted run: go on with {RESUME}, or delete it")
        left = self._left()
        self._refuse_other(str(self.path), left["about"], but=())
        self.finished, self.seconds = left["finished"], left["seconds"]

    def _left(self) -> dict[str, Any]:
        try:
            left = json.loads(self.path.read_text())
            return {
                "about": dict(left["about"]),
                "finished": dict(left["finished"]),
                "seconds": float(left["seconds"]),
            }
        except (ValueError, TypeError, KeyError) as error:
            raise ValueError(f"{self.path} does not hold parts of a run ({error}): delete it") from error

    def keep(self, plan: Any, old: dict[str, Any]) -> None:
        """Take over all parts of an old result but those that are to be measured again.

        Raises:
            ValueError: if these are not parts of the plan, or the old result is of another command, machine or version;
                it says how.
        """
        self._refuse_other("the result to renew", old)
        try:
            values = dict(_values(plan, old["data"], ()))
        except (LookupError, TypeError) as error:
            raise ValueError(f"the result to renew is not of this plan ({error}): measure all of it") from error
        again, names = self._about["again"], {place: place.split(_BETWEEN) for place in values}
        for name in again:
            if not any(name in parts for parts in names.values()):
                raise ValueError(f"{results.AGAIN} {name}: the parts are {', '.join(values)}")
        kept = {place: value for place, value in values.items() if not set(again) & set(names[place])}
        self.finished = {**kept, **self.finished}

    def _refuse_other(self, what: str, about: dict[str, Any], but: Sequence[str] = ("code", "again")) -> None:
        for name, value in self._about.items():
            if name not in but and about.get(name) != value:
                raise ValueError(
                    f"{what} is of a run with another {name}, {about.get(name)!r} instead of {value!r}: "
                    "go on as that began, or delete it"
                )

    @property
    def spent(self) -> dict[str, Any]:
        """Seconds that the parts took."""
        return {"seconds": round(self.seconds, 1)}

    def carry_out(self, plan: Any) -> Any:
        """Measure what is not finished, one part after the other, and return the result."""
        parts = dict(_calls(plan, ()))
        for number, (place, measure) in enumerate(parts.items(), start=1):
            if place not in self.finished:
                print(f"part {number} of {len(parts)}: {place}", file=sys.stderr)
                self._measure(place, measure)
        return _filled(plan, (), self.finished)

    def _measure(self, place: str, measure: Callable[[], Any]) -> None:
        start = time.perf_counter()
        self.finished[place] = measure()
        self.seconds += time.perf_counter() - start
        results.write({"about": self._about, "seconds": self.seconds, "finished": self.finished}, self.path)

    def forget(self) -> None:
        """Remove the file, once the result is written."""
        self.path.unlink(missing_ok=True)


def _children(plan: Any) -> Iterator[tuple[Any, Any]]:
    return iter(plan.items() if isinstance(plan, dict) else enumerate(plan) if isinstance(plan, list) else ())


def _calls(plan: Any, place: tuple[Any, ...]) -> Iterator[tuple[str, Callable[[], Any]]]:
    """The calls of a plan, by their place."""
    if callable(plan):
        yield _name(place), plan
    for name, part in _children(plan):
        yield from _calls(part, (*place, name))


def _values(plan: Any, data: Any, place: tuple[Any, ...]) -> Iterator[tuple[str, Any]]:
    """What a result has in the place of each call of its plan."""
    if callable(plan):
        yield _name(place), data
    for name, part in _children(plan):
        yield from _values(part, data[name], (*place, name))


def _filled(plan: Any, place: tuple[Any, ...], finished: dict[str, Any]) -> Any:
    """The plan with results in the place of calls."""
    if callable(plan):
        return finished[_name(place)]
    filled = {name: _filled(part, (*place, name), finished) for name, part in _children(plan)}
    return filled if isinstance(plan, dict) else list(filled.values()) if isinstance(plan, list) else plan


def _name(place: tuple[Any, ...]) -> str:
    return _BETWEEN.join(map(str, place)) or "all"
