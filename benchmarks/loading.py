"""Images a second that the loader gives, by augmentation.

An epoch of batches is drawn and thrown away, three times, and the fastest is shown. Time of the processor is disturbed
less by other programs than the clock. The loader works in a thread beside training and takes a share of the cores.
``torch.utils.benchmark`` does not fit here: it has no clock of processor time.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import trysquare as ts
from benchmarks.report import Figure, Part, Plot, Table

AUGMENTS = {
    "none": {},
    "crop, flip": {"random_crop": {"padding": 4}, "flip": {}},
    "resized crop 0.25": {"random_resized_crop": {"scale": 0.25}},
    "randaugment n=1, m=6": {"randaugment": {"num_ops": 1, "magnitude": 6}},
    "randaugment n=2, m=9": {"randaugment": {"num_ops": 2, "magnitude": 9}},
    "resized crop, flip, randaugment n=2, m=6": {
        "random_resized_crop": {"scale": 0.25},
        "flip": {},
        "randaugment": {"num_ops": 2, "magnitude": 6},
    },
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this question."""
    parser.add_argument("--data", help="folder of the data set; the digits of the package without it")
    parser.add_argument("--name", default="cifar10", help="data set in that folder")
    parser.add_argument("--batch", type=int, default=512)
    parser.add_argument("--workers", type=int, default=1)


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return images a second of each augmentation in each of three epochs."""
    name = arguments.name if arguments.data else "digits"
    images = ts.data.load(name, arguments.data)
    settings = {"name": name, "batch": arguments.batch, "workers": arguments.workers}
    chosen = dict(list(AUGMENTS.items())[: 3 if arguments.quick else None])
    options: Any = {"shuffle": True, "drop_last": True, "workers": arguments.workers}
    loaders = {name: ts.data.Loader(images, arguments.batch, augment, **options) for name, augment in chosen.items()}
    return {**settings, "rows": {name: rates(loader) for name, loader in loaders.items()}}


def rates(loader: ts.data.Loader, epochs: int = 3) -> dict[str, list[float]]:
    """Return images a second, and a second of processor time, of each epoch."""
    clocks = {"clock": time.perf_counter, "processor": time.process_time}
    found: dict[str, list[float]] = {name: [] for name in clocks}
    images = len(loader) * loader.batch_size
    for epoch in range(epochs):
        begin = {name: clock() for name, clock in clocks.items()}
        for _ in loader.epoch(epoch):
            pass
        for name, clock in clocks.items():
            found[name].append(images / (clock() - begin[name]))
    return found


def describe(data: dict[str, Any]) -> list[Part]:
    """Return a table of the fastest epochs."""
    rows = [[label, f"{max(r['clock']):.0f}", f"{max(r['processor']):.0f}"] for label, r in data["rows"].items()]
    title = f"{data['name']}, batches of {data['batch']}, {data['workers']} workers"
    return [Table(["augmentation", "images a second", "images a processor second"], rows, title)]


def draw(data: dict[str, Any]) -> Figure:
    """Draw the fastest epochs."""
    clocks = {"clock": "by the clock", "processor": "by processor time"}
    series = {label: {name: max(row[key]) for name, row in data["rows"].items()} for key, label in clocks.items()}
    return Figure(Plot(series, "images a second", log="x"))
