"""Processor time: who else took some while something was measured."""

from __future__ import annotations

import os
from pathlib import Path

STAT = Path("/proc/stat")
# Of all the processor's time: from here on other programs make times wrong.
DISTURBING = 0.03


def foreign_seconds() -> float | None:
    """Processor time that was spent so far, but not by this process or its finished children, nor in waiting.

    What a virtual machine was kept waiting for is part of it. ``None`` where the system does not tell.
    """
    try:
        _, user, nice, system, _, _, *interrupts = STAT.read_text().splitlines()[0].split()
    except (OSError, ValueError, IndexError):
        return None
    spent = sum(map(int, (user, nice, system, *interrupts[:3]))) / os.sysconf("SC_CLK_TCK")
    return spent - sum(os.times()[:4])


def share_of_others(foreign: float | None, seconds: float) -> float | None:
    """Part of the time of all cores in so many seconds that other programs took."""
    return None if foreign is None else max(0.0, foreign) / (max(seconds, 1e-9) * (os.cpu_count() or 1))
