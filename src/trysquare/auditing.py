"""A table that says, layer by layer, whether a network is 1-Lipschitz and where it is not."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from trysquare.layers.base import ParametrizedWeight
from trysquare.layers.heads import UnitNormLinear
from trysquare.layers.residual import ConcatResidual, _Residual
from trysquare.layers.scaling import InputScaling
from trysquare.lipschitz import Step, follow, lipschitz_lower_bound
from trysquare.lipschitz.follow import input_like
from trysquare.lipschitz.modules import batch_norm_scales
from trysquare.operators import Axis, LinearOperator, read_layer, reads
from trysquare.progress import track
from trysquare.spectrum import lanczos_extremes, norm_range, singular_values

# Singular values this near to 1 are those of an orthogonal layer in float32.
TOLERANCE = 2e-5
# Numbers of multiplications that the audit spends on one layer, beyond its certified bound.
_SPECTRUM_COST = 3e8
_LANCZOS_COST = 8e8
_LANCZOS_STEPS = 40
_LOWER_BOUND_SECONDS = 3.0


@dataclass(frozen=True)
class LayerAudit:
    """One row of the table.

    Attributes:
        name: path of the module, or of the function that the forward pass calls.
        type: class or function.
        geometry: shapes, and the numbers of a convolution.
        smallest: smallest singular value, or a certified lower bound on it (the remark says which); ``None`` if it was
            not computed or there is none.
        largest: largest singular value found (a lower bound on the norm); ``None`` if there is none.
        bound: certified upper bound on the layer's own Lipschitz constant.
        bound_so_far: certified bound of the network up to here.
        verdict: ``"orthogonal"``, ``"1-Lipschitz"`` or ``"amplifies"``.
        remark: why, and what to do.
        spectrum: all singular values where they were asked for and affordable.
    """

    name: str
    type: str
    geometry: str
    smallest: float | None
    largest: float | None
    bound: float
    bound_so_far: float
    verdict: str
    remark: str
    spectrum: list[float] | None = field(default=None, repr=False)


@dataclass(frozen=True)
class AuditReport:
    """What ``audit`` found.

    Attributes:
        layers: a row for each module and function on the way, in the order in which they run.
        bound: certified upper bound on the Lipschitz constant of the network.
        lower_bound: largest Jacobian norm seen.
        input_shape: shape of the inputs that it holds for.
    """

    layers: list[LayerAudit]
    bound: float
    lower_bound: float
    input_shape: tuple[int, ...]

    @property
    def ratio(self) -> float:
        """Bound over lower bound: 1 if the bound is known to be exact."""
        return self.bound / self.lower_bound if self.lower_bound else math.inf

    def to_json(self) -> str:
        """The report as JSON; numbers that JSON does not have (infinity) become ``null``."""
        content = {**asdict(self), "ratio": self.ratio}
        return json.dumps(_finite(content), indent=2, allow_nan=False)

    def __str__(self) -> str:
        header = ["layer", "type", "geometry", "σ min", "σ max", "bound", "so far", "verdict", "remark"]
        rows = [
            [
                row.name, row.type, row.geometry, _number(row.smallest), _number(row.largest), _number(row.bound),
                _number(row.bound_so_far), row.verdict, row.remark,
            ]
            for row in self.layers
        ]  # fmt: skip
        widths = [max(len(line[i]) for line in [header, *rows]) for i in range(len(header))]
        lines = [
            "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) for line in [header, *rows]
        ]
        lines.insert(1, "  ".join("-" * width for width in widths))
        return "\n".join(line.rstrip() for line in [*lines, "", self.summary])

    @property
    def summary(self) -> str:
        """The three numbers of the whole network."""
        shape = " x ".join(map(str, self.input_shape))
        return (
            f"Inputs of {shape}: certified Lipschitz bound {self.bound:.6g}, lower bound found {self.lower_bound:.6g}, "
            f"ratio {self.ratio:.4g}"
        )

    def __rich__(self) -> Any:
        from rich.console import Group
        from rich.table import Table

        table = Table("layer", "type", "geometry", "σ min", "σ max", "bound", "so far", "verdict", "remark")
        colours = {"orthogonal": "green", "1-Lipschitz": "cyan", "amplifies": "red"}
        for row in self.layers:
            table.add_row(
                row.name, row.type, row.geometry, _number(row.smallest), _number(row.largest), _number(row.bound),
                _number(row.bound_so_far), f"[{colours[row.verdict]}]{row.verdict}[/]", row.remark,
            )  # fmt: skip
        return Group(table, self.summary)


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.6g}"


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _finite(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def audit(
    model: nn.Module, input_shape: Sequence[int], *, inputs: Tensor | None = None, spectra: bool = False
) -> AuditReport:
    """Audit a network: built with this library or not.

    Args:
        model: in eval mode if it has dropout or batch normalisation.
        input_shape: shape of one input without the batch.
        inputs: ``(batch, *input_shape)``, where to look for the lower bound; normal noise unless given.
        spectra: whether to keep all singular values of layers for which they are affordable.

    Returns:
        A report: print it, or take ``.layers``, ``.bound``, ``.lower_bound``, ``.to_json()``.

    Raises:
        NoRuleError: if a part of the network has no Lipschitz rule.
        ValueError: if the shape does not fit, or weights are not finite.

    >>> report = audit(nn.Sequential(OrthoConv2d(4, 8, 3, stride=2), nn.ReLU()), (4, 8, 8))
    >>> [row.verdict for row in report.layers]
    ['orthogonal', '1-Lipschitz']
    """
    bound, steps = follow(model, input_shape)
    rows = [_row(step, spectra) for step in track(steps, "auditing layers", len(steps))]
    if inputs is None:
        inputs = _noise(model, tuple(input_shape))
    lower = lipschitz_lower_bound(model, inputs, power_steps=4, ascent_steps=3, seconds=_LOWER_BOUND_SECONDS)
    return AuditReport(rows, bound, lower, tuple(input_shape))


def _noise(model: nn.Module, shape: tuple[int, ...]) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(1, *shape, generator=generator).to(input_like(model))


def _row(step: Step, spectra: bool) -> LayerAudit:
    if step.module is not None and reads(step.module):
        return _linear_row(step, spectra)
    smallest = largest = None
    remark = ""
    if isinstance(step.module, nn.modules.batchnorm._NormBase):
        smallest, largest, remark = _normalisation(step.module)
    elif step.constant > 1 + TOLERANCE:
        remark = _why_amplifies(step)
    geometry = _shapes(step)
    verdict = _verdict(smallest, step.constant)
    return LayerAudit(step.name, step.kind, geometry, smallest, largest, step.constant, step.bound, verdict, remark)


def _verdict(smallest: float | None, bound: float) -> str:
    if bound > 1 + TOLERANCE:
        return "amplifies"
    return "orthogonal" if smallest is not None and smallest >= 1 - TOLERANCE else "1-Lipschitz"


def _shapes(step: Step) -> str:
    return f"{_times(step.input_shape)} -> {_times(step.output_shape)}"


def _times(sizes: Sequence[int]) -> str:
    return "x".join(map(str, sizes))


def _normalisation(layer: nn.Module) -> tuple[float, float, str]:
    scales = batch_norm_scales(layer)
    low, high = float(scales.min()), float(scales.max())
    if high <= 1 + TOLERANCE:
        return low, high, ""
    channel = int(scales.argmax())
    return low, high, f"|weight| / sqrt(running_var + eps) is {high:.4g} at channel {channel}: shrink its weight"


def _why_amplifies(step: Step) -> str:
    if _is_ours(step.module):
        return _why_ours_amplifies(step)
    if isinstance(step.module, InputScaling):
        return f"the data are scaled by up to {step.constant:.4g}: part of the constant"
    if isinstance(step.module, _Residual | ConcatResidual):
        return _why_residual_amplifies(step)
    if "Pool" in step.kind or "pool" in step.kind:
        return "windows overlap: use kernel_size = stride"
    if "Pad" in step.kind or step.kind == "pad":
        return "the padding repeats positions: use zeros"
    if step.kind in ("add", "iadd", "sub"):
        return f"branches add up to {step.constant:.4g} times the larger: weight them so that the weights sum to 1"
    if step.kind in ("cat", "stack", "concat"):
        return "the same input twice: divide by the root of the number of branches"
    if step.kind in ("mul", "truediv", "div"):
        return f"a scaling by up to {step.constant:.4g}: part of the constant"
    return f"slope up to {step.constant:.4g}: use a 1-Lipschitz one"


def _is_ours(module: nn.Module | None) -> bool:
    return isinstance(module, ParametrizedWeight) and parametrize.is_parametrized(module, "weight")


def _why_ours_amplifies(step: Step) -> str:
    layer: Any = step.module
    above = f"{step.constant - 1:.1e}"
    if layer.parametrization.truncation_error > TOLERANCE:
        return f"its method is truncated, which adds {above}: give it more terms"
    dtype = str(layer.parametrization.like.dtype).removeprefix("torch.")
    return f"its weights were rounded to {dtype}, which adds {above}: keep it in float32"


def _why_residual_amplifies(step: Step) -> str:
    block: Any = step.module
    shape = list(step.input_shape)
    if isinstance(block, ConcatResidual):
        axis = block.dim if block.dim < 0 else block.dim - 1
        shape[axis] //= 2
    parts = {"branch": block.branch, "shortcut": getattr(block, "shortcut", None)}
    bounds = {name: follow(part, shape)[0] for name, part in parts.items() if part is not None}
    worst = max(bounds, key=lambda name: bounds[name])
    if bounds[worst] <= 1 + TOLERANCE:
        return "its factors were rounded: keep it in float32"
    return f"its {worst} has the bound {bounds[worst]:.4g}: audit that with input_shape {tuple(shape)}"


def _linear_row(step: Step, spectra: bool) -> LayerAudit:
    assert step.module is not None
    operator = read_layer(step.module, step.input_shape)
    remarks = [*padding_remarks(operator)]
    smallest, largest, values, remark = _extremes(step, operator)
    bound = step.constant
    if remark:
        remarks.append(remark)
    if isinstance(step.module, UnitNormLinear):
        remarks.append("each output is 1-Lipschitz, not all together: certify with its certified_radii")
    elif bound > 1 + TOLERANCE and not remarks_explain(operator):
        norm = f"the weight has norm {bound:.4g}: use the trysquare layer of this shape, or divide by it"
        remarks.insert(0, _why_ours_amplifies(step) if _is_ours(step.module) else norm)
    kept = values.tolist() if spectra and values is not None else None
    geometry = _convolution_geometry(step.module, step)
    verdict = _verdict(smallest, bound)
    return LayerAudit(
        step.name, step.kind, geometry, smallest, largest, bound, step.bound, verdict, "; ".join(remarks), kept
    )


def remarks_explain(operator: LinearOperator) -> bool:
    """Whether padding alone is enough of a reason for amplification."""
    return operator.repeats > 1


def _convolution_geometry(layer: nn.Module, step: Step) -> str:
    if isinstance(layer, nn.Linear):
        return _shapes(step)
    numbers: Any = layer
    parts = [f"k{_times(numbers.kernel_size)}"]
    parts += [f"s{_times(numbers.stride)}"] if max(numbers.stride) > 1 else []
    parts += [f"d{_times(numbers.dilation)}"] if max(numbers.dilation) > 1 else []
    parts += [f"g{numbers.groups}"] if numbers.groups > 1 else []
    padding = numbers.padding if isinstance(numbers.padding, str) else f"p{_times(numbers.padding)}"
    return f"{_shapes(step)} {' '.join(parts)} {padding} {numbers.padding_mode}"


def padding_remarks(operator: LinearOperator) -> list[str]:
    """What is wrong with the padding of a convolution, axis by axis, and what to do; equal axes are named once."""
    remarks = [remark for axis in operator.axes if (remark := _padding_remark(axis))]
    return list(dict.fromkeys(remarks))


def _padding_remark(axis: Axis) -> str | None:
    if axis.repeats == 1:
        return None
    left, right = axis.pad
    if axis.mode != "circular":
        return (
            f"{axis.mode} padding {max(left, right)} repeats pixels up to {axis.repeats} times: use zeros or circular"
        )
    if left + right >= axis.extent:
        best = max(0, -((axis.stride - axis.extent) // 2))
        return f"circular padding {max(left, right)} repeats outputs: use {best}"
    return (
        f"size {axis.size} is not a multiple of stride {axis.stride}, so circular windows overlap where they wrap: "
        f"pad or crop the input to {axis.size // axis.stride * axis.stride or axis.stride}"
    )


def _extremes(step: Step, operator: LinearOperator) -> tuple[float | None, float, Tensor | None, str]:
    """Smallest and largest singular value, all of them where affordable, and what to say about them."""
    if _spectrum_cost(operator) <= _SPECTRUM_COST:
        assert step.module is not None
        values = singular_values(step.module, step.input_shape)
        return float(values[-1]), float(values[0]), values, ""
    if operator.circular:
        low, high = norm_range(operator)
        how = (
            "σ min is a certified lower bound"
            if low > 0
            else "σ min not computed: too large; trysquare.singular_values has it"
        )
        return (low if low > 0 else None), min(high, step.constant), None, how
    applied = math.prod(operator.image) * math.prod(operator.kernel.shape[1:]) * 2
    steps = max(6, min(_LANCZOS_STEPS, int(_LANCZOS_COST // applied)))
    found = lanczos_extremes(operator, steps, 1e-6)
    remark = f"σ max by {steps} Lanczos steps, to {found.largest_tolerance:.0e}; σ min not computed: too large"
    return None, found.largest, None, remark


def _spectrum_cost(operator: LinearOperator) -> float:
    """Multiplications of the singular value decompositions."""
    if operator.circular:
        rows = operator.kernel.shape[0] // operator.groups
        columns = operator.kernel.shape[1] * math.prod(operator.stride)
        taps = zip(operator.axes, operator.kernel.shape[2:], strict=True)
        blocks = operator.groups * math.prod(1 if k <= 1 else axis.period // axis.stride for axis, k in taps)
        return 4.0 * blocks * rows * columns * min(rows, columns)
    rows, columns = (math.prod(shape) // operator.groups for shape in (operator.image, operator.domain))
    return 4.0 * operator.groups * rows * columns * min(rows, columns)
