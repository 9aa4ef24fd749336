"""Results on disk: what was measured, on which machine, with what."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import platform
import shlex
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

import trysquare as ts
from benchmarks.commands import TITLES
from trysquare.files import check_writable, write_whole

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "benchmarks" / "results"
FIELDS = ("command", "line", "date", "quick", "threads", "machine", "versions", "missing", "data")
RESUME = "--resume"
AGAIN = "--again"
PACKAGES = ("torch", "numpy", "orthogonium", "einops", "matplotlib")


def machine() -> dict[str, Any]:
    """Processor, cores and memory, as far as the system tells."""
    return {
        "cpu": system_field("/proc/cpuinfo", "model name") or platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9, 1),
        "system": f"{platform.system()} {platform.release()}",
    }


def usable_gigabytes() -> float:
    """Memory that a benchmark may take of this machine."""
    return round(0.7 * machine()["memory_gb"], 1)


def system_field(path: str, name: str) -> str | None:
    """What one of Linux's ``name: value`` files says; ``None`` where there is no such file or name."""
    try:
        lines = Path(path).read_text().splitlines()
    except OSError:
        return None
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith(name)), None)


def versions() -> dict[str, str | None]:
    """Of Python, of this library and of the packages that take part; ``None`` if one is not installed."""
    return {"python": platform.python_version(), "trysquare": ts.__version__, **{p: _version(p) for p in PACKAGES}}


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def about(command: str, line: list[str], quick: bool, missing: list[str], again: Sequence[str] = ()) -> dict[str, Any]:
    """What a result has to say of where it comes from."""
    return {
        "command": command,
        "line": "python -m benchmarks " + shlex.join(_asked(line)),
        "quick": quick,
        "threads": torch.get_num_threads(),
        "machine": machine(),
        "versions": versions(),
        "code": code(),
        "missing": missing,
        "again": list(again),
    }


def code() -> str:
    """Digest of what was run: the sources of the library and of the benchmarks."""
    digest = hashlib.sha256()
    for path in sorted([*Path(ts.__file__).parent.rglob("*.py"), *Path(__file__).parent.glob("*.py")]):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


def record(about: dict[str, Any], spent: dict[str, Any], data: Any) -> dict[str, Any]:
    """Everything that belongs to a result, which is ready now; see ``Parts.spent``."""
    date = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    return {**about, "date": date, **spent, "data": data}


def renewed(old: dict[str, Any], about: dict[str, Any], spent: dict[str, Any], data: Any) -> dict[str, Any]:
    """An old result of which some parts were measured again."""
    now = record(about, spent, data)
    again = {"parts": about["again"], **{name: now[name] for name in ("date", "code", *spent)}}
    return {**old, "data": data, "again": [*old.get("again", []), again]}


def _asked(line: list[str]) -> list[str]:
    """The arguments that say what is measured, not how far a run has come or where on this machine files are."""
    shown: dict[str, list[str]] = {AGAIN: [], "--out": [], "--data": ["--data", "DIR"]}
    parts = iter([part for argument in line for part in _name_and_value(argument) if part != RESUME])
    kept: list[str] = []
    for part in parts:
        kept += shown.get(part, [part])
        if part in shown:
            next(parts, None)
    return kept


def _name_and_value(argument: str) -> list[str]:
    return argument.split("=", 1) if argument.startswith("--") else [argument]


def default_path(command: str, quick: bool) -> Path:
    """Where a result goes if nothing else is asked for: quick ones to a folder of their own, which git ignores."""
    return FOLDER / ("quick" if quick else ".") / f"{command}.json"


class NotWrittenError(Exception):
    """A result could not be written: the disk is full, or the folder cannot be written to any more."""


def write(content: Any, path: Path) -> None:
    """Write JSON so that the file is the old one or the new one, never half of it.

    Raises:
        NotWrittenError: if it cannot be written; it names the file, which is as it was.
    """
    text = json.dumps(content, indent=1, allow_nan=False) + "\n"
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        write_whole(path, text)
    except OSError as error:
        raise NotWrittenError(error.strerror or str(error)) from error


def make_room(path: Path) -> None:
    """Make the folder of a file, and see that the file can be written.

    Raises:
        ValueError: if it cannot; ``OSError`` if that is because of the folder.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    check_writable(path)


def refuse_other(path: Path, command: str) -> None:
    """Let nothing but a result of the same command be replaced.

    Raises:
        ValueError: if there is another file.
    """
    if not path.is_file() or not path.stat().st_size:
        return
    try:
        other = json.loads(path.read_text())["command"]
    except (ValueError, TypeError, LookupError):
        other = None
    if other != command:
        raise ValueError(f"{path} is {f'a result of {other}' if other else 'no result'}: move it, or give --out")


def set_aside(path: Path, new: dict[str, Any]) -> Path | None:
    """Keep a result of another command line, or with peers, beside the place that it has to leave: it may be of hours.

    Quick ones are not.

    Returns:
        Where it is, if there is one.
    """
    if not path.is_file() or not path.stat().st_size:
        return None
    old = json.loads(path.read_text())
    if old.get("quick") or all(old.get(name) == new[name] for name in ("line", "missing")):
        return None
    places = (path.with_name(f"{path.name}.{number}.before") for number in itertools.count(1))
    return path.replace(next(place for place in places if not place.exists()))


def read(folder: Path) -> dict[str, dict[str, Any]]:
    """All results in a folder, by command.

    Raises:
        ValueError: if there is no such folder, a file in it is not a result, or two are of one command; it names the
            file.
    """
    if not folder.is_dir():
        raise ValueError(f"there is no folder {folder}")
    found: dict[str, dict[str, Any]] = {}
    for path in sorted(folder.glob("*.json")):
        result = read_one(path)
        if result["command"] in found:
            raise ValueError(f"{path} is a second result of {result['command']}: keep it in another folder")
        found[result["command"]] = result
    return found


def read_one(path: Path) -> dict[str, Any]:
    """A result.

    Raises:
        ValueError: if the file is none; it names it.
    """
    try:
        result = json.loads(path.read_text())
        lost = [name for name in FIELDS if name not in result]
        if lost:
            raise ValueError(f"it has no {', '.join(lost)}")
        if result["command"] in TITLES:
            return result  # type: ignore[no-any-return]
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path} is not a result: {error}") from error
    raise ValueError(f"{path} is not a result of {', '.join(TITLES)}")
