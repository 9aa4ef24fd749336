"""Targets for AOC in a network, next to what was measured."""

from __future__ import annotations

import math
from collections.abc import Iterable
from statistics import median

from benchmarks import peers
from benchmarks.measure import Samples, ratio, ratios
from benchmarks.networks import PADDED, REFERENCE, VARIANTS, Case
from benchmarks.report import Part, Table

# AOC's share of the time that orthogonium adds to the same network.
SHARE_OF_PEER = 1 / 6
# Ratios to Conv2d.
TRAIN_RATIO = {("resnet34", 8): 1.6, ("resnet34", 32): 1.2}
EVAL_RATIO = 1.02
MEMORY_RATIO = 1.05


def table(cases: Iterable[tuple[Case, dict[str, Samples]]]) -> list[Part]:
    """One row for each target of each case that has both AOC and the reference.

    Args:
        cases: with the samples of each variant, by what is measured.
    """
    rows = [
        row
        for case, samples in cases
        if {"AOC", REFERENCE} <= samples.keys()
        for row in [*_shares(case, samples), *_ratios(case, samples)]
    ]
    columns = ["target", "at most", "measured", "turns", "least and most in a turn", "met", PADDED]
    return [Table(columns, rows, "Targets for AOC")] if rows else []


def _shares(case: Case, samples: dict[str, Samples]) -> list[list[str]]:
    """What ours adds of the time that the peer adds, with each of its orthogonalizers.

    And what our kernels add: without what our padding gains.
    """
    rows = []
    plain, aoc = samples[REFERENCE]["train"], samples["AOC"]["train"]
    for rival in filter(_is_rival, samples):
        peer, way = samples[rival]["train"], rival.removeprefix("orthogonium AOC")
        name = f"{case}: share of orthogonium's added time{way}"
        rows.append(_share_row(name, aoc, plain, peer, plain))
        if PADDED in samples:
            rows.append(_share_row(f"{name}, kernels alone", aoc, samples[PADDED]["train"], peer, plain))
    return rows


def _is_rival(name: str) -> bool:
    return VARIANTS[name].method == "AOC" and peers.is_peer(name)


def _share_row(
    name: str, ours: list[float], without: list[float], theirs: list[float], plain: list[float]
) -> list[str]:
    """By the medians of what is added in a turn, since single turns are noise."""
    turns = list(zip(ours, without, theirs, plain, strict=False))
    added, more = [a - base for a, base, _, _ in turns], [b - base for _, _, b, base in turns]
    shares = [_share(a, b) for a, b in zip(added, more, strict=True)]
    return _verdict(name, SHARE_OF_PEER, _share(median(added), median(more)), shares)


def _share(added: float, more: float) -> float:
    return added / more if more > 0 else math.inf


def _ratios(case: Case, samples: dict[str, Samples]) -> list[list[str]]:
    limits = {
        "train": ("training step", TRAIN_RATIO.get((case.network, case.batch))),
        "eval": ("evaluation", EVAL_RATIO),
        "memory": ("peak memory of training", MEMORY_RATIO),
    }
    base, aoc, padded = samples[REFERENCE], samples["AOC"], samples.get(PADDED, {})
    rows = []
    for kind, (what, limit) in limits.items():
        if limit is not None and kind in aoc and kind in base:
            turns = ratios(aoc[kind], base[kind])
            other = f"{ratio(padded[kind], base[kind]):.3f}" if kind in padded else ""
            rows.append(_verdict(f"{case}: {what}", limit, median(turns), turns, other))
    return rows


def _verdict(name: str, most: float, measured: float, turns: list[float], other: str = "") -> list[str]:
    spread = f"{min(turns):.3f} to {max(turns):.3f}"
    met = "yes" if measured <= most else "**no**"
    return [name, f"{most:.3f}", f"{measured:.3f}", str(len(turns)), spread, met, other]
