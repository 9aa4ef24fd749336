"""Results on disk: what was measured, on which machine, with which versions."""

from __future__ import annotations

import json
import os
import platform
import shlex
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

import trysquare as ts

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "benchmarks" / "results"
FIELDS = ("command", "line", "date", "quick", "threads", "machine", "versions", "missing", "data")


def record(command: str, line: list[str], quick: bool, missing: list[str], data: Any) -> dict[str, Any]:
    """Return a result with everything that is needed to repeat it."""
    versions: dict[str, str | None] = {"python": platform.python_version(), "trysquare": ts.__version__}
    for package in ("torch", "numpy", "orthogonium", "einops"):
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            versions[package] = None
    return {
        "command": command,
        "line": "python -m benchmarks " + shlex.join(_shown(line)),
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "quick": quick,
        "threads": torch.get_num_threads(),
        "machine": {
            "cpu": system_field("/proc/cpuinfo", "model name") or platform.processor() or platform.machine(),
            "cores": os.cpu_count(),
            "memory_gb": round(memory_gigabytes(), 1),
            "system": f"{platform.system()} {platform.release()}",
        },
        "versions": versions,
        "missing": missing,
        "data": data,
    }


def memory_gigabytes() -> float:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9


def system_field(path: str, name: str) -> str | None:
    """Return a value of one of Linux's ``name: value`` files, or ``None`` where it does not exist."""
    try:
        lines = Path(path).read_text().splitlines()
    except OSError:
        return None
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith(name)), None)


def _shown(line: list[str]) -> list[str]:
    """Return the arguments without the places of files on this machine."""
    words = iter([word for part in line for word in (part.split("=", 1) if part.startswith("--") else [part])])
    kept: list[str] = []
    for word in words:
        if word in ("--out", "--data"):
            next(words, None)
        kept += {"--out": [], "--data": ["--data", "DIR"]}.get(word, [word])
    return kept


def write(content: Any, path: Path) -> None:
    """Write JSON; what cannot be written as JSON leaves the old file as it is."""
    path.write_text(json.dumps(content, indent=1, allow_nan=False) + "\n")


def read(folder: Path) -> dict[str, dict[str, Any]]:
    """Return all results in a folder, by command.

    Raises:
        ValueError: if there are none, or a file is not a result; it names the file.
    """
    found = {}
    for path in sorted(folder.glob("*.json")):
        try:
            result = json.loads(path.read_text())
            lost = [name for name in FIELDS if name not in result]
        except (ValueError, TypeError) as error:
            raise ValueError(f"{path} is not a result: {error}") from error
        if lost:
            raise ValueError(f"{path} is not a result: it has no {', '.join(lost)}")
        found[result["command"]] = result
    if not found:
        raise ValueError(f"there are no results in {folder}")
    return found
