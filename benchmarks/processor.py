"""Processor time: who else took some while something was measured."""

from __future__ import annotations

import os
import resource
from pathlib import Path

STAT = Path("/proc/stat")
# Share of the processor from which on others are worth a warning, if it is more than these seconds: the system counts
# in steps of 0.01.
DISTURBING = 0.03
LEAST_SECONDS = 0.1


def foreign_seconds() -> float | None:
    """Processor time spent so far by anything but this process and its finished children; idling does not count.

    What the host of a virtual machine kept from it does. ``None`` where the system does not tell.
    """
    try:
        _, user, nice, system, _, _, *interrupts = STAT.read_text().splitlines()[0].split()
    except (OSError, ValueError, IndexError):
        return None
    spent = sum(map(int, (user, nice, system, *interrupts[:3]))) / os.sysconf("SC_CLK_TCK")
    return spent - _own_seconds()


def _own_seconds() -> float:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(part.ru_utime + part.ru_stime for part in used)


def share_of_others(foreign: float, seconds: float) -> float:
    """Part of the time of all cores in so many seconds that others took."""
    return min(1.0, max(0.0, foreign) / (max(seconds, 1e-9) * (os.cpu_count() or 1)))


def is_disturbing(foreign: float, seconds: float) -> bool:
    """Whether that is enough for times to be doubted."""
    return foreign > LEAST_SECONDS and share_of_others(foreign, seconds) > DISTURBING
