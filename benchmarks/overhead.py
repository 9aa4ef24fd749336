"""A network with every kind of orthogonal convolution, against the same network with ``nn.Conv2d``.

The networks are ResNet-34 and the residual depthwise network of the paper, ResNet-18 for small images, and the small
network of Li et al.; only the convolution class is exchanged, and all convolutions are circular. "Conv2d, our padding"
is torch's convolution with our way to pad, which keeps no padded copy for backward: the difference to "Conv2d" is what
padding alone gains. Times are those of a step of plain SGD and of an evaluation without gradients. Peak memory is that
of a fresh process, interpreter included, and differs by up to 19 % between processes that do the same.

The contestants are not equally exact. Our SOC uses nine terms of the exponential and is exact to 1e-6; orthogonium's
uses 5 in training and 12 in evaluation. "SOC, 3 terms" has as many as adaptive SOC, and an error of up to 0.052.
orthogonium's AOC takes 12 Björck steps by default and rebuilds its kernels in every evaluation, unless they are
exported. Its BCOP, SOC and Cayley, and our "BCOP, original style", emulate strides with more channels, as the original
methods do.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import threading
import time
from collections.abc import Iterator
from statistics import median
from typing import Any, NamedTuple

import torch

from benchmarks import peers
from benchmarks.measure import (
    ChildError,
    Samples,
    in_child,
    interleaved,
    limited_memory,
    peak_bytes,
    ratio,
    saved_bytes,
)
from benchmarks.networks import NETWORKS, PADDED, REFERENCE, VARIANTS, build, evaluation, images, train_step
from benchmarks.report import Figure, Part, Plot, Table, failures, megabytes, milliseconds, times
from benchmarks.results import usable_gigabytes

PEER = """\
orthogonium's copy of the original SOC takes about half the time of ours in a training step of ResNet-34 at batch 8 (8.6
against 16 times Conv2d) and saves less for backward, because it stops after 5 terms where ours takes nine; on the small
network, and in every evaluation, it is slower. Its adaptive SOC beats "SOC, 3 terms" on the small network (2.7 against
4.8 times Conv2d) and on the depthwise one (2.6 against 3.1). With its QR, orthogonium's AOC takes much less time than
with its default, and about as much memory as Conv2d from batch 32 on. An evaluation of ResNet-34 at batch 8 peaks lower
with its AOC (1.10 against 1.17 times), because our layers keep their free tensors besides the kernels; ``ts.to_torch``
drops them."""


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
    Case("depthwise", 32, 32),
    Case("bcop-small", 32, 128),
)
QUICK = (Case("resnet18", 32, 8),)
QUICK_VARIANTS = (REFERENCE, "AOC", "orthogonium AOC")
# These are sampled in every turn; slower variants are dropped once they have taken this many seconds.
COMPARED = tuple(name for name, variant in VARIANTS.items() if variant.method in ("plain", "AOC"))
PATIENCE = 20.0
# A variant whose step takes longer than this many seconds is not tried with a larger batch.
SLOW_STEP = 30.0
# The peak rises until the allocator can reuse its pieces; slow networks stop after this many seconds.
PASSES, PASS_SECONDS = 3, 30.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this question."""
    parser.add_argument("--networks", nargs="+", choices=NETWORKS, help="only these")
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, metavar="NAME", help="; ".join(VARIANTS))
    parser.add_argument("--rounds", type=int, help="samples of each time; 5 (--quick: 2)")
    parser.add_argument("--processes", type=int, help="samples of a peak of memory, at most; 3 (--quick: 1)")
    parser.add_argument("--limit", type=float, default=300.0, help="seconds for a process of up to three steps")


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return samples of time and memory of each network, the smallest batch first."""
    cases = QUICK if arguments.quick else FULL
    cases = tuple(case for case in cases if case.network in (arguments.networks or NETWORKS))
    if not cases:
        raise ValueError(f"--quick has only {', '.join(map(str, QUICK))}")
    asked = arguments.variants or (QUICK_VARIANTS if arguments.quick else VARIANTS)
    chosen = peers.that_run([REFERENCE, *(name for name in asked if name != REFERENCE)])
    rounds = arguments.rounds or (2 if arguments.quick else 5)
    processes = arguments.processes or (1 if arguments.quick else 3)
    data: dict[str, Any] = {}
    for case in sorted(cases):
        smaller = data.setdefault(case.network, [])
        rows = {name: _worth_trying(name, smaller) for name in chosen}
        for _ in range(processes):
            for name in chosen:
                _add_memory(rows[name], case, name, arguments.limit)
        _add_times(rows, case, rounds)
        smaller.append({**case._asdict(), "rows": rows})
    return data


def _worth_trying(name: str, smaller: list[dict[str, Any]]) -> dict[str, Any]:
    """Return an empty row, or an error if the variant failed, or was very slow, with a smaller batch."""
    for entry in smaller:
        row = entry["rows"][name]
        if "error" in row:
            return {"error": row["error"]}
        if median(row["train"]) > SLOW_STEP:
            return {"error": f"a step with batch {entry['batch']} takes {median(row['train']):.0f} s"}
    return {}


def _add_memory(row: dict[str, Any], case: Case, variant: str, limit: float) -> None:
    """Add a sample of memory in training and one in evaluation, unless the variant fails, or is slow and has one."""
    if "error" in row or (row.get("spent", 0.0) > PATIENCE and variant not in COMPARED):
        return
    begin = time.perf_counter()
    for mode, failure in (("train", "error"), ("eval", "eval_error")):
        arguments = [*case, variant, mode, torch.get_num_threads(), usable_gigabytes(), os.getpid()]
        try:
            row.setdefault(f"memory_{mode}", []).append(in_child("benchmarks.overhead", arguments, limit))
        except ChildError as error:
            if not row[f"memory_{mode}"]:
                row[failure] = f"{error} (batch {case.batch})"
                del row[f"memory_{mode}"]
                break
    row["spent"] = row.get("spent", 0.0) + time.perf_counter() - begin


def _add_times(rows: dict[str, dict[str, Any]], case: Case, rounds: int) -> None:
    works = [name for name, row in rows.items() if "error" not in row]
    models = {name: build(case.network, case.size, name) for name in works}
    x, labels = images(case.batch, case.size)
    trained = interleaved(
        {name: train_step(models[name], x, labels) for name in works},
        rounds,
        patience=PATIENCE,
        always=COMPARED,
        label=f"steps of {case}",
    )
    for model in models.values():
        model.zero_grad()
    evaluated = interleaved(
        {name: evaluation(models[name], x) for name in works if "memory_eval" in rows[name]},
        2 * rounds,
        patience=PATIENCE / 2,
        always=COMPARED,
        label=f"evaluations of {case}",
    )
    for mode, samples in (("train", trained), ("eval", evaluated)):
        for name, seconds in samples.items():
            rows[name][mode] = seconds
    del models
    gc.collect()  # the next case needs the memory


def memory(case: Case, variant: str, mode: str) -> dict[str, int]:
    """Return the bytes that this process holds at most after some passes, and what autograd saves."""
    model = build(case.network, case.size, variant)
    x, labels = images(case.batch, case.size)
    call = train_step(model, x, labels) if mode == "train" else evaluation(model, x)
    begin, passes = time.perf_counter(), 0
    while passes < PASSES and time.perf_counter() - begin < PASS_SECONDS:
        call()
        passes += 1
    found = {"peak": peak_bytes(), "passes": passes}
    return {**found, "saved": saved_bytes(lambda: model(x))} if mode == "train" else found


def _cases(data: dict[str, Any]) -> Iterator[tuple[Case, dict[str, Any]]]:
    for entry in (entry for entries in data.values() for entry in entries):
        yield Case(entry["network"], entry["size"], entry["batch"]), entry["rows"]


def samples(row: dict[str, Any]) -> Samples:
    """Return the samples of a variant by what was measured; one that failed has none."""
    if "error" in row:
        return {}
    found = {"training step": row["train"], "saved for backward": [one["saved"] for one in row["memory_train"]]}
    found["peak memory of training"] = [one["peak"] for one in row["memory_train"]]
    if "eval" in row:
        found["evaluation"] = row["eval"]
        found["peak memory of evaluation"] = [one["peak"] for one in row["memory_eval"]]
    return found


def ratios(data: dict[str, Any], what: str) -> dict[str, dict[str, float]]:
    """Return, for each case, the ratios to ``nn.Conv2d`` by variant."""
    found = {}
    for case, rows in _cases(data):
        base = samples(rows[REFERENCE])[what]
        found[str(case)] = {
            name: ratio(taken[what], base) for name, row in rows.items() if what in (taken := samples(row))
        }
    return found


def share(rows: dict[str, Any], peer: str, base: str = REFERENCE) -> float:
    """Return the time that our AOC adds to a step of ``base``, as a share of what the peer's adds to Conv2d.

    It is the quotient of the medians of what is added in a turn, since single turns are noise.
    """
    plain = rows[REFERENCE]["train"]
    added = [ours - other for ours, other, _ in zip(rows["AOC"]["train"], rows[base]["train"], rows[peer]["train"])]  # noqa: B905
    more = [theirs - other for theirs, other in zip(rows[peer]["train"], plain)]  # noqa: B905
    return median(added) / median(more)


def describe(data: dict[str, Any]) -> list[Part]:
    """Return a table for each thing measured, one for what AOC adds, and what failed."""
    parts: list[Part] = []
    shown = {"training step": "ms", "evaluation": "ms", "peak memory of training": "MB", "saved for backward": "MB"}
    for what, unit in (shown | {"peak memory of evaluation": "MB"}).items():
        found = ratios(data, what)
        show = milliseconds if unit == "ms" else megabytes
        base = [f"{show(median(samples(rows[REFERENCE])[what]))} {unit}" for _, rows in _cases(data)]
        names = [name for name in VARIANTS if name != REFERENCE and any(name in row for row in found.values())]
        rows = [[name, *(times(row[name]) if name in row else "" for row in found.values())] for name in names]
        title = f"{what.capitalize()}: {REFERENCE}, and the others as multiples of it"
        parts.append(Table([what, *found], [[REFERENCE, *base], *rows], title))
    parts += _shares(data)
    failed = {f"{name} ({case})": row for case, rows in _cases(data) for name, row in rows.items() if "error" in row}
    return parts + failures(failed)


def _shares(data: dict[str, Any]) -> list[Part]:
    """Return what AOC adds to a step, as a share of what orthogonium's adds, by its orthogonalizer."""
    rivals = [name for name in COMPARED if name.startswith("orthogonium")]
    lines = [
        [
            f"{case}{kind}",
            *(f"{share(rows, rival, base):.2f}" if "train" in rows.get(rival, {}) else "" for rival in rivals),
        ]
        for case, rows in _cases(data)
        for kind, base in (("", REFERENCE), (", kernels alone", PADDED))
        if {"AOC", base} <= {name for name, row in rows.items() if "train" in row}
    ]
    title = "Time that our AOC adds, as a share of what orthogonium's adds (our target is at most 0.17)"
    note = '"Kernels alone" compares with "Conv2d, our padding": without what our padding gains.'
    return [Table(["training step", *rivals], lines, title), note] if lines else []


def draw(data: dict[str, Any]) -> Figure:
    """Draw ratios of training steps."""
    found = ratios(data, "training step")
    return Figure(Plot(found, "training step, times nn.Conv2d", log="x", reference=1))


def end_with_parent(parent: int) -> None:
    """End this process once the one that started it has ended: it would disturb the next measurement."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


if __name__ == "__main__":  # a child that measures memory
    network, size, batch, variant, mode, threads, gigabytes, parent = sys.argv[1:]
    end_with_parent(int(parent))
    if int(threads) != torch.get_num_threads():  # setting it has side effects: see linalg.inverse
        torch.set_num_threads(int(threads))
    try:
        with limited_memory(float(gigabytes)):
            print(json.dumps(memory(Case(network, int(size), int(batch)), variant, mode)))
    except MemoryError as error:
        sys.exit(str(error))
