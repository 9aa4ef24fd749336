"""The commands by name: one module each.

Its ``plan(arguments)`` says what to measure (``parts.py``), and ``describe(data)`` what was found. If it has options of
its own it has ``add_arguments(parser)``, and ``peer_wins(data)`` if a peer takes part.
"""

from __future__ import annotations

from importlib import import_module
from types import ModuleType
from typing import Any

TITLES = {
    "overhead": "Overhead in a network",
    "orthogonalizers": "Ways to an orthonormal matrix",
    "scaling": "Scaling",
    "methods": "Methods",
    "recipe": "A recipe",
    "kernels": "Kernels",
    "compose": "Block convolution",
    "spectrum": "Norms of convolutions",
    "loading": "Loading of data",
    "counts": "Counts",
}


def command(name: str) -> ModuleType:
    """The module of a command."""
    return import_module(f"benchmarks.{name}")


def peer_wins(name: str, data: Any) -> list[str]:
    """Where a peer is better, by the data of a command."""
    return command(name).peer_wins(data) if has_peers(name) else []


def has_peers(name: str) -> bool:
    """Whether a peer may take part in a command."""
    return hasattr(command(name), "peer_wins")
