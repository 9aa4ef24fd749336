"""Models of plain torch, made 1-Lipschitz: the way in, as ``export`` is the way out.

The forward pass is traced once (``tracing``), the graph is rewritten (``rewriting``), and what it calls now takes the
place of the modules of a copy.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Literal, TypedDict, Unpack, overload

import torch
from torch import Tensor, fx, nn

from trysquare.naming import require_known, shown
from trysquare.nn.rewriting import Change, Conversion, Converter
from trysquare.nn.tracing import is_leaf, trace, value_of

__all__ = ["Change", "Conversion", "Converted", "from_torch"]

Shapes = Sequence[int] | Sequence[Sequence[int]]
"""The shape of one input without the batch, or a list of shapes."""

_BATCH = 2  # samples of the input that is traced


class Converted(fx.GraphModule):
    """A converted model."""

    @property
    def conversion(self) -> Conversion:
        """What was changed, to what, and why."""
        return self.meta["conversion"]

    def as_torch(self) -> nn.Module:
        """Return the same calls without the table."""
        return fx.GraphModule(self, self.graph, self._get_name())

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle as torch does, and the table with it."""
        return _unpickled, (*super().__reduce__(), self.conversion)


class _Choices(TypedDict, total=False):
    activation: str
    residual: str
    init: str
    expanding_shortcut: str
    keep: tuple[type[nn.Module], ...]


def _unpickled(make: Callable[..., fx.GraphModule], arguments: tuple[object, ...], table: Conversion) -> Converted:
    plain = make(*arguments)
    result = Converted(plain, plain.graph, plain._get_name())
    result.meta["conversion"] = table
    return result


@overload
def from_torch(
    model: nn.Module, input_shape: Shapes, *, dry_run: Literal[False] = ..., **choices: Unpack[_Choices]
) -> Converted: ...


@overload
def from_torch(
    model: nn.Module, input_shape: Shapes, *, dry_run: Literal[True], **choices: Unpack[_Choices]
) -> Conversion: ...


def from_torch(
    model: nn.Module,
    input_shape: Shapes,
    *,
    activation: str = "maxmin",
    residual: str = "convex",
    init: str = "random",
    expanding_shortcut: str = "2x2",
    keep: tuple[type[nn.Module], ...] = (),
    dry_run: bool = False,
) -> Converted | Conversion:
    """Turn a model in plain torch into a 1-Lipschitz network of the same architecture.

    Convolutions and linear layers become orthogonal ones of the same numbers where these exist, and 1-Lipschitz ones
    otherwise; normalisation becomes centering, activations ``MaxMin``; pooling is scaled to norm 1; sums of branches
    get weights that add up to 1, and concatenations are divided by the root of the number of their parts. All other
    calls either do not amplify, or are refused, with the line of code that makes them. Of several outputs, each is
    1-Lipschitz. The model is traced in eval mode: anything that it does only in training, besides dropout, is left out.

    Args:
        model: any model that ``torch.fx`` can trace; code may ask for sizes. It is not changed.
        input_shape: shape of one input without the batch, or a list of shapes for several inputs.
        activation: ``"maxmin"``, or ``"keep"`` to leave activations, those that amplify divided by their largest slope.
        residual: ``"convex"`` weights ``(1 - t, t)`` of sums, or ``"learnable"`` ones of any sign; both are trained.
        init: ``"random"`` weights, or ``"pretrained"``: the nearest to those of the model (``layer.project_``), which
            are first multiplied by the factors of a batch normalisation that directly follows.
        expanding_shortcut: what becomes of a kernel that is smaller than its stride and has no orthogonal counterpart:
            ``"2x2"`` makes it as large as the stride, ``"aol"`` keeps its size and uses ``method="aol"``.
        keep: classes of modules that are left as they are; their constants are part of that of the network.
        dry_run: whether to return the table only.

    Returns:
        A ``torch.fx.GraphModule`` with the names of the model's modules, in its mode. Its ``conversion`` is a table of
        what was changed, to what, and why. With ``dry_run=True`` that table.

    Raises:
        ValueError: if something cannot be converted, naming each line, or the model cannot be traced.

    >>> plain = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten())
    >>> plain.append(nn.Linear(512, 10))  # doctest: +ELLIPSIS
    Sequential(...
    >>> model = ts.from_torch(plain, (3, 8, 8))
    >>> round(ts.lipschitz_bound(model.eval(), (3, 8, 8)), 4)
    1.0
    >>> model.conversion
        was          is now          where  why
    1x  Conv2d       OrthoConv2d     0      orthogonal, same geometry
    1x  BatchNorm2d  BatchCentering  1      centering: dividing by a deviation is not Lipschitz
    1x  ReLU         MaxMin          2      isometric: keeps the norm of gradients
    1x  Flatten      Flatten         3      moves or drops values
    1x  Linear       OrthoLinear     4      orthonormal rows or columns
    """
    options = {"activation": activation, "residual": residual, "init": init, "expanding_shortcut": expanding_shortcut}
    known = {"activation": ("maxmin", "keep"), "residual": ("convex", "learnable"), "init": ("random", "pretrained"),
             "expanding_shortcut": ("2x2", "aol")}  # fmt: skip
    for name, value in options.items():
        require_known(value, known[name], name)
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, not {type(model).__name__}")
    copied = copy.deepcopy(model).eval()
    if is_leaf(copied, keep):  # a single module, into which the trace would go
        copied = nn.Sequential(copied)
    inputs = _examples(copied, input_shape, _BATCH)
    graph = trace(copied, inputs, keep)
    converter = Converter(copied, graph, keep, {**options, "init": "random"} if dry_run else options)
    converter.run()
    table = converter.table
    if dry_run:
        return table
    if table.refused:
        raise ValueError(
            f"{len(table.refused)} of {len(table.rows)} calls of {type(model).__name__} cannot be converted:\n"
            f"{table.refusals()}\n"
            "Change these lines, or leave modules as they are by keep=(Class, ...); dry_run=True returns the table"
        )
    for node in reversed(list(graph.nodes)):  # weights that layers have taken over, and what was computed of them
        if not node.users and node.op != "output" and node not in converter.dependent:
            graph.erase_node(node)
    graph.lint()
    found = {str(n.target): converter.modules.get(str(n.target)) for n in graph.nodes if n.op == "call_module"}
    for path, module in found.items():
        if module is not None:
            _set(copied, path, module)
    result = Converted(copied, graph, class_name=type(model).__name__)
    result.meta["conversion"] = table
    _check(result, graph, _examples(copied, input_shape, _BATCH + 1))
    return result.train(model.training)


def _examples(model: nn.Module, input_shape: Shapes, batch: int) -> list[Tensor]:
    several = isinstance(input_shape, list | tuple) and bool(input_shape) and not isinstance(input_shape[0], int)
    shapes = [tuple(s) if isinstance(s, list | tuple) else () for s in (input_shape if several else [input_shape])]
    for sizes in shapes:
        if not sizes or not all(isinstance(size, int) and not isinstance(size, bool) and size > 0 for size in sizes):
            raise ValueError(f"input_shape={shown(input_shape)} must be positive integers, one input without the batch")
    like = next((t for t in (*model.parameters(), *model.buffers()) if t.is_floating_point()), torch.empty(0))
    return [torch.zeros(batch, *shape, device=like.device, dtype=like.dtype) for shape in shapes]


def _set(model: nn.Module, path: str, module: nn.Module) -> None:
    parent, _, name = path.rpartition(".")
    setattr(model.get_submodule(parent), name, module)


@torch.no_grad()
def _check(result: fx.GraphModule, graph: fx.Graph, inputs: Sequence[Tensor]) -> None:
    """See that the result takes a batch of another size, and returns what the model does, of that size.

    Raises:
        ValueError: if not.
    """
    output = next(node for node in graph.nodes if node.op == "output")
    wanted = fx.map_arg(output.args[0], lambda node: tuple(value_of(node, result).shape[1:]))
    try:
        found = fx.node.map_aggregate(result.eval()(*inputs), lambda value: _sizes(value, len(inputs[0])))
    except (RuntimeError, ValueError) as error:
        raise ValueError(f"the converted model does not run on a batch of {len(inputs[0])}: {error}") from error
    if found != wanted:
        raise ValueError(f"the converted model returns {found} for a batch of {len(inputs[0])}, not {wanted}")


def _sizes(value: fx.node.Argument, batch: int) -> fx.node.Argument:
    if not isinstance(value, Tensor):
        return value
    return tuple(value.shape[1:]) if value.ndim and len(value) == batch else "another batch"
