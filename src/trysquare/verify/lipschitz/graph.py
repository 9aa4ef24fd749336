"""What a forward pass computed, and where every number came from.

Each number that depends on the input is a *variable* with a number of its own, its *label*. A negative label is the
negative of a variable, 0 is a constant. Calls that only move numbers move their labels (``record``); all other calls
are a ``Node``, which makes new variables from old ones.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from trysquare.torch_internals import tree_leaves

if TYPE_CHECKING:
    from trysquare.nn.linalg.bounds import SingularValueRange
    from trysquare.verify.lipschitz.record import Step

Shape = tuple[int, ...]
Shapes = list[Shape] | dict[str, Shape]
"""Shapes of the inputs of a model, without the batch, by position or by name."""
Inputs = list[Tensor] | dict[str, Tensor]
"""What a model is called with, by position or by name."""
Arguments = dict[str, Any]
"""Arguments of a call by name: numbers, dtypes, lists, ``None``, tensors, and ``Value`` in place of some."""
# The smallest and the largest number that a value can be.
Range = tuple[float, float]
ANY: Range = (-math.inf, math.inf)


class NoRuleError(ValueError):
    """A model, module or call whose Lipschitz constant is not known."""


def class_name(module: nn.Module | None) -> str:
    """Return the name of a module's class, without what torch puts in front of parametrized ones."""
    return type(module).__name__.removeprefix("Parametrized")


class Frame(NamedTuple):
    """A module that is running: its name in the model, the module, and the number of this call of it."""

    name: str
    module: nn.Module
    call: int


@dataclass
class Value:
    """An argument of a node that depends on the input.

    Attributes:
        labels: of its entries.
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
        apart: whether these arguments read different inputs of the network.
        between: the range of an argument; by default nothing is known (see ``ranges``).
        constants: of a leaf, one for each input, once they are known.
        norms: certified norms that are known already, by what the outputs are weighted with.
        range: of the singular values of a convolution, if that was met on the way.
        moves: whether it is none that computes, but a note of a call that moved numbers and may have repeated some.
    """

    op: str
    args: Arguments
    outputs: list[tuple[int, Shape]]
    floating: list[bool]
    dtype: torch.dtype
    path: tuple[Frame, ...]
    line: str
    inner: list[Node] = field(default_factory=list)
    inner_labels: list[Tensor] = field(default_factory=list)
    changes: dict[int, float] = field(default_factory=dict)
    apart: bool = False
    between: Callable[[Value], Range] = lambda _: ANY
    constants: list[float] | None = None
    moves: bool = False
    norms: dict[bytes, Any] = field(default_factory=dict)
    range: SingularValueRange | None = None

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
        return sum(math.prod(shape) for _, shape in self.outputs)

    @property
    def start(self) -> int:
        """First label."""
        return self.outputs[0][0]

    def labels(self, output: int = 0) -> Tensor:
        """Return labels of a result."""
        start, shape = self.outputs[output]
        return torch.arange(start, start + math.prod(shape), dtype=torch.float64).view(shape)

    def where(self) -> str:
        """Return what an error calls it."""
        inside = f" of {class_name(self.module)} at {self.name!r}" if self.module is not None else ""
        return f"{self.op}{inside} ({self.line})"


@dataclass(eq=False)
class Graph:
    """What a forward pass computed.

    Attributes:
        nodes: in the order in which they ran.
        inputs: first label and shape of each input.
        result: what the model returned, with a ``Value`` for each tensor that depends on the input.
        tokens: the inputs that are integers, which count as one-hot vectors.
        modules: first input and output of modules that take and return a tensor, by the number of the call.
        steps: all calls on values, also those that move numbers and those inside of leaves.
        returned: as ``result``, with a ``Slot`` for each such tensor. The inputs have the slots from 0 on.
    """

    nodes: list[Node]
    inputs: list[tuple[int, Shape]]
    result: Any = None
    tokens: frozenset[int] = frozenset()
    modules: dict[int, tuple[Value, Value]] = field(default_factory=dict)
    steps: list[Step] = field(default_factory=list)
    returned: Any = None

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
        """Return the call whose results have a label among them; ``None`` for an input, or a constant."""
        at = bisect_right(self._starts, abs(label)) - 1
        node = self._nodes[at] if at >= 0 else None
        return node if node is not None and abs(label) < node.start + node.size else None

    def makers(self, labels: Tensor) -> list[Node] | None:
        """Return the calls that made values; ``None`` if some of these are inputs."""
        left, found = labels[labels != 0].abs(), []
        while left.numel():
            node = self.maker(float(left[0]))
            if node is None:
                return None
            found.append(node)
            left = left[(left < node.start) | (left >= node.start + node.size)]
        return found

    def whole(self, labels: Tensor) -> Node | None:
        """Return the call whose whole first result these values are, in its order and in whatever shape."""
        node = self.maker(float(labels.reshape(-1)[0])) if labels.numel() else None
        if node is None or math.prod(node.outputs[0][1]) != labels.numel():
            return None
        return node if torch.equal(labels.reshape(-1), node.labels().reshape(-1)) else None
