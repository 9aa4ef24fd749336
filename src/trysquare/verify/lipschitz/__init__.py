"""Lipschitz constants of whole networks."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn

from trysquare.naming import shown
from trysquare.nn.geometry import flag, per_axis
from trysquare.nn.linalg.precision import coarsest_dtype, own_tensors, users_device
from trysquare.torch_internals import tree_leaves, tree_map
from trysquare.verify.lipschitz import ours as ours  # registers the rules of our blocks
from trysquare.verify.lipschitz.blocks import constant_factor
from trysquare.verify.lipschitz.checks import input_like, refuse_unreadable, require_module, unchanged
from trysquare.verify.lipschitz.evaluate import ExactEvaluation
from trysquare.verify.lipschitz.graph import Calls, Graph, Inputs, Node, NoRuleError, Shape, Shapes, Value, class_name
from trysquare.verify.lipschitz.leaves import is_leaf, rule
from trysquare.verify.lipschitz.lower import lipschitz_lower_bound
from trysquare.verify.lipschitz.record import Step, same_numbers
from trysquare.verify.lipschitz.trace import TakesTokens, Tracer
from trysquare.verify.lipschitz.walk import Walk

__all__ = [
    "Analysis",
    "ExactEvaluation",
    "NoRuleError",
    "analyse",
    "input_like",
    "lipschitz_bound",
    "lipschitz_lower_bound",
    "rule",
]

# Samples of a batch that is traced: two tell whether the samples of a batch mix.
BATCH = 2
InputShape = Sequence[int] | Sequence[Sequence[int]] | Mapping[str, Sequence[int]]
# Numbers of one input, each of which has a label and a weight.
_LARGEST_INPUT = 1 << 26


def lipschitz_bound(model: nn.Module, input_shape: InputShape) -> float:
    """Return a certified upper bound on the l2 Lipschitz constant of a network, in its present mode.

    The model runs once, and what it computes is recorded call by call (``trace``); a closed table has a bound for each
    call (``rules``). A scaling of the data in front (mean and deviation) is part of the constant. A bound of 0 means
    that the output provably does not change; bounds that are not between 1e-150 and 1e150 may come out larger, up to
    infinity.

    Proved: for all inputs ``x``, ``y`` of this shape, ``|f(x) - f(y)| <= bound * |x - y|`` for the recorded calls with
    the weights that the forward pass uses, in exact arithmetic, and that the samples of a batch do not mix. The
    rounding of the forward pass in its dtype is not included. Random inputs test that the model makes the same calls
    for every batch, and ``certify`` checks it for each batch that it certifies. A call without a rule raises; no
    constant is ever assumed to be 1.

    A network that starts with an embedding takes tokens: its constant is with respect to one-hot vectors over the
    vocabulary, so changing ``k`` tokens changes the output by at most ``bound * sqrt(2 k)``.

    Args:
        model: any module; it is not changed. It must be in eval mode if it has layers that behave differently in
            training (dropout, batch normalisation, spectral normalisation).
        input_shape: shape of one input without the batch; a list of shapes for a model of several inputs, or a
            dictionary for inputs by name. The bound is then with respect to all inputs together, and for all outputs
            together if the model returns several (tuples, dictionaries).

    Raises:
        NoRuleError: if a call is not Lipschitz or has no rule, or the forward pass is not a fixed function of each
            sample; it names the module and the line.
        TypeError: if the model is no module.
        ValueError: if the shape does not fit, or weights are not finite.

    >>> model = nn.Sequential(OrthoConv2d(3, 12, 2, stride=2), nn.ReLU(), nn.Flatten(), nn.Linear(768, 10))
    >>> bound = lipschitz_bound(model, (3, 16, 16))
    """
    return analyse(model, input_shape).bound


@dataclass(frozen=True, eq=False)
class Analysis:
    """What is known about a network.

    Attributes:
        bound: certified Lipschitz bound of everything that it returns.
        graph: the calls of its forward pass.
        walk: their bounds.
        gains: of each call, by its ``id``: by how much at most a change of its results alone changes what the network
            returns.
    """

    bound: float
    graph: Graph
    walk: Walk
    gains: dict[int, float]

    @cached_property
    def _head(self) -> tuple[Node, float] | None:
        """The product with a constant matrix that the network's result is, times a number, plus constants."""
        if len(self.graph.outputs) != 1:
            return None
        labels, calls, scale = self.graph.outputs[0], Calls(self.graph.nodes), 1.0
        while True:
            last = calls.whole(-labels if bool((labels < 0).all()) else labels)
            if last is None or last.outputs[0][1] != labels.shape:
                return None
            if last.op in ("addmm", "mm"):
                names = ("mat1", "mat2") if last.op == "addmm" else ("self", "mat2")
                plain = last.op == "mm" or (last.args.get("alpha", 1) == 1 and not isinstance(last.args["self"], Value))
                known = isinstance(last.args[names[0]], Value) and not isinstance(last.args[names[1]], Value)
                return (last, scale * (1 + 2.0**-40)) if plain and known else None
            factor = constant_factor(last)
            if factor is None or factor.numel() != 1 or last.values[0].labels.shape != labels.shape:
                return None
            labels, scale = last.values[0].labels, scale * abs(float(factor))

    @property
    def head(self) -> Node | None:
        """The product with a constant matrix whose result is the network's, up to a factor and constants."""
        return None if self._head is None else self._head[0]

    @property
    def head_weight(self) -> Tensor | None:
        """Weight ``(classes, features)`` of the head, times the factor behind it."""
        if self._head is None:
            return None
        weight = self._head[0].args["mat2"].detach().mT
        return weight if self._head[1] == 1 + 2.0**-40 else weight.cpu().double() * self._head[1]

    @property
    def features_bound(self) -> float:
        """Certified bound of what the head reads; that of the whole network if there is no head."""
        if self.head is None:
            return self.bound
        name = "mat1" if self.head.op == "addmm" else "self"
        return self.walk.rounded_up(self.walk.bound([self.head.args[name].labels]))


@own_tensors()
@torch.no_grad()
def analyse(model: nn.Module, input_shape: InputShape, *, batch: int = BATCH, compare: bool = True) -> Analysis:
    """Trace a network and bound all that it computes; see ``lipschitz_bound``.

    Args:
        model: not changed.
        input_shape: as for ``lipschitz_bound``.
        batch: samples of the batch that is traced, at least 2: these tell whether the samples of a batch mix.
        compare: whether to run the model on random inputs, and see that it is what was traced.

    >>> found = ts.lipschitz.analyse(nn.Sequential(OrthoLinear(8, 6), nn.ReLU(), nn.Linear(6, 3)), (8,))
    >>> found.head_weight.shape, round(found.features_bound, 4)
    (torch.Size([3, 6]), 1.0)
    """
    require_module(model)
    (batch,), compare = per_axis("batch", batch, 1, least=2), flag("compare", compare)
    shapes = checked_shapes(input_shape)
    refuse_unreadable(model)
    like = input_like(model)
    with unchanged(model):
        graph = _traced(model, shapes, like, batch)
    if not sum(leaf.numel() for leaf in graph.tensors):
        raise ValueError(f"{class_name(model)} returns no numbers for an input of shape {input_shape}")
    bound, walk, gains = _bounded(model, graph)
    found = Analysis(bound, graph, walk, gains)
    if compare:
        with unchanged(model):
            _compare(model, found, shapes, like)
            _refuse_other_sizes(model, found, _traced(model, shapes, like, BATCH if batch > BATCH else batch + 1))
    return found


def _bounded(model: nn.Module, graph: Graph) -> tuple[float, Walk, dict[int, float]]:
    """Return the bound of what was traced, the walk that found it, and the gain of each call.

    Raises:
        NoRuleError: if there is none, or the samples of the batch are not apart.
    """
    batch, walk = graph.batch, Walk(graph)
    walk.forward()
    if any(_are_tokens(labels, graph) for labels in graph.outputs):
        raise NoRuleError("tokens that do not go to an embedding have no Lipschitz constant")
    scalars = [tensor for tensor in graph.outputs if tensor.ndim == 0]
    for returned in [tensor for tensor in graph.tensors if tensor.ndim] + scalars:
        if returned.ndim == 0 or len(returned) != batch:
            raise NoRuleError(
                f"{class_name(model)} moves or mixes the samples of a batch: it returns {tuple(returned.shape)} for a "
                f"batch of {batch}. The first axis of inputs and outputs must be the batch; torch's recurrent layers "
                "have it second unless batch_first=True"
            )
    weights, gains = _weights_of_samples(model, walk, graph)
    if not all(torch.allclose(each, weights[0], rtol=1e-6, atol=0.0) for each in weights):
        raise NoRuleError(
            f"{class_name(model)} moves or mixes the samples of a batch: it amplifies more in one place than in another"
        )
    bound = walk.rounded_up(min(math.sqrt(max(float(each.max()) for each in weights)), walk.bound(graph.outputs)))
    return bound, walk, gains


def _refuse_other_sizes(model: nn.Module, found: Analysis, graph: Graph) -> None:
    """See that a batch of another size is computed with the same constants, or has the same bound.

    Raises:
        NoRuleError: if not.
    """
    if _are_same(graph.nodes, found.graph.nodes):
        return
    other = _bounded(model, graph)[0]
    if not math.isclose(other, found.bound, rel_tol=1e-6):
        raise NoRuleError(
            f"{class_name(model)} has a Lipschitz bound of {other:.6g} in batches of {graph.batch} and of "
            f"{found.bound:.6g} in batches of {found.graph.batch}: what it computes depends on the size of the "
            "batch, or changes from pass to pass"
        )


@own_tensors()
@torch.no_grad()
def refuse_changed(model: nn.Module, found: Analysis, input_shape: InputShape) -> None:
    """See that a model still makes the very calls that were bounded, with the same constants.

    Raises:
        NoRuleError: if not.
    """
    with unchanged(model):
        graph = _traced(model, checked_shapes(input_shape), input_like(model), found.graph.batch)
    if not _are_same(graph.steps, found.graph.steps):
        raise NoRuleError(
            f"{class_name(model)} was changed while the data was read: what it computes at the end is not what was "
            "bounded; let nothing train it, or move its statistics, meanwhile"
        )


def _are_same(calls: Sequence[Node | Step], others: Sequence[Node | Step]) -> bool:
    """Whether calls are the same, with the same constants."""

    def same(a: object, b: object) -> bool:
        if isinstance(a, Tensor) and isinstance(b, Tensor):
            return same_numbers(a, b)
        return type(a) is type(b) and (isinstance(a, Value) or a is b or bool(a == b))

    def parts(call: Node | Step) -> list[object]:
        return [call.op, *tree_leaves((call.args, call.kwargs if isinstance(call, Step) else {}))]

    pairs = zip(map(parts, calls), map(parts, others), strict=False)
    return len(calls) == len(others) and all(len(a) == len(b) and all(map(same, a, b)) for a, b in pairs)


def _weights_of_samples(model: nn.Module, walk: Walk, graph: Graph) -> tuple[list[Tensor], dict[int, float]]:
    """Return the weights of each sample's outputs on its own inputs, and each call's gain on all outputs of a batch.

    The outputs of half of the samples at a time are followed back, which must not lead to the other half. Any two
    samples are in different halves once, if each bit of their numbers says which.

    Raises:
        NoRuleError: if samples mix.
    """
    numbers, gains = torch.arange(graph.batch), dict[int, float]()
    samples: list[Tensor] = [torch.empty(0)] * graph.batch
    for bit in range((graph.batch - 1).bit_length()):
        for side in (0, 1):
            half = (numbers >> bit & 1) == side
            chosen = [half.double().view(-1, *(1,) * (out.ndim - 1)).expand(out.shape) for out in graph.outputs]
            weights, seen = walk.back(graph.outputs, chosen)
            if any(bool((w[~half] > 0).any()) for w in weights):
                raise NoRuleError(
                    f"{class_name(model)} mixes the samples of a batch: what it returns for one depends on the others"
                )
            for number in numbers[half].tolist():
                samples[number] = torch.cat([w[number].flatten() for w in weights])
            gains = {call: max(gain, gains.get(call, 0.0)) for call, gain in seen.items()}
    return samples, gains


def _are_tokens(labels: Tensor, graph: Graph) -> bool:
    inputs = [(start, start + math.prod(shape)) for start, shape in graph.inputs]
    names = labels.abs()
    return any(bool(((names >= inputs[k][0]) & (names < inputs[k][1])).any()) for k in graph.tokens)


def checked_shapes(input_shape: InputShape) -> Shapes:
    """Shapes of all inputs, by position or by name.

    Raises:
        ValueError: if they are not shapes.
    """
    if isinstance(input_shape, Mapping):
        named = {str(name): _checked_shape(shape, input_shape) for name, shape in input_shape.items()}
        if named:
            return named
    elif isinstance(input_shape, list | tuple) and input_shape and not isinstance(input_shape[0], int):
        return [_checked_shape(shape, input_shape) for shape in input_shape]
    return [_checked_shape(input_shape, input_shape)]


def _checked_shape(shape: object, given: object) -> Shape:
    sizes = tuple(shape) if isinstance(shape, list | tuple) else ()
    if not sizes or not all(isinstance(size, int) and not isinstance(size, bool) and size > 0 for size in sizes):
        raise ValueError(
            f"input_shape={shown(given)} must be positive integers, one input without the batch, or a list or "
            "dictionary of such shapes"
        )
    if math.prod(sizes) > _LARGEST_INPUT:
        raise ValueError(
            f"input_shape={shown(sizes)} has more than {_LARGEST_INPUT} numbers, too many to follow one by one: "
            "trysquare.spectral_norm_bound(layer), without a shape, bounds a layer for every size at once"
        )
    return sizes


def _traced(model: nn.Module, shapes: Shapes, like: Tensor, batch: int) -> Graph:
    tokens, line = frozenset[int](), ""
    while True:
        try:
            return Tracer(model, is_leaf).trace(_inputs(shapes, like, batch, tokens), tokens)
        except TakesTokens as found:
            tokens, line = tokens | found.args[0], line or found.args[1]
        except NoRuleError:
            raise
        except ValueError as error:
            if not line:
                raise
            raise NoRuleError(
                f"an embedding takes tokens, not values that were computed ({line}): it jumps from one to the next, "
                f"and has a Lipschitz constant only as the first layer. On tokens {error}"
            ) from error


def _inputs(shapes: Shapes, like: Tensor, batch: int, tokens: frozenset[int], words: int = 1) -> Inputs:
    """Normal noise, the same each time; some of them tokens below a number of words."""
    generator = torch.Generator().manual_seed(0)
    made = [
        torch.randint(words, (batch, *shape), generator=generator).to(like.device)
        if number in tokens
        else torch.randn(batch, *shape, generator=generator).to(like)
        for number, shape in enumerate(shapes.values() if isinstance(shapes, dict) else shapes)
    ]
    return dict(zip(shapes, made, strict=True)) if isinstance(shapes, dict) else made


def random_inputs(graph: Graph, shapes: Shapes, like: Tensor, batch: int) -> Inputs:
    """Normal noise, the same each time; tokens if that is what the model takes."""
    words = min((len(node.args["weight"]) for node in graph.nodes if node.op == "embedding"), default=1)
    return _inputs(shapes, like, batch, graph.tokens, words)


def _compare(model: nn.Module, found: Analysis, shapes: Shapes, like: Tensor) -> None:
    """See that the model does with numbers, and batches of other sizes, what was traced.

    Raises:
        NoRuleError: if not.
    """
    batch = found.graph.batch
    inputs = random_inputs(found.graph, shapes, like, batch + 1)

    def each(change: Callable[[Tensor], Tensor]) -> Inputs:
        return {n: change(v) for n, v in inputs.items()} if isinstance(inputs, dict) else [change(v) for v in inputs]

    def graded_inputs(wanted: bool) -> Inputs:
        return each(lambda v: v.detach().requires_grad_(wanted and v.is_floating_point()))

    exact_model = ExactEvaluation(found.graph, found.gains)
    followed, error = exact_model(each(lambda v: v[:batch]))
    short = coarsest_dtype(like)
    rounding = exact_model.in_short(error, short)

    def called(values: Inputs) -> list[Tensor]:
        values = tree_map(torch.clone, values)  # the model may write into its inputs
        try:
            with users_device():
                result = model(**values) if isinstance(values, dict) else model(*values)
        except Exception as error:
            raise ValueError(f"{class_name(model)} fails on a batch that it was not traced with: {error}") from error
        return [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]

    with torch.no_grad():
        plain, flipped, alone = called(inputs), called(each(lambda v: v.flip(0))), called(each(lambda v: v[:1]))
    graded = plain
    for wanted in (True, False):
        with torch.enable_grad(), warnings.catch_warnings():  # what an attack computes
            warnings.simplefilter("ignore")  # compilers look at the gradients of inputs that are no leaves
            # It may write where autograd does not let it, so that no attack can ask for these gradients.
            with suppress(ValueError):
                graded = called(graded_inputs(wanted))
                break
    exact = [leaf for leaf in tree_leaves(followed) if isinstance(leaf, Tensor)]
    reason = (
        f"{class_name(model)} returns other values when it runs than when it is followed; it must not depend on "
        "whether it is traced or compiled, on gradients being recorded, on the size of the batch, or on anything but "
        "its input"
    )
    refuse_difference([t[:batch] if t.ndim else t for t in plain], exact, short, rounding, reason)
    refuse_difference(plain, graded, short, rounding, reason)
    depends = f"{class_name(model)} moves or mixes the samples of a batch: outputs depend on others, or on the place"
    first = plain if any(t.ndim == 0 for t in plain) else [t[:1] for t in plain]
    refuse_difference(alone, first, short, rounding, depends)
    refuse_difference(plain, [t.flip(0) if t.ndim else t for t in flipped], short, rounding, depends)


def refuse_difference(
    found: list[Tensor], expected: list[Tensor], dtype: torch.dtype, rounding: float, reason: str
) -> None:
    """Refuse outputs that differ by more than arithmetic can explain.

    The tolerance is some times the root of the dtype's precision, and what its rounding errors can come to in this
    network. It need not be sharp: what it looks for is another function.
    """
    same, overflows = len(found) == len(expected), False
    for one, two in zip(found, expected, strict=False):
        if one.shape != two.shape:
            same = False
            continue
        a, b = (t.detach().cpu().double() for t in (one, two))
        shorter = max(
            (dtype, *(t.dtype for t in (one, two) if t.is_floating_point())), key=lambda d: torch.finfo(d).eps
        )
        finite = b[b.isfinite()].abs()
        size = float(finite.max()) if finite.numel() else 0.0
        if not math.isfinite(rounding):
            rounding = 0.0
        overflows = overflows or bool((~a.isfinite() & b.isfinite()).any())
        tolerance = 8 * (torch.finfo(shorter).eps ** 0.5 * size + torch.finfo(shorter).tiny) + rounding
        same = same and torch.allclose(a, b, rtol=0, atol=tolerance, equal_nan=True)
    if not same:
        short = str(dtype).removeprefix("torch.")
        raise NoRuleError(f"its values overflow in {short}, and are finite in float64" if overflows else reason)
