"""Models of plain torch, made 1-Lipschitz: the way in, as ``export`` is the way out.

The forward pass is traced once (``torch.fx``, with the sizes of the given input), and every call and module is looked up
in two tables: ``_MODULES`` and ``_CALLS``. The rule of all entries is that what depends on the input in a 1-Lipschitz way
still does afterwards, so that the whole network does. Nothing is taken to be 1-Lipschitz because it is not known.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, overload

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from trysquare.naming import require_known, shown
from trysquare.nn.geometry import window_overlap
from trysquare.nn.layers import activations, centering, conv, counterparts, pooling
from trysquare.nn.layers.linear import OrthoLinear
from trysquare.nn.tracing import Tracer, value_of
from trysquare.progress import track

_BATCH = 2  # samples of the input that is traced
_Replacement = tuple[nn.Module | None, str]
"""A module to put in the place of another one (``None``: it stays), and why."""


class _NotConvertible(Exception):
    """A call or module without a 1-Lipschitz counterpart; the message is the reason."""


# -- the table that the user gets


@dataclass(frozen=True)
class Change:
    """One module or call: where it is, what it was and is now (``""``: cannot be converted), why, and the user's line."""

    where: str
    before: str
    after: str
    why: str
    line: str


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
        """One line for all rows that differ in nothing but where they are."""
        groups: dict[tuple[str, str, str], list[Change]] = {}
        for row in self.rows:
            groups.setdefault((row.before, row.after or "CANNOT BE CONVERTED", row.why), []).append(row)
        lines = [("", "was", "is now", "where", "why")]
        for (before, after, why), rows in groups.items():
            where = rows[0].where + (f", ... {rows[-1].where}" if len(rows) > 1 else "")
            lines.append((f"{len(rows)}x", before, after, where, why + "".join(f" ({r.line})" for r in rows if not r.after)))
        widths = [max(len(line[column]) for line in lines) for column in range(4)]
        return "\n".join(
            "  ".join([*(cell.ljust(width) for cell, width in zip(line, widths, strict=False)), line[4]]) for line in lines
        )

    def __repr__(self) -> str:
        """The table."""
        return str(self)


# -- modules


@dataclass
class _Request:
    """A module to be replaced, where it stands in the graph, and what the user asked for."""

    module: Any
    given: Tensor  # what it reads, without numbers
    made: Tensor  # what it returns
    axis: int  # of the channels
    options: dict[str, str]

    @property
    def sizes(self) -> tuple[int, ...]:
        """Sizes of what it reads, behind the batch and the channels."""
        return tuple(self.given.shape[2:])


def _factory(module: nn.Module, given: Tensor | None = None) -> dict[str, Any]:
    like = next((t for t in (*module.parameters(), *module.buffers()) if t.is_floating_point()), given)
    return {} if like is None else {"device": like.device, "dtype": like.dtype}


def _linear(at: _Request) -> _Replacement:
    m = at.module
    new = OrthoLinear(m.in_features, m.out_features, m.bias is not None, **_factory(m))
    return new, "orthonormal rows or columns"


def _convolution(at: _Request) -> _Replacement:
    """The same geometry where an orthogonal kernel exists; else a larger kernel, or AOL."""
    m, dims, transposed = at.module, at.module.weight.ndim - 2, isinstance(at.module, nn.modules.conv._ConvTransposeNd)
    numbers = {name: getattr(m, name) for name in ("kernel_size", "stride", "padding", "dilation", "groups")}
    layer: Any = getattr(conv, f"OrthoConv{'Transpose' if transposed else ''}{dims}d")
    if transposed:
        numbers["output_padding"] = m.output_padding

    def make(**changed: Any) -> nn.Module:
        return layer(m.in_channels, m.out_channels, **{**numbers, "padding_mode": "zeros", **changed},
                     bias=m.bias is not None, **_factory(m))  # fmt: skip

    border = ""
    if m.padding_mode != "zeros":
        try:
            fits = all(size % step == 0 for size, step in zip(at.sizes, m.stride, strict=True))
            if m.padding_mode == "circular" and fits:
                return make(padding_mode="circular"), "orthogonal, same geometry"
        except ValueError:
            pass
        border = f"; {m.padding_mode} padding, which would amplify, is zeros"
    try:
        return make(), "orthogonal, same geometry" + border
    except ValueError as error:
        reason = str(error).split(":")[0]
    taps = tuple(max(k, s) for k, s in zip(m.kernel_size, m.stride, strict=True))
    if at.options["expanding_shortcut"] == "2x2" and not transposed and taps != m.kernel_size:
        axes = zip(at.made.shape[2:], at.sizes, m.stride, taps, m.dilation, m.padding, strict=True)
        # What the larger kernel reads behind the end of the map, where its size is odd.
        short = [max(0, (out - 1) * s + d * (k - 1) + 1 - size - 2 * p) for out, size, s, k, d, p in axes]
        try:
            new = make(kernel_size=taps)
            if any(short):
                new = _padded(new, short, dims)
            return new, f"{reason}: a kernel of {'x'.join(map(str, taps))} has one" + border
        except ValueError:
            pass
    return make(method="aol"), f"{reason}: 1-Lipschitz by AOL" + border


def _padded(layer: nn.Module, behind: Sequence[int], dims: int) -> nn.Module:
    """The layer behind zeros at the end of each axis."""
    zeros: Any = {1: nn.ZeroPad1d, 2: nn.ZeroPad2d, 3: nn.ZeroPad3d}[dims]
    return nn.Sequential(zeros(tuple(pad for amount in reversed(behind) for pad in (0, amount))), layer)


def _normalisation(at: _Request) -> _Replacement:
    m, why = at.module, "centering: dividing by a deviation is not Lipschitz"
    factory = _factory(m, at.given)
    if isinstance(m, nn.modules.batchnorm._BatchNorm):
        return centering.BatchCentering(m.num_features, m.momentum, m.affine, **factory), why
    if isinstance(m, nn.modules.instancenorm._InstanceNorm):
        return counterparts.GroupCentering(m.num_features, m.num_features, m.affine, **factory), why
    if isinstance(m, nn.GroupNorm):
        return counterparts.GroupCentering(m.num_groups, m.num_channels, m.affine, **factory), why
    if isinstance(m, nn.LayerNorm):
        return counterparts.LastAxesCentering(m.normalized_shape, m.bias is not None, **factory), why
    return nn.Identity(), "removed: it only divides, which is not Lipschitz"


def _slope(module: Any) -> float:
    """Lipschitz constant of an activation of torch, rounded up."""
    return {
        nn.GELU: 1.1291, nn.SiLU: 1.0999, nn.Mish: 1.0886, nn.Hardswish: 1.5001, nn.SELU: 1.7581,
        nn.LeakyReLU: max(1.0, abs(getattr(module, "negative_slope", 1.0))),
        nn.ELU: max(1.0, abs(getattr(module, "alpha", 1.0))),
    }.get(type(module), 1.0)  # fmt: skip


def _activation(at: _Request) -> _Replacement:
    if at.options["activation"] == "maxmin" or isinstance(at.module, nn.PReLU):
        if at.given.shape[at.axis] % 2:
            return activations.Abs(), f"{at.given.shape[at.axis]} channels make no pairs; isometric"
        return activations.MaxMin(at.axis), "isometric: keeps the norm of gradients"
    slope = _slope(at.module)
    if slope == 1:
        return None, "1-Lipschitz as it is"
    return counterparts.Divided(at.module, slope), f"slopes up to {slope:.5g}"


def _bounded(at: _Request) -> _Replacement:
    return None, "1-Lipschitz as it is"


def _moves(at: _Request) -> _Replacement:
    return None, "moves or drops values"


def _each(value: Any, dims: int) -> tuple[Any, ...]:
    return tuple(value) if isinstance(value, tuple | list) else (value,) * dims


def _max_pool(at: _Request) -> _Replacement:
    m, dims = at.module, at.given.ndim - 2
    if m.return_indices:
        raise _NotConvertible("return_indices=True")
    windows = [_each(value, dims) for value in (m.kernel_size, m.stride or m.kernel_size, m.dilation)]
    overlap = window_overlap(*windows)  # type: ignore[arg-type]
    if overlap == 1:
        return None, "1-Lipschitz as it is: windows do not overlap"
    why = f"up to {overlap} windows share an input"
    if m.ceil_mode:
        return counterparts.Divided(m, overlap**0.5), why
    return getattr(pooling, f"LipschitzMaxPool{dims}d")(m.kernel_size, m.stride, m.padding, m.dilation), why


def _average_pool(at: _Request) -> _Replacement:
    m, dims = at.module, at.given.ndim - 2
    if m.ceil_mode or getattr(m, "divisor_override", None) is not None:
        raise _NotConvertible("ceil_mode and divisor_override have no scaled counterpart")
    layer = getattr(pooling, f"ScaledAvgPool{dims}d")(m.kernel_size, m.stride, m.padding)
    return layer, "scaled to norm 1: means attenuate"


def _adaptive_pool(at: _Request) -> _Replacement:
    m, out, dims = at.module, tuple(at.made.shape[2:]), at.given.ndim - 2
    average = isinstance(m, nn.modules.pooling._AdaptiveAvgPoolNd)
    why = "scaled to norm 1: means attenuate" if average else "1-Lipschitz"
    if set(out) == {1}:
        return (pooling.GlobalScaledAvgPool() if average else pooling.GlobalMaxPool()), why
    if out == at.sizes:
        return nn.Identity(), "its output has the size of its input"
    if all(size % o == 0 for size, o in zip(at.sizes, out, strict=True)):
        windows = tuple(size // o for size, o in zip(at.sizes, out, strict=True))
        return getattr(pooling, f"{'ScaledAvg' if average else 'LipschitzMax'}Pool{dims}d")(windows), why
    if average:
        norm = math.prod(_norm(size, lambda x, o=o: F.adaptive_avg_pool1d(x, o)) for size, o in zip(at.sizes, out, strict=True))
        return counterparts.Divided(m, norm), f"norm {norm:.4g} from {at.sizes} to {out}"
    shared = math.prod(_most_windows(size, o) for size, o in zip(at.sizes, out, strict=True))
    return counterparts.Divided(m, shared**0.5), f"up to {shared} windows share an input"


def _most_windows(size: int, out: int) -> int:
    """Largest number of windows of adaptive pooling that read the same input."""
    ends = [(o * size // out, -(-(o + 1) * size // out)) for o in range(out)]
    return max(sum(start <= place < end for start, end in ends) for place in range(size))


def _upsample(at: _Request) -> _Replacement:
    """Torch interpolates axis by axis, so the norm is the product of those of the axes."""
    m, out = at.module, tuple(at.made.shape[2:])
    names = {"bilinear": "linear", "trilinear": "linear", "bicubic": None, "area": None}
    mode = names.get(m.mode, m.mode)
    if mode is None:
        raise _NotConvertible(f"mode={m.mode!r}: use nearest, or (bi)linear")
    corners = {} if mode.startswith("nearest") else {"align_corners": m.align_corners}
    scales = _each(m.scale_factor if m.scale_factor is not None else None, len(out))

    def along(o: int, scale: Any) -> Callable[[Tensor], Tensor]:
        size = {"size": o} if scale is None else {"scale_factor": float(scale)}
        return lambda x: F.interpolate(x, mode=mode, recompute_scale_factor=m.recompute_scale_factor, **size, **corners)

    norm = math.prod(_norm(size, along(o, s)) for size, o, s in zip(at.sizes, out, scales, strict=True))
    return counterparts.Divided(m, norm), f"copies values: norm {norm:.4g}"


def _norm(size: int, resample: Callable[[Tensor], Tensor]) -> float:
    """Norm of a linear map along one axis, rounded up."""
    matrix = resample(torch.eye(size, dtype=torch.float64).unsqueeze(0))[0]
    return float(torch.linalg.matrix_norm(matrix, 2)) * (1 + 1e-6)


def _padding(at: _Request) -> _Replacement:
    zeros: Any = {1: nn.ZeroPad1d, 2: nn.ZeroPad2d, 3: nn.ZeroPad3d}[at.given.ndim - 2]
    return zeros(at.module.padding), "repeated pixels would amplify"


def _log_softmax(at: _Request) -> _Replacement:
    count = at.given.shape[at.module.dim]
    return counterparts.Divided(at.module, count**0.5), f"norm up to the root of {count}"


def _ours(at: _Request) -> _Replacement:
    return None, "is a layer of trysquare"


# Classes of torch, what to do with them; the first that a module is an instance of counts.
_MODULES: list[tuple[tuple[Any, ...], Callable[[_Request], _Replacement]]] = [
    ((nn.modules.conv._ConvNd,), _convolution),
    ((nn.Linear,), _linear),
    ((nn.modules.batchnorm._BatchNorm, nn.modules.instancenorm._InstanceNorm, nn.GroupNorm, nn.LayerNorm, nn.RMSNorm),
     _normalisation),
    ((nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.PReLU, nn.RReLU, nn.ELU, nn.CELU, nn.SELU, nn.GELU, nn.SiLU, nn.Mish, nn.Softplus,
      nn.Hardswish), _activation),
    ((nn.Sigmoid, nn.Tanh, nn.Hardsigmoid, nn.Hardtanh, nn.Softsign, nn.LogSigmoid, nn.Tanhshrink, nn.Softshrink,
      nn.Softmax, nn.Softmax2d), _bounded),
    ((nn.LogSoftmax,), _log_softmax),
    ((nn.modules.pooling._MaxPoolNd,), _max_pool),
    ((nn.modules.pooling._AvgPoolNd,), _average_pool),
    ((nn.modules.pooling._AdaptiveAvgPoolNd, nn.modules.pooling._AdaptiveMaxPoolNd), _adaptive_pool),
    ((nn.Upsample,), _upsample),
    ((nn.modules.padding._ReflectionPadNd, nn.modules.padding._ReplicationPadNd, nn.modules.padding._CircularPadNd), _padding),
    ((nn.Identity, nn.Flatten, nn.Unflatten, nn.PixelShuffle, nn.PixelUnshuffle, nn.ChannelShuffle,
      nn.modules.dropout._DropoutNd, nn.modules.padding._ConstantPadNd), _moves),
]  # fmt: skip


def _replacement(at: _Request, keep: tuple[type[nn.Module], ...]) -> _Replacement:
    if isinstance(at.module, keep):
        return None, "kept as asked"
    if type(at.module).__module__.split(".")[0] == "trysquare":
        return _ours(at)
    if type(at.module).__module__.startswith("einops.") and type(at.module).__name__ == "Rearrange":
        return _moves(at)
    for classes, convert in _MODULES:
        if isinstance(at.module, classes):
            return convert(at)
    raise _NotConvertible("no 1-Lipschitz counterpart is known")


# -- calls

# Calls of torch that are modules too, by name: the class, and the names of the arguments behind the input.
_FUNCTIONS: dict[str, tuple[Any, str]] = {
    **{name: (getattr(nn, kind), arguments) for name, kind, arguments in (
        ("relu", "ReLU", ""), ("relu6", "ReLU6", ""), ("leaky_relu", "LeakyReLU", "negative_slope"), ("elu", "ELU", "alpha"),
        ("celu", "CELU", "alpha"), ("selu", "SELU", ""), ("gelu", "GELU", "approximate"), ("silu", "SiLU", ""),
        ("mish", "Mish", ""), ("prelu", "PReLU", ""), ("rrelu", "RReLU", "lower upper"), ("hardswish", "Hardswish", ""),
        ("softplus", "Softplus", "beta threshold"), ("sigmoid", "Sigmoid", ""), ("tanh", "Tanh", ""),
        ("hardsigmoid", "Hardsigmoid", ""), ("hardtanh", "Hardtanh", "min_val max_val"), ("softsign", "Softsign", ""),
        ("logsigmoid", "LogSigmoid", ""), ("softmax", "Softmax", "dim"), ("log_softmax", "LogSoftmax", "dim"),
        ("dropout", "Dropout", "p"), ("dropout1d", "Dropout1d", "p"), ("dropout2d", "Dropout2d", "p"),
        ("dropout3d", "Dropout3d", "p"), ("alpha_dropout", "AlphaDropout", "p"), ("layer_norm", "LayerNorm", "normalized_shape"),
        ("interpolate", "Upsample", "size scale_factor mode align_corners recompute_scale_factor"),
    )},
    **{f"{name}_pool{dims}d": (getattr(nn, f"{kind}Pool{dims}d"), arguments) for dims in (1, 2, 3) for name, kind, arguments in (
        ("max", "Max", "kernel_size stride padding dilation ceil_mode return_indices"),
        ("avg", "Avg", "kernel_size stride padding ceil_mode count_include_pad" + " divisor_override" * (dims > 1)),
        ("adaptive_avg", "AdaptiveAvg", "output_size"), ("adaptive_max", "AdaptiveMax", "output_size"),
    )},
}  # fmt: skip
# Calls that move, drop or negate values, or bring them nearer to each other, and copy none.
_MOVING = frozenset(
    """
    abs amax amin channel_shuffle chunk clamp clamp_max clamp_min clone contiguous cos detach diagonal double flatten flip
    float half movedim moveaxis narrow native_channel_shuffle neg permute pixel_shuffle pixel_unshuffle ravel reshape roll
    rot90 select sin sort split split_with_sizes squeeze swapaxes swapdims tensor_split to transpose t type_as unbind
    unflatten unsqueeze view
    """.split()
)
_PARTS = ("chunk", "split", "split_with_sizes", "tensor_split", "unbind")
_SAME = {"iadd": "add", "isub": "sub", "imul": "mul", "itruediv": "div", "truediv": "div", "true_divide": "div", "rsub": "sub",
         "multiply": "mul", "subtract": "sub", "divide": "div", "concat": "cat", "concatenate": "cat", "sum": "mean",
         "min": "max", "maximum": "max", "minimum": "max", "stack": "cat"}  # fmt: skip


def _written(node: fx.Node) -> str:
    """Name of a call as the user wrote it."""
    return str(getattr(node.target, "__name__", node.target))


def _name(node: fx.Node) -> str:
    """Name of a call, the same for torch's function, the method and the operator; with its module if it is not torch's."""
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

    def __init__(self, model: nn.Module, graph: fx.Graph, keep: tuple[type[nn.Module], ...], options: dict[str, str]) -> None:
        self.model, self.graph, self.keep, self.options = model, graph, keep, options
        self.table, self.modules = Conversion(), dict[str, nn.Module]()
        self.dependent: set[fx.Node] = set()

    def run(self) -> None:
        nodes = list(self.graph.nodes)
        for node in track(nodes, "converting", len(nodes)):
            if node.op == "placeholder":
                self.dependent.add(node)
            if node.op not in ("call_module", "call_function", "call_method") or not self._depends(node):
                continue
            self.dependent.add(node)
            is_module = node.op == "call_module"
            where, line = str(node.target) if is_module else node.name, node.meta.get("line", "")
            before = _kind(self.model.get_submodule(where)) if is_module else _written(node)
            try:
                after, why = self._convert_module(node) if is_module else self._convert_call(node)
            except _NotConvertible as error:
                after, why = "", str(error)
            if is_module or why:
                self.table.rows.append(Change(where, before, after, why, line))

    # -- what is known about a node

    def _depends(self, node: fx.Node) -> bool:
        found = value_of(node, self.model)
        values = found if isinstance(found, tuple | list) else (found,)
        real = any(isinstance(value, Tensor) and value.is_floating_point() for value in values)
        return real and bool(self._from_input(node))

    def _from_input(self, node: fx.Node) -> list[fx.Node]:
        """The arguments that depend on the input."""
        return [n for n in node.all_input_nodes if n in self.dependent]

    def _module(self, node: fx.Node) -> nn.Module:
        path = str(node.target)
        return self.modules[path] if path in self.modules else self.model.get_submodule(path)

    def _value(self, argument: Any) -> Any:
        return value_of(argument, self.model) if isinstance(argument, fx.Node) else argument

    def _shape(self, argument: Any) -> tuple[int, ...]:
        value = self._value(argument)
        return tuple(value.shape) if isinstance(value, Tensor) else ()

    def _channel_axis(self, node: fx.Node) -> int:
        """The last axis behind a linear layer; the first one after the batch behind a convolution."""
        while node.op != "placeholder":
            node = self._from_input(node)[0]
            kind = type(self._module(node)).__name__ if node.op == "call_module" else _name(node)
            if "linear" in kind.lower():
                return len(self._shape(node)) - 1
            if "conv" in kind.lower():
                return 1
        return 1

    # -- rewriting

    def _request(self, node: fx.Node, module: nn.Module) -> _Request:
        given = self._value(self._from_input(node)[0])
        return _Request(module, given, self._value(node), self._channel_axis(node), self.options)

    def _put(self, node: fx.Node, module: nn.Module, *args: Any) -> None:
        """Call a module in the place of ``node``, with ``args``, or what it was given.

        It is kept where the old module was, or, in the place of a call, where that was made. A module that is used
        several times and becomes several is counted up.
        """
        if node.op == "call_module":
            path, others = str(node.target), self.modules
        else:
            home = list(node.meta.get("nn_module_stack", {"": ("", None)}).values())[-1][0]
            path, others = f"{home}.{_name(node)}".lstrip("."), dict(self.model.named_modules()) | self.modules
        names = (path if number == 0 else f"{path}_{number}" for number in range(len(self.graph.nodes)))
        stateless = next(module.parameters(), None) is None
        for name in names:
            if name not in others and (name == path or not hasattr(self.model, name)):
                self.modules[name] = module
                break
            if stateless and name in self.modules and repr(self.modules[name]) == repr(module):
                break
        path = name
        with self.graph.inserting_before(node):
            new = self.graph.call_module(path, args or (self._from_input(node)[0],))
        new.meta = dict(node.meta)
        node.replace_all_uses_with(new)
        self.graph.erase_node(node)
        self.dependent.add(new)

    def _refuse_unused(self, node: fx.Node, in_place: bool) -> None:
        if in_place and not node.users:
            raise _NotConvertible("it writes in place and its result is not used: write y = f(x)")

    def _convert_module(self, node: fx.Node) -> tuple[str, str]:
        path = str(node.target)
        if path in self.modules and next(self.modules[path].parameters(), None) is not None:
            return _kind(_last(self.modules[path])), "shared with the one before"
        module = self.model.get_submodule(path)
        self._refuse_unused(node, bool(getattr(module, "inplace", False)))
        new, why = _replacement(self._request(node, module), self.keep)
        if new is None:
            return _kind(module), why
        why += self._projected(node, module, new)
        self._put(node, new)
        return _kind(_last(new)), why

    def _projected(self, node: fx.Node, old: Any, new: nn.Module) -> str:
        """Start near the old weight, times the factors of a batch normalisation behind it; the distance as text."""
        layer: Any = _last(new)
        if self.options["init"] != "pretrained" or not hasattr(layer, "project_") or old.weight.is_meta:
            return ""
        weight, wanted = old.weight.detach().clone(), layer.weight.detach()
        users = list(node.users)
        behind: Any = self._module(users[0]) if len(users) == 1 and users[0].op == "call_module" else None
        is_norm = isinstance(behind, nn.modules.batchnorm._BatchNorm) and behind.running_var is not None
        if is_norm and not isinstance(old, nn.modules.conv._ConvTransposeNd):
            scale = (behind.running_var + behind.eps).rsqrt() * (1 if behind.weight is None else behind.weight.detach())
            weight *= scale.view(-1, *(1,) * (weight.ndim - 1))
        missing = [large - small for large, small in zip(wanted.shape, weight.shape, strict=True)]
        weight = F.pad(weight, [pad for gap in reversed(missing) for pad in (0, gap)])
        if float(weight.norm()) == 0:
            return "; its old weight is 0"
        distance = layer.project_(weight * (wanted.norm() / weight.norm()))
        if old.bias is not None:
            layer.bias.data.copy_(old.bias.detach())
        return f"; at {distance:.2f} from the old weight, scaled"

    def _convert_call(self, node: fx.Node) -> tuple[str, str]:
        name = _name(node)
        self._refuse_unused(node, _written(node).endswith("_"))
        if name in _FUNCTIONS:
            kind, names = _FUNCTIONS[name]
            return self._as_module(node, kind(**_arguments(node, names, self.model)))
        if name in _MOVING:
            return name, ""
        handler = getattr(self, f"_call_{name}", None)
        if handler is None:
            raise _NotConvertible("no 1-Lipschitz counterpart is known")
        return handler(node)  # type: ignore[no-any-return]

    def _as_module(self, node: fx.Node, module: nn.Module) -> tuple[str, str]:
        """Convert a call as the module that does the same; dropout becomes that, since it was traced in eval mode."""
        new, why = _replacement(self._request(node, module), ())
        if new is None and not isinstance(module, nn.modules.dropout._DropoutNd):
            return _name(node), why
        new = module if new is None else new
        why += self._projected(node, module, new)
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
            raise _NotConvertible("it copies the smaller of its arguments along axes of the other (broadcasting)")
        if len(dependent) == 1:
            return _name(node), ""  # a shift
        if sign < 0:
            with self.graph.inserting_before(node):
                second = self.graph.call_function(torch.neg, (second,))
            second.meta = dict(node.meta)
            self.dependent.add(second)
        kind = {"convex": counterparts.ConvexSum, "learnable": counterparts.LearnableSum}[self.options["residual"]]
        value = self._value(node)
        new = kind(device=value.device, dtype=value.dtype)
        self._put(node, new, first, second)
        return _kind(new), "weights that add up to 1: branches would add up"

    def _call_mul(self, node: fx.Node) -> tuple[str, str]:
        first, second = node.args[0], node.args[1] if len(node.args) > 1 else node.kwargs["other"]
        given, factor = (first, second) if first in self.dependent else (second, first)
        if factor in self.dependent:
            raise _NotConvertible("a product of two values that depend on the input is not Lipschitz")
        if self._shape(given) != self._shape(node):
            raise _NotConvertible("it copies its argument along axes of the factor (broadcasting)")
        if isinstance(factor, fx.Node) and factor.op == "get_attr" and isinstance(self._value(factor), nn.Parameter):
            new = counterparts.BoundedScale(self._value(factor))
            self._put(node, new, given)
            return "BoundedScale", "a learnable scale, of at most 1"
        return "mul", "part of the constant: a fixed scale"

    def _call_div(self, node: fx.Node) -> tuple[str, str]:
        divisor = node.args[1] if len(node.args) > 1 else node.kwargs["other"]
        if divisor in self.dependent:
            raise _NotConvertible("a division by what depends on the input is not Lipschitz")
        if self._shape(node.args[0]) != self._shape(node):
            raise _NotConvertible("it copies its argument along axes of the divisor (broadcasting)")
        return "div", "part of the constant: a fixed scale"

    def _call_cat(self, node: fx.Node) -> tuple[str, str]:
        values: Any = node.args[0] if node.args else node.kwargs["tensors"]
        dim = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim", node.kwargs.get("axis", 0))
        dependent = [value for value in values if value in self.dependent]
        if dim == 0:
            raise _NotConvertible("it joins along the batch")
        if len(dependent) == 1:
            return _name(node), ""
        origins = [self._origin(value) for value in dependent]
        sources, places = {o[0] for o in origins}, {o[1] for o in origins}
        if len(sources) == 1 and None not in sources and len(places) == len(origins):
            return "cat", "1-Lipschitz as it is: of different parts of one value"
        new = counterparts.ScaledConcat(int(dim), len(dependent), _written(node) == "stack")
        self._put(node, new, values)
        return "ScaledConcat", f"divided by the root of {len(dependent)}: each part may depend on all of the input"

    def _origin(self, node: fx.Node) -> tuple[fx.Node | None, Any]:
        """The value that a node depends on one part of, and which part; ``None`` if there is no such value."""
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
            raise _NotConvertible("it mixes the samples of the batch: name the axes")
        over = sorted(dim % ndim for dim in _each(dims, 1))
        if over[0] == 0:
            raise _NotConvertible("it mixes the samples of the batch")
        new = counterparts.ScaledMean(over, bool(found.get("keepdim", False)))
        self._put(node, new)
        return "ScaledMean", "scaled to norm 1"

    def _call_max(self, node: fx.Node) -> tuple[str, str]:
        if len(self._from_input(node)) > 1:
            raise _NotConvertible("of two values that depend on the input; MaxMin in one call is ts.MaxMin")
        return _name(node), "1-Lipschitz as it is"

    def _call_getitem(self, node: fx.Node) -> tuple[str, str]:
        index = node.args[1] if isinstance(node.args[1], tuple) else (node.args[1],)
        if not all(each is None or each is Ellipsis or isinstance(each, int | slice) for each in index):
            raise _NotConvertible("an index that is a tensor or a list may repeat values")
        return "getitem", ""

    def _call_getattr(self, node: fx.Node) -> tuple[str, str]:
        if node.args[1] not in ("T", "mT"):
            raise _NotConvertible(f"the attribute {node.args[1]!r} of a tensor")
        return "getattr", ""

    def _call_pad(self, node: fx.Node) -> tuple[str, str]:
        found = _arguments(node, "pad mode value", self.model)
        if found.get("mode", "constant") == "constant":
            return "pad", ""
        new: Any = getattr(nn, f"ConstantPad{len(found['pad']) // 2}d")(tuple(found["pad"]), 0.0)
        self._put(node, new)
        return _kind(new), "repeated pixels would amplify"

    def _call_expand(self, node: fx.Node) -> tuple[str, str]:
        if self._shape(node) != self._shape(node.args[0]):
            raise _NotConvertible("it copies values")
        return _name(node), ""

    _call_expand_as = _call_repeat = _call_expand

    def _call_matmul(self, node: fx.Node) -> tuple[str, str]:
        if len(self._from_input(node)) > 1:
            raise _NotConvertible("a product of two values that depend on the input (attention) is not Lipschitz")
        raise _NotConvertible("a product with a matrix: use nn.Linear")

    _call_bmm = _call_einsum = _call_mm = _call_scaled_dot_product_attention = _call_matmul

    def _weighted(self, node: fx.Node, names: str, build: Callable[..., nn.Module]) -> tuple[str, str]:
        """A convolution or linear layer whose weight is an argument."""
        if len(self._from_input(node)) > 1:
            raise _NotConvertible("its weight depends on the input")
        found = _arguments(node, f"weight bias {names}", self.model)
        weight = found.pop("weight")
        bias = found.pop("bias", None)
        module: Any = build(weight.shape, bias=bias is not None, **found, device="meta")
        is_held = isinstance(weight, nn.Parameter)  # else it is computed on the way, and only its shape is known
        module.weight = nn.Parameter(weight.detach() if is_held else torch.empty(weight.shape, dtype=weight.dtype))
        if bias is not None and isinstance(bias, nn.Parameter):
            module.bias = nn.Parameter(bias.detach())
        return self._as_module(node, module)

    def _call_linear(self, node: fx.Node) -> tuple[str, str]:
        return self._weighted(node, "", lambda shape, **kw: nn.Linear(shape[1], shape[0], **kw))

    def _conv(self, node: fx.Node) -> tuple[str, str]:
        def build(shape: torch.Size, groups: int = 1, **kw: Any) -> nn.Module:
            return getattr(nn, f"Conv{len(shape) - 2}d")(shape[1] * groups, shape[0], tuple(shape[2:]), groups=groups, **kw)  # type: ignore[no-any-return]

        return self._weighted(node, "stride padding dilation groups", build)

    _call_conv1d = _call_conv2d = _call_conv3d = _conv

    def _conv_transpose(self, node: fx.Node) -> tuple[str, str]:
        def build(shape: torch.Size, groups: int = 1, **kw: Any) -> nn.Module:
            kind = getattr(nn, f"ConvTranspose{len(shape) - 2}d")
            return kind(shape[0], shape[1] * groups, tuple(shape[2:]), groups=groups, **kw)  # type: ignore[no-any-return]

        return self._weighted(node, "stride padding output_padding groups dilation", build)

    _call_conv_transpose1d = _call_conv_transpose2d = _call_conv_transpose3d = _conv_transpose

    def _call_batch_norm(self, node: fx.Node) -> tuple[str, str]:
        channels = self._shape(node.args[0])[1]
        return self._as_module(node, nn.BatchNorm1d(channels, affine=node.kwargs.get("weight") is not None))

    def _call_group_norm(self, node: fx.Node) -> tuple[str, str]:
        found = _arguments(node, "num_groups weight", self.model)
        channels = self._shape(node.args[0])[1]
        return self._as_module(node, nn.GroupNorm(found["num_groups"], channels, affine="weight" in found))


def _kind(module: nn.Module) -> str:
    return module._get_name()  # type: ignore[no-any-return]


def _last(module: nn.Module) -> nn.Module:
    """The layer behind padding, if it needs that."""
    return module[-1] if isinstance(module, nn.Sequential) else module


class _Converted(fx.GraphModule):
    """A converted model."""

    @property
    def conversion(self) -> Conversion:
        """What was changed, to what, and why."""
        return self.meta["conversion"]  # type: ignore[no-any-return]


@overload
def from_torch(model: nn.Module, input_shape: Sequence[Any], *, activation: str = ..., residual: str = ..., init: str = ...,
               expanding_shortcut: str = ..., keep: tuple[type[nn.Module], ...] = ..., dry_run: Literal[False] = ...
               ) -> _Converted: ...  # fmt: skip
@overload
def from_torch(model: nn.Module, input_shape: Sequence[Any], *, activation: str = ..., residual: str = ..., init: str = ...,
               expanding_shortcut: str = ..., keep: tuple[type[nn.Module], ...] = ..., dry_run: Literal[True]
               ) -> Conversion: ...  # fmt: skip
def from_torch(
    model: nn.Module,
    input_shape: Sequence[Any],
    *,
    activation: str = "maxmin",
    residual: str = "convex",
    init: str = "random",
    expanding_shortcut: str = "2x2",
    keep: tuple[type[nn.Module], ...] = (),
    dry_run: bool = False,
) -> Any:
    """Make a 1-Lipschitz network of a model of plain torch, with the same architecture.

    Convolutions and linear layers become orthogonal ones of the same numbers where these exist, and 1-Lipschitz ones
    otherwise; normalisation becomes centering, activations ``MaxMin``; pooling is scaled to norm 1; sums of branches get
    weights that add up to 1, concatenations are divided by the root of the number of their parts. Everything else either
    does not amplify as it is, or is refused with the line of code that does it. The model is traced in eval mode: what it
    does in training only, besides dropout, is left out.

    Args:
        model: any model that ``torch.fx`` can trace; code may ask for sizes. It is not changed.
        input_shape: shape of one input without the batch, or a list of shapes for several inputs.
        activation: ``"maxmin"``, or ``"keep"`` to leave activations, those that amplify divided by their largest slope.
        residual: ``"convex"`` weights ``(1 - t, t)`` of sums, or ``"learnable"`` ones of any sign; both are trained.
        init: ``"random"`` weights, or ``"pretrained"``: the nearest to those of the model (``layer.project_``), times the
            factors of a batch normalisation right behind.
        expanding_shortcut: what to do with kernels that are smaller than their stride and have no orthogonal kernel: make
            them as large (``"2x2"``), or keep their size and use ``method="aol"`` (``"aol"``).
        keep: classes of modules that are left as they are; their constants are part of that of the network.
        dry_run: whether to return the table only.

    Returns:
        A ``torch.fx.GraphModule`` with the names of the model's modules, in its mode. Its ``conversion`` is a table of
        what was changed, to what, and why. With ``dry_run=True`` that table.

    Raises:
        ValueError: if something cannot be converted, naming each line, or the model cannot be traced.

    >>> plain = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(512, 10))
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
    graph = Tracer(copied, inputs, keep).trace(copied)
    converter = _Converter(copied, graph, keep, {**options, "init": "random"} if dry_run else options)
    converter.run()
    table = converter.table
    if dry_run:
        return table
    if table.refused:
        lines = [f"  {row.before} at {row.where!r}: {row.why} ({row.line})" for row in table.refused]
        raise ValueError(
            f"{len(lines)} of {len(table.rows)} calls of {type(model).__name__} cannot be converted:\n" + "\n".join(lines)
            + "\nChange these lines, or leave modules as they are with keep=(Class, ...); dry_run=True returns the table"
        )  # fmt: skip
    graph.lint()
    found = {str(n.target): converter.modules.get(str(n.target)) for n in graph.nodes if n.op == "call_module"}
    for path, module in found.items():
        if module is not None:
            _set(copied, path, module)
    result = _Converted(copied, graph, class_name=type(model).__name__)
    result.meta["conversion"] = table
    _check(result, graph, _examples(copied, input_shape, _BATCH + 1))
    return result.train(model.training)


def _examples(model: nn.Module, input_shape: Sequence[Any], batch: int) -> list[Tensor]:
    several = isinstance(input_shape, list | tuple) and bool(input_shape) and not isinstance(input_shape[0], int)
    shapes = list(input_shape) if several else [input_shape]
    for shape in shapes:
        sizes = tuple(shape) if isinstance(shape, list | tuple) else ()
        if not sizes or not all(isinstance(size, int) and not isinstance(size, bool) and size > 0 for size in sizes):
            raise ValueError(f"input_shape={shown(input_shape)} must be positive integers, one input without the batch")
    return [torch.zeros(batch, *shape, **_factory(model)) for shape in shapes]


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


def _sizes(value: Any, batch: int) -> Any:
    if not isinstance(value, Tensor):
        return value
    return tuple(value.shape[1:]) if value.ndim and len(value) == batch else "another batch"
