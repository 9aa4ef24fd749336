"""Traced forward passes, rewritten call by call into 1-Lipschitz ones, with a table of what was changed.

Each module is replaced by its counterpart (``counterparts``), each call by what is said of it here; calls that are
modules too, such as ``F.relu``, are taken for these. The rule of all entries is that what depends on the input in a
1-Lipschitz way still does afterwards. Calls that are not known are refused, with the line that makes them.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from trysquare.nn.counterparts import (
    BATCH_NORM,
    DROPOUT,
    TRANSPOSED,
    UNKNOWN,
    NotConvertibleError,
    Request,
    counterpart,
    each_axis,
)
from trysquare.nn.layers import calls
from trysquare.nn.tracing import value_of
from trysquare.progress import track

# Of a projection: on a trained 64x64x3x3 kernel the distance is 0.911 after 20, 0.904 after 40, 0.898 after 100 steps.
_STEPS = 40


# -- the table that the user gets


@dataclass(frozen=True)
class Change:
    """One module or call.

    Attributes:
        where: path of the module, or name of the call.
        before: what it was.
        after: what it is now; ``""`` if it cannot be converted.
        why: the reason.
        line: the line of code that calls it.
        distance: with pretrained weights, that of the new weight from the old one scaled to its norm, relative to it.
    """

    where: str
    before: str
    after: str
    why: str
    line: str
    distance: float | None = None


@dataclass
class Conversion:
    """What ``from_torch`` changed, to what and why, and what it could not: a table when printed.

    Attributes:
        rows: one for each module or call that computes, in the order of the forward pass.
    """

    rows: list[Change] = field(default_factory=list)

    @property
    def refused(self) -> list[Change]:
        """What cannot be converted."""
        return [row for row in self.rows if not row.after]

    def refusals(self) -> str:
        """Return a line for each call that cannot be converted; where several modules make it, one for all."""
        groups = _grouped(self.refused, lambda row: (row.before, row.why, row.line))
        return "\n".join(f"  {rows[0].before} at {_places(rows)}: {rows[0].why}{_at(rows[0])}" for rows in groups)

    def __str__(self) -> str:
        """Return one line for all rows that differ in nothing but where they are."""
        lines = [["", "was", "is now", "where", "why"]]
        for rows in _grouped(self.rows, lambda row: (row.before, row.after, row.why, "" if row.after else row.line)):
            first = rows[0]
            far = [row.distance for row in rows if row.distance is not None]
            ends = sorted({f"{distance:.2f}" for distance in (min(far), max(far))}) if far else []
            why = first.why + (f"; {' to '.join(ends)} from the old weights" if ends else "")
            why += "" if first.after else _at(first)
            lines.append([f"{len(rows)}x", first.before, first.after or "CANNOT BE CONVERTED", _places(rows), why])
        widths = [*(max(len(line[column]) for line in lines) for column in range(4)), 0]
        padded = (map(str.ljust, line, widths) for line in lines)
        return "\n".join("  ".join(line).rstrip() for line in padded)

    def __repr__(self) -> str:
        """Return the table."""
        return str(self)


def _grouped(rows: list[Change], key: Callable[[Change], Hashable]) -> list[list[Change]]:
    """Put rows of one key together, in the order in which the keys appear."""
    groups: dict[Hashable, list[Change]] = {}
    for row in rows:
        groups.setdefault(key(row), []).append(row)
    return list(groups.values())


def _places(rows: list[Change]) -> str:
    return rows[0].where + (f", ... {rows[-1].where}" if len(rows) > 1 else "")


def _at(row: Change) -> str:
    return f" ({row.line})" if row.line else ""


# -- calls

# Calls of torch that are modules too: the class, and the names of the arguments behind the input.
_FUNCTIONS: dict[str, tuple[type[nn.Module], str]] = {
    "relu": (nn.ReLU, ""), "relu6": (nn.ReLU6, ""), "leaky_relu": (nn.LeakyReLU, "negative_slope"),
    "elu": (nn.ELU, "alpha"), "celu": (nn.CELU, "alpha"), "selu": (nn.SELU, ""), "gelu": (nn.GELU, "approximate"),
    "silu": (nn.SiLU, ""), "mish": (nn.Mish, ""), "prelu": (nn.PReLU, ""), "rrelu": (nn.RReLU, "lower upper"),
    "hardswish": (nn.Hardswish, ""), "softplus": (nn.Softplus, "beta threshold"), "sigmoid": (nn.Sigmoid, ""),
    "tanh": (nn.Tanh, ""), "hardsigmoid": (nn.Hardsigmoid, ""), "hardtanh": (nn.Hardtanh, "min_val max_val"),
    "softsign": (nn.Softsign, ""), "logsigmoid": (nn.LogSigmoid, ""), "softmax": (nn.Softmax, "dim"),
    "log_softmax": (nn.LogSoftmax, "dim"), "dropout": (nn.Dropout, "p"), "dropout1d": (nn.Dropout1d, "p"),
    "dropout2d": (nn.Dropout2d, "p"), "dropout3d": (nn.Dropout3d, "p"), "alpha_dropout": (nn.AlphaDropout, "p"),
    "layer_norm": (nn.LayerNorm, "normalized_shape"),
    "interpolate": (nn.Upsample, "size scale_factor mode align_corners recompute_scale_factor"),
}  # fmt: skip
for _dims in (1, 2, 3):
    _windows = "kernel_size stride padding"
    _FUNCTIONS |= {
        f"max_pool{_dims}d": (getattr(nn, f"MaxPool{_dims}d"), f"{_windows} dilation ceil_mode return_indices"),
        f"avg_pool{_dims}d": (getattr(nn, f"AvgPool{_dims}d"), f"{_windows} ceil_mode count_include_pad"),
        f"adaptive_avg_pool{_dims}d": (getattr(nn, f"AdaptiveAvgPool{_dims}d"), "output_size"),
        f"adaptive_max_pool{_dims}d": (getattr(nn, f"AdaptiveMaxPool{_dims}d"), "output_size"),
    }
# Calls that move, drop or negate values, or bring them nearer to each other.
_MOVING = frozenset(
    """
    abs amax amin channel_shuffle chunk clamp clamp_max clamp_min clone contiguous cos detach diagonal double flatten
    flip float half movedim moveaxis narrow native_channel_shuffle neg permute pixel_shuffle pixel_unshuffle ravel
    rearrange reshape roll rot90 select sin sort split split_with_sizes squeeze swapaxes swapdims tensor_split to
    transpose t type_as unbind unflatten unsqueeze view
    """.split()
)
# Arguments that do not matter to a counterpart.
_IGNORED = ("input", "inplace", "training", "weight", "bias", "eps", "_stacklevel")
_MAKING = ("new_zeros", "new_ones", "new_full", "new_empty", "zeros_like", "ones_like", "full_like", "empty_like")
_PARTED = "1-Lipschitz as it is: of different parts of one value"
_PARTS = ("chunk", "split", "split_with_sizes", "tensor_split", "unbind")
_SAME = {
    "iadd": "add", "isub": "sub", "rsub": "sub", "subtract": "sub", "imul": "mul", "multiply": "mul", "itruediv": "div",
    "truediv": "div", "true_divide": "div", "divide": "div", "concat": "cat", "concatenate": "cat", "stack": "cat",
    "sum": "mean", "min": "max", "maximum": "max", "minimum": "max", "einops.einops.rearrange": "rearrange",
    "einops.einops.reduce": "reduce",
}  # fmt: skip


def _within(node: fx.Node, name: str) -> str:
    """``name`` behind the path of the module whose forward pass makes a call."""
    stack = list(node.meta.get("nn_module_stack", {}).values())
    return f"{stack[-1][0] if stack else ''}.{name}".lstrip(".")


def _written(node: fx.Node) -> str:
    """Return the name of a call as the user wrote it."""
    return str(getattr(node.target, "__name__", node.target))


def _name(node: fx.Node) -> str:
    """Return the name of a call, the same for function, method and operator, with its module if that is not torch."""
    name = _written(node)
    home = getattr(node.target, "__module__", None) or "torch"
    is_foreign = node.op == "call_function" and home.split(".")[0] not in ("torch", "_operator", "builtins")
    name = f"{home}.{name}" if is_foreign else name.rstrip("_")
    return _SAME.get(name, name)


def _arguments(node: fx.Node, names: str, model: nn.Module) -> dict[str, Any]:
    """Arguments of a call behind the input, by name, without those that are ``None`` or have another name."""
    given = dict(zip(names.split(), node.args[1:], strict=False))
    given |= {name: value for name, value in node.kwargs.items() if name in names.split()}
    found: dict[str, Any] = fx.map_arg(given, lambda n: value_of(n, model))
    return {name: value for name, value in found.items() if value is not None}


class Converter:
    """Rewrites a traced graph in place, node by node."""

    def __init__(
        self, model: nn.Module, graph: fx.Graph, keep: tuple[type[nn.Module], ...], options: dict[str, str]
    ) -> None:
        self.model, self.graph, self.keep, self.options = model, graph, keep, options
        self.table, self.modules = Conversion(), dict[str, nn.Module]()
        self.dependent: set[fx.Node] = set()
        self.weights: dict[int, str] = {}

    def run(self) -> None:
        nodes = list(self.graph.nodes)
        for node in track(nodes, "converting", len(nodes)):
            if node.op == "placeholder":
                self.dependent.add(node)
            if node.op not in ("call_module", "call_function", "call_method") or not self._depends(node):
                continue
            self.dependent.add(node)
            is_module = node.op == "call_module"
            where, line = str(node.target) if is_module else _within(node, node.name), node.meta.get("line", "")
            before = _kind(self.model.get_submodule(where)) if is_module else _written(node)
            self.distance: float | None = None
            try:
                after, why = self._convert_module(node) if is_module else self._convert_call(node)
            except (ValueError, TypeError) as error:
                after, why = "", str(error)
            if is_module or why:
                self.table.rows.append(Change(where, before, after, why, line, self.distance))

    # -- what is known about a node

    def _depends(self, node: fx.Node) -> bool:
        if node.op != "call_module" and _name(node) in _MAKING:
            return False
        found = value_of(node, self.model)
        values = found if isinstance(found, tuple | list) else (found,)
        return any(isinstance(value, Tensor) for value in values) and bool(self._from_input(node))

    def _from_input(self, node: fx.Node) -> list[fx.Node]:
        """Return the arguments that depend on the input."""
        return [n for n in node.all_input_nodes if n in self.dependent]

    def _module(self, node: fx.Node) -> nn.Module:
        path = str(node.target)
        return self.modules[path] if path in self.modules else self.model.get_submodule(path)

    def _value(self, argument: object) -> Any:
        return value_of(argument, self.model) if isinstance(argument, fx.Node) else argument

    def _shape(self, argument: object) -> tuple[int, ...]:
        value = self._value(argument)
        return tuple(value.shape) if isinstance(value, Tensor) else ()

    def _alike(self, nodes: list[fx.Node]) -> bool:
        """Return whether all have the same shape."""
        return len({self._shape(node) for node in nodes}) == 1

    def _count(self, node: fx.Node) -> int:
        """Return how many numbers a node has."""
        value = self._value(node)
        return sum(v.numel() for v in (value if isinstance(value, tuple | list) else (value,)) if v.is_floating_point())

    def _channel_axis(self, node: fx.Node) -> int:
        """Return the last axis behind a linear layer; the first one after the batch behind a convolution."""
        while node.op != "placeholder":
            node = self._from_input(node)[0]
            kind = type(self._module(node)).__name__ if node.op == "call_module" else _name(node)
            if "linear" in kind.lower():
                return len(self._shape(node)) - 1
            if "conv" in kind.lower():
                return 1
        return 1

    # -- rewriting

    def _request(self, node: fx.Node, module: nn.Module) -> Request:
        given = self._value(self._from_input(node)[0])
        return Request(module, given, self._value(node), self._channel_axis(node), self.options)

    def _put(self, node: fx.Node, module: nn.Module, *args: fx.node.Argument) -> None:
        """Call a module in place of ``node``, with ``args``, or what it was given.

        It is kept where the old module was, or, in place of a call, where that was made. A module that is used
        several times and becomes several is counted up.
        """
        path = str(node.target) if node.op == "call_module" else _within(node, _name(node))
        stateless = next(module.parameters(), None) is None
        for number in range(len(self.graph.nodes)):
            name = f"{path}_{number}" if number else path
            if stateless and name in self.modules and repr(self.modules[name]) == repr(module):
                break
            parent, _, last = name.rpartition(".")
            taken = hasattr(self.model.get_submodule(parent), last) and name != str(node.target)
            if name not in self.modules and not taken:
                self.modules[name] = module
                break
        with self.graph.inserting_before(node):
            new = self.graph.call_module(name, args or (self._from_input(node)[0],))
        new.meta = dict(node.meta)
        node.replace_all_uses_with(new)
        self.graph.erase_node(node)
        self.dependent.add(new)

    def _refuse_unused(self, node: fx.Node, in_place: bool) -> None:
        if in_place and not node.users:
            raise NotConvertibleError("it writes in place and its result is not used: write y = f(x)")

    def _convert_module(self, node: fx.Node) -> tuple[str, str]:
        path = str(node.target)
        if path in self.modules and next(self.modules[path].parameters(), None) is not None:
            return _kind(_last(self.modules[path])), "shared with the one before"
        module = self.model.get_submodule(path)
        self._refuse_unused(node, bool(getattr(module, "inplace", False)))
        new, why = counterpart(self._request(node, module), self.keep)
        if new is None:
            return _kind(module), why
        if len(node.args) + len(node.kwargs) > 1:
            raise NotConvertibleError("it is called with other arguments besides its input")
        why += self._tied(path, module) + self._projected(node, module, _last(new))
        self._put(node, new)
        return _kind(_last(new)), why

    def _tied(self, where: str, module: nn.Module) -> str:
        """Return what to say of a module that shared its weight with another one."""
        weight = getattr(module, "weight", None)
        first = self.weights.setdefault(id(weight), where) if isinstance(weight, nn.Parameter) else where
        return "" if first == where else f"; shares its weight with {first} no longer"

    def _projected(self, node: fx.Node, old: Any, layer: Any) -> str:
        """Start near the old weight, times the factors of a batch normalisation behind it; what to say of it."""
        if self.options["init"] != "pretrained" or not hasattr(layer, "project_"):
            return ""
        weight, wanted = old.weight.detach().clone(), layer.weight.detach()
        users = list(node.users)
        behind: Any = self._module(users[0]) if len(users) == 1 and users[0].op == "call_module" else None
        is_norm = isinstance(behind, BATCH_NORM) and behind.running_var is not None
        if is_norm and not isinstance(old, TRANSPOSED):
            scale = (behind.running_var + behind.eps).rsqrt() * (1 if behind.weight is None else behind.weight.detach())
            weight *= scale.view(-1, *(1,) * (weight.ndim - 1))
        missing = [large - small for large, small in zip(wanted.shape, weight.shape, strict=True)]
        weight = F.pad(weight, [pad for gap in reversed(missing) for pad in (0, gap)])
        if not weight.any():
            return "; random: there is no old weight"
        self.distance = layer.project_(weight * (wanted.norm() / weight.norm()), steps=_STEPS)
        if old.bias is not None:
            layer.bias.data.copy_(old.bias.detach())
        return ""

    def _convert_call(self, node: fx.Node) -> tuple[str, str]:
        name, value = _name(node), self._value(node)
        self._refuse_unused(node, _written(node).endswith("_"))
        if isinstance(value, Tensor) and not value.is_floating_point():
            raise NotConvertibleError("its result jumps: what depends on it is not Lipschitz")
        if name in _FUNCTIONS:
            kind, names = _FUNCTIONS[name]
            other = [key for key, value in node.kwargs.items() if value and key not in (*names.split(), *_IGNORED)]
            if other:
                raise NotConvertibleError(f"its argument {other[0]} has no meaning for {kind.__name__}")
            return self._as_module(node, kind(**_arguments(node, names, self.model)))
        if name in _MOVING:
            if len(self._from_input(node)) > 1 and name != "type_as":
                raise NotConvertibleError("its other arguments depend on the input too")
            if self._count(node) > self._count(self._from_input(node)[0]):
                raise NotConvertibleError("it copies values")
            return name, ""
        handler = getattr(self, f"_call_{name}", None)
        if handler is None:
            raise NotConvertibleError(UNKNOWN)
        return handler(node)

    def _as_module(self, node: fx.Node, module: nn.Module) -> tuple[str, str]:
        """Convert a call as the module that does the same; dropout becomes that, since it was traced in eval mode."""
        new, why = counterpart(self._request(node, module), ())
        if new is None and not isinstance(module, DROPOUT):
            return _name(node), why
        new = module if new is None else new
        why += self._projected(node, module, _last(new))
        self._put(node, new)
        return _kind(_last(new)), why

    # -- calls, by name

    def _call_add(self, node: fx.Node) -> tuple[str, str]:
        return self._sum(node, 1)

    def _call_sub(self, node: fx.Node) -> tuple[str, str]:
        return self._sum(node, -1)

    def _sum(self, node: fx.Node, sign: int) -> tuple[str, str]:
        first, second = node.args[0], node.args[1] if len(node.args) > 1 else node.kwargs["other"]
        dependent: list[Any] = [n for n in (first, second) if n in self.dependent]
        if not self._alike([*dependent, node]):
            raise NotConvertibleError("it copies the smaller of its arguments along axes of the other (broadcasting)")
        if len(dependent) == 1:  # a shift
            is_scaled = node.kwargs.get("alpha", 1) != 1
            return _name(node), "part of the constant: alpha" if is_scaled else ""
        first, second = (second, first) if _written(node) == "rsub" else (first, second)
        if sign < 0:
            with self.graph.inserting_before(node):
                second = self.graph.call_function(torch.neg, (second,))
            second.meta = dict(node.meta)
            self.dependent.add(second)
        kinds: dict[str, Callable[..., nn.Module]] = {"convex": calls.ConvexSum, "learnable": calls.LearnableSum}
        value = self._value(node)
        new = kinds[self.options["residual"]](device=value.device, dtype=value.dtype)
        self._put(node, new, first, second)
        sizes = "weights that" if self.options["residual"] == "convex" else "weights of any sign whose sizes"
        return _kind(new), f"{sizes} add up to 1: branches would add up"

    def _call_mul(self, node: fx.Node) -> tuple[str, str]:
        first, second = node.args[0], node.args[1] if len(node.args) > 1 else node.kwargs["other"]
        given, factor = (first, second) if first in self.dependent else (second, first)
        if factor in self.dependent:
            raise NotConvertibleError("a product of two values that depend on the input is not Lipschitz")
        if self._shape(given) != self._shape(node):
            raise NotConvertibleError("it copies its argument along axes of the factor (broadcasting)")
        if isinstance(factor, fx.Node) and factor.op == "get_attr" and isinstance(self._value(factor), nn.Parameter):
            new = calls.BoundedScale(self._value(factor))
            self._put(node, new, given)
            return "BoundedScale", "a learnable scale, of at most 1"
        return "mul", "part of the constant: a fixed scale"

    def _call_div(self, node: fx.Node) -> tuple[str, str]:
        divisor = node.args[1] if len(node.args) > 1 else node.kwargs["other"]
        if divisor in self.dependent:
            raise NotConvertibleError("a division by what depends on the input is not Lipschitz")
        if self._shape(node.args[0]) != self._shape(node):
            raise NotConvertibleError("it copies its argument along axes of the divisor (broadcasting)")
        return "div", "part of the constant: a fixed scale"

    def _call_cat(self, node: fx.Node) -> tuple[str, str]:
        values: Any = node.args[0] if node.args else node.kwargs["tensors"]
        dim: Any = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim", node.kwargs.get("axis", 0))
        dependent = [value for value in values if value in self.dependent]
        if dim % len(self._shape(node)) == 0:
            raise NotConvertibleError("it concatenates along the axis of the batch")
        if len(dependent) == 1:
            return _name(node), ""
        if self._of_different_parts(dependent):
            return "cat", _PARTED
        new = calls.ScaledConcat(int(dim), len(dependent), _written(node) == "stack")
        self._put(node, new, values)
        return "ScaledConcat", f"divided by the root of {len(dependent)}: each part may depend on all of the input"

    def _of_different_parts(self, nodes: list[fx.Node]) -> bool:
        """Return whether each node depends on a part of one value, and no two of them on the same part."""
        sources, places = zip(*map(self._origin, nodes), strict=True)
        return None not in sources and len(set(sources)) == 1 and len(set(places)) == len(nodes)

    def _origin(self, node: fx.Node) -> tuple[fx.Node | None, object]:
        """Return the value that a node depends on one part of, and which part; ``None`` if there is no such value."""
        while node.op != "placeholder":
            given = self._from_input(node)
            if len(given) != 1:
                break
            if _name(node) == "getitem" and given[0].op != "placeholder" and _name(given[0]) in _PARTS:
                return self._from_input(given[0])[0], node.args[1]
            node = given[0]
        return None, None

    def _call_mean(self, node: fx.Node) -> tuple[str, str]:
        found = _arguments(node, "dim keepdim", self.model)
        ndim, dims = len(self._shape(node.args[0])), found.get("dim", node.kwargs.get("axis"))
        if dims is None:
            raise NotConvertibleError("it mixes the samples of the batch: name the axes")
        over = sorted(dim % ndim for dim in each_axis(dims, 1))
        if over[0] == 0:
            raise NotConvertibleError("it mixes the samples of the batch")
        new = calls.ScaledMean(over, bool(found.get("keepdim", False)))
        self._put(node, new)
        return "ScaledMean", "scaled to norm 1"

    def _call_reduce(self, node: fx.Node) -> tuple[str, str]:
        layers = importlib.import_module("einops.layers.torch")
        sizes = {name: self._value(size) for name, size in node.kwargs.items()}
        return self._as_module(node, layers.Reduce(*node.args[1:], **sizes))

    def _call_max(self, node: fx.Node) -> tuple[str, str]:
        dependent = self._from_input(node)
        if len(dependent) > 1 and self._of_different_parts(dependent) and self._alike([*dependent, node]):
            return _name(node), _PARTED
        if len(dependent) > 1:
            raise NotConvertibleError("it compares two values that depend on the input; ts.MaxMin keeps both of them")
        if self._count(node) > self._count(dependent[0]):
            raise NotConvertibleError("it copies values")
        return _name(node), "1-Lipschitz as it is"

    def _call_getitem(self, node: fx.Node) -> tuple[str, str]:
        index = node.args[1] if isinstance(node.args[1], tuple) else (node.args[1],)
        if not all(each is None or each is Ellipsis or isinstance(each, int | slice) for each in index):
            raise NotConvertibleError("an index that is a tensor or a list may repeat values")
        return "getitem", ""

    def _call_getattr(self, node: fx.Node) -> tuple[str, str]:
        raise NotConvertibleError(f"it reads the attribute {node.args[1]!r} of a tensor")

    def _call_pad(self, node: fx.Node) -> tuple[str, str]:
        found = _arguments(node, "pad mode value", self.model)
        if found.get("mode", "constant") == "constant":
            return "pad", ""
        new: nn.Module = getattr(nn, f"ConstantPad{len(found['pad']) // 2}d")(tuple(found["pad"]), 0.0)
        self._put(node, new)
        return _kind(new), "repeated pixels would amplify"

    def _call_expand(self, node: fx.Node) -> tuple[str, str]:
        if self._shape(node) != self._shape(node.args[0]):
            raise NotConvertibleError("it copies values")
        return _name(node), ""

    _call_expand_as = _call_repeat = _call_expand

    def _call_matmul(self, node: fx.Node) -> tuple[str, str]:
        if len(self._from_input(node)) > 1:
            raise NotConvertibleError("a product of two values that depend on the input (attention) is not Lipschitz")
        raise NotConvertibleError("a product with a matrix: use nn.Linear")

    _call_bmm = _call_einsum = _call_mm = _call_scaled_dot_product_attention = _call_matmul

    def _weighted(self, node: fx.Node, names: str, build: Callable[..., nn.Module]) -> tuple[str, str]:
        """Return a convolution or linear layer whose weight is an argument."""
        if len(self._from_input(node)) > 1:
            raise NotConvertibleError("its weight depends on the input")
        found = _arguments(node, f"weight bias {names}", self.model)
        weight = found.pop("weight")
        bias = found.pop("bias", None)
        module = build(weight.shape, bias=bias is not None, **found, device="meta")
        is_held = isinstance(weight, nn.Parameter)  # else it is computed on the way, and only its shape is known
        module.weight = nn.Parameter(weight.detach() if is_held else torch.zeros(weight.shape))
        if bias is not None:
            module.bias = nn.Parameter(bias.detach() if isinstance(bias, nn.Parameter) else torch.zeros(len(bias)))
        return self._as_module(node, module)

    def _call_linear(self, node: fx.Node) -> tuple[str, str]:
        return self._weighted(node, "", lambda shape, **kw: nn.Linear(shape[1], shape[0], **kw))

    def _conv(self, node: fx.Node) -> tuple[str, str]:
        transposed = "transpose" in _name(node)

        def build(shape: torch.Size, groups: int = 1, **kw: Any) -> nn.Module:
            kind = getattr(nn, f"Conv{'Transpose' if transposed else ''}{len(shape) - 2}d")
            channels = (shape[0], shape[1] * groups) if transposed else (shape[1] * groups, shape[0])
            return kind(*channels, tuple(shape[2:]), groups=groups, **kw)

        names = "stride padding output_padding groups dilation" if transposed else "stride padding dilation groups"
        return self._weighted(node, names, build)

    _call_conv1d = _call_conv2d = _call_conv3d = _conv
    _call_conv_transpose1d = _call_conv_transpose2d = _call_conv_transpose3d = _conv

    def _norm(self, node: fx.Node) -> tuple[str, str]:
        kind = nn.BatchNorm1d if _name(node) == "batch_norm" else nn.InstanceNorm1d
        found = _arguments(node, "running_mean running_var weight", self.model)
        return self._as_module(node, kind(self._shape(node.args[0])[1], affine="weight" in found))

    _call_batch_norm = _call_instance_norm = _norm

    def _call_group_norm(self, node: fx.Node) -> tuple[str, str]:
        found = _arguments(node, "num_groups weight", self.model)
        affine = "weight" in found
        return self._as_module(node, nn.GroupNorm(found["num_groups"], self._shape(node.args[0])[1], affine=affine))


def _kind(module: nn.Module) -> str:
    return module._get_name()


def _last(module: nn.Module) -> nn.Module:
    """Return the layer behind padding, if it needs that."""
    return module[-1] if isinstance(module, nn.Sequential) else module
