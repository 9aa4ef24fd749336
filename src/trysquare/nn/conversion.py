"""Models of plain torch, made 1-Lipschitz: the way in, as ``export`` is the way out.

The forward pass is traced once (``tracing``). Each module is replaced by its counterpart (``counterparts``), each call
by what is said of it here; calls that are modules too, such as ``F.relu``, are taken for these. The rule of all entries
is that what depends on the input in a 1-Lipschitz way still does afterwards, and so does what the network returns.
Calls that are not known are refused, with the line that makes them.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypedDict, Unpack, overload

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from trysquare.naming import require_known, shown
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
from trysquare.nn.tracing import trace, value_of
from trysquare.progress import track

Shapes = Sequence[int] | Sequence[Sequence[int]]
"""The shape of one input without the batch, or a list of shapes."""

_BATCH = 2  # samples of the input that is traced
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

    def __str__(self) -> str:
        """Return one line for all rows that differ in nothing but where they are."""
        groups: dict[tuple[str, str, str], list[Change]] = {}
        for row in self.rows:
            groups.setdefault((row.before, row.after or "CANNOT BE CONVERTED", row.why), []).append(row)
        lines = [["", "was", "is now", "where", "why"]]
        for (before, after, why), rows in groups.items():
            where = rows[0].where + (f", ... {rows[-1].where}" if len(rows) > 1 else "")
            far = [row.distance for row in rows if row.distance is not None]
            ends = sorted({f"{distance:.2f}" for distance in (min(far), max(far))}) if far else []
            why += f"; {' to '.join(ends)} from the old weights" if ends else ""
            why += "".join(f" ({row.line})" for row in rows if not row.after)
            lines.append([f"{len(rows)}x", before, after, where, why])
        widths = [*(max(len(line[column]) for line in lines) for column in range(4)), 0]
        padded = (map(str.ljust, line, widths) for line in lines)
        return "\n".join("  ".join(line).rstrip() for line in padded)

    def __repr__(self) -> str:
        """Return the table."""
        return str(self)


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
    reshape roll rot90 select sin sort split split_with_sizes squeeze swapaxes swapdims tensor_split to transpose t
    type_as unbind unflatten unsqueeze view
    """.split()
)
# Arguments that do not matter to a counterpart.
_IGNORED = ("input", "inplace", "training", "weight", "bias", "eps", "_stacklevel")
_MAKING = ("new_zeros", "new_ones", "new_full", "new_empty", "zeros_like", "ones_like", "full_like", "empty_like")
_PARTS = ("chunk", "split", "split_with_sizes", "tensor_split", "unbind")
_SAME = {
    "iadd": "add", "isub": "sub", "rsub": "sub", "subtract": "sub", "imul": "mul", "multiply": "mul", "itruediv": "div",
    "truediv": "div", "true_divide": "div", "divide": "div", "concat": "cat", "concatenate": "cat", "stack": "cat",
    "sum": "mean", "min": "max", "maximum": "max", "minimum": "max",
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
    if node.op == "call_function" and home.split(".")[0] not in ("torch", "_operator", "builtins"):
        return f"{home}.{name}"
    name = name.rstrip("_")
    return _SAME.get(name, name)


def _arguments(node: fx.Node, names: str, model: nn.Module) -> dict[str, Any]:
    """Arguments of a call behind the input, by name, without those that are ``None`` or have another name."""
    given = dict(zip(names.split(), node.args[1:], strict=False))
    given |= {name: value for name, value in node.kwargs.items() if name in names.split()}
    found: dict[str, Any] = fx.map_arg(given, lambda n: value_of(n, model))
    return {name: value for name, value in found.items() if value is not None}


class _Converter:
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
        dependent = [n for n in (first, second) if n in self.dependent]
        if any(self._shape(n) != self._shape(node) for n in dependent):
            raise NotConvertibleError("it copies the smaller of its arguments along axes of the other (broadcasting)")
        if len(dependent) == 1:
            return _name(node), ""  # a shift
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
        return _kind(new), "weights that add up to 1: branches would add up"

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
        origins = [self._origin(value) for value in dependent]
        sources, places = {o[0] for o in origins}, {o[1] for o in origins}
        if len(sources) == 1 and None not in sources and len(places) == len(origins):
            return "cat", "1-Lipschitz as it is: of different parts of one value"
        new = calls.ScaledConcat(int(dim), len(dependent), _written(node) == "stack")
        self._put(node, new, values)
        return "ScaledConcat", f"divided by the root of {len(dependent)}: each part may depend on all of the input"

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

    def _call_max(self, node: fx.Node) -> tuple[str, str]:
        if len(self._from_input(node)) > 1:
            raise NotConvertibleError("it compares two values that depend on the input; ts.MaxMin keeps both of them")
        if self._count(node) > self._count(self._from_input(node)[0]):
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


class Converted(fx.GraphModule):
    """A converted model."""

    @property
    def conversion(self) -> Conversion:
        """What was changed, to what, and why."""
        return self.meta["conversion"]

    def as_torch(self) -> nn.Module:
        """Return the same calls without the table."""
        return fx.GraphModule(self, self.graph, self._get_name())

    def __reduce__(self) -> Any:
        """Pickle as torch does, and the table with it."""
        return _unpickled, (*super().__reduce__(), self.conversion)


class _Choices(TypedDict, total=False):
    activation: str
    residual: str
    init: str
    expanding_shortcut: str
    keep: tuple[type[nn.Module], ...]


def _unpickled(make: Callable[..., fx.GraphModule], arguments: tuple[Any, ...], table: Conversion) -> Converted:
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
    calls either do not amplify, or are refused, with the line of code that makes them. The model is traced in eval
    mode: anything that it does only in training, besides dropout, is left out.

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
    inputs = _examples(copied, input_shape, _BATCH)
    graph = trace(copied, inputs, keep)
    converter = _Converter(copied, graph, keep, {**options, "init": "random"} if dry_run else options)
    converter.run()
    table = converter.table
    if dry_run:
        return table
    if table.refused:
        lines = [f"  {row.before} at {row.where!r}: {row.why} ({row.line})" for row in table.refused]
        raise ValueError(
            f"{len(lines)} of {len(table.rows)} calls of {type(model).__name__} cannot be converted:\n"
            + "\n".join(lines)
            + "\nChange these lines, or leave modules as they are by keep=(Class, ...); dry_run=True returns the table"
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
