"""The commands by name: one module each, with ``add_arguments``, ``measure``, ``describe`` and ``peer_wins``."""

from __future__ import annotations

from importlib import import_module
from types import ModuleType

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
