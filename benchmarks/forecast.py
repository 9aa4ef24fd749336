"""A forecast of training steps on graphics cards, from the calls that a step makes: no card was here to measure it.

The ATen calls of forward, backward and plain SGD are recorded on the meta device, where our layers take the path of
accelerators, and a model of the card prices them. Host and card work side by side, and the slower one sets the time.
The host needs the same time for every call. On the card a view costs nothing, and every other call the largest of: the
least time of a kernel; FLOPs over the peak of their precision; bytes of operands and results over the bandwidth of the
memory; and for a factorisation or a triangular solve a time for each row, as rows wait for each other. Peaks and
bandwidths are those of data sheets, without sparsity and without caches. As by default in torch, float32 products use
no tensor cores and convolutions use TF32. Times a row are from measurements that others published.

Two numbers are fitted, both to the paper's library in the paper's table, and kept for every card: the time of the host
to the step at batch 128, and the least time of a kernel to what the library adds at batch 512. Left out are loading of
data, the reconditioning of every 64th step, compiled code and CUDA graphs, and that no network reaches the peak of a
large card: a plain step that is forecast too fast makes construction look dearer.
"""

from __future__ import annotations

import argparse
import heapq
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

import trysquare as ts
from benchmarks import peers
from benchmarks.networks import PADDED, REFERENCE, VARIANTS, billion, exchange, resnet34, train_step
from benchmarks.report import Part, Table, megabytes, milliseconds, times

PEER = """\
Where our kernels are built one by one and the card, not the host, sets the time: that adds 122 ms to a step of
ResNet-34 at batch 512 on an RTX 4090, and orthogonium's kernels 72. Its Björck steps are products, while rows of our
factorisations wait. Built together (`with ts.built(model)`), ours add 35 ms there, and less than orthogonium's in all
of these rows."""
# Fitted to the paper's table, see above; tests/benchmarks/test_forecast.py fits them again.
HOST = 9.00e-6  # seconds of a call
KERNEL = 6.59e-6  # least seconds of a kernel
# Seconds a row. Cholesky by cuSOLVER takes 0.7 to 0.9 µs a row for one matrix of 128 to 2,048 rows and 1.2 to 2.5 µs
# for batches of 16 and 64 (pytorch PR 173515); two triangular solves take 0.9 µs a row (16 of 128 rows, PR 175898).
ROW = {"linalg_cholesky_ex": 1.5e-6, "linalg_solve_triangular": 0.5e-6}
# What reads and writes nothing, besides the views that torch marks as such.
NO_KERNEL = {"_unsafe_view", "set_", "empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}

OURS, THEIRS = "AOC", "orthogonium AOC"
# A context for a model and what is built in it; entering is part of what is recorded.
BUILDS: dict[str, Callable[[nn.Module], AbstractContextManager[Any]]] = {
    "one by one": nullcontext,
    "together": ts.built,
}


class Card(NamedTuple):
    """What data sheets say: TFLOP/s in each precision, GB/s of the memory, and GB/s of links among that many cards."""

    float64: float
    float32: float
    tf32: float
    bfloat16: float
    memory: float
    links: dict[int, float]
    source: str


CARDS = {
    "RTX 4090": Card(1.29, 82.6, 82.6, 165.2, 1008, {8: 32}, "NVIDIA's Ada whitepaper; 8 cards by PCIe 4.0 x16"),
    "A100": Card(19.5, 19.5, 156, 312, 2039, {8: 300, 64: 200}, "A100 80GB SXM, DGX A100: NVLink, 8 x 200 Gb/s"),
    "H100": Card(66.9, 66.9, 494.7, 989.4, 3350, {8: 450, 64: 400}, "H100 SXM, DGX H100: NVLink, 8 x 400 Gb/s"),
}
# Milliseconds of a training step in the paper's table. It does not name the card. Its appendix has RTX 3080 and 4090,
# and the 18.6 GB of batch 512 fit only the second.
PAPER_CARD = "RTX 4090"
PAPER = {
    REFERENCE: {128: 137, 256: 284, 512: 550},
    THEIRS: {128: 239, 256: 354, 512: 622},
    "orthogonium BCOP": {128: 389, 256: 624, 512: 1116},
}
KINDS = ("measured", "forecast")
FITTED = ((THEIRS, 128), (THEIRS, 512))


class Call(NamedTuple):
    """What a call of ATen takes: without bytes it launches no kernel; ``wait`` is the seconds of dependent rows."""

    name: str
    flops: int = 0
    bytes: int = 0
    precision: str = "float32"
    wait: float = 0.0


def forecast(calls: Sequence[Call], card: Card) -> float:
    """Return the seconds that a card is forecast to take for recorded calls, such as those of ``Case.step``.

    Training costs that times the number of steps: nothing waits between them.
    """
    host = HOST * len(calls)
    device = sum(
        max(KERNEL, call.flops / getattr(card, call.precision) / 1e12, call.bytes / card.memory / 1e9, call.wait)
        for call in calls
        if call.bytes
    )
    return max(host, device)


def record(call: Callable[[], Any]) -> list[Call]:
    """Return the calls of ATen that a call makes, forward and backward; on the meta device it computes nothing.

    Raises:
        ValueError: if there is one whose cost is not known: another factorisation, or an operator that is not torch's.
    """
    with _Recorder() as recorder:
        call()
    return recorder.calls


class _Recorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Call] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.namespace != "profiler":
            self.calls.append(_priced(func, args, kwargs or {}, result))
        return result


def _priced(func: Any, args: Any, kwargs: Any, result: Any) -> Call:
    packet, name = func.overloadpacket, func.overloadpacket.__name__
    factorises = name != "linalg_vector_norm" and any(part in name for part in ("linalg", "cholesky", "geqrf", "solve"))
    if func.namespace != "aten" or (factorises and name not in ROW):
        raise ValueError(f"{func} has no price: only torch's own operators have one, and factorisations those in ROW")
    if func.is_view or name in NO_KERNEL:
        return Call(name)
    tensors = [leaf for leaf in tree_leaves((args, kwargs, result)) if isinstance(leaf, Tensor)]
    # An expanded tensor is read once.
    moved = sum(min(tensor.nbytes, tensor.untyped_storage().nbytes()) for tensor in tensors)
    if factorises:
        rows = args[0].shape[-1]
        products = args[0].numel() * rows // 3 if name == "linalg_cholesky_ex" else args[1].numel() * rows
    elif packet in flop_registry:
        rows, products = 0, flop_registry[packet](*args, **kwargs, out_val=result)
    else:
        return Call(name, bytes=moved)
    precision = str(args[0].dtype).removeprefix("torch.")
    if precision == "float32" and name.startswith("convolution"):
        precision = "tf32"
    return Call(name, products, moved, precision, rows * ROW.get(name, 0.0))


class Case(NamedTuple):
    """A network, images of 224 x 224 a card, the dtype of its maps, and numbers of cards."""

    network: str
    batch: int
    dtype: torch.dtype = torch.float32
    cards: tuple[int, ...] = (1,)

    def __str__(self) -> str:
        return f"{self.network}, {str(self.dtype).removeprefix('torch.')}, batch {self.batch}"

    def model(self, variant: str) -> nn.Module:
        """Return it on the meta device."""
        # orthogonium computes with what it initialises.
        with torch.device("cpu" if variant.startswith("orthogonium") else "meta"):
            model = billion() if self.network == LARGE else resnet34(224)
            return exchange(model, VARIANTS[variant].make).to("meta", self.dtype)

    def step(self, model: nn.Module) -> list[Call]:
        """Return the calls of a training step."""
        images = torch.empty(self.batch, 3, 224, 224, dtype=self.dtype, device="meta")
        labels = torch.empty(self.batch, dtype=torch.long, device="meta")
        return record(train_step(model, images, labels, foreach=True))  # as on a card


LARGE = "a billion parameters"
QUICK = (Case("resnet34", 128, cards=(1, 8)),)
FULL = (
    *(Case("resnet34", batch, cards=(1, 8, 64) if batch == 128 else (1,)) for batch in PAPER[REFERENCE]),
    Case("resnet34", 512, torch.bfloat16),
    Case(LARGE, 32, torch.bfloat16, (1, 8, 64)),
)


def construction(layers: Sequence[nn.Module], build: str) -> list[Call]:
    """Return the calls that build the weights of layers by one of ``BUILDS`` and take their gradients."""
    directions = [torch.empty_like(layer.weight) for layer in layers]

    def call() -> None:
        with BUILDS[build](nn.ModuleList(layers)):
            torch.autograd.backward([layer.weight for layer in layers], directions)

    return record(call)


def owners(costs: Sequence[float], ranks: int) -> list[list[int]]:
    """Return what each rank owns: the dearest first, each to the rank that has least to do."""
    shares: list[list[int]] = [[] for _ in range(ranks)]
    loads = [(0.0, rank) for rank in range(ranks)]
    for index in sorted(range(len(costs)), key=lambda index: -costs[index]):
        load, rank = loads[0]
        shares[rank].append(index)
        heapq.heapreplace(loads, (load + costs[index], rank))
    return shares


def data_parallel(calls: Sequence[Call], card: Card, cards: int, reduced: float, exchanged: float = 0) -> float:
    """Return the seconds of a step with gradients that DDP reduces, and kernels that are gathered and scattered.

    Bytes that are reduced travel while the card computes; those that are exchanged, before and after.
    """
    seconds_a_byte = 2 * (cards - 1) / cards / (1e9 * card.links[cards]) if cards > 1 else 0.0
    return max(forecast(calls, card), reduced * seconds_a_byte) + exchanged * seconds_a_byte


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the check against the paper, and forecasts for one card and for many."""
    paper: dict[str, Any] = {}
    for name in peers.that_run(PAPER):
        for batch, measured in PAPER[name].items():
            case = Case("resnet34", batch)
            calls = case.step(case.model(name))
            row = {"measured": measured / 1e3, "forecast": forecast(calls, CARDS[PAPER_CARD]), "calls": len(calls)}
            paper.setdefault(name, {})[str(batch)] = {**row, "fitted": (name, batch) in FITTED}
    return {
        "fitted": {"host": HOST, "kernel": KERNEL},
        "cards": {
            name: card._asdict() | {"links": ", ".join(f"{v} ({n})" for n, v in card.links.items())}
            for name, card in CARDS.items()
        },
        "paper": paper,
        "forecasts": [entry for case in (QUICK if arguments.quick else FULL) for entry in _forecasts(case)],
    }


def _forecasts(case: Case) -> list[dict[str, Any]]:
    """Return, for cards and numbers of them, steps with and without construction."""
    with_theirs = peers.installed() and case.network != LARGE and case.dtype == torch.float32
    whole = [REFERENCE, THEIRS, PADDED] if with_theirs else [PADDED]
    models = {name: case.model(name) for name in (*whole, OURS)}
    size = {name: 4 * sum(parameter.numel() for parameter in model.parameters()) for name, model in models.items()}
    recorded = {name: case.step(models[name]) for name in whole}
    layers = [module for module in models[OURS].modules() if is_parametrized(module, "weight")]
    built = 4 * sum(layer.weight.numel() for layer in layers)
    everything = {build: construction(layers, build) for build in BUILDS}
    # c³ for each tap of the kernel, as the FLOPs of its construction grow.
    costs = [max(layer.weight.shape[:2]) ** 3 * prod(layer.weight.shape[2:]) for layer in layers]
    entries = []
    for cards in case.cards:
        shares = [share for share in owners(costs, cards) if share]
        shared = {build: [construction([layers[i] for i in share], build) for share in shares] for build in BUILDS}
        for name, card in CARDS.items():
            if cards > 1 and cards not in card.links:
                continue
            step = partial(data_parallel, card=card, cards=cards)
            steps = {name: step(calls, reduced=size[name]) for name, calls in recorded.items()}
            for build, calls in everything.items():
                steps[f"{OURS}, {build}"] = step(recorded[PADDED] + calls, reduced=size[OURS])
                if cards > 1:
                    ranks = (recorded[PADDED] + calls for calls in shared[build])
                    steps[f"{OURS}, {build}, shared"] = max(step(calls, reduced=0, exchanged=built) for calls in ranks)
            entries.append(
                {"case": str(case), "card": name, "cards": cards, "layers": len(layers), "steps": steps}
                | {"bytes": {"parameters": size[PADDED], "kernels": built, "free tensors": size[OURS]}}
                | {"share": max(sum(costs[index] for index in share) for share in shares) / sum(costs)}
                | {"calls": {name: len(calls) for name, calls in (recorded | everything).items()}}
                | {"waiting": {build: sum(call.wait for call in calls) for build, calls in everything.items()}}
            )
    return entries


def describe(data: dict[str, Any]) -> list[Part]:
    """Return the constants, the check, and tables of one card and of many."""
    constants = [[name, *map(str, card.values())] for name, card in data["cards"].items()]
    headings = ["card", "FP64", "FP32", "TF32", "BF16", "memory GB/s", "links GB/s (cards)", "data sheets of"]
    paper = data["paper"]
    check = [
        [f"{name}, batch {batch}", f"{row['calls']:,}"]
        + [f"{milliseconds(row[kind])} ({times(row[kind] / paper[REFERENCE][batch][kind])})" for kind in KINDS]
        + [f"{row['forecast'] / row['measured'] - 1:+.1%}", "yes" if row["fitted"] else ""]
        for name, rows in paper.items()
        for batch, row in rows.items()
    ]
    host, kernel = (f"{1e6 * data['fitted'][key]:.2f} µs" for key in ("host", "kernel"))
    added = {
        name: " and ".join(f"{_fixed(rows, kind) - _fixed(paper[REFERENCE], kind):.0f} ms" for kind in KINDS)
        for name, rows in paper.items()
    }
    fixed = "; ".join(f"{name}, {found}" for name, found in added.items() if name != REFERENCE)
    one, many = ([entry for entry in data["forecasts"] if (entry["cards"] > 1) == more] for more in (False, True))
    sent = dict.fromkeys(
        f"* {entry['case']}: {', '.join(f'{megabytes(n)} MB of {name}' for name, n in entry['bytes'].items())}. The "
        f"largest of {entry['cards']} shares is {entry['share']:.1%} of the construction of {entry['layers']} layers."
        for entry in many
    )
    counted = ", ".join(f"{number:,} ({name})" for name, number in one[0]["calls"].items())
    waits = ", ".join(f"{milliseconds(seconds)} ms ({build})" for build, seconds in one[0]["waiting"].items())
    title = f"The check: ResNet-34 of 224 x 224 images, measured in the paper and forecast for {PAPER_CARD}"
    return [
        Table(headings, constants, "Constants; peaks in TFLOP/s"),
        Table(["training step", "ATen calls", *(f"{kind} ms" for kind in KINDS), "error", "fitted"], check, title),
        f"The fit: {host} for a call on the host, and at least {kernel} for a kernel. Nothing was fitted to BCOP, and "
        "the paper's grows faster with the batch than orthogonium's copy: they do not convolve alike. Construction is "
        f"what does not grow (twice batch 256 less batch 512) beyond {REFERENCE}; measured and forecast: {fixed}.",
        _steps(one, "Forecast: a training step on one card"),
        "Ratios compare with the network that builds nothing and pads in the same way: ours with "
        f'"{PADDED}", orthogonium with "{REFERENCE}". The paper\'s table does not check what our padding gains. '
        f"ATen calls of a step, and of construction alone: {counted}. In the latter, rows that wait take {waits}.",
        _steps(many, "Forecast: a data-parallel step"),
        "Not shared, every card builds all kernels, and DDP reduces the gradients of the free tensors while the card "
        "computes. Shared, layers have owners (the dearest first, by c³ and taps): their kernels are gathered before "
        "the step and the gradients scattered after it, while nothing is computed, and the slowest card sets the time. "
        "Either way a card sends almost twice these bytes, of float32:",
        "\n".join(sent),
    ]


def _fixed(rows: dict[str, Any], kind: str) -> float:
    """Return the milliseconds that do not grow with the batch."""
    return 1e3 * (2 * rows["256"][kind] - rows["512"][kind])


def _steps(entries: list[dict[str, Any]], title: str) -> Table:
    """Return a table of steps; what builds kernels is compared with the step that does not."""
    names = list(dict.fromkeys(name for entry in entries for name in entry["steps"]))
    rows = []
    for entry in entries:
        steps, cells = entry["steps"], [f"{entry['case']}, {entry['cards']} {entry['card']}"]
        for name in names:
            without = REFERENCE if name in (REFERENCE, THEIRS) else PADDED
            known = name in steps
            cells.append(f"{milliseconds(steps[name])} ({times(steps[name] / steps[without])})" if known else "")
        rows.append(cells)
    return Table(["training step, ms", *names], rows, title)
