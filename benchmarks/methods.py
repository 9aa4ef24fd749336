"""Cost of every method and block against a plain ``nn.Conv2d`` of the same shape.

    python benchmarks/methods.py [--channels 32] [--size 16] [--batch 8] [--picture methods.png]

For each method: building the weight (forward and backward of the weight alone; in the Fourier domain the response at
that image size; all kernels of a block), one training step (forward and backward of the layer), the forward pass in
eval mode, and the bytes that autograd keeps for backward. Layers are measured in turns; times depend on the machine, so
look at the ratios to ``nn.Conv2d``. The picture needs matplotlib.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import trysquare as ts
from measure import interleaved, saved_bytes
from trysquare.linalg.fourier import RESPONSES

COLUMNS = ("build ms", "step ms", "ratio", "eval ms", "ratio", "saved MB", "ratio")


def layers(channels: int, stride: int) -> dict[str, nn.Module]:
    """The plain layer first, then every method, ``channels`` to ``channels * stride`` with a 3x3 kernel."""
    shape = (channels, channels * stride, 3, stride)
    made: dict[str, nn.Module] = {"nn.Conv2d": nn.Conv2d(*shape, padding=1, padding_mode="circular")}
    made |= {name: ts.OrthoConv2d(*shape, method=name) for name in ts.METHODS}
    made |= {name: ts.FourierOrthoConv2d(*shape, method=name) for name in RESPONSES}
    if stride == 1:  # these keep the shape
        made |= {"SLL": ts.SLLBlock2d(channels), "CPL": ts.CPLBlock2d(channels)}
    made |= {"SLL-AOC": ts.SLLAOCBlock2d(*shape), "Sandwich-AOC": ts.SandwichAOCConv2d(*shape)}
    return made | {"Sandwich": ts.SandwichConv2d(*shape)}


def build(layer: nn.Module, size: int) -> Callable[[], Any]:
    """Make what the layer convolves with, and take its gradient."""
    if hasattr(layer, "response"):
        coarse = (size // layer.stride[0], size // layer.stride[1])

        def call() -> None:
            made = layer.response(coarse)
            sum(part.abs().sum() for part in (made if isinstance(made, tuple) else (made,))).backward()

        return call
    if hasattr(layer, "free_tensors"):
        direction = torch.randn_like(layer.weight)
        return lambda: layer.weight.backward(direction)
    return lambda: None


def evaluate(layer: nn.Module, x: torch.Tensor) -> Callable[[], Any]:
    """Forward pass without gradients, in eval mode."""

    def call() -> None:
        layer.eval()
        with torch.no_grad():
            layer(x)

    return call


def train(layer: nn.Module, x: torch.Tensor) -> Callable[[], Any]:
    """Forward and backward pass."""

    def call() -> None:
        layer.train()
        layer(x).sum().backward()

    return call


def measure(channels: int, stride: int, size: int, batch: int, rounds: int) -> dict[str, tuple[float, ...]]:
    """Columns of the table for every layer."""
    made = layers(channels, stride)
    x = torch.randn(batch, channels, size, size)
    builds = interleaved({name: build(layer, size) for name, layer in made.items()}, rounds)
    steps = interleaved({name: train(layer, x) for name, layer in made.items()}, rounds)
    evals = {}
    for name, layer in made.items():  # one after the other: switching the mode forgets the cached weight
        evals |= interleaved({name: evaluate(layer, x)}, 3 * rounds)
    kept = {name: saved_bytes(lambda layer=layer: layer.train()(x)) / 1e6 for name, layer in made.items()}
    plain = "nn.Conv2d"
    return {
        name: (
            1e3 * builds[name], 1e3 * steps[name], steps[name] / steps[plain], 1e3 * evals[name],
            evals[name] / evals[plain], kept[name], kept[name] / kept[plain],
        )
        for name in made
    }  # fmt: skip


def print_table(title: str, results: dict[str, tuple[float, ...]]) -> None:
    """One line for each layer."""
    print(f"\n{title:<28}" + "".join(f"{column:>10}" for column in COLUMNS))
    for name, values in results.items():
        cells = (f"{v:>9.1f}x" if c == "ratio" else f"{v:>10.2f}" for c, v in zip(COLUMNS, values, strict=True))
        print(f"{name:<28}" + "".join(cells), flush=True)


def draw(results: dict[str, dict[str, tuple[float, ...]]], path: str) -> None:
    """Ratios to the plain layer as bars, on a logarithmic axis."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    kinds = {"training step": 2, "eval forward": 4, "saved for backward": 6}
    figure, axes = pyplot.subplots(1, len(results), figsize=(6 * len(results), 4.5), sharey=True, squeeze=False)
    for axis, (title, rows) in zip(axes[0], results.items(), strict=True):
        names = [name for name in rows if name != "nn.Conv2d"]
        for shift, (kind, column) in enumerate(kinds.items()):
            heights = [rows[name][column] for name in names]
            axis.bar([i + 0.27 * (shift - 1) for i in range(len(names))], heights, width=0.27, label=kind)
        axis.set_xticks(range(len(names)), names, rotation=45)
        axis.set_yscale("log")
        axis.axhline(1, color="black", linewidth=0.8)
        axis.set_title(title)
    axes[0][0].set_ylabel("times nn.Conv2d")
    axes[0][0].legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> None:
    """Measure, print, draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in (("channels", 32), ("size", 16), ("batch", 8), ("rounds", 7)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--picture", help="file to draw the ratios into")
    arguments = parser.parse_args()
    results = {}
    for stride in (1, 2):
        title = f"{arguments.channels} -> {arguments.channels * stride}, 3x3, stride {stride}"
        results[title] = measure(arguments.channels, stride, arguments.size, arguments.batch, arguments.rounds)
        print_table(title, results[title])
    if arguments.picture:
        draw(results, arguments.picture)


if __name__ == "__main__":
    main()
