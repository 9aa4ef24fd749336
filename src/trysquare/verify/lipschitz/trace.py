"""One forward pass as a list of the computations that really happened, and of where every number came from.

Each number that depends on the input is a *variable* with a number of its own, its *label*. A traced tensor carries the
labels of its entries; a negative label is the negative of a variable, 0 is a constant. Calls that only move numbers
move their labels; all other calls become a ``Node``, which makes new variables from old ones.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from trysquare.verify.lipschitz.shadow import (
    Frame,
    NoRuleError,
    Shadow,
    Shape,
    Step,
    TakesTokens,
    Traced,
    address,
    class_name,
    has_memory,
    laid_out,
    leaves_of,
    mapped,
    paired,
    plain_structure,
    run,
    same_numbers,
    user_line,
)

_REPEATING = frozenset(
    """
    cat expand gather im2col index index_select reflection_pad1d reflection_pad2d reflection_pad3d repeat
    replication_pad1d replication_pad2d replication_pad3d stack upsample_nearest1d upsample_nearest2d
    upsample_nearest3d _upsample_nearest_exact1d _upsample_nearest_exact2d _upsample_nearest_exact3d
    """.split()
)


@dataclass
class Value:
    """An argument of a node that depends on the input.

    Attributes:
        labels: of its entries, at the time of the call.
    """

    labels: Tensor


@dataclass(eq=False)
class Node:
    """A call that computes.

    Attributes:
        op: its name: that of ATen's function without the overload, or ``"leaf"`` for a module that has a rule.
        args: arguments by name; those that depend on the input are ``Value``, all others are what they were.
        outputs: first label and shape of each tensor that it returned.
        floating: whether each of these holds real numbers that can change continuously.
        dtype: of the first of them.
        path: the modules that were running, outermost first.
        line: file, line and source of the code that made the call.
        inner: what a leaf computes inside.
        inner_labels: of what it returned there.
        changes: bounds of the arguments whose changes add up, by their ``id``: how the sum is best shared out.
        constants: of a leaf, one for each input, once they are known.
        norms: certified norms that are known already, by what the outputs are weighted with.
        range: of the singular values of a convolution, if that was met on the way.
        moves: whether it is none that computes, but a note of a call that moved numbers and may have repeated some.
    """

    op: str
    args: dict[str, Any]
    outputs: list[tuple[int, Shape]]
    floating: list[bool]
    dtype: torch.dtype
    path: tuple[Frame, ...]
    line: str
    inner: list[Node] = field(default_factory=list)
    inner_labels: list[Tensor] = field(default_factory=list)
    changes: dict[int, float] = field(default_factory=dict)
    constants: list[float] | None = None
    moves: bool = False
    norms: dict[bytes, Any] = field(default_factory=dict)
    range: Any = None

    @property
    def module(self) -> nn.Module | None:
        """The innermost module that was running."""
        return self.path[-1].module if self.path else None

    @property
    def name(self) -> str:
        """Path of that module."""
        return self.path[-1].name if self.path else ""

    @property
    def values(self) -> list[Value]:
        """The arguments that depend on the input."""
        return [leaf for leaf in tree_leaves(list(self.args.values())) if isinstance(leaf, Value)]

    @property
    def size(self) -> int:
        """Number of variables."""
        return sum(_numel(shape) for _, shape in self.outputs)

    @property
    def start(self) -> int:
        """First label."""
        return self.outputs[0][0]

    def where(self) -> str:
        """What an error calls it."""
        inside = f" of {class_name(self.module)} at {self.name!r}" if self.module is not None else ""
        return f"{self.op}{inside} ({self.line})"


def _numel(shape: Sequence[int]) -> int:
    number = 1
    for size in shape:
        number *= size
    return number


@dataclass(eq=False)
class Graph:
    """What a forward pass computed.

    Attributes:
        nodes: in the order in which they ran.
        inputs: first label and shape of each input.
        result: what the model returned, with a ``Value`` for each tensor that depends on the input.
        tokens: whether the input is integers, which count as one-hot vectors.
        modules: first input and output of modules that take and return a tensor, by the number of the call.
        steps: everything that happened, in order: all calls on values, also those that move numbers.
        shapes: what these calls returned, without numbers.
        writes: whether any of them writes to where a value is: what such a write reaches depends on whether the calls
            before it copied, or not.
    """

    nodes: list[Node]
    inputs: list[tuple[int, Shape]]
    result: Any = None
    tokens: bool = False
    modules: dict[int, tuple[Value, Value]] = field(default_factory=dict)
    steps: list[Step] = field(default_factory=list)
    shapes: list[Any] = field(default_factory=list)
    writes: bool = False

    @property
    def batch(self) -> int:
        """Samples of the batch that was traced."""
        return self.inputs[0][1][0]

    @property
    def outputs(self) -> list[Tensor]:
        """Labels of all that the model returned and depends on the input."""
        return [leaf.labels for leaf in tree_leaves(self.result) if isinstance(leaf, Value)]

    @property
    def tensors(self) -> list[Tensor]:
        """Everything that the model returned, constants too; of what depends on the input its labels."""
        values = (leaf.labels if isinstance(leaf, Value) else leaf for leaf in tree_leaves(self.result))
        return [value for value in values if isinstance(value, Tensor)]


class Calls:
    """Which call made a value.

    Args:
        nodes: calls, in the order in which they ran.
    """

    def __init__(self, nodes: list[Node]) -> None:
        blocks = sorted(((node.start, node) for node in nodes if node.size), key=lambda block: block[0])
        self._starts, self._nodes = [start for start, _ in blocks], [node for _, node in blocks]

    def maker(self, label: float) -> Node | None:
        """The call whose results have a label among them; ``None`` for an input, or a constant."""
        at = bisect_right(self._starts, abs(label)) - 1
        node = self._nodes[at] if at >= 0 else None
        return node if node is not None and abs(label) < node.start + node.size else None

    def makers(self, labels: Tensor) -> list[Node] | None:
        """The calls that made values; ``None`` if some of these are inputs."""
        left, found = labels[labels != 0].abs(), []
        while left.numel():
            node = self.maker(float(left[0]))
            if node is None:
                return None
            found.append(node)
            left = left[(left < node.start) | (left >= node.start + node.size)]
        return found

    def whole(self, labels: Tensor) -> Node | None:
        """The call whose first result values are: all of it and in its order, in whatever shape."""
        node = self.maker(float(labels.reshape(-1)[0])) if labels.numel() else None
        if node is None or _numel(node.outputs[0][1]) != labels.numel():
            return None
        expected = torch.arange(node.start, node.start + labels.numel(), dtype=torch.float64)
        return node if torch.equal(labels.reshape(-1), expected) else None


def _copied(constant: Tensor) -> Tensor:
    """A copy with the same strides: what torch calls next may depend on these."""
    copied = constant.clone()
    if not has_memory(constant) or copied.stride() == constant.stride() or not constant.numel():
        return copied
    reach = 1 + sum((n - 1) * step for n, step in zip(constant.shape, constant.stride(), strict=True))
    return constant.as_strided((reach,), (1,)).clone().as_strided(constant.shape, constant.stride(), 0)


class Tracer(Shadow):
    """Makes the graph of a model: the payload is labels.

    Args:
        model: what to trace.
        dtype: of its inputs.
        is_leaf: whether a module is kept as one node.
    """

    def __init__(self, model: nn.Module, dtype: torch.dtype, is_leaf: Callable[[nn.Module], bool]) -> None:
        super().__init__(model, dtype, is_leaf)
        self.nodes: list[Node] = []
        self.modules: dict[int, tuple[Value, Value]] = {}
        self.steps: list[Step] = []
        self.known_shapes: list[Any] = []
        self.inputs_end = 0
        self._next = 1
        self._constants: dict[Any, Tensor] = {}

    def trace(self, shapes: Any, device: torch.device, batch: int, tokens: bool) -> Graph:
        """Run the model on a batch of inputs of these shapes (a list for several, a dictionary for named ones)."""
        inputs: list[tuple[int, Shape]] = []

        def made(shape: Shape) -> Traced:
            labels, start = self._new((batch, *shape))
            inputs.append((start, (batch, *shape)))
            return self.noted(Traced(labels, torch.int64 if tokens else self.dtype, device))

        args = [made(shape) for shape in shapes] if isinstance(shapes, list) else []
        kwargs = {name: made(shape) for name, shape in shapes.items()} if isinstance(shapes, dict) else {}
        self.inputs_end = self._next

        result = run(self, args, kwargs)
        values = tree_map(self._value, self.step("return", plain_structure(result)))
        return Graph(self.nodes, inputs, values, tokens, self.modules, self.steps, self.known_shapes, self.writes)

    def step(self, name: str, args: Any) -> Any:
        """Take note of a step; returns its arguments with constants as they are now."""
        as_now = mapped(self._as_now, args)
        places = mapped(lambda leaf: leaf if (p := self.payload(leaf)) is None else self.place(p, leaf.dtype), as_now)
        self.steps.append(Step(name, places, user_line()))
        return as_now

    def _as_now(self, leaf: Any) -> Any:
        """A constant as it is now, since it may be written to later; everything else as it is."""
        if not isinstance(leaf, Tensor) or self.payload(leaf) is not None:
            return leaf
        plain = leaf.detach()
        place = (address(plain), plain.storage_offset()) if has_memory(plain) else id(leaf)
        key = place, plain.dtype, plain.shape, plain.stride()
        if (known := self._constants.get(key)) is None or not same_numbers(known, plain):
            known = self._constants[key] = _copied(plain)
        return known

    def shapes(self, func: Any, args: Any, kwargs: Any) -> Any:
        """What torch says, which is kept."""
        self.known_shapes.append(self.torchs_shapes(func, args, kwargs))
        return self.known_shapes[-1]

    def _value(self, leaf: Any) -> Any:
        """The labels of a tensor as they are now; everything else as it is."""
        if (payload := self.payload(leaf)) is None:
            return leaf
        if bool(payload.isnan().any()):
            raise NoRuleError(
                f"it uses memory that nothing was written into ({user_line()}): it is not a fixed function"
            )
        return Value(payload.clone())

    def lifted(self, constant: Tensor) -> Tensor:
        """Constants have the label 0."""
        return torch.zeros(constant.shape, dtype=torch.float64)

    def number(self, value: Any) -> Any:
        """As any constant."""
        return 0.0

    def _new(self, shape: Shape) -> tuple[Tensor, int]:
        start, self._next = self._next, self._next + _numel(shape)
        return torch.arange(start, self._next, dtype=torch.float64).view(shape), start

    def _is_input(self, labels: Tensor) -> bool:
        sizes = labels.abs()
        return bool(((sizes > 0) & (sizes < self.inputs_end)).all())

    def _check_cast(self, value: Tensor, dtype: torch.dtype) -> None:
        integers = not dtype.is_floating_point and not dtype.is_complex and dtype != torch.bool
        payload = self.payload(value)
        if payload is not None and self._is_input(payload):
            if integers and value.is_floating_point():
                raise TakesTokens
            if integers:
                return
            if not value.is_floating_point():
                raise NoRuleError(
                    f"tokens that do not go to an embedding have no Lipschitz constant ({user_line()}), and numbers "
                    "that are rounded to integers jump"
                )
        super()._check_cast(value, dtype)

    def _fresh(self, op: str, func: Any, args: Any, kwargs: Any) -> Any:
        if op == "embedding" and (indices := self.payload(args[1])) is not None and args[1].is_floating_point():
            if self._is_input(indices):
                raise TakesTokens
            raise NoRuleError(
                f"an embedding takes tokens, not values that were computed ({user_line()}): it jumps from one to the "
                "next, and has a Lipschitz constant only as the first layer"
            )
        return super()._fresh(op, func, args, kwargs)

    def compute(self, op: str, func: Any, args: Any, kwargs: Any, like: Any) -> Any:
        """A new node."""
        names = [argument.name for argument in func._schema.arguments]
        bound = dict(zip(names, args, strict=False)) | kwargs

        depending = [leaf for leaf in tree_leaves(list(bound.values())) if self.payload(leaf) is not None]
        jumping = any(not leaf.is_floating_point() for leaf in depending)
        if jumping and not self.inside and op not in ("embedding", "where"):
            raise NoRuleError(
                f"{op} of integers or conditions that depend on the input ({user_line()}): they jump. Tokens have a "
                "Lipschitz constant only as what an embedding takes; whether the pieces of a function fit each other "
                "where a condition changes cannot be told from rounded numbers: write it with torch.where of what is "
                "compared, torch.maximum, torch.minimum or clamp, or register its constant with "
                "@trysquare.lipschitz.rule"
            )
        node = self._node(op, {name: tree_map(self._value, given) for name, given in bound.items()}, like)
        return paired(lambda part, _: part, self._payloads(node, like), like)

    def _node(self, op: str, args: dict[str, Any], like: Any) -> Node:
        tensors = [leaf for leaf in tree_leaves(like) if isinstance(leaf, Tensor)]
        outputs = []
        for tensor in tensors:
            outputs.append((self._next, tuple(tensor.shape)))
            self._next += tensor.numel()
        floating = [tensor.is_floating_point() for tensor in tensors]
        dtype = tensors[0].dtype if tensors else self.dtype
        node = Node(op, args, outputs, floating, dtype, tuple(self.path), user_line())
        self.nodes.append(node)
        return node

    def move(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Move labels; calls that may repeat some are kept in mind, for those who read an audit."""
        made = super().move(func, args, kwargs)
        op = func._schema.name.split("::")[-1].removesuffix("_")
        if op in _REPEATING and isinstance(made, Tensor):
            first = next(p for leaf in tree_leaves(args) if (p := self.payload(leaf)) is not None)
            self._note_move(op, first, made)
        return made

    def _note_move(self, op: str, before: Tensor, after: Tensor) -> None:
        args = {"input": Value(before.clone()), "output": Value(after.clone())}
        self.nodes.append(Node(op, args, [], [], self.dtype, tuple(self.path), user_line(), moves=True))

    @staticmethod
    def _payloads(node: Node, like: Any) -> Any:
        """Labels of the results."""
        made = []
        tensors = (leaf for leaf in leaves_of(like) if isinstance(leaf, Tensor))
        for (start, shape), tensor in zip(node.outputs, tensors, strict=True):
            labels = torch.arange(start, start + _numel(shape), dtype=torch.float64).view(shape)
            made.append(laid_out(labels, tensor))
        return made[0] if len(made) == 1 else made

    def call_module(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Call a module; one that has a rule becomes a node, with what it computes inside of that."""
        if not self.keeps_whole(module, args, kwargs):
            before, inputs = len(self.nodes), [p.clone() for arg in args[:1] if (p := self.payload(arg)) is not None]
            result = super().call_module(module, args, kwargs)
            made = self.payload(result)
            if inputs and made is not None:
                if before == len(self.nodes):
                    self._note_move("move", inputs[0], made)
                self.modules[self.path[-1].call] = Value(inputs[0]), Value(made.clone())
            return result
        self.step("module", [self.path[-1].name, *args])
        values = [Value(arg_payload.clone()) for arg in args if (arg_payload := self.payload(arg)) is not None]
        outer, self.nodes = self.nodes, []
        self.inside += 1
        result = super().call_module(module, args, kwargs)
        self.inside -= 1
        inner, self.nodes = self.nodes, outer
        if not isinstance(result, Traced):
            raise NoRuleError(
                f"{class_name(module)} has a Lipschitz rule and returns {type(result).__name__}: a rule is about one "
                "tensor that depends on the input"
            )
        shared = {value.untyped_storage()._cdata for arg in args if (value := self.payload(arg)) is not None}
        if result.payload.untyped_storage()._cdata in shared:  # what it returns is a part of what it was given
            self.nodes += inner
            return result
        shapes = [tuple(arg.shape) for arg in args]
        node = self._node("leaf", {"inputs": values, "shapes": shapes, "dtype": args[0].dtype}, result)
        node.inner, node.inner_labels = inner, [result.payload.clone()]
        self.step("end of module", [result])
        return self.noted(Traced(self._payloads(node, result), result.dtype, result.device))
