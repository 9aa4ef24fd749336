"""Write ``docs/methods.md``: what each method can do, every cell found out by running the layer.

    python docs/generate_methods.py

A cell is a tick only if the layer was built, applied to every basis vector in float64, and its singular values are what
the first column says; for the blocks, which are not linear, those of dense Jacobians at several points. For each cross
and each reservation a footnote names the reason.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import trysquare as ts
from trysquare.nn.linalg.fourier import RESPONSES

TARGET = Path(__file__).parent / "methods.md"
PLAIN = {1: ts.OrthoConv1d, 2: ts.OrthoConv2d, 3: ts.OrthoConv3d}
TRANSPOSED = {1: ts.OrthoConvTranspose1d, 2: ts.OrthoConvTranspose2d, 3: ts.OrthoConvTranspose3d}
FOURIER = {1: ts.FourierOrthoConv1d, 2: ts.FourierOrthoConv2d, 3: ts.FourierOrthoConv3d}
FOURIER_TRANSPOSED = {
    1: ts.FourierOrthoConvTranspose1d,
    2: ts.FourierOrthoConvTranspose2d,
    3: ts.FourierOrthoConvTranspose3d,
}
BLOCKS = {
    "SLL": "SLLBlock",
    "CPL": "CPLBlock",
    "SLL-AOC": "SLLAOCBlock",
    "Sandwich": "SandwichConv",
    "Sandwich-AOC": "SandwichAOCConv",
}
KEEP_SHAPE = ("SLLBlock", "CPLBlock")
POINTS = 4
# column: cases (transposed, channels, kernel, options, sizes of the input) that all have to work
FEATURES: dict[str, list[tuple[bool, tuple[int, int], Any, dict[str, Any], tuple[int, ...]]]] = {
    "channel change": [
        (False, (5, 3), 3, {}, (4, 4)),
        (False, (3, 5), 3, {}, (4, 4)),
        (False, (3, 4), 3, {}, (6,)),
    ],
    "stride": [
        (False, (2, 8), 3, {"stride": 2}, (6, 6)),
        (False, (3, 4), 3, {"stride": 2}, (6, 6)),
        (False, (2, 11), 3, {"stride": (2, 2)}, (6, 6)),
    ],
    "transposed": [
        (True, (4, 4), 3, {}, (4, 4)),
        (True, (8, 2), 3, {"stride": 2}, (3, 3)),
        (True, (4, 6), 3, {"groups": 2, "stride": (2, 1)}, (2, 3)),
    ],
    "groups": [(False, (4, 4), 3, {"groups": 2}, (4, 4)), (False, (4, 6), 3, {"groups": 2, "stride": 2}, (4, 4))],
    "dilation": [
        (False, (4, 4), 3, {"dilation": 2}, (5, 5)),
        (False, (2, 8), 3, {"dilation": 3, "stride": 2}, (6, 6)),
        (False, (4, 4), 3, {"dilation": (1, 2), "groups": 2}, (4, 5)),
    ],
    "1-D": [(False, (4, 4), 3, {}, (6,))],
    "2-D": [(False, (4, 4), 3, {}, (3, 9))],
    "3-D": [(False, (2, 2), (1, 3, 3), {}, (2, 3, 3))],
}
NOTES = {
    "rko": "`rko` is orthogonal exactly where no input is read by two windows, `k <= s / gcd(s, d)` on each axis. "
    "Elsewhere the reshaped matrix is not an orthogonal kernel: a row must be orthogonal to its own shifts too "
    "(`W Wᵀ = I` asks for it at every lag), which an orthonormal matrix does not give. It is divided by the square "
    "root of the number of windows that share an input, and 1-Lipschitz by the bound in `parametrizations/rko.py`.",
    "aol": "`aol` rescales a free kernel by the row sums of `|WᵀW|`; the lemma behind it (diagonal dominance, "
    "`parametrizations/aol.py`) bounds singular values from above only. They are all 1 if and only if the free kernel "
    "is orthogonal up to the scale of its channels.",
    "spectral": "`spectral` divides a free kernel by one upper bound of its norm (`parametrizations/spectral.py`), so "
    "that its singular values stay in proportion: the largest is at most 1, the others what training makes them.",
    "soc": "`soc` is a polynomial near an exponential. A polynomial of modulus 1 on an interval of the "
    "imaginary axis is constant, so none is exactly orthogonal for every skew kernel; the layer states a certified "
    "error instead (`layer.truncation_error`), which more `terms` make as small as wanted. `kernel_size` "
    "is that of the skew kernel and must be odd: a skew kernel has a tap at `-j` for each tap at `j`. On a circular "
    "domain, where that takes fewer products, the terms are applied one after the other; the large kernel is built "
    "for certificates and export.",
    "sc-fac": "`sc-fac` kernels are separable: `K_ij = A_i M B_j`. Checked by the rank of the taps as a block matrix.",
    "manifold": "`manifold` has the kernels of `aoc`, from orthonormal matrices and angles (the CS decomposition, in "
    "`parametrizations/manifold.py`). It is for `ts.optim.RiemannianAdam`, which keeps the matrices orthonormal, so "
    "that training passes orthonormalise nothing. What anything else has written to is orthonormalised where it is "
    "used.",
    "fourier": "A convolution built from free blocks at each frequency has a kernel as large as the image (a kernel of "
    "`k` taps has only `prod(k)` degrees of freedom for the blocks of all frequencies), so it depends on the size of "
    "the image: the blocks are rebuilt when that changes, and `layer.at_size(h, w)` exports plain layers for one size.",
    "eco": "`eco` has no dilation to choose: its response repeats every `k` frequencies, and a response of period `k` "
    "belongs to taps exactly `size / k` apart (the Poisson summation formula on a circular domain): at most `prod(k)` "
    "of them, all over the image. On an axis whose size `k` does not divide, the next larger divisor takes its place "
    "(`layer.equivalent_kernel_size(h, w)` tells).",
    "block": "Blocks with an activation of slopes `D` between 0 and 1 inside, 1-Lipschitz for every `D`; checked on "
    "dense Jacobians. None is orthogonal: the eigenvalues of `I - 2 MᵀDM` are 1 and -1 only where `MᵀDM` is a "
    "projector (orthogonal kernels around it, in `SLL-AOC`, do not change that), and a sandwich `2 AᵀDB` "
    "loses what `D = 0` cuts off. A transposed block has, at the same slopes, the transposed Jacobian.",
    "step": "`x - 2 Kᵀ σ(K x + b)` adds to its own input, so that its output has the input's channels and size: there "
    "is neither a change of channels nor a stride, alone or with groups or dilation. `SLL-AOC` puts orthogonal kernels "
    "around it, which change both. Its Jacobian `I - 2 KᵀDK` is symmetric (checked): the block is its own transpose.",
    "sandwich": "`Sandwich` makes `[A B]` at each frequency, so its kernels are as large as the image, and plain "
    "layers are the same for one size only (`layer.at_size(h, w)`); `Sandwich-AOC` has kernels of size `k`.",
}


@dataclass
class Row:
    """A method, and what was found out about it."""

    name: str
    make: Callable[..., Any]
    export: Callable[[Any, tuple[int, ...]], nn.Module]
    notes: list[str] = field(default_factory=list)
    linear: bool = True
    # Whether the output has the input's shape, whatever the arguments.
    keeps_shape: bool = False


def _explicit(name: str) -> Callable[..., Any]:
    def make(transposed: bool, channels: tuple[int, int], kernel: Any, options: dict[str, Any], dims: int) -> Any:
        layers = TRANSPOSED if transposed else PLAIN
        return layers[dims](*channels, kernel, method=name, dtype=torch.float64, **options)

    return make


def _fourier(name: str) -> Callable[..., Any]:
    def make(transposed: bool, channels: tuple[int, int], kernel: Any, options: dict[str, Any], dims: int) -> Any:
        layers = FOURIER_TRANSPOSED if transposed else FOURIER
        return layers[dims](*channels, kernel, method=name, dtype=torch.float64, **options)

    return make


def _block(name: str) -> Callable[..., Any]:
    def make(transposed: bool, channels: tuple[int, int], kernel: Any, options: dict[str, Any], dims: int) -> Any:
        numbers: tuple[int, ...] = channels
        if name in KEEP_SHAPE:
            options = options if channels[0] == channels[1] else {"out_channels": channels[1], **options}
            numbers, transposed = channels[:1], False
        block = getattr(ts, f"{name}{'Transpose' if transposed else ''}{dims}d")
        try:
            return block(*numbers, kernel_size=kernel, dtype=torch.float64, activation=nn.Softplus(), **options)
        except TypeError as error:
            raise ValueError(f"{name} has no {options}: {error}") from error

    return make


def _exported(layer: Any, sizes: tuple[int, ...]) -> nn.Module:
    return layer.at_size(*sizes) if hasattr(layer, "at_size") else ts.to_torch(layer)  # type: ignore[no-any-return]


def rows() -> list[Row]:
    """One row for each method of the registries, and for each block."""
    explicit = [Row(name, _explicit(name), _exported, [name] if name in NOTES else []) for name in ts.METHODS]
    fourier = [Row(name, _fourier(name), _exported, ["fourier"] + ["eco"] * (name == "eco")) for name in RESPONSES]
    extra = {"SLL": ["step"], "CPL": ["step"], "Sandwich": ["sandwich"]}
    blocks = [
        Row(name, _block(cls), _exported, ["block", *extra.get(name, [])], False, fixed)
        for name, cls in BLOCKS.items()
        for fixed in [cls in KEEP_SHAPE]
    ]
    return explicit + fourier + blocks


def singular_values(row: Row, layer: nn.Module, shape: tuple[int, ...]) -> Tensor:
    """From the response to every basis vector, or from Jacobians at random points, small and large."""
    if not row.linear:
        points = (10**n * torch.randn(shape).double() for n in range(POINTS))
        return torch.cat([torch.linalg.svdvals(_jacobian(layer, point)) for point in points])
    with torch.no_grad():
        basis = torch.eye(math.prod(shape), dtype=torch.float64).view(-1, *shape)
        zero = layer(torch.zeros(1, *shape, dtype=torch.float64))
        return torch.linalg.svdvals((layer(basis) - zero).flatten(1))


def _jacobian(layer: nn.Module, x: Tensor) -> Tensor:
    frozen = layer.eval().requires_grad_(False)
    return torch.autograd.functional.jacobian(lambda point: frozen(point.view(1, *x.shape)).flatten(), x.flatten())


def is_orthogonal(row: Row, layer: nn.Module, shape: tuple[int, ...]) -> bool:
    """Whether every singular value is 1, up to what the layer states."""
    error = 1e-11 + getattr(layer, "truncation_error", 0.0)
    return bool((singular_values(row, layer, shape) - 1).abs().max() < error)


def works(row: Row, orthogonal: bool, cases: list[Any]) -> bool:
    """Whether all cases can be built and have the spectrum that they should have."""
    for transposed, channels, kernel, options, sizes in cases:
        try:
            layer = row.make(transposed, channels, kernel, options, len(sizes))
        except ValueError:
            return False
        shape = (channels[0], *sizes)
        values = singular_values(row, layer, shape)
        if values.max() > 1 + 1e-11 + getattr(layer, "truncation_error", 0.0):
            return False
        if orthogonal and not is_orthogonal(row, layer, shape):
            return False
    return True


def feature_cell(row: Row, orthogonal: bool, feature: str) -> str:
    """Whether all cases of a feature work; those with a step are another feature's for blocks that have none."""
    cases = FEATURES[feature]
    if row.keeps_shape and feature in ("groups", "dilation"):
        cases = [case for case in cases if case[1][0] == case[1][1] and "stride" not in case[3]]
    if row.keeps_shape and feature == "transposed":
        return "itself" if works(row, orthogonal, cases[:1]) and is_symmetric(row) else "✗"
    return "✓" if works(row, orthogonal, cases) else "✗"


def is_symmetric(row: Row) -> bool:
    """Whether dense Jacobians are their own transposes."""
    matrix = _jacobian(row.make(False, (4, 4), 3, {}, 2), torch.randn(4, 4, 5).double())
    return torch.allclose(matrix, matrix.T, atol=1e-12)


def orthogonal_cell(row: Row) -> tuple[str, bool]:
    """What the spectrum is without stride, and where kernel = stride."""
    layer = row.make(False, (4, 4), 3, {}, 2)
    error = getattr(layer, "truncation_error", 0.0)
    if is_orthogonal(row, layer, (4, 3, 9)):
        return (f"to {error:.0e}" if error else "✓"), True
    try:
        patches = row.make(False, (2, 18), 3, {"stride": 3}, 2)
    except ValueError:
        return "✗", False
    return ("where kernel = stride" if is_orthogonal(row, patches, (2, 6, 6)) else "✗"), False


def size_cell(row: Row) -> str:
    """Size of the kernel of a layer that is asked for ``k``."""
    layers = [row.make(False, (4, 4), k, {}, 2) for k in (3, 5)]
    if hasattr(layers[0], "equivalent_kernel_size"):
        return _image_size_cell(layers[0])
    if not row.linear:
        return _block_size_cell(layers)
    small, large = (layer.weight.shape[-1] for layer in layers)
    if (small, large) != (3, 5):
        return f"{(large - small) // 2} (k - 1) + 1"
    taps = layers[0].weight.detach().permute(0, 2, 1, 3).reshape(12, 12)
    return "k, separable" if torch.linalg.matrix_rank(taps, atol=1e-9) == 4 else "k"


def _image_size_cell(layer: Any) -> str:
    """Where the kernel on one image is not 0."""
    taps = (layer.at_size(6, 9)[1].weight.abs().amax((0, 1)) > 1e-9).nonzero().tolist()
    if taps == [[i, j] for i in range(0, 6, 2) for j in range(0, 9, 3)] and layer.equivalent_kernel_size(6, 9) == (
        3,
        3,
    ):
        return "k taps, size / k apart"
    return "image" if len(taps) == 54 and layer.equivalent_kernel_size(6, 9) == (6, 9) else "?"


@torch.no_grad()
def _block_size_cell(layers: list[Any]) -> str:
    """Sizes of the convolutions that a block is exported to, or of those that its response amounts to."""
    if hasattr(layers[0], "at_size"):
        kinds = nn.Conv2d | nn.ConvTranspose2d
        kernels = [m.weight for m in layers[0].at_size(6, 8).modules() if isinstance(m, kinds)]
        full = all(tuple(k.shape[2:]) == (6, 8) and bool((k.abs().amax((0, 1)) > 1e-9).all()) for k in kernels)
        return "image" if full and len(kernels) == 2 else "?"
    plain = [[m.kernel_size for m in ts.to_torch(layer).modules() if isinstance(m, nn.Conv2d)] for layer in layers]
    return "k" if [set(sizes) for sizes in plain] == [{(3, 3)}, {(5, 5)}] else "?"


@torch.no_grad()
def exports(row: Row) -> str:
    """Whether plain torch layers compute the same."""
    cases: list[Any] = [
        (False, (4, 4), {}), (False, (4, 6), {}), (False, (3, 8), {"stride": 2}), (True, (4, 6), {}),
        (True, (8, 2), {"stride": 2}), (True, (4, 6), {"groups": 2}),
    ]  # fmt: skip
    for transposed, channels, options in cases[:1] if row.keeps_shape else cases:
        layer = row.make(transposed, channels, 3, options, 2)
        x = torch.randn(1, channels[0], 20, 20, dtype=torch.float64)
        plain = row.export(layer, (20, 20))
        if not torch.allclose(plain(x), layer(x)) or any(isinstance(m, type(layer)) for m in plain.modules()):
            return "✗"
    return "one size" if hasattr(layer, "at_size") else "✓"


def table() -> str:
    """The table in Markdown, with footnotes."""
    titles = ["method", "orthogonal", "kernel", *FEATURES, "export"]
    lines = ["| " + " | ".join(titles) + " |", "|" + "---|" * len(titles)]
    used: list[str] = []
    for row in rows():
        torch.manual_seed(0)
        exact, orthogonal = orthogonal_cell(row)
        cells = [exact, size_cell(row)]
        cells += [feature_cell(row, orthogonal, feature) for feature in FEATURES]
        cells.append(exports(row))
        used += [note for note in row.notes if note not in used]
        marks = "".join(f"[{used.index(note) + 1}]" for note in row.notes)
        lines.append("| " + " | ".join([f"`{row.name}` {marks}".strip(), *cells]) + " |")
    notes = [f"{index}. {NOTES[note]}" for index, note in enumerate(used, start=1)]
    return "\n".join([*lines, "", *notes])


def page() -> str:
    """The whole page."""
    return f"""# Methods

Made by `python docs/generate_methods.py`, which builds and runs each layer; do not edit. A tick means: built natively,
singular values found from the response to every basis vector in float64, all of them 1 (within 1e-11, or what the
column *orthogonal* says), or at most 1 for the methods that are 1-Lipschitz. A geometry in which no orthogonal kernel
exists is refused by every orthogonal method, for the reason in `geometry.py`.

The first {len(ts.METHODS)} are `OrthoConv1d/2d/3d` and `OrthoConvTranspose1d/2d/3d` with `method=...`; the next
{len(RESPONSES)} are `FourierOrthoConv1d/2d/3d` and `FourierOrthoConvTranspose1d/2d/3d` with `method=...`. The last
{len(BLOCKS)} are blocks with an activation inside: {", ".join(f"`{cls}1d/2d/3d`" for cls in BLOCKS.values())},
and `...Transpose1d/2d/3d` of the last three.

{table()}

`ts.optim.RiemannianAdam` trains orthonormal matrices of any shape, those of layers with `method="manifold"` above all.
ProjUNN-T is not a layer but an optimizer, `ProjUNN`, for parameters that are orthogonal themselves: square matrices,
and the blocks of a convolution in the Fourier domain. A parameter that is moved along the orthogonal group must be
square (a group has one identity), so it has neither a stride nor a change of channels.

```python
layer = ts.OrthoConv2d(16, 32, 3, stride=2, method="soc", terms=6)
assert layer.kernel_size == (14, 14)  # the equivalent kernel
assert layer.truncation_error < 3e-4

wide = ts.FourierOrthoConv2d(16, 32, 3, method="lot")
assert wide.equivalent_kernel_size(20, 24) == (20, 24)
```
"""


if __name__ == "__main__":
    TARGET.write_text(page())
