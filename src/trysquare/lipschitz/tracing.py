"""From a model to the graph of its forward pass, and from a node of that graph back to a name."""

from __future__ import annotations

import operator
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx, nn

from trysquare.lipschitz.registry import NoRuleError, find_rule, way_out

# The model is the only part of the module that is traced, so that hooks and overrides of its own are seen.
_ROOT = "model"


class _Tracer(fx.Tracer):
    """Follows Python code down to modules that have a rule, and to torch's own."""

    def __init__(self) -> None:
        super().__init__(param_shapes_constant=True)
        self.path: list[str] = []
        self._autocast = _autocast()

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return find_rule(m) is not None or super().is_leaf_module(m, module_qualified_name)

    def call_module(self, m: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        # Left in place by an exception, so that the error can name the module.
        self.path.append(self.path_of_module(m))
        result = super().call_module(m, forward, args, kwargs)
        self.path.pop()
        return result

    def create_node(self, *args: Any, **kwargs: Any) -> fx.Node:
        # The graph has no record of contexts, so what they do to its operations would be lost.
        if _autocast() != self._autocast:
            raise NoRuleError("it switches autocast on or off inside; switch it around the whole model")
        return super().create_node(*args, **kwargs)


def _autocast() -> list[tuple[bool, torch.dtype]]:
    return [(torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)) for device in ("cpu", "cuda")]


def traced(model: nn.Module) -> fx.GraphModule:
    """The graph of a model's forward pass on one input.

    Raises:
        NoRuleError: if it cannot be followed.
    """
    root, tracer = nn.Sequential(OrderedDict({_ROOT: model})), _Tracer()
    try:
        graph = tracer.trace(root)
    except Exception as error:
        where = tracer.path[-1] if tracer.path else _ROOT
        kind = type(root.get_submodule(where)).__name__
        raise NoRuleError(
            f"the forward pass of {kind} at {shown(where)!r} cannot be followed by torch.fx ({error}). {way_out(kind)}"
        ) from error
    for node in graph.nodes:
        # An attribute becomes a node where it is used: that of a value that is returned, outside of every module.
        node.meta["nn_module_stack"] = node.meta.get("nn_module_stack") or {_ROOT: (_ROOT, type(model))}
    return fx.GraphModule(tracer.root, graph)


def function_name(n: fx.Node) -> str:
    """Name of the function or method that a node calls."""
    return n.target if isinstance(n.target, str) else getattr(n.target, "__name__", str(n.target))


def shown(target: Any) -> str:
    """Path of a module or tensor as the model knows it; the model itself has the name of the root's only part."""
    return str(target).removeprefix(f"{_ROOT}.")


def _owner(n: fx.Node) -> tuple[str, str]:
    """Path and class of the module whose forward pass calls the function."""
    path, kind = list(n.meta["nn_module_stack"].values())[-1]
    return path, kind if isinstance(kind, str) else kind.__name__


def owner_class(n: fx.Node) -> str:
    """Class of the module whose forward pass a node is in."""
    return _owner(n)[1].removeprefix("Parametrized")


def node_name(n: fx.Node) -> str:
    """Path of a module, or of the module that calls a function with the name of the node."""
    if n.op == "call_module":
        return shown(n.target)
    path = _owner(n)[0]
    return n.name if path == _ROOT else f"{shown(path)}.{n.name}"


def is_embedding(graph: nn.Module, node: fx.Node) -> bool:
    """Whether a node looks tokens up in a table."""
    if node.op == "call_module":
        return isinstance(graph.get_submodule(str(node.target)), nn.Embedding)
    return node.target is F.embedding


def vocabulary(graph: nn.Module, node: fx.Node) -> int:
    """Number of rows of that table, or 1 where that is not known."""
    if node.op == "call_module":
        return int(graph.get_submodule(str(node.target)).num_embeddings)  # type: ignore[arg-type]
    table = node.args[1] if len(node.args) > 1 else node.kwargs.get("weight")
    known = isinstance(table, fx.Node) and table.op == "get_attr"
    return len(operator.attrgetter(str(table.target))(graph)) if known else 1  # type: ignore[union-attr]
