"""From the calls of a forward pass to the rows of the table."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from trysquare.nn.layers.activations import Householder, NActivation
from trysquare.nn.layers.heads import UnitNormLinear
from trysquare.nn.layers.pooling import EuclideanNorm
from trysquare.nn.linalg.operator import Axis, LinearOperator
from trysquare.nn.parametrizations.base import ParametrizedWeight
from trysquare.verify.auditing.report import LayerAudit
from trysquare.verify.lipschitz import Analysis, input_like, lipschitz_lower_bound
from trysquare.verify.lipschitz.graph import Frame, Node, Value, class_name
from trysquare.verify.lipschitz.rules import RULES, batch_norm_scales
from trysquare.verify.operators import read_layer, reads
from trysquare.verify.spectrum import lanczos_extremes, norm_range, singular_values, spectrum_flops

# Singular values this near to 1 are those of an orthogonal layer in float32.
TOLERANCE = 2e-5
# Numbers of multiplications that the audit spends on one layer, beyond its certified bound.
_SPECTRUM_COST = 3e8
_LANCZOS_COST = 8e8
_LANCZOS_STEPS = 40
# Numbers in the inputs at which the slope of a layer that is not linear is looked at, and for how long.
_NOISE_NUMBERS = 1 << 16
_SLOPE_SECONDS = 1.0


@dataclass(frozen=True)
class _Step:
    """One module of torch or ours, or one call of somebody else's code.

    Attributes:
        name: path of the module, and the name of the call.
        module: the module, or ``None`` for a call.
        kind: class or name of the call.
        nodes: what it computes.
        input_shape: shape of its first input, without the batch.
        output_shape: shape of its output, without the batch.
        constant: its own bound: that of its result over the largest of its inputs'.
        bound: of everything up to and including it.
        depth: how many blocks of ours it is inside of.
        in_block: whether it is a part of calls that are bounded as a whole.
    """

    name: str
    module: nn.Module | None
    kind: str
    nodes: list[Node]
    input_shape: tuple[int, ...]
    output_shape: tuple[int, ...]
    constant: float
    bound: float
    depth: int
    in_block: bool


def steps_of(found: Analysis) -> Iterator[_Step]:
    """The modules and calls that the network's result is made by, in the order in which they run.

    A block of ours comes before what it calls, which is one deeper.
    """
    walk, used, told = found.walk, dict[str, int](), set[int]()
    numbered = [(i, node) for i, node in enumerate(walk.nodes) if not isinstance(walk.bounds[i], ValueError)]
    outer = {frame.call for node in walk.nodes for frame in _path(node)[:-1]}
    for owner, group in groupby(numbered, lambda pair: _owner(pair[0], pair[1], outer)):
        pairs = list(group)
        nodes, node, depth = [node for _, node in pairs], pairs[0][1], 0
        frames = _path(node)
        for frame in frames:
            if frame.call in outer and _is_block(frame.module) and frame.call in found.graph.modules:
                if frame.call not in told:
                    told.add(frame.call)
                    yield _module_step(found, frame, [], depth)
                depth += 1
        last = frames[-1] if frames else None
        if last is not None and last.call in told:
            continue  # a part of the block's own row
        if isinstance(owner, Frame) and owner.call in found.graph.modules:
            yield _module_step(found, owner, nodes, depth)
            continue
        values = [node.args["input"]] if node.moves else node.values
        shape = node.args["output"].labels.shape if node.moves else torch.Size(nodes[-1].outputs[0][1])
        module = node.module if isinstance(owner, Frame) else None
        name = (
            node.name
            if module is not None
            else ".".join(filter(None, ("" if node.name == "model" else node.name, node.op)))
        )
        used[name] = used.get(name, -1) + 1
        name = f"{name}_{used[name]}" if used[name] and module is None else name
        kind = class_name(module) if module is not None else node.op
        result = float(walk.bounds[pairs[-1][0]])  # type: ignore[arg-type]
        yield _step(found, name, module, kind, nodes, values, shape, result, depth)


def _module_step(found: Analysis, frame: Frame, nodes: list[Node], depth: int) -> _Step:
    before, after = found.graph.modules[frame.call]
    result, shape = found.walk.bound([after.labels]), after.labels.shape
    return _step(found, frame.name, frame.module, class_name(frame.module), nodes, [before], shape, result, depth)


def _step(
    found: Analysis, name: str, module: nn.Module | None, kind: str, nodes: list[Node], values: list[Value],
    shape: torch.Size, bound: float, depth: int,
) -> _Step:  # fmt: skip
    inputs = [found.walk.bound([value.labels]) for value in values]
    largest = max((b for b in inputs if 0 < b < math.inf), default=1.0)
    shapes = tuple(values[0].labels.shape[1:]), tuple(shape[1:])
    up = found.walk.rounded_up
    in_block = any(id(node) in found.walk.in_blocks or node.op == "block" for node in nodes)
    return _Step(name, module, kind, nodes, *shapes, up(bound / largest), up(bound), depth, in_block)


def _path(node: Node) -> tuple[Frame, ...]:
    """Return the modules that were running; norms are a part of the layers that take them."""
    return node.path[:-1] if isinstance(node.module, EuclideanNorm) and len(node.path) > 1 else node.path


def _is_block(module: nn.Module) -> bool:
    return type(module).__module__.startswith("trysquare.nn.layers")


def _owner(number: int, node: Node, outer: set[int]) -> Frame | int:
    """Return what calls have in common that make one row: the call of a module of torch or ours that calls no other."""
    frame = _path(node)[-1] if node.path else None
    library = frame is not None and type(frame.module).__module__.split(".")[0] in ("torch", "trysquare")
    return frame if library and frame is not None and frame.call not in outer else number


def layer_row(step: _Step, spectra: bool) -> LayerAudit:
    """Return the row of a step."""
    if step.module is not None and reads(step.module) and len(step.input_shape):
        return _linear_row(step, step.module, spectra)
    normalisation = next((node for node in step.nodes if "batch_norm" in node.op), None)
    smallest = largest = None
    if normalisation is not None:
        scales = batch_norm_scales(normalisation.args)
        smallest, largest = float(scales.min()), float(scales.max())
    remark, attained = _about(step)
    if normalisation is not None and largest is not None and largest > 1 + TOLERANCE:
        remark += f" (channel {int(scales.argmax())})"
    if largest is None and step.constant > 1 + TOLERANCE and not attained:
        largest = _largest_slope(step)
    verdict = _verdict(smallest, largest, step.constant, attained)
    if verdict == "not certified":
        remark += "; the bound is above 1, and it is not known whether it is attained"
    shapes = _shapes(step)
    so_far = None if step.depth else step.bound
    return LayerAudit(
        step.name, step.kind, shapes, smallest, largest, step.constant, so_far, verdict, remark, step.depth
    )


def _about(step: _Step) -> tuple[str, bool]:
    """Return why the bound of a step is above 1, or that it keeps lengths; and whether the bound is attained."""
    above, bound = step.constant > 1 + TOLERANCE, f"{step.constant:.4g}"
    nodes = [node for node in step.nodes if not node.moves]
    if not step.nodes:
        return ("its parts amplify, or add up to more than 1: see their rows" if above else ""), False
    if not nodes:
        joined = step.kind in ("cat", "stack")
        repeats = f"{_JOINED if joined else 'it repeats numbers'}: divide by {bound}"
        return (repeats, not joined) if above else (_MOVED, False)
    if nodes[-1].op == "leaf":
        folds = isinstance(step.module, _FOLDS)
        return (_why_ours(step) if above else _FOLDED if folds else ""), False
    nodes = [node for node in nodes if node.op in RULES]
    rules = [RULES[node.op] for node in nodes]
    if not above:
        folds = all(rule.isometric for rule in rules)
        return _FOLDED if folds else "", False
    # A shift by a constant amplifies nothing.
    told = [rule for node, rule in zip(nodes, rules, strict=True) if rule.remark and not _is_shift(node)]
    worst = told[-1] if told else rules[-1]
    return worst.remark.format(bound=bound) or f"its rule gives {bound}", worst.attained


def _largest_slope(step: _Step) -> float | None:
    """Return the largest slope seen of a module of torch or ours; calls of others may need more than one input."""
    if step.module is None or not step.input_shape:
        return None
    batch = max(1, min(8, _NOISE_NUMBERS // math.prod(step.input_shape)))
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(batch, *step.input_shape, generator=generator).to(input_like(step.module))
    with torch.random.fork_rng(devices=[]):  # the same start each time, and nobody else's numbers change
        torch.manual_seed(0)
        try:
            return lipschitz_lower_bound(step.module, inputs, power_steps=4, ascent_steps=2, seconds=_SLOPE_SECONDS)
        except (TypeError, ValueError):  # it takes more than one input, or has no derivatives
            return None


def _is_shift(node: Node) -> bool:
    return node.op in ("add", "sub", "rsub") and len(node.values) == 1


_JOINED = "the parts may depend on the same input, up to as many times as there are"
_MOVED = "isometric: it only moves numbers or changes signs"
_FOLDED = "isometric: its Jacobian is orthogonal everywhere"
_FOLDS = (Householder, NActivation)


def _verdict(smallest: float | None, largest: float | None, bound: float, attained: bool = False) -> str:
    if bound <= 1 + TOLERANCE:
        return "orthogonal" if smallest is not None and smallest >= 1 - TOLERANCE else "1-Lipschitz"
    return "amplifies" if attained or (largest is not None and largest > 1) else "not certified"


def _shapes(step: _Step) -> str:
    return f"{_times(step.input_shape)} -> {_times(step.output_shape)}"


def _times(sizes: Sequence[int]) -> str:
    return "x".join(map(str, sizes))


def _why_ours(step: _Step) -> str:
    layer = step.module
    above = f"{step.constant - 1:.1e}"
    if not (isinstance(layer, ParametrizedWeight) and parametrize.is_parametrized(layer, "weight")):
        return f"its rule gives {step.constant:.4g}"
    if layer.parametrization.truncation_error > TOLERANCE:
        return f"its method is truncated, which adds {above}: give it more terms"
    dtype = str(layer.parametrization.like.dtype).removeprefix("torch.")
    return f"its weights were rounded to {dtype}, which adds {above}: keep it in float32"


def _linear_row(step: _Step, layer: nn.Module, spectra: bool) -> LayerAudit:
    operator = read_layer(layer, step.input_shape)
    found = _extremes(layer, step, operator)
    if step.constant < found.largest:  # the last layer of a block, which is bounded as a whole
        step = replace(step, constant=norm_range(operator, lowest=False).high)
    verdict = _verdict(found.smallest, found.largest, step.constant)
    said = [*_linear_remarks(step, operator, found.largest), found.remark]
    kept = found.values.tolist() if spectra and found.values is not None else None
    return LayerAudit(
        step.name, step.kind, _geometry(layer, step), found.smallest, found.largest, step.constant,
        None if step.depth else step.bound, verdict, "; ".join(filter(None, said)), step.depth, kept,
    )  # fmt: skip


def _geometry(layer: nn.Module, step: _Step) -> str:
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


def _extremes(layer: nn.Module, step: _Step, operator: LinearOperator) -> _Extremes:
    if spectrum_flops(operator) <= _SPECTRUM_COST:
        values = singular_values(layer, step.input_shape)
        return _Extremes(float(values[-1]), float(values[0]), values, "")
    if operator.circular:
        known = next((node.range for node in step.nodes if node.range is not None and node.range.low > 0), None)
        low, _, found = known or norm_range(operator)
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


def _linear_remarks(step: _Step, operator: LinearOperator, largest: float) -> list[str]:
    """Return why a linear layer amplifies, or may, and what to do; nothing if it does not."""
    if isinstance(step.module, UnitNormLinear):
        return ["each output is 1-Lipschitz, not all together: certify with its certified_radii"]
    bound = step.constant
    if bound <= 1 + TOLERANCE:
        return []
    if step.in_block:
        return ["a part of a block that is bounded as a whole: what counts is the bound so far behind that"]
    if isinstance(step.module, ParametrizedWeight) and parametrize.is_parametrized(step.module, "weight"):
        return [_why_ours(step)]
    said = list(dict.fromkeys(remark for axis in operator.axes if (remark := _padding_remark(axis))))
    if operator.repeats > 1:
        zeros = replace(operator, axes=tuple(replace(axis, mode="zeros") for axis in operator.axes))
        norm = norm_range(zeros, lowest=False).high
        said += [f"with zeros the norm is still up to {norm:.4g}: divide by it too"] if norm > 1 + TOLERANCE else []
    elif largest > 1:
        between = f"{bound:.4g}" if bound <= largest * 1.001 else f"between {largest:.4g} and {bound:.4g}"
        said.append(f"the norm is {between}: use the trysquare layer of this shape, or divide by it")
    if largest <= 1:
        said.append(f"the bound is {bound:.4g}, and no singular value above 1 was found: divide by it to be certain")
    return said


def _padding_remark(axis: Axis) -> str | None:
    """Return what is wrong with the padding of one axis, and what to do."""
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
