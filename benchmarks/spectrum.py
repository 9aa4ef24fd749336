"""Norms of convolutions: time and value of several ways, next to the true value.

Seconds (median of 3), the value, and by how much it is above (+) or below (-) the true norm, which is that of a dense
matrix or of all frequencies. A value below the truth makes a certificate wrong: it is marked, and counted for each way.
"... for every size" holds for images of any size. In brackets: steps of Gram iteration, which, ours and that of
``get_conv_sv``, knows nothing of padding that repeats outputs (circular padding 2). orthogonium's ``get_conv_sv`` is
shown where it is installed; it is written for that library's own layers, and here takes plain ones, with strides too.
torch's ``spectral_norm`` estimates the norm of the reshaped weight, which is not that of the convolution, in float32.
"""

from __future__ import annotations

import argparse
import math
import warnings
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrizations

import trysquare as ts
from benchmarks import peers
from benchmarks.measure import interleaved
from benchmarks.report import NOISE, Part, Table
from trysquare.nn.linalg.bounds import circular_gram_bound, kernel_gram_bound
from trysquare.nn.linalg.spectrum import polyphase

Layer = tuple[str, nn.Conv2d, int]
# How far the true norm itself may be off.
ROUNDING = 1e-7
OURS = "spectral_norm_bound"
PEER = "orthogonium get_conv_sv"


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
        found[f"{PEER} ({steps})"] = lambda: float(estimate(layer, n_iter=steps, return_stab_rank=False, imsize=size))
    return found


def torch_estimate(layer: nn.Conv2d) -> float:
    """The norm by which torch's ``spectral_norm`` divides the weight, after 20 power iterations."""
    copy = nn.Conv2d(layer.in_channels, layer.out_channels, layer.kernel_size, groups=layer.groups, bias=False)
    copy.weight.data.copy_(layer.weight)
    normal = parametrizations.spectral_norm(copy, n_power_iterations=20)
    with torch.no_grad():
        return float(layer.weight.norm() / normal.weight.norm())


def plan(arguments: argparse.Namespace) -> dict[str, Any]:
    """Value and samples of each way, layer by layer."""
    return {"layers": [partial(_measure_layer, *layer) for layer in layers(arguments.quick)]}


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
    """One table, and who is below the truth."""
    rows = []
    below: dict[str, list[bool]] = {}
    for entry in data["layers"]:
        rows.append([entry["name"], "true norm", "", f"{entry['true']:.6f}", "", ""])
        for way, found in entry["ways"].items():
            if "error" in found:
                rows.append(["", way, "", found["error"], "", ""])
                continue
            error = found["value"] / entry["true"] - 1
            wrong = _too_small(found, entry["true"])
            below.setdefault(way.split(" (")[0], []).append(wrong)
            cells = [f"{median(found['seconds']):.3f}", f"{found['value']:.6f}", f"{error:+.1e}"]
            rows.append(["", way, *cells, "too small" if wrong else ""])
    counted = "; ".join(f"{who}: {sum(wrong)} of {len(wrong)} layers" for who, wrong in below.items())
    return [Table(["layer", "way", "seconds", "value", "error", ""], rows), f"Below the true norm: {counted}."]


def peer_wins(data: dict[str, Any]) -> list[str]:
    """Norms that orthogonium finds faster, and no worse: not below the truth, and not further above it than ours."""
    found = []
    for entry in data["layers"]:
        mine = entry["ways"][OURS]
        for way, theirs in entry["ways"].items():
            if not way.startswith(PEER) or "error" in theirs or "error" in mine:
                continue
            seconds, fewer = median(mine["seconds"]), median(theirs["seconds"])
            sound = not _too_small(theirs, entry["true"]) and theirs["value"] <= 1.01 * mine["value"]
            if sound and seconds > NOISE * fewer:
                found.append(f"norm of {entry['name']}: {way} takes {fewer:.3g} s, our bound {seconds:.3g} s.")
    return found
