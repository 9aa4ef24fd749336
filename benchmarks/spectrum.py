"""Several ways to the norm of a convolution, next to the true norm, which comes from a dense matrix or all frequencies.

A value below the true norm makes a certificate wrong, and is marked. "... for every size" holds for images of any size.
Numbers in brackets are steps of Gram iteration, which, in ours and in orthogonium's ``get_conv_sv``, ignores that
padding may repeat outputs (circular padding 2). ``get_conv_sv`` is written for that library's own layers, and is given
plain ones here. torch's ``spectral_norm`` estimates the norm of the reshaped weight, not that of the convolution.
"""

from __future__ import annotations

import argparse
import math
import warnings
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrizations

import trysquare as ts
from benchmarks import peers
from benchmarks.measure import interleaved
from benchmarks.report import Figure, Part, Plot, Table
from trysquare.nn.linalg.bounds import circular_gram_bound, kernel_gram_bound
from trysquare.nn.linalg.spectrum import polyphase

Layer = tuple[str, nn.Conv2d, int]
# How far the true norm itself may be off.
ROUNDING = 1e-7
OURS = "spectral_norm_bound"
PEER = """\
``get_conv_sv`` is faster than ours with zeros around the map (21 against 35 ms on 3 x 3 images), but 15 to 55 % too
large there. On the two plain circular convolutions it is as tight as ours, and takes about twice the time."""


def layers(quick: bool = False) -> list[Layer]:
    """Plain, orthogonal, strided, grouped, circular, zero-padded and over-padded ones."""
    circular = {"padding": 1, "padding_mode": "circular"}
    few: list[Layer] = [
        ("16, k3, circular", nn.Conv2d(16, 16, 3, **circular), 16),
        ("32, 4 groups, circular", nn.Conv2d(32, 32, 3, groups=4, **circular), 16),
        ("16, k3, zeros", nn.Conv2d(16, 16, 3, padding=1), 16),
        ("64, k3, zeros, 3x3", nn.Conv2d(64, 64, 3, padding=1), 3),
        ("16, circular padding 2", nn.Conv2d(16, 16, 3, padding=2, padding_mode="circular"), 16),
    ]
    many: list[Layer] = [
        ("64, k3, circular", nn.Conv2d(64, 64, 3, **circular), 32),
        ("64 -> 128, s2, circular", nn.Conv2d(64, 128, 3, 2, **circular), 32),
        ("64, orthogonal", ts.to_torch(ts.OrthoConv2d(64, 64, 3)), 32),
        ("64, k3, zeros", nn.Conv2d(64, 64, 3, padding=1), 16),
    ]
    return few if quick else few + many


def ways(layer: nn.Conv2d, size: int) -> dict[str, Callable[[], float]]:
    """Every way to a norm that applies to the layer."""
    shape = (layer.in_channels, size, size)
    convolution = polyphase(layer.weight.double(), layer.stride, layer.dilation, layer.groups)
    coarse = tuple(size // s for s in layer.stride)
    circular = layer.padding_mode == "circular"
    found: dict[str, Callable[[], float]] = {
        OURS: lambda: ts.spectral_norm_bound(layer, shape),
        "... for every size": lambda: ts.spectral_norm_bound(layer),
        "Gram, kernel (3)": lambda: kernel_gram_bound(convolution, 3),
        "torch spectral_norm": lambda: torch_estimate(layer),
    }
    if circular:
        found["Gram, frequencies (6)"] = lambda: circular_gram_bound(convolution, coarse)
    if peers.installed():
        estimate = peers.load("layers.conv.singular_values", "get_conv_sv")
        steps = 6 if circular else 3  # with zeros its kernels double at each step: 6 take minutes
        found[f"orthogonium get_conv_sv ({steps})"] = lambda: float(
            estimate(layer, n_iter=steps, return_stab_rank=False, imsize=size)
        )
    return found


def torch_estimate(layer: nn.Conv2d) -> float:
    """The norm by which torch's ``spectral_norm`` divides the weight, after 20 power iterations."""
    copy = nn.Conv2d(layer.in_channels, layer.out_channels, layer.kernel_size, groups=layer.groups, bias=False)
    copy.weight.data.copy_(layer.weight)
    normal = parametrizations.spectral_norm(copy, n_power_iterations=20)
    with torch.no_grad():
        return float(layer.weight.norm() / normal.weight.norm())


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return value and samples of each way, layer by layer."""
    return {"layers": [_measure_layer(*layer) for layer in layers(arguments.quick)]}


def _measure_layer(name: str, layer: nn.Conv2d, size: int) -> dict[str, Any]:
    true = ts.extreme_singular_values(layer, (layer.in_channels, size, size), tolerance=1e-8).largest
    calls = ways(layer, size)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = {way: _tried(call) for way, call in calls.items()}
        seconds = interleaved({way: calls[way] for way in found if "value" in found[way]}, 3, patience=30, label=name)
    for way, samples in seconds.items():
        found[way]["seconds"] = samples
    return {"name": name, "true": true, "ways": found}


def _tried(call: Callable[[], float]) -> dict[str, Any]:
    try:
        value = call()
        return {"value": value} if math.isfinite(value) else {"error": f"returns {value}"}
    except Exception as error:
        return {"error": f"{type(error).__name__}: {str(error)[:60]}"}


def _too_small(found: dict[str, Any], true: float) -> bool:
    return found["value"] < true * (1 - ROUNDING)


def describe(data: dict[str, Any]) -> list[Part]:
    """Return a table with a row for each layer, and one that counts values below the truth."""
    columns = list(dict.fromkeys(way.split(" (")[0] for entry in data["layers"] for way in entry["ways"]))
    rows, seconds = [], []
    below: dict[str, list[bool]] = {way: [] for way in columns}
    for entry in data["layers"]:
        cells, taken = dict.fromkeys(columns, ""), dict.fromkeys(columns, "")
        for name, found in entry["ways"].items():
            way = name.split(" (")[0]
            if "error" in found:
                cells[way] = found["error"]
                continue
            wrong = _too_small(found, entry["true"])
            below[way].append(wrong)
            cells[way] = f"{found['value'] / entry['true'] - 1:+.1e}" + (" (too small)" if wrong else "")
            taken[way] = f"{1e3 * median(found['seconds']):.0f}"
        rows.append([entry["name"], f"{entry['true']:.4f}", *cells.values()])
        seconds.append([entry["name"], *taken.values()])
    rows.append(["too small", "", *(f"{sum(wrong)} of {len(wrong)}" for wrong in below.values())])
    return [
        Table(["layer", "true norm", *columns], rows, "Relative error of the norm"),
        Table(["layer", *columns], seconds, "Milliseconds"),
    ]


def draw(data: dict[str, Any]) -> Figure:
    """Draw each value as a multiple of the true norm: what is left of 1 is wrong."""
    series: dict[str, dict[str, float]] = {}
    for entry in data["layers"]:
        for way, found in entry["ways"].items():
            if "value" in found:
                series.setdefault(way.split(" (")[0], {})[entry["name"]] = found["value"] / entry["true"]
    return Figure(Plot(series, "value / true norm (left of 1 is wrong)", log="x", reference=1))
