"""Types of command line arguments: what no run can do is refused before it starts."""

from __future__ import annotations

import argparse
import math
import os

import trysquare as ts


def count(text: str) -> int:
    """A whole number of at least 1."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is less than 1")
    return number


def threads(text: str) -> int:
    """At most as many as there are cores: with more, a time says how they wait for each other."""
    number, cores = count(text), os.cpu_count()
    if cores and number > cores:
        raise argparse.ArgumentTypeError(f"{text} is more than the {cores} cores of this machine")
    return number


def amount(text: str) -> float:
    """A positive number."""
    number = float(text)
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is not a positive number")
    return number


def cifar10(text: str) -> str:
    """A folder that CIFAR-10 can be read from."""
    for split in ("train", "test"):
        try:
            ts.data.load("cifar10", text, split)
        except (ValueError, OSError) as error:
            raise argparse.ArgumentTypeError(str(error)) from error
    return text
