"""From the steps of a forward pass to the rows of the table."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from trysquare.auditing import remarks
from trysquare.auditing.remarks import TOLERANCE
from trysquare.auditing.report import LayerAudit
from trysquare.layers.conv import AffineInverse
from trysquare.layers.residual import ConcatResidual, _Residual
from trysquare.lipschitz import Step, follow, lipschitz_lower_bound
from trysquare.lipschitz.follow import input_like
from trysquare.lipschitz.modules import batch_norm_scales
from trysquare.operators import LinearOperator, read_layer, reads
from trysquare.spectrum import lanczos_extremes, norm_range, singular_values, spectrum_flops

# Numbers of multiplications that the audit spends on one layer, beyond its certified bound.
_SPECTRUM_COST = 3e8
_LANCZOS_COST = 8e8
_LANCZOS_STEPS = 40
# Numbers in the inputs at which the Jacobian of a layer that is not linear is looked at.
_NOISE_NUMBERS = 1 << 16
_JACOBIAN_SECONDS = 1.0


def layer_rows(step: Step, spectra: bool, depth: int = 0) -> Iterator[LayerAudit]:
    """The row of a step; if it is a block of ours, followed by those of the layers inside of it."""
    inner = [(name, *follow(nn.Sequential(part), shape)) for name, part, shape in _parts(step)]
    row = _linear_row(step, spectra) if _is_linear(step) else _other_row(step, {name: b for name, b, _ in inner})
    yield replace(row, depth=depth, bound_so_far=None if depth else step.bound)
    for name, _, steps in inner:
        for part in steps:
            # The part is the first and only module of a Sequential: "0", and "0.conv" inside of it.
            path = f"{step.name}.{name}{part.name.removeprefix('0')}"
            yield from layer_rows(replace(part, name=path), spectra, depth + 1)


def _parts(step: Step) -> Iterator[tuple[str, nn.Module, Sequence[int]]]:
    """Modules inside of a block of ours whose bounds its own is made of, and the shapes of their inputs."""
    block, shape = step.module, list(step.input_shape)
    if isinstance(block, ConcatResidual):
        shape[block.dim if block.dim < 0 else block.dim - 1] //= 2
        yield "branch", block.branch, shape
    elif isinstance(block, _Residual):
        yield "branch", block.branch, shape
        if block.shortcut is not None:
            yield "shortcut", block.shortcut, shape
    elif isinstance(block, AffineInverse):
        yield "adjoint", block.adjoint, shape


def noise(model: nn.Module, shape: Sequence[int], batch: int = 1) -> Tensor:
    """Normal inputs of a model, the same each time."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(batch, *shape, generator=generator).to(input_like(model))


def _is_linear(step: Step) -> bool:
    return step.module is not None and reads(step.module)


def _other_row(step: Step, parts: dict[str, float]) -> LayerAudit:
    """A row without a spectrum: a normalisation, an activation, a function, a block with these bounds of its parts."""
    smallest = largest = None
    above = step.constant > 1 + TOLERANCE
    attained = False
    if isinstance(step.module, nn.modules.batchnorm._NormBase):
        scales = batch_norm_scales(step.module)
        smallest, largest = float(scales.min()), float(scales.max())
        remark = remarks.normalisation(scales) if above else ""
    elif above:
        largest = _largest_jacobian(step)
        attained = remarks.is_attained(step)
        remark = remarks.why_above_one(step, parts)
    else:
        remark = remarks.isometric(step)
    verdict = _verdict(smallest, largest, step.constant, attained)
    if verdict == "not certified":
        remark += "; the bound is above 1, and nothing above 1 was found"
    return LayerAudit(
        step.name, step.kind, _shapes(step), smallest, largest, step.constant, step.bound, verdict, remark
    )


def _largest_jacobian(step: Step) -> float | None:
    """Largest Jacobian norm seen of a module of torch or ours; others may need more than one input."""
    module = step.module
    if module is None or isinstance(module, nn.Embedding):
        return None
    if type(module).__module__.split(".")[0] not in ("torch", "trysquare"):
        return None
    batch = max(1, min(8, _NOISE_NUMBERS // math.prod(step.input_shape)))
    inputs = noise(module, step.input_shape, batch)
    with torch.random.fork_rng(devices=[]):  # the same start each time, and nobody else's numbers change
        torch.manual_seed(0)
        return lipschitz_lower_bound(module, inputs, power_steps=4, ascent_steps=2, seconds=_JACOBIAN_SECONDS)


def _verdict(smallest: float | None, largest: float | None, bound: float, attained: bool = False) -> str:
    if bound <= 1 + TOLERANCE:
        return "orthogonal" if smallest is not None and smallest >= 1 - TOLERANCE else "1-Lipschitz"
    return "amplifies" if attained or (largest is not None and largest > 1) else "not certified"


def _shapes(step: Step) -> str:
    return f"{_times(step.input_shape)} -> {_times(step.output_shape)}"


def _times(sizes: Sequence[int]) -> str:
    return "x".join(map(str, sizes))


def _linear_row(step: Step, spectra: bool) -> LayerAudit:
    assert step.module is not None
    operator = read_layer(step.module, step.input_shape)
    found = _extremes(step, operator)
    verdict = _verdict(found.smallest, found.largest, step.constant)
    said = [*remarks.linear(step, operator, found.largest), found.remark]
    kept = found.values.tolist() if spectra and found.values is not None else None
    return LayerAudit(
        step.name, step.kind, _geometry(step.module, step), found.smallest, found.largest, step.constant, step.bound,
        verdict, "; ".join(filter(None, said)), spectrum=kept,
    )  # fmt: skip


def _geometry(layer: nn.Module, step: Step) -> str:
    if isinstance(layer, nn.Linear):
        return _shapes(step)
    numbers: Any = layer
    parts = [f"k{_times(numbers.kernel_size)}"]
    parts += [f"s{_times(numbers.stride)}"] if max(numbers.stride) > 1 else []
    parts += [f"d{_times(numbers.dilation)}"] if max(numbers.dilation) > 1 else []
    parts += [f"g{numbers.groups}"] if numbers.groups > 1 else []
    padding = numbers.padding if isinstance(numbers.padding, str) else f"p{_times(numbers.padding)}"
    return f"{_shapes(step)} {' '.join(parts)} {padding} {numbers.padding_mode}"


class _Extremes(NamedTuple):
    """Smallest and largest singular value, all of them where affordable, and what to say about them."""

    smallest: float | None
    largest: float
    values: Tensor | None
    remark: str


def _extremes(step: Step, operator: LinearOperator) -> _Extremes:
    if spectrum_flops(operator) <= _SPECTRUM_COST:
        assert step.module is not None
        values = singular_values(step.module, step.input_shape)
        return _Extremes(float(values[-1]), float(values[0]), values, "")
    if operator.circular:
        low, _, found = norm_range(operator)
        if found > 0:
            how = (
                "is a certified lower bound" if low > 0 else "not computed: too large; trysquare.singular_values has it"
            )
            return _Extremes(low if low > 0 else None, found, None, f"σ min {how}")
    return _by_lanczos(operator, step.constant)


def _by_lanczos(operator: LinearOperator, bound: float) -> _Extremes:
    applied = math.prod(operator.image) * math.prod(operator.kernel.shape[1:]) * 2
    steps = max(6, min(_LANCZOS_STEPS, int(_LANCZOS_COST // applied)))
    found = lanczos_extremes(operator, steps, 1e-6)
    if found.largest <= 1 < bound and steps < _LANCZOS_STEPS:  # look longer: it may be above 1 after all
        steps = _LANCZOS_STEPS
        found = lanczos_extremes(operator, steps, 1e-6)
    how = f"σ max by {steps} Lanczos steps, to {found.largest_tolerance:.0e}; σ min not computed: too large"
    return _Extremes(None, found.largest, None, how)
