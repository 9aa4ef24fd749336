"""FLOPs, aten calls, saved and written bytes of building kernels: numbers that do not depend on the machine.

``tests/benchmarks/test_counts.py`` fails if one of them grows beyond ``counts.json`` next to it; ``--record`` makes the
present numbers the limits. FLOPs are those of products; factorisations show in the calls and in "written", the bytes of
the results of all operations but views. "Saved" is what autograd keeps between forward and backward of the weight.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import trysquare as ts
from benchmarks import results
from benchmarks.measure import aten_calls, flops, saved_bytes, weight_gradient, weight_of, written_bytes
from benchmarks.report import Part, Table
from trysquare.nn.linalg.fourier import RESPONSES

RECORDED = results.ROOT / "tests" / "benchmarks" / "counts.json"
# Of the map, where a method depends on it.
SIZE = 8

LAYERS: dict[str, Callable[[], nn.Module]] = {
    **{f"square, k{k}": lambda k=k: ts.OrthoConv2d(32, 32, k) for k in range(1, 6)},
    "square, k3, 256 channels": lambda: ts.OrthoConv2d(256, 256, 3),
    "wider": lambda: ts.OrthoConv2d(16, 48, 3),
    "narrower": lambda: ts.OrthoConv2d(48, 16, 3),
    "stride 2, k3": lambda: ts.OrthoConv2d(16, 32, 3, stride=2),
    "stride 2, k4": lambda: ts.OrthoConv2d(16, 64, 4, stride=2),
    "stride 2, parsimonious": lambda: ts.OrthoConv2d(32, 32, 3, stride=2, parsimonious=True),
    "4 groups": lambda: ts.OrthoConv2d(32, 32, 3, groups=4),
    "depthwise, multiplier 2": lambda: ts.OrthoConv2d(32, 64, 3, groups=32),
    "dilation 2": lambda: ts.OrthoConv2d(32, 32, 3, dilation=2),
    "transposed, stride 2": lambda: ts.OrthoConvTranspose2d(32, 16, 3, stride=2),
    "1-D, k3": lambda: ts.OrthoConv1d(32, 32, 3),
    "1-D, k5, stride 2": lambda: ts.OrthoConv1d(16, 32, 5, stride=2),
    "3-D, k3": lambda: ts.OrthoConv3d(16, 16, 3),
    "3-D, k2, stride 2": lambda: ts.OrthoConv3d(4, 32, 2, stride=2),
    "linear": lambda: ts.OrthoLinear(64, 32),
    **{f"method {name}": lambda name=name: ts.OrthoConv2d(16, 16, 3, method=name) for name in ts.METHODS},
    **{
        f"method {name}, 8 x 8": lambda name=name: ts.FourierOrthoConv2d(8, 16, 3, 2, method=name) for name in RESPONSES
    },
    **{
        f"orthogonalizer {name}": lambda name=name: ts.OrthoLinear(64, 32, orthogonalizer=name)
        for name in ts.linalg.ORTHOGONALIZERS
    },
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--record", action="store_true", help="make these numbers the limit of the tests")


def count(name: str) -> dict[str, int]:
    """Return the counts of one of ``LAYERS``, the same in every run."""
    torch.manual_seed(0)
    layer = LAYERS[name]()
    call = weight_gradient(layer, SIZE)
    return {
        "flops": flops(call),
        "calls": aten_calls(call),
        "saved": saved_bytes(lambda: weight_of(layer, SIZE)),
        "written": written_bytes(call),
    }


def excess(found: dict[str, int], limit: dict[str, int]) -> dict[str, str]:
    """Return what is above its limit, with both numbers."""
    return {key: f"{found[key]} > {limit[key]}" for key in limit if found[key] > limit[key]}


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the counts of all layers; they become the limit if asked for."""
    found = {name: count(name) for name in LAYERS}
    if arguments.record:
        results.write(found, RECORDED)
    return found


def describe(data: dict[str, Any]) -> list[Part]:
    kinds = {"flops": "FLOPs", "calls": "aten calls", "saved": "saved bytes", "written": "written bytes"}
    rows = [[name, *(f"{row[kind]:,}" for kind in kinds)] for name, row in data.items()]
    return [Table(["layer", *kinds.values()], rows)]
