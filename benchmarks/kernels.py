"""Cost of building orthogonal kernels, side by side with ``orthogonium`` where that is installed.

    python benchmarks/kernels.py [--quick]

Every row is measured in one run with the two libraries in turns. FLOPs, calls and bytes do not depend on the machine;
times do, so look at their ratio.
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import trysquare as ts
from measure import aten_calls, flops, interleaved, saved_bytes

try:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from orthogonium.layers import AdaptiveOrthoConv2d
except ImportError:
    AdaptiveOrthoConv2d = None


def forward_and_backward(layer: nn.Module) -> Callable[[], Any]:
    """Build the kernel and take its gradient, nothing else."""
    direction = torch.randn_like(layer.weight)
    return lambda: layer.weight.backward(direction)


def square_kernels(quick: bool) -> None:
    """Cost of ``c -> c`` kernels."""
    print(f"{'square kernel':<16}{'library':<14}{'FLOPs/c^3':>10}{'calls':>7}{'saved/weight':>13}{'ms':>9}{'ratio':>8}")
    for channels, size in ((64, 3), (128, 3), (128, 5)) if quick else ((64, 3), (128, 3), (256, 3), (512, 3), (128, 5)):
        layers: dict[str, nn.Module] = {"trysquare": ts.OrthoConv2d(channels, channels, size, bias=False)}
        if AdaptiveOrthoConv2d is not None:
            layers["orthogonium"] = AdaptiveOrthoConv2d(
                channels, channels, size, padding=size // 2, padding_mode="circular", bias=False
            )
        calls = {name: forward_and_backward(layer) for name, layer in layers.items()}
        rounds = 15 if channels > 256 else 40
        seconds = interleaved(calls, rounds)
        for name, layer in layers.items():
            kept = saved_bytes(lambda layer=layer: layer.weight) / (layer.weight.numel() * 4)
            print(
                f"{f'{channels}, {size}x{size}':<16}{name:<14}{flops(calls[name]) / channels**3:>10.1f}"
                f"{aten_calls(calls[name]):>7}{kept:>13.2f}{1e3 * seconds[name]:>9.1f}"
                f"{seconds[name] / seconds['trysquare']:>7.1f}x",
                flush=True,
            )


def grouped_kernels() -> None:
    """Calls for many small groups against one."""
    one, many = (ts.OrthoConv2d(2 * groups, 2 * groups, 3, groups=groups) for groups in (1, 256))
    counts = [aten_calls(forward_and_backward(layer)) for layer in (one, many)]
    print(f"\n1 group of 2 channels: {counts[0]} calls; 256 groups of 2 channels: {counts[1]} calls")


def evaluation() -> None:
    """Eval forward of a layer against the plain convolution with the same weight and padding."""
    print(f"\n{'eval forward':<36}{'trysquare ms':>14}{'nn.Conv2d ms':>14}{'ratio':>8}")
    for channels, size, batch in ((64, 32, 8), (128, 16, 8), (256, 14, 8)):
        layer = ts.OrthoConv2d(channels, channels, 3).eval()
        plain = ts.to_torch(layer)
        x = torch.randn(batch, channels, size, size)
        with torch.no_grad():
            seconds = interleaved({"ours": lambda: layer(x), "plain": lambda: plain(x)}, 100)  # noqa: B023
        print(
            f"{f'{batch} x {channels} x {size} x {size}':<36}{1e3 * seconds['ours']:>14.2f}"
            f"{1e3 * seconds['plain']:>14.2f}{seconds['ours'] / seconds['plain']:>7.3f}x",
            flush=True,
        )


def orthogonalizers() -> None:
    """Time of each way to an orthonormal matrix, forward and backward."""
    print(f"\n{'orthonormal matrix':<20}" + "".join(f"{name:>15}" for name in ts.linalg.ORTHOGONALIZERS))
    for shape in ((64, 64), (128, 512), (512, 512)):
        matrix = torch.nn.init.orthogonal_(torch.empty(shape)).requires_grad_()
        direction = torch.randn(shape)
        calls = {
            name: lambda apply=entry.apply: apply(matrix).backward(direction)  # noqa: B023
            for name, entry in ts.linalg.ORTHOGONALIZERS.items()
        }
        seconds = interleaved(calls, 15)
        print(f"{shape!s:<20}" + "".join(f"{1e3 * s:>12.2f} ms" for s in seconds.values()), flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small kernels only")
    arguments = parser.parse_args()
    if AdaptiveOrthoConv2d is None:
        print("orthogonium is not installed (pip install -c constraints.txt '.[bench]'): our figures only\n")
    square_kernels(arguments.quick)
    grouped_kernels()
    evaluation()
    orthogonalizers()
