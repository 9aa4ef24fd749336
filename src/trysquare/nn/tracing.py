"""Forward passes as graphs of calls whose sizes are known, with the line of code that made each call.

``torch.fx`` alone stops where code asks for a size to decide something (``if x.shape[-1] % 2``). Here every traced
value has one without numbers beside it (a fake tensor), which answers: all sizes are numbers but that of the batch,
which stays a part of the graph.
"""

from __future__ import annotations

import inspect
import linecache
import math
import operator
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor, fx, nn

from trysquare import torch_internals

_TORCH, _HERE = str(Path(torch.__file__).parent), str(Path(__file__).parent)


class _Sizes(tuple[Any, ...]):
    """Sizes of a traced tensor: that of the batch is traced, the others are numbers."""

    sizes: tuple[int, ...]

    def numel(self) -> fx.Proxy | int:
        return math.prod(self[1:]) * self[0]

    def __eq__(self, other: object) -> bool:
        return self.sizes == (other.sizes if isinstance(other, _Sizes) else other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = tuple.__hash__


class _Proxy(fx.Proxy):
    """A traced value that knows its sizes, so that code may ask for them."""

    @property
    def _value(self) -> Any:
        return self.node.meta["value"]

    @property
    def shape(self) -> _Sizes:
        sizes = tuple(self._value.shape)
        batch = [fx.Proxy.__getattr__(self, "size")(0)] if sizes else []
        found = _Sizes([*batch, *sizes[1:]])
        found.sizes = sizes
        return found

    def size(self, dim: int | None = None) -> _Sizes | fx.Proxy | int:
        return self.shape if dim is None else self.shape[dim]

    def dim(self) -> int:
        return int(self._value.ndim)

    def numel(self) -> fx.Proxy | int:
        return self.shape.numel()

    @property
    def ndim(self) -> int:
        return self.dim()

    @property
    def T(self) -> fx.Proxy:  # noqa: N802
        return self.permute(*reversed(range(self.dim())))

    @property
    def mT(self) -> fx.Proxy:  # noqa: N802
        return self.transpose(-2, -1)

    @property
    def values(self) -> fx.Proxy:
        return operator.getitem(self, 0)  # of what sort, max and the like return

    @property
    def indices(self) -> fx.Proxy:
        return operator.getitem(self, 1)

    @property
    def dtype(self) -> torch.dtype:
        return self._value.dtype

    def is_floating_point(self) -> bool:
        return bool(self._value.is_floating_point())

    def __iter__(self) -> Iterator[fx.Proxy]:
        if isinstance(self._value, tuple | list):
            return iter([operator.getitem(self, place) for place in range(len(self._value))])
        return super().__iter__()


class _Tracer(fx.Tracer):
    """Records calls with the sizes of their results, and the user's line that made them."""

    def __init__(self, model: nn.Module, inputs: Sequence[Tensor], keep: tuple[type[nn.Module], ...]) -> None:
        einops = sys.modules.get("einops")  # its functions want to know what kind of tensor they are given
        searched: Any = (math,) if einops is None else (math, einops)
        super().__init__(autowrap_modules=searched)
        optional = list(inspect.signature(model.forward).parameters.values())[len(inputs) :]
        self.model, self.inputs, self.keep = model, iter([*inputs, *(each.default for each in optional)]), keep
        self.fake = torch_internals.FakeTensorMode(allow_non_fake_inputs=True)
        self.runs = False  # a leaf, whose inner calls are not traced

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return is_leaf(m, self.keep)

    def call_module(
        self, m: nn.Module, forward: Callable[..., object], args: tuple[object, ...], kwargs: dict[str, object]
    ) -> object:
        return forward(*args, **kwargs) if self.runs else super().call_module(m, forward, args, kwargs)

    def getattr(self, attr: str, attr_val: object, parameter_proxy_cache: dict[str, fx.Proxy]) -> object:
        return attr_val if self.runs else super().getattr(attr, attr_val, parameter_proxy_cache)

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return _Proxy(node, self)

    def create_arg(self, a: object) -> fx.node.Argument:
        return super().create_arg(tuple(a) if isinstance(a, _Sizes) else a)

    def create_proxy(self, kind: str, target: fx.node.Target, *args: Any, **kwargs: Any) -> Any:
        proxy = super().create_proxy(kind, target, *args, **kwargs)
        proxy.node.meta["line"] = _user_line()
        self.runs = True
        try:
            with torch.no_grad(), self.fake:
                proxy.node.meta["value"] = self._run(proxy.node)
        except Exception as error:
            if kind == "call_method" and not hasattr(Tensor, str(target)):
                raise AttributeError(f"a tensor has no attribute {target!r}") from error
            raise ValueError(f"the model does not take this input: {error}") from error
        finally:
            self.runs = False
        value = proxy.node.meta["value"]
        if type(value) in (tuple, list):  # which code may slice, reverse, count and unpack
            return tuple(operator.getitem(proxy, place) for place in range(len(value)))
        return proxy

    def _run(self, node: fx.Node) -> object:
        if node.op == "placeholder":
            given = next(self.inputs)
            return self.fake.from_tensor(given) if isinstance(given, Tensor) else given
        if node.op == "get_attr":
            return _attribute(self.model, node.target)
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: value_of(n, self.model))
        if node.op == "call_module":
            return self.model.get_submodule(str(node.target))(*args, **kwargs)
        if node.op == "call_method":
            return getattr(type(args[0]), str(node.target))(*args, **kwargs)
        assert callable(node.target)
        return node.target(*args, **kwargs)


def _attribute(model: nn.Module, target: object) -> object:
    path, _, name = str(target).rpartition(".")
    return getattr(model.get_submodule(path), name)


def is_leaf(module: nn.Module, keep: tuple[type[nn.Module], ...] = ()) -> bool:
    """Return whether a module is one call, because it is torch's, of this package, or of a class in ``keep``."""
    known = type(module).__module__.split(".")[0] in ("trysquare", "einops")
    return known or isinstance(module, keep) or fx.Tracer().is_leaf_module(module, "")


def trace(model: nn.Module, inputs: Sequence[Tensor], keep: tuple[type[nn.Module], ...] = ()) -> fx.Graph:
    """Return the graph of a forward pass; modules of torch, of this package and of classes in ``keep`` are one call.

    Raises:
        ValueError: if it cannot be traced, naming the line.
    """
    try:
        traced, plain = _Tracer(model, inputs, keep).trace(model), fx.Graph()
        plain.output(plain.graph_copy(traced, {}))  # a graph names the class of its tracer, which a pickle would want
        for node in reversed(list(plain.nodes)):
            if node.target is operator.getitem and not node.users:  # parts that are not used
                plain.erase_node(node)
        return plain
    except (RuntimeError, TypeError, ValueError, AttributeError, NotImplementedError) as error:
        lines = [line for frame, _ in traceback.walk_tb(error.__traceback__) if (line := _line_of(frame))]
        at = f" ({lines[-1]})" if lines else ""
        raise ValueError(f"{type(model).__name__} cannot be traced: {error}{at}") from error


def value_of(node: fx.Node, model: nn.Module) -> Any:
    """Return what a node returned (a tensor without numbers if it depends on the input), or an attribute."""
    return node.meta["value"] if "value" in node.meta else _attribute(model, node.target)


def _line_of(frame: FrameType) -> str:
    """Return file, number and text of the line that a frame is at, unless that is torch's, or one of this package."""
    name = frame.f_code.co_filename
    if name.startswith((_TORCH, _HERE, "<")):
        return ""
    return f"{Path(name).name}:{frame.f_lineno}: {linecache.getline(name, frame.f_lineno).strip()}"


def _user_line() -> str:
    """Return the innermost line of the user's forward pass that is running."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not trace.__code__:
        if line := _line_of(frame):
            return line
        frame = frame.f_back
    return ""
