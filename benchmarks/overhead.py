"""The paper's table of costs: a network with every kind of orthogonal convolution, against ``nn.Conv2d``.

ResNet-34 as in the paper (transition blocks are one strided convolution, the reference has circular padding), ResNet-18
for 32 x 32 images, the paper's network of depthwise blocks, and the small network of Li et al.; in each only the
convolution class is exchanged. Around the convolutions all have layers that orthogonal networks have: MaxMin, residuals
with factors, no batch normalisation. Our layers with a kernel extend the map anew for backward, where the others keep
the extended copy. "Conv2d, our padding" has that and nothing else of ours: its steps show what it gains, its
evaluations, which are those of Conv2d, what is noise.

orthogonium's AOC has 12 steps of Björck by default; with its QR it is exact, with its Cholesky a fresh layer of 16
channels has singular values down to 0.98. It and adaptive SOC build their kernels in each evaluation; exported, as it
advises, AOC would cost what ``nn.Conv2d`` costs. Its copies of the originals are as these are: strides emulated by more
channels (Cayley with kernels of half the size), BCOP with 12 steps of Björck, SOC with zeros around the map, 5 terms in
training and 12 in evaluation, Cayley built anew in each evaluation. "BCOP, original style" emulates strides too, and
iterates until it has converged. Our SOC is exact to 1e-6 by nine terms, applied one by one; "SOC, 3 terms" has as many
as adaptive SOC, and an error of up to 0.052. SOC and orthogonium's BCOP have the next odd kernel size in the place of
an even one.

All variants take turns, after one that does not count. A variant that has taken 20 s for steps, or 10 s for
evaluations, is sampled no more; but Conv2d and the AOC of both libraries stay for five turns of steps and ten of
evaluations, and those that the targets are about go on alone for more. Memory is the peak of a fresh process,
interpreter included, in three steps or as many as it has begun after half a minute; there are three processes, fewer
if those took 20 s, but always three of Conv2d, "our padding" and our AOC. Differences below the spread of peaks, which
stands below each table, say little. In evaluation our layers keep the free tensors besides the kernels; ``ts.to_torch``
keeps only the kernels. "saved" is what autograd keeps for backward. Steps are those of SGD without momentum, which has
no state of its own; the look of our layers at their free tensors, every 64 steps, is not among them.

Among the targets, a share is what our AOC adds to a step of Conv2d, of what orthogonium's adds; "kernels alone" is what
it adds to "Conv2d, our padding", of the same. It is the quotient of the medians of what is added, since single turns
are noise. A share is negative where ours adds nothing, and inf in a turn in which orthogonium's does not.
"""

from __future__ import annotations

import argparse
import gc
import os
import time
from collections.abc import Iterator
from functools import partial
from statistics import median
from typing import Any, NamedTuple

import torch

from benchmarks import peers, targets
from benchmarks.measure import Call, ChildError, Samples, aten_calls, flops, in_child, interleaved
from benchmarks.memory import PASSES
from benchmarks.networks import NETWORKS, PADDED, REFERENCE, VARIANTS, Case, build
from benchmarks.options import amount, count
from benchmarks.report import (
    Part,
    Plot,
    Table,
    absent,
    better_peer,
    failures,
    megabytes,
    milliseconds,
    ratio_plot,
    with_ratios,
)
from benchmarks.results import usable_gigabytes
from benchmarks.steps import evaluation, images, train_step
from trysquare.progress import track


class Limits(NamedTuple):
    """How often to measure, and what a variant may take at most.

    Attributes:
        rounds: samples of each time.
        processes: samples of each peak of memory, at most.
        patience: seconds of steps or processes after which a variant is sampled no more, half of it for evaluations;
            once in any case. What the targets are about has all samples, what they compare it with all times.
        seconds: time of a process.
        gigabytes: memory of a process.
    """

    rounds: int
    processes: int
    patience: float
    seconds: float
    gigabytes: float


FULL = (
    Case("resnet34", 224, 8),
    Case("resnet34", 224, 32),
    Case("resnet18", 32, 128),
    Case("depthwise", 32, 32),
    Case("bcop-small", 32, 128),
)
# What the targets are about, and what they compare it with.
TARGETED = (REFERENCE, PADDED, "AOC")
COMPARED = tuple(name for name, variant in VARIANTS.items() if variant.method in ("plain", "AOC"))
QUICK = (Case("resnet18", 32, 8),)
QUICK_VARIANTS = (REFERENCE, "AOC", "AOC parsimonious", "orthogonium AOC")
# Seconds of a step from which on a variant is not tried with a larger batch.
SLOW_STEP = 30.0
MEASURED = {
    "train": ("training step", "s", 1.0),
    "eval": ("evaluation", "s", 1.0),
    "memory": ("peak memory", "MB", 1e-6),
    "eval memory": ("peak memory of evaluation", "MB", 1e-6),
    "saved": ("saved for backward", "MB", 1e-6),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of this command."""
    parser.add_argument("--networks", nargs="+", choices=NETWORKS, help="only these")
    parser.add_argument("--batches", type=count, nargs="+", help="only these of ResNet-34, such as 128; 8 and 32")
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, metavar="NAME", help="; ".join(VARIANTS))
    parser.add_argument("--rounds", type=count, help="samples of each time; 5 (--quick: 2)")
    parser.add_argument("--patience", type=amount, help="seconds after which a slow variant is sampled no more; 20")
    parser.add_argument("--processes", type=count, help="samples of a peak of memory, at most; 3 (--quick: 1)")
    parser.add_argument("--memory", type=amount, help="gigabytes that a network may take; 70 %% of the machine's")
    parser.add_argument("--limit", type=amount, help="seconds for a process of up to three steps; 300 (--quick: 100)")


def plan(arguments: argparse.Namespace) -> dict[str, Any]:
    """Raw samples, for each network by batch.

    Raises:
        ValueError: if that is nothing.
    """
    cases, chosen, limits = _chosen_cases(arguments), _chosen_variants(arguments), _limits(arguments)
    return {
        network: _by_batch([case for case in cases if case.network == network], chosen, limits)
        for network in dict.fromkeys(case.network for case in cases)
    }


def _chosen_cases(arguments: argparse.Namespace) -> list[Case]:
    networks = arguments.networks or NETWORKS
    cases = [case for case in (QUICK if arguments.quick else FULL) if case.network in networks]
    if arguments.batches:
        if "resnet34" not in networks:
            raise ValueError(f"--batches are those of resnet34, which is not one of {', '.join(networks)}")
        cases = [case for case in cases if case.network != "resnet34"]
        cases = [*(Case("resnet34", 224, batch) for batch in arguments.batches), *cases]
    if not cases:
        raise ValueError(f"--quick has only {', '.join(map(str, QUICK))}; leave it out for {', '.join(networks)}")
    return cases


def _chosen_variants(arguments: argparse.Namespace) -> list[str]:
    """The reference, then what was asked for."""
    asked = arguments.variants or (QUICK_VARIANTS if arguments.quick else VARIANTS)
    others = [name for name in asked if name != REFERENCE]
    return [REFERENCE, *peers.that_run(others, "--variants", arguments.variants)]


def _limits(arguments: argparse.Namespace) -> Limits:
    quick = arguments.quick
    return Limits(
        arguments.rounds or (2 if quick else 5),
        arguments.processes or (1 if quick else 3),
        arguments.patience or 20.0,
        arguments.limit or (100.0 if quick else 300.0),
        arguments.memory or usable_gigabytes(),
    )


def _by_batch(cases: list[Case], chosen: list[str], limits: Limits) -> list[Call]:
    """A part for each case, the smallest batch first.

    What fails with a batch, or takes very long, is not tried with a larger one in the same run.
    """
    failed: dict[str, str] = {}

    def measure(case: Case) -> dict[str, Any]:
        rows = _measure_case(case, chosen, limits, failed)
        failed.update({name: _why_not_larger(case, row) for name, row in rows.items()})
        return {**case._asdict(), "rows": rows}

    return [partial(measure, case) for case in sorted(cases)]


def _why_not_larger(case: Case, row: dict[str, Any]) -> str:
    """Why a variant is not tried with a larger batch; nothing if it is."""
    if "error" in row:
        return str(row["error"])
    seconds = median(row["train"])
    return f"a step with batch {case.batch} takes {seconds:.0f} s" if seconds > SLOW_STEP else ""


def _measure_case(case: Case, chosen: list[str], limits: Limits, failed: dict[str, str]) -> dict[str, dict[str, Any]]:
    rows = _memory(case, chosen, limits, failed)
    works = [name for name in chosen if "error" not in rows[name]]
    if not works:
        return rows
    models = {name: build(case.network, case.size, name) for name in works}
    x, labels = images(case.batch, case.size)
    calls = {name: train_step(models[name], x, labels) for name in works}
    trained = _timed(calls, (limits.rounds, limits.rounds), limits.patience, str(case))
    for model in models.values():
        model.zero_grad()
    calls = {name: evaluation(models[name], x) for name in works if "memory_eval" in rows[name]}
    evaluated = _timed(calls, (2 * limits.rounds, 6 * limits.rounds), limits.patience / 2, str(case))
    for name in calls.keys() & TARGETED:
        rows[name]["operations"] = {"calls": aten_calls(calls[name]), "flops": flops(calls[name])}
    del models, calls
    gc.collect()
    for mode, samples in (("train", trained), ("eval", evaluated)):
        for name, seconds in samples.items():
            rows[name][mode] = seconds
    return rows


def _timed(calls: dict[str, Call], rounds: tuple[int, int], patience: float, label: str) -> Samples:
    """Seconds in turns of all, as far as patience goes, then in turns of those that the targets are about."""
    together, alone = rounds
    found = interleaved(calls, together, patience=patience, always=COMPARED, label=label)
    few = {name: calls[name] for name in TARGETED if name in calls}
    if len(few) > 1:
        for name, seconds in interleaved(few, alone, label=f"{label}, closer").items():
            found[name] += seconds
    return found


def _memory(case: Case, chosen: list[str], limits: Limits, failed: dict[str, str]) -> dict[str, dict[str, Any]]:
    """What several processes of each variant needed, in turns, or why there is nothing."""
    rows: dict[str, dict[str, Any]] = {name: {"error": failed[name]} if failed.get(name) else {} for name in chosen}
    if _same_network(case, chosen):
        rows["AOC parsimonious"] = {"error": "the network is that of AOC, since all layers with a stride expand"}
    tries = [name for _ in range(limits.processes) for name in chosen]
    spent = dict.fromkeys(chosen, 0.0)
    for name in track(tries, f"memory, {case}", len(tries)):
        if "error" not in rows[name] and (spent[name] < limits.patience or name in TARGETED):
            start = time.perf_counter()
            _add_samples(rows[name], case, name, limits)
            spent[name] += time.perf_counter() - start
    return rows


def _same_network(case: Case, chosen: list[str]) -> bool:
    """Whether AOC's parsimonious kind saves nothing, as it does in strided layers that do not expand."""
    kinds = ("AOC", "AOC parsimonious")
    if not set(kinds) <= set(chosen):
        return False
    expressive, parsimonious = ([p.shape for p in build(case.network, case.size, name).parameters()] for name in kinds)
    return expressive == parsimonious


def _add_samples(row: dict[str, Any], case: Case, variant: str, limits: Limits) -> None:
    """Memory of training and of evaluation; without the first the variant has failed."""
    arguments = [torch.get_num_threads(), limits.gigabytes, os.getpid()]
    for mode, failure in (("train", "error"), ("eval", "eval_error")):
        try:
            sample = in_child("benchmarks.memory", [*case, variant, mode, *arguments], limits.seconds)
            row.setdefault(f"memory_{mode}", []).append(sample)
            row.pop(failure, None)
        except ChildError as error:
            if f"memory_{mode}" not in row:
                row[failure] = f"{error} (batch {case.batch})"
                return


def _cases(data: dict[str, Any]) -> Iterator[tuple[Case, dict[str, Any]]]:
    for entry in (entry for entries in data.values() for entry in entries):
        yield Case(entry["network"], entry["size"], entry["batch"]), entry["rows"]


def _samples(rows: dict[str, Any]) -> dict[str, Samples]:
    """Seconds and bytes of the variants that ran, by name; some could be trained only."""
    found: dict[str, Samples] = {}
    for name, row in rows.items():
        if "error" in row:
            continue
        found[name] = {"train": row["train"]}
        for mode, kind in (("train", "memory"), ("eval", "eval memory")):
            if mode in row:
                found[name] |= {mode: row[mode], kind: [sample["peak"] for sample in row[f"memory_{mode}"]]}
        found[name]["saved"] = [sample["saved"] for sample in row["memory_train"]]
    return found


def describe(data: dict[str, Any]) -> list[Part]:
    """A table for each case, what failed, and the targets."""
    parts: list[Part] = []
    for case, rows in _cases(data):
        samples = _samples(rows)
        parts += [_table(case, samples)] if REFERENCE in samples else [f"No table of {case}:"]
        parts += [*failures({**rows, **_not_evaluated(rows)}), *absent(VARIANTS, rows)]
        parts += [*_fewer_passes(rows), *_spread(rows)]
        parts += _operations(rows)
        parts += [_plot(case, samples)] if REFERENCE in samples and len(samples) > 1 else []
    return [*parts, *targets.table((case, _samples(rows)) for case, rows in _cases(data))]


def _not_evaluated(rows: dict[str, Any]) -> dict[str, Any]:
    return {f"{name}, evaluation": {"error": row["eval_error"]} for name, row in rows.items() if "eval_error" in row}


def _fewer_passes(rows: dict[str, Any]) -> list[Part]:
    """Who was too slow for the peak to have settled."""
    samples = {name: row["memory_train"] for name, row in rows.items() if "memory_train" in row}
    passes = {name: min(sample.get("passes", PASSES) for sample in taken) for name, taken in samples.items()}
    slow = [f"{name} {fewest}" for name, fewest in passes.items() if fewest < PASSES]
    return [f"Peak memory is that of fewer than {PASSES} steps: {', '.join(slow)}."] if slow else []


def _spread(rows: dict[str, Any]) -> list[Part]:
    """By how much peaks of processes that did the same differ."""
    found = []
    for mode, what in (("train", "training"), ("eval", "evaluation")):
        peaks = [[sample["peak"] for sample in row.get(f"memory_{mode}", [])] for row in rows.values()]
        spreads = [max(taken) / min(taken) - 1 for taken in peaks if len(taken) > 1]
        found += [f"{max(spreads):.0%} in {what}"] if spreads else []
    return [f"Peaks of processes of one variant differ by up to {' and '.join(found)}."] if found else []


def _operations(rows: dict[str, Any]) -> list[Part]:
    """What an evaluation with AOC consists of, next to one with the reference: that is no matter of noise."""
    counted = {name: rows[name]["operations"] for name in TARGETED if "operations" in rows.get(name, {})}
    said = [f"{count['calls']} with {name} ({count['flops'] / 1e9:.3f} GFLOPs)" for name, count in counted.items()]
    return [f"Operations of torch in an evaluation: {', '.join(said)}."] if said else []


def _table(case: Case, samples: dict[str, Samples]) -> Table:
    heads = ("train ms", "eval ms", "peak MB", "eval peak MB", "saved MB")
    columns = ["convolution", *(cell for head in heads for cell in (head, "ratio"))]
    shown = {"train": milliseconds, "eval": milliseconds, "memory": megabytes, "eval memory": megabytes}
    shown["saved"] = megabytes
    rows = [[name, *with_ratios(row, samples[REFERENCE], shown)] for name, row in samples.items()]
    return Table(columns, rows, str(case))


def _plot(case: Case, samples: dict[str, Samples]) -> Plot:
    kinds = {key: MEASURED[key][0] for key in ("train", "eval", "memory", "saved")}
    return ratio_plot(f"overhead-{case.network}-{case.batch}", str(case), samples, REFERENCE, kinds)


def peer_wins(data: dict[str, Any]) -> list[str]:
    """Where a layer of orthogonium is faster or smaller than ours of the same method, or the only one that ran."""
    found = []
    for case, raw in _cases(data):
        samples = _samples(raw)
        ours = {VARIANTS[name].method: name for name in raw if VARIANTS[name].library == "trysquare"}
        pairs = [(name, ours[VARIANTS[name].method]) for name in samples if _has_rival(name, ours)]
        for kind, (what, unit, scale) in MEASURED.items():
            for peer, own in pairs:
                if kind in samples[peer] and kind in samples.get(own, {}):
                    pair = samples[own][kind], samples[peer][kind]
                    found += better_peer(f"{case}, {what}", peers.own_name(peer), unit, scale, *pair, own)
        found += [
            f"{case}: {peers.own_name(peer)} of orthogonium runs, ours: {_failure(raw[own])}."
            for peer, own in pairs
            if _failure(raw[own]) and not _failure(raw[peer])
        ]
    return found


def _has_rival(name: str, ours: dict[str, str]) -> bool:
    return peers.is_peer(name) and VARIANTS[name].method in ours


def _failure(row: dict[str, Any]) -> str:
    """Why a variant could not be trained, or evaluated."""
    return str(row.get("error") or row.get("eval_error") or "")
