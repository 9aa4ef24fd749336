"""Block convolution: full convolution against products of taps, and a chain one by one against a tree.

python benchmarks/compose.py
"""

from __future__ import annotations

from functools import reduce

import torch
from torch import Tensor

from measure import interleaved
from trysquare.linalg import compose
from trysquare.linalg.kernels import compose_by_convolution, compose_by_taps


def tree(kernels: list[Tensor]) -> Tensor:
    """Compose neighbours in one batch until one kernel is left (an associative scan)."""
    while len(kernels) > 1:
        dims = kernels[0].ndim - 2
        pairs = compose(torch.stack(kernels[0:-1:2]), torch.stack(kernels[1::2]), dims=dims)
        kernels = [*pairs.unbind(), *kernels[len(kernels) - len(kernels) % 2 :]]
    return kernels[0]


def main() -> None:
    """Print both comparisons, forward and backward, as ratios of one run."""
    print(f"{'kernels':<38}{'full convolution ms':>20}{'products of taps ms':>20}{'ratio':>8}")
    for channels, k, size in (
        (16, (3, 3), (3, 3)),
        (64, (2, 2), (2, 2)),
        (64, (3, 3), (3, 3)),
        (64, (5, 5), (5, 5)),
        (256, (2, 2), (2, 2)),
        (256, (3, 3), (3, 3)),
        (256, (2, 2), (5, 5)),
        (64, (3,), (3,)),
        (64, (7,), (7,)),
        (32, (2, 2, 2), (2, 2, 2)),
    ):
        after = torch.randn(1, channels, channels, *k, requires_grad=True)
        before = torch.randn(1, channels, channels, *size, requires_grad=True)
        ways = {"conv": compose_by_convolution, "taps": compose_by_taps}
        calls = {name: lambda way=way: way(after, before).sum().backward() for name, way in ways.items()}  # noqa: B023
        s = interleaved(calls, 20)
        name = f"{channels} channels, {k} after {size}"
        print(f"{name:<38}{1e3 * s['conv']:>20.2f}{1e3 * s['taps']:>20.2f}{s['taps'] / s['conv']:>7.2f}x", flush=True)

    print(f"\n{'chain of 2x2 kernels':<38}{'one by one ms':>20}{'tree ms':>20}{'ratio':>8}")
    for channels, count in ((16, 4), (16, 8), (64, 4), (64, 8), (128, 4)):
        kernels = [torch.randn(channels, channels, 2, 2, requires_grad=True) for _ in range(count)]
        calls = {
            "chain": lambda: reduce(compose, kernels).sum().backward(),  # noqa: B023
            "tree": lambda: tree(kernels).sum().backward(),  # noqa: B023
        }
        s = interleaved(calls, 10)
        name = f"{count} of {channels} channels"
        print(f"{name:<38}{1e3 * s['chain']:>20.2f}{1e3 * s['tree']:>20.2f}{s['tree'] / s['chain']:>7.2f}x", flush=True)


if __name__ == "__main__":
    main()
