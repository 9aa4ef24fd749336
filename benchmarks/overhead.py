"""The paper's table of costs: a network with every kind of orthogonal convolution, against ``nn.Conv2d``.

ResNet-34 as in the paper (transition blocks are one strided convolution, the reference has circular padding), ResNet-18
for 32 x 32 images, and the paper's network of depthwise blocks; in each only the convolution class is exchanged.
Times are medians, all variants in turns. Memory is the peak of a fresh process for each variant in three steps,
interpreter included; "saved" is what autograd keeps for backward. Steps are those of SGD without momentum, which has no
state of its own: an optimizer with state keeps it for the free tensors, of which AOC has 2.7 times fewer than ResNet-34
has weights.
"""

from __future__ import annotations

import argparse
import gc
from collections.abc import Iterator
from statistics import median
from typing import Any, NamedTuple

import torch

from benchmarks import peers
from benchmarks.measure import ChildError, in_child, interleaved
from benchmarks.networks import NETWORKS, REFERENCE, VARIANTS, build
from benchmarks.report import Part, Plot, Table, better_peers, failures, megabytes, milliseconds, times
from benchmarks.results import machine
from benchmarks.steps import evaluation, images, train_step
from trysquare.progress import track


class Case(NamedTuple):
    """A network on images of a size, in batches."""

    network: str
    size: int
    batch: int

    def __str__(self) -> str:
        return f"{self.network}, {self.size} x {self.size}, batch {self.batch}"


FULL = (
    Case("resnet34", 224, 8),
    Case("resnet34", 224, 32),
    Case("resnet18", 32, 128),
    Case("depthwise", 32, 128),
)
QUICK = (Case("resnet18", 32, 8),)
QUICK_VARIANTS = (REFERENCE, "AOC", "AOC parsimonious", "orthogonium AOC")
# Of the overhead of the same network in `orthogonium`, and ratios to Conv2d at ResNet-34.
SHARE_OF_PEER = 1 / 6
TARGETS = {"train": {8: 1.6, 32: 1.2}, "eval": 1.02, "memory": 1.05}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of this command."""
    parser.add_argument("--networks", nargs="+", choices=NETWORKS, help="only these")
    parser.add_argument("--batch", type=int, nargs="+", help="batches for ResNet-34, such as 128")
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, metavar="NAME", help=", ".join(VARIANTS))
    parser.add_argument("--rounds", type=int, help="samples of each time; 5 (--quick: 2)")
    parser.add_argument("--memory", type=float, help="gigabytes that a network may take; 70 %% of the machine's")
    parser.add_argument("--limit", type=float, help="seconds that three steps may take; 600 (--quick: 100)")


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Raw samples of every case."""
    quick = arguments.quick
    cases = [case for case in (QUICK if quick else FULL) if case.network in (arguments.networks or NETWORKS)]
    if arguments.batch:
        cases = [case for case in cases if case.network != "resnet34"]
        cases = [*(Case("resnet34", 224, batch) for batch in arguments.batch), *cases]
    chosen = arguments.variants or (QUICK_VARIANTS if quick else list(VARIANTS))
    chosen = [REFERENCE, *(name for name in chosen if name != REFERENCE)]
    if not peers.installed():
        chosen = [name for name in chosen if VARIANTS[name].library != "orthogonium"]
    rounds, limit = arguments.rounds or (2 if quick else 5), arguments.limit or (100.0 if quick else 600.0)
    memory = arguments.memory or round(0.7 * machine()["memory_gb"], 1)
    return {"cases": [_measure_case(case, chosen, rounds, limit, memory) for case in cases]}


def _measure_case(case: Case, chosen: list[str], rounds: int, limit: float, memory: float) -> dict[str, Any]:
    rows = {name: _memory(case, name, limit, memory) for name in track(chosen, f"memory, {case}", len(chosen))}
    works = [name for name, row in rows.items() if "error" not in row]
    models = {name: build(case.network, case.size, name) for name in works}
    x, labels = images(case.batch, case.size)
    options: Any = {"patience": limit / 4, "label": str(case)}
    trained = interleaved({name: train_step(models[name], x, labels) for name in works}, rounds, **options)
    for model in models.values():
        model.zero_grad()
    evaluated = interleaved({name: evaluation(models[name], x) for name in works}, 2 * rounds + 1, **options)
    del models
    gc.collect()
    for name in works:
        rows[name] |= {"train": trained[name], "eval": evaluated[name]}
    return {**case._asdict(), "rows": rows}


def _memory(case: Case, variant: str, limit: float, memory: float) -> dict[str, Any]:
    """Peaks of two processes, or why there is none."""
    found = {}
    for mode in ("train", "eval"):
        arguments = [*case, variant, mode, torch.get_num_threads(), memory]
        try:
            found[f"memory_{mode}"] = in_child("benchmarks.memory", arguments, limit)
        except ChildError as error:
            return {"error": str(error)}
    return found


def _cases(data: dict[str, Any]) -> Iterator[tuple[Case, dict[str, Any]]]:
    for entry in data["cases"]:
        yield Case(entry["network"], entry["size"], entry["batch"]), entry["rows"]


def _numbers(rows: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Medians and bytes of the variants that ran, by name."""
    return {
        name: {
            "train": median(row["train"]),
            "eval": median(row["eval"]),
            "memory": row["memory_train"]["peak"],
            "eval memory": row["memory_eval"]["peak"],
            "saved": row["memory_train"]["saved"],
        }
        for name, row in rows.items()
        if "error" not in row
    }


def describe(data: dict[str, Any]) -> list[Part]:
    """A table for each case, what failed, and the targets."""
    parts: list[Part] = []
    for case, rows in _cases(data):
        numbers = _numbers(rows)
        parts += [_table(case, numbers), *failures(rows)]
        parts += [_plot(case, numbers)] if len(numbers) > 1 else []
    return [*parts, *_targets(data)]


def _table(case: Case, numbers: dict[str, dict[str, float]]) -> Table:
    columns = ["convolution", "train ms", "", "eval ms", "", "peak MB", "", "eval peak MB", "", "saved MB", ""]
    shown = {"train": milliseconds, "eval": milliseconds, "memory": megabytes, "eval memory": megabytes}
    shown["saved"] = megabytes
    base = numbers[REFERENCE]
    rows = [
        [name, *(cell for key, show in shown.items() for cell in (show(row[key]), times(row[key] / base[key])))]
        for name, row in numbers.items()
    ]
    return Table(columns, rows, str(case))


def _plot(case: Case, numbers: dict[str, dict[str, float]]) -> Plot:
    names = [name for name in numbers if name != REFERENCE]
    kinds = {"train": "training step", "eval": "evaluation", "memory": "peak memory", "saved": "saved for backward"}
    places = list(range(len(names)))
    series = {
        label: (places, [numbers[name][key] / numbers[REFERENCE][key] for name in names])
        for key, label in kinds.items()
    }
    name = f"overhead-{case.network}-{case.batch}"
    return Plot(name, str(case), series, "", "times nn.Conv2d", ticks=names, log="y", reference=1)


def _targets(data: dict[str, Any]) -> list[Part]:
    rows = [row for case, raw in _cases(data) for row in _targets_of(case, _numbers(raw))]
    if not rows:
        return []
    return [Table(["target", "at most", "measured", "met"], rows, "Targets for AOC")]


def _targets_of(case: Case, numbers: dict[str, dict[str, float]]) -> list[list[str]]:
    if "AOC" not in numbers:
        return []
    base, aoc, peer = numbers[REFERENCE], numbers["AOC"], numbers.get("orthogonium AOC")
    rows = []
    if peer is not None and peer["train"] > base["train"]:
        share = (aoc["train"] - base["train"]) / (peer["train"] - base["train"])
        rows.append(_verdict(f"{case}: share of orthogonium's added time", SHARE_OF_PEER, share))
    if case.network == "resnet34":
        ratio = {key: aoc[key] / base[key] for key in base}
        if case.batch in TARGETS["train"]:
            rows.append(_verdict(f"{case}: train time", TARGETS["train"][case.batch], ratio["train"]))
        rows.append(_verdict(f"{case}: eval time", TARGETS["eval"], ratio["eval"]))
        rows.append(_verdict(f"{case}: peak memory", TARGETS["memory"], ratio["memory"]))
    return rows


def _verdict(name: str, most: float, measured: float) -> list[str]:
    return [name, f"{most:.3f}", f"{measured:.3f}", "yes" if measured <= most else "**no**"]


def peer_wins(data: dict[str, Any]) -> list[str]:
    """Where orthogonium's layer of the same method is faster or smaller, or the only one that ran."""
    found = []
    units = {"train": ("training step", "s"), "eval": ("evaluation", "s"), "memory": ("peak memory", "bytes")}
    for case, raw in _cases(data):
        numbers = _numbers(raw)
        for key, (what, unit) in units.items():
            ours, theirs = (_by_method(numbers, key, library) for library in ("trysquare", "orthogonium"))
            found += better_peers(f"{case}, {what}", unit, ours, theirs)
        failed = {
            VARIANTS[name].method for name in raw if name not in numbers and VARIANTS[name].library == "trysquare"
        }
        works = _by_method(numbers, "train", "orthogonium").keys()
        found += [f"{case}: {method} of orthogonium runs, ours does not." for method in sorted(failed & works)]
    return found


def _by_method(numbers: dict[str, dict[str, float]], key: str, library: str) -> dict[str, float]:
    return {VARIANTS[name].method: row[key] for name, row in numbers.items() if VARIANTS[name].library == library}
