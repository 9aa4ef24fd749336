"""The paper's table of costs: a network with every kind of orthogonal convolution, against ``nn.Conv2d``.

ResNet-34 as in the paper (transition blocks are one strided convolution, the reference has circular padding), ResNet-18
for 32 x 32 images, and the paper's network of depthwise blocks; in each only the convolution class is exchanged. Around
the convolutions all have layers that orthogonal networks have: MaxMin, residuals with factors, no batch normalisation.

Layers of orthogonium build their kernels in each evaluation; exported to ``nn.Conv2d``, as it advises, they would cost
what that costs. Its copies of the originals are as these are: strides emulated by more channels (Cayley's kernels are
1 x 1 then), SOC with zeros around the map and 5 terms in training, BCOP with 12 steps of Björck. "BCOP, original style"
iterates until it has converged.

Times are medians, all variants in turns. Memory is the peak of a fresh process for each variant in three steps,
interpreter included; "saved" is what autograd keeps for backward. Steps are those of SGD without momentum, which has no
state of its own: an optimizer with state keeps it for the free tensors, of which AOC has 2.7 times fewer than ResNet-34
has weights.
"""

from __future__ import annotations

import argparse
import gc
import sys
from collections.abc import Iterator
from statistics import median
from typing import Any, NamedTuple

import torch

from benchmarks import peers
from benchmarks.measure import ChildError, in_child, interleaved
from benchmarks.networks import NETWORKS, REFERENCE, VARIANTS, build
from benchmarks.options import amount, count
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


class Limits(NamedTuple):
    """How often to measure, and what a variant may take at most."""

    rounds: int
    processes: int
    seconds: float
    gigabytes: float


FULL = (
    Case("resnet34", 224, 8),
    Case("resnet34", 224, 32),
    Case("resnet18", 32, 128),
    Case("depthwise", 32, 32),
)
QUICK = (Case("resnet18", 32, 8),)
QUICK_VARIANTS = (REFERENCE, "AOC", "AOC parsimonious", "orthogonium AOC")
# Of the overhead of the same network in `orthogonium`, and ratios to Conv2d at ResNet-34.
SHARE_OF_PEER = 1 / 6
PEER = "orthogonium "
MEASURED = {
    "train": ("training step", "s"),
    "eval": ("evaluation", "s"),
    "memory": ("peak memory", "bytes"),
    "eval memory": ("peak memory of evaluation", "bytes"),
    "saved": ("saved for backward", "bytes"),
}
TARGETS = {"train": {8: 1.6, 32: 1.2}, "eval": 1.02, "memory": 1.05}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of this command."""
    parser.add_argument("--networks", nargs="+", choices=NETWORKS, help="only these")
    parser.add_argument("--batch", type=count, nargs="+", help="batches for ResNet-34, such as 128")
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, metavar="NAME", help="; ".join(VARIANTS))
    parser.add_argument("--rounds", type=count, help="samples of each time; 5 (--quick: 2)")
    parser.add_argument("--processes", type=count, help="samples of each peak of memory; 3 (--quick: 1)")
    parser.add_argument("--memory", type=amount, help="gigabytes that a network may take; 70 %% of the machine's")
    parser.add_argument("--limit", type=amount, help="seconds that three steps may take; 600 (--quick: 100)")


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Raw samples of every case."""
    quick = arguments.quick
    cases = [case for case in (QUICK if quick else FULL) if case.network in (arguments.networks or NETWORKS)]
    if arguments.batch and "resnet34" in (arguments.networks or NETWORKS):
        cases = [case for case in cases if case.network != "resnet34"]
        cases = [*(Case("resnet34", 224, batch) for batch in arguments.batch), *cases]
    if not cases:
        sys.exit(f"--quick has only {', '.join(map(str, QUICK))}; leave it out for {', '.join(arguments.networks)}")
    chosen = arguments.variants or (QUICK_VARIANTS if quick else list(VARIANTS))
    chosen = [REFERENCE, *(name for name in chosen if name != REFERENCE)]
    if not peers.installed():
        chosen = [name for name in chosen if VARIANTS[name].library != "orthogonium"]
    limits = Limits(
        arguments.rounds or (2 if quick else 5),
        arguments.processes or (1 if quick else 3),
        arguments.limit or (100.0 if quick else 600.0),
        arguments.memory or round(0.7 * machine()["memory_gb"], 1),
    )
    return {"cases": [_measure_case(case, chosen, limits) for case in cases]}


def _measure_case(case: Case, chosen: list[str], limits: Limits) -> dict[str, Any]:
    rows = _memory(case, chosen, limits)
    works = [name for name in chosen if "error" not in rows[name]]
    models = {name: build(case.network, case.size, name) for name in works}
    x, labels = images(case.batch, case.size)
    options: Any = {"patience": limits.seconds / 4, "label": str(case)}
    trained = interleaved({name: train_step(models[name], x, labels) for name in works}, limits.rounds, **options)
    for model in models.values():
        model.zero_grad()
    evaluated = interleaved({name: evaluation(models[name], x) for name in works}, 2 * limits.rounds + 1, **options)
    del models
    gc.collect()
    for name in works:
        rows[name] |= {"train": trained[name], "eval": evaluated[name]}
    return {**case._asdict(), "rows": rows}


def _memory(case: Case, chosen: list[str], limits: Limits) -> dict[str, dict[str, Any]]:
    """What several processes of each variant needed, in turns, or why there is nothing."""
    rows: dict[str, dict[str, Any]] = {name: _known(case, name, chosen) for name in chosen}
    for _ in track(range(limits.processes), f"memory, {case}", limits.processes):
        for name in chosen:
            if "error" not in rows[name]:
                _add_sample(rows[name], case, name, limits)
    return rows


def _known(case: Case, variant: str, chosen: list[str]) -> dict[str, Any]:
    """An error for AOC's parsimonious kind where it saves nothing, as it does in strided layers that do not expand."""
    if variant != "AOC parsimonious" or "AOC" not in chosen:
        return {}
    shapes = [[p.shape for p in build(case.network, case.size, name).parameters()] for name in ("AOC", variant)]
    return (
        {"error": "the network is that of AOC, since all layers with a stride expand"} if shapes[0] == shapes[1] else {}
    )


def _add_sample(row: dict[str, Any], case: Case, variant: str, limits: Limits) -> None:
    for mode in ("train", "eval"):
        arguments = [*case, variant, mode, torch.get_num_threads(), limits.gigabytes]
        try:
            row.setdefault(f"memory_{mode}", []).append(in_child("benchmarks.memory", arguments, limits.seconds))
        except ChildError as error:
            row["error"] = str(error)
            return


def _cases(data: dict[str, Any]) -> Iterator[tuple[Case, dict[str, Any]]]:
    for entry in data["cases"]:
        yield Case(entry["network"], entry["size"], entry["batch"]), entry["rows"]


def _numbers(rows: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Medians and bytes of the variants that ran, by name."""
    return {
        name: {
            "train": median(row["train"]),
            "eval": median(row["eval"]),
            "memory": median(sample["peak"] for sample in row["memory_train"]),
            "eval memory": median(sample["peak"] for sample in row["memory_eval"]),
            "saved": row["memory_train"][0]["saved"],
        }
        for name, row in rows.items()
        if "error" not in row
    }


def describe(data: dict[str, Any]) -> list[Part]:
    """A table for each case, what failed, and the targets."""
    parts: list[Part] = []
    for case, rows in _cases(data):
        numbers = _numbers(rows)
        parts += [_table(case, numbers)] if REFERENCE in numbers else [f"No table of {case}:"]
        parts += failures(rows)
        parts += [_plot(case, numbers)] if REFERENCE in numbers and len(numbers) > 1 else []
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
    if "AOC" not in numbers or REFERENCE not in numbers:
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
    """Where a layer of orthogonium is faster or smaller than ours of the same method, or the only one that ran."""
    found = []
    for case, raw in _cases(data):
        numbers = _numbers(raw)
        ours = {VARIANTS[name].method: name for name in raw if VARIANTS[name].library == "trysquare"}
        theirs = {name: ours.get(VARIANTS[name].method, "") for name in numbers if name.startswith(PEER)}
        for key, (what, unit) in MEASURED.items():
            values = {name.removeprefix(PEER): numbers[name][key] for name in theirs}
            mine = {name.removeprefix(PEER): numbers[own][key] for name, own in theirs.items() if own in numbers}
            found += better_peers(f"{case}, {what}", unit, mine, values)
        failed = [name for name, own in theirs.items() if own in raw and own not in numbers]
        found += [f"{case}: {name.removeprefix(PEER)} of orthogonium runs, ours does not." for name in failed]
    return found
