"""Norms of convolutions: time and value of several ways, next to the true value.

    python benchmarks/spectrum.py

Columns: seconds (median of 3), the value, and by how much it is above (+) or below (-) the true norm, which is that of
a dense matrix or of all frequencies. A value below the truth makes a certificate wrong: it is marked, and the last
lines count for each way how often that happened. ``orthogonium``'s ``get_conv_sv`` is shown where it is installed;
torch's ``spectral_norm`` estimates the norm of the reshaped weight, which is not that of the convolution. Gram
iteration, ours and that of ``get_conv_sv``, knows nothing of padding that repeats outputs (the last layer).
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable

import torch
from torch import nn
from torch.nn.utils import parametrizations

import trysquare as ts
from measure import interleaved
from trysquare.linalg.bounds import circular_gram_bound, kernel_gram_bound
from trysquare.linalg.spectrum import polyphase

try:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from orthogonium.layers.conv.singular_values import get_conv_sv
except ImportError:
    get_conv_sv = None

# How far the true norm itself may be off.
ROUNDING = 1e-7

Layer = tuple[str, nn.Conv2d, int]


def layers() -> list[Layer]:
    """Plain, orthogonal, strided, grouped, circular, zero-padded and over-padded ones."""
    torch.manual_seed(0)
    circular = {"padding": 1, "padding_mode": "circular"}
    return [
        ("16, k3, circular", nn.Conv2d(16, 16, 3, **circular), 16),
        ("64, k3, circular", nn.Conv2d(64, 64, 3, **circular), 32),
        ("64 -> 128, s2, circular", nn.Conv2d(64, 128, 3, 2, **circular), 32),
        ("32, 4 groups, circular", nn.Conv2d(32, 32, 3, groups=4, **circular), 16),
        ("64, orthogonal", ts.to_torch(ts.OrthoConv2d(64, 64, 3)), 32),
        ("16, k3, zeros", nn.Conv2d(16, 16, 3, padding=1), 16),
        ("64, k3, zeros", nn.Conv2d(64, 64, 3, padding=1), 16),
        ("64, k3, zeros, 3x3", nn.Conv2d(64, 64, 3, padding=1), 3),
        ("16, circular padding 2", nn.Conv2d(16, 16, 3, padding=2, padding_mode="circular"), 16),
    ]  # fmt: skip


def ways(layer: nn.Conv2d, size: int) -> dict[str, Callable[[], float]]:
    """Every way to a norm that applies to the layer."""
    shape = (layer.in_channels, size, size)
    convolution = polyphase(layer.weight.double(), layer.stride, layer.dilation, layer.groups)
    coarse = tuple(size // s for s in layer.stride)
    circular = layer.padding_mode == "circular"
    found: dict[str, Callable[[], float]] = {
        "spectral_norm_bound": lambda: ts.spectral_norm_bound(layer, shape),
        "... for every size": lambda: ts.spectral_norm_bound(layer),
        "Gram, kernel (3)": lambda: kernel_gram_bound(convolution, 3),
        "torch spectral_norm": lambda: torch_estimate(layer),
    }
    if circular:
        found["Gram, frequencies (6)"] = lambda: circular_gram_bound(convolution, coarse)
    if get_conv_sv is not None:
        steps = 6 if circular else 3  # with zeros its kernels double at each step: 6 take minutes
        found[f"orthogonium get_conv_sv ({steps})"] = lambda: float(
            get_conv_sv(layer, n_iter=steps, return_stab_rank=False, imsize=size)
        )
    return found


def torch_estimate(layer: nn.Conv2d) -> float:
    """The norm by which torch's ``spectral_norm`` divides the weight, after 20 power iterations."""
    copy = nn.Conv2d(layer.in_channels, layer.out_channels, layer.kernel_size, groups=layer.groups, bias=False)
    copy.weight.data.copy_(layer.weight)
    normal = parametrizations.spectral_norm(copy, n_power_iterations=20)
    with torch.no_grad():
        return float(layer.weight.norm() / normal.weight.norm())


def main() -> None:
    """Print the table, then who is below the truth."""
    tried, below = Counter[str](), Counter[str]()
    print(f"{'layer':<26}{'way':<30}{'seconds':>9}{'value':>12}{'error':>11}")
    for name, layer, size in layers():
        true = ts.extreme_singular_values(layer, (layer.in_channels, size, size), tolerance=1e-8).largest
        print(f"{name:<26}{'true norm':<30}{'':>9}{true:>12.6f}")
        for way, call in ways(layer, size).items():
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    value, seconds = call(), interleaved({way: call}, 3)[way]
            except Exception as error:
                print(f"{'':<26}{way:<30}  {type(error).__name__}: {str(error)[:50]}")
                continue
            wrong = value < true * (1 - ROUNDING)
            who = way.split(" (")[0]
            tried[who] += 1
            below[who] += wrong
            mark = "  UNDER-ESTIMATES" if wrong else ""
            print(f"{'':<26}{way:<30}{seconds:>9.3f}{value:>12.6f}{value / true - 1:>+11.1e}{mark}", flush=True)
    print("\nbelow the true norm, on how many of the layers:")
    for who, layers_tried in tried.items():
        print(f"  {who:<30}{below[who]} of {layers_tried}")


if __name__ == "__main__":
    if get_conv_sv is None:
        print("orthogonium is not installed (pip install -c constraints.txt '.[bench]'): without it\n")
    main()
