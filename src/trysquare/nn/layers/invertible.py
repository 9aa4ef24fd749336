"""Inverses of layers, and chains of invertible layers that keep no activations for the backward pass."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, cast, runtime_checkable

import torch
from torch import Tensor, fx, nn
from torch.autograd.function import once_differentiable

from trysquare import torch_internals
from trysquare.nn.geometry import flag
from trysquare.nn.layers.convolution import PLAIN_CONV
from trysquare.nn.linalg.precision import Context, Gradients, autocast_dtype
from trysquare.nn.parametrizations.base import (
    Caching,
    OpenBlock,
    Parametrization,
    ParametrizedWeight,
    Slots,
    WeightCache,
    copy_weights,
    parameters_of,
)

__all__ = ["InvertibleSequential"]


@runtime_checkable
class InvertibleLayer(Protocol):
    """A layer that has an inverse, as ``InvertibleSequential`` needs it.

    A layer that is not orthogonal also says how it changes volumes, if anybody asks for that of the chain.
    """

    def inverse(self) -> nn.Module:
        """Return the inverse: a module that shares the parameters, and has an ``inverse`` itself."""
        ...

    def log_abs_det(self, x: Tensor) -> Tensor:
        """Return the logarithm of the volume by which the layer stretches near each sample of ``x``: ``(batch,)``."""
        ...


class Isometry:
    """Mixin for layers whose inverse, where they have one, is their adjoint: they keep volumes."""

    def log_abs_det(self, x: Tensor) -> Tensor:
        """Return 0 for each sample: a square orthogonal layer keeps volumes.

        Raises:
            ValueError: if the layer has no inverse.
        """
        self.inverse()
        return x.new_zeros(x.shape[:1])

    def inverse(self) -> nn.Module:
        """Return the exact inverse; it shares all parameters."""
        raise NotImplementedError


class AffineInverse(Isometry, nn.Module):
    """``y ↦ adjoint(y - bias)``: undoes ``x ↦ W x + bias`` for a square orthogonal ``W``.

    Args:
        adjoint: the adjoint layer, without bias.
        bias: shared with the layer that is undone.
        dims: number of axes behind the channels.
    """

    def __init__(self, adjoint: nn.Module, bias: nn.Parameter, dims: int) -> None:
        super().__init__()
        self.adjoint = adjoint
        self.bias = bias
        self.dims = dims

    def forward(self, y: Tensor) -> Tensor:
        return self.adjoint(y - self.bias.view(-1, *(1,) * self.dims))

    def inverse(self) -> nn.Module:
        """Return the layer that this undoes, with all of its parameters."""
        layer: Any = self.adjoint
        twin = layer.adjoint()
        twin.bias = self.bias
        return cast("nn.Module", twin)

    def as_torch(self) -> nn.Module:
        """Return a layer that subtracts the bias (a convolution with one tap of 1), and the plain adjoint."""
        layer: Any = self.adjoint
        plain, channels = layer.as_torch(), len(self.bias)
        shift: nn.Module
        if not self.dims:
            shift = nn.Linear(channels, channels, device="meta")
            weight = torch.eye(channels, dtype=self.bias.dtype, device=self.bias.device)
        else:
            shift = PLAIN_CONV[self.dims](channels, channels, 1, groups=channels, device="meta")
            weight = self.bias.new_ones(channels, 1, *(1,) * self.dims)
        copy_weights(shift, weight, -self.bias, self.training)
        return nn.Sequential(shift, plain)


class InvertibleSequential(nn.Sequential):
    """A chain of invertible layers: exact inverse, volume, and a backward pass that keeps no activations.

    The backward pass recomputes the input of each layer from its output by the layer's inverse, so that the memory of
    activations does not depend on the number of layers: kept are the input and the output of the chain. Gradients are
    those of the plain pass up to the rounding of the inverses, and cost one more forward pass. Weights are built once
    for both passes; what their construction keeps is as in any other network, and nothing within ``ts.built``.

    Layers have a method ``inverse()`` that returns the inverse module: square ``OrthoConv*d``, ``OrthoLinear`` and
    ``FourierOrthoConv*d``, invertible down- and upsampling, shuffles, ``InputScaling``, other chains, and layers of
    your own. These have a method ``log_abs_det(x)`` too, if they change volumes and somebody asks.

    The plain pass is taken, with the same result, where nobody wants gradients, in compiled graphs, under transforms of
    ``torch.func``, for parameters that were replaced for one call, and where parametrizations were taken off (as
    ``to_torch`` does) or others put on top, and in eval mode for short dtypes. Second derivatives are refused.

    Args:
        layers: invertible layers, or one ordered dictionary of them, as for ``nn.Sequential``.
        recompute: whether the backward pass recomputes activations; otherwise it keeps them.

    Raises:
        TypeError: if a layer has no ``inverse``.
        ValueError: if it has none with its numbers.
        RuntimeError: at a forward pass for training, if numbers are rounded to less than float32 (by autocast
            or by their dtype), from which inputs cannot be recomputed; at a backward pass, if a layer is so badly
            conditioned that the recomputed input is not the one that was given.

    >>> flow = InvertibleSequential(OrthoConv2d(4, 16, 2, stride=2), OrthoConv2d(16, 16, 3), InvertibleUpsampling2d(2))
    >>> x = torch.randn(2, 4, 8, 8)
    >>> bool(torch.allclose(flow.inverse()(flow(x)), x, atol=1e-5)), flow.log_abs_det(x).detach()
    (True, tensor([0., 0.]))
    """

    def __init__(self, *layers: Any, recompute: bool = True) -> None:
        named = layers[0] if len(layers) == 1 and isinstance(layers[0], OrderedDict) else None
        for layer in layers if named is None else named.values():
            if not isinstance(layer, nn.Module):
                raise TypeError(f"layers must be modules, not {type(layer).__name__}")
            _inverse_of(layer)
        super().__init__(*layers)
        self.recompute = flag("recompute", recompute)

    def as_torch(self) -> nn.Module:
        """Return the layers in an ``nn.Sequential``."""
        return nn.Sequential(OrderedDict(self._modules)).train(self.training)  # named_children leaves repetitions out

    def __getitem__(self, idx: Any) -> Any:
        """Return a layer, or a part of the chain."""
        found = super().__getitem__(idx)
        if isinstance(found, InvertibleSequential) and isinstance(idx, slice):
            found.recompute = self.recompute
        return found

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        return self._passed(input, volume=False)[0]

    def with_log_abs_det(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the output and ``log_abs_det(x)``, from one pass; neither keeps activations."""
        return self._passed(x, volume=True)

    def log_abs_det(self, x: Tensor) -> Tensor:
        """Return the logarithm of the volume by which the chain stretches near each sample: ``(batch,)``.

        Raises:
            TypeError: if a layer does not say by how much it does.
        """
        return self._passed(x, volume=True)[1]

    def inverse(self, y: Tensor | None = None) -> Any:
        """Return the inverse chain, which shares all parameters, or what it makes of ``y`` if that is given."""
        chain = InvertibleSequential(*(_inverse_of(layer) for layer in reversed(self)), recompute=self.recompute)
        chain.train(self.training)
        return chain if y is None else chain(y)

    def _passed(self, x: Tensor, volume: bool) -> tuple[Tensor, Tensor]:
        if not isinstance(x, Tensor | fx.Proxy):  # which torch.fx follows
            raise TypeError(f"input must be a tensor, not {type(x).__name__}")
        parameters = list(self.parameters())
        trained = [tensor for tensor in parameters if tensor.requires_grad]
        plain = (
            not self.recompute
            or not len(self)
            or not torch.is_grad_enabled()
            or not (trained or x.requires_grad)
            or torch.compiler.is_compiling()
            or torch_internals.jit_trace() is not None
            or torch_internals.transforms_are_active()
            or type(x) not in (Tensor, nn.Parameter)
            or any(type(tensor) is not nn.Parameter for tensor in parameters)
            or not all(callable(getattr(layer, "inverse", None)) for layer in self)
            or any(part._made_by() is None for part in self.modules() if isinstance(part, ParametrizedWeight))
        )
        if plain:
            return _applied(self, x, volume)
        if autocast_dtype(x) is not None or x.dtype not in (torch.float32, torch.float64):
            if not self.training:
                return _applied(self, x, volume)
            raise RuntimeError(
                f"activations (of {x.dtype}, or under autocast) that are rounded to less than float32 cannot be "
                "recomputed from the output: leave autocast around InvertibleSequential, or keep activations by "
                "recompute=False"
            )
        # The pass itself, with every weight built once; the graph begins at these, and not inside of the pass.
        weights = _Weights()
        with torch.no_grad(), weights.handed_to(self):
            results = _applied(self, x, volume)
        direct: list[Tensor] = [tensor for tensor in trained if id(tensor) not in weights.sources]
        run = _Run(list(self), weights, direct, results, volume)
        return cast("tuple[Tensor, Tensor]", _Recomputed.apply(run, x, *weights.built.values(), *direct))


def _inverse_of(layer: nn.Module) -> nn.Module:
    inverse: Callable[[], nn.Module] | None = getattr(layer, "inverse", None)
    if not callable(inverse):
        raise TypeError(
            f"{type(layer).__name__} has no method inverse(): use square orthogonal layers, invertible sampling, "
            "shuffles, or layers of your own with inverse(), which returns the inverse module"
        )
    return inverse()


def _applied(layers: Sequence[nn.Module] | nn.Sequential, x: Tensor, volume: bool) -> tuple[Tensor, Tensor]:
    """Return the output of layers, and the sum of their ``log_abs_det`` (zeros if that is not wanted)."""
    total = x.new_zeros(x.shape[:1])
    for layer in layers:
        if volume:
            total = total + _log_abs_det(layer, x)
        x = layer(x)
    return x, total


def _log_abs_det(layer: nn.Module, x: Tensor) -> Tensor:
    if not callable(found := getattr(layer, "log_abs_det", None)):
        raise TypeError(
            f"{type(layer).__name__} has no method log_abs_det(x), which returns (batch,) logarithms of volumes: "
            "only orthogonal layers may leave it out"
        )
    volume: Tensor = found(x)
    if volume.shape != x.shape[:1]:
        raise ValueError(
            f"log_abs_det of {type(layer).__name__} has shape {tuple(volume.shape)}, not {tuple(x.shape[:1])}: one "
            "number for each sample"
        )
    return volume


Place = tuple[WeightCache, Hashable]


class _Weights:
    """The weights of the layers of a chain, each built once, by the cache that they belong to and its key.

    Attributes:
        built: weights, with the graph of their construction.
        sources: ``id`` of the free tensors that they were built from.
        handed: what layers get in their place, if that is not the weight cut off from its graph.
    """

    def __init__(self) -> None:
        self.built: dict[Place, Tensor] = {}
        self.sources: set[int] = set()
        self.handed: dict[Place, Tensor] | None = None

    @contextmanager
    def handed_to(self, *modules: nn.Module) -> Iterator[None]:
        """Context in which the layers inside of modules get their weights from here."""
        parts = {part: part.block for module in modules for part in module.modules() if isinstance(part, Caching)}
        for part, around in parts.items():
            if isinstance(part, Parametrization) and any(tensor.requires_grad for tensor in part.slots.values()):
                part.cache.clear()  # or a pass without gradients takes the weight from there, which has no graph
            part.block = _Lender(self, around)
        try:
            yield
        finally:
            for part, around in parts.items():
                part.block = around


class _Lender:
    """Stands in place of the open block of one part: builds by that, if there was one, but once."""

    def __init__(self, weights: _Weights, around: OpenBlock | None) -> None:
        self.weights, self.around = weights, around

    def weight(
        self, build: Callable[[], Tensor], cache: WeightCache, slots: Slots, names: Sequence[str], key: Hashable
    ) -> Tensor:
        """Return ``build()``, built once."""
        kept, place = self.weights, (cache, key)
        if kept.handed is not None and place in kept.handed:
            return kept.handed[place] if torch.is_grad_enabled() else kept.handed[place].detach()
        if place not in kept.built:
            free = parameters_of(slots, names)
            if not any(tensor.requires_grad for tensor in free):
                return cache.get(build, slots, names, key)
            with torch.enable_grad():
                made = build() if self.around is None else self.around.weight(build, cache, slots, names, key)
            kept.built[place] = made
            kept.sources.update(map(id, free))
        return kept.built[place].detach()


class _Run:
    """A pass through a chain: what its backward pass needs besides the tensors that autograd keeps.

    Args:
        layers: of the chain.
        weights: built in the pass.
        direct: trained parameters that layers use as they are.
        results: of the pass.
        volume: whether the logarithm of the volume is one of them.
    """

    def __init__(
        self,
        layers: list[nn.Module],
        weights: _Weights,
        direct: list[Tensor],
        results: tuple[Tensor, Tensor],
        volume: bool,
    ) -> None:
        self.layers, self.direct, self.results, self.volume = layers, direct, [results], volume
        self.places, self.sources = list(weights.built), weights.sources


class _RunContext(Context, Protocol):
    run: _Run


class _Recomputed(torch.autograd.Function):
    """The results of a pass as a function of its input, the built weights and the other parameters."""

    @staticmethod
    def forward(ctx: _RunContext, run: _Run, x: Tensor, *tensors: Tensor) -> tuple[Tensor, Tensor]:
        output, total = run.results.pop()  # the graph must not hold what it returns
        output = output.view_as(output) if output is x else output
        ctx.run = run
        ctx.save_for_backward(x, output, *tensors)
        if not run.volume:
            ctx.mark_non_differentiable(total)
        return output, total

    @staticmethod
    @once_differentiable
    def backward(ctx: _RunContext, grad: Tensor, volume_grad: Tensor) -> Gradients:
        run = ctx.run
        given, y, *tensors = ctx.saved_tensors
        built = [tensor.detach().requires_grad_() for tensor in tensors[: len(run.places)]]
        weights = _Weights()
        weights.handed = dict(zip(run.places, built, strict=True))
        wanted = [*built, *run.direct]
        sums: dict[int, Tensor] = {}
        for number, layer in reversed(list(enumerate(run.layers))):
            undo = _inverse_of(layer)
            with weights.handed_to(layer, undo):
                with torch.no_grad():
                    x = undo(y)
                if not number:
                    _check_recomputed(x, given)
                    x = given
                x = x.detach().requires_grad_()
                with torch.enable_grad():
                    results = _applied([layer], x, run.volume)[: 1 + run.volume]
            # What a layer does not depend on, of the weights of the others, has no gradient here.
            both = [(r, g) for r, g in zip(results, (grad, volume_grad), strict=False) if r.requires_grad]
            grad, *found = torch.autograd.grad(
                [result for result, _ in both], [x, *wanted], [g for _, g in both], allow_unused=True
            )
            for tensor, part in zip(wanted, found, strict=True):
                if part is not None:
                    sums[id(tensor)] = sums[id(tensor)] + part if id(tensor) in sums else part
            y = x.detach()
        return None, grad, *(sums.get(id(tensor)) for tensor in wanted)


def _check_recomputed(x: Tensor, given: Tensor) -> None:
    """Refuse to return gradients at other activations than those of the pass.

    Raises:
        RuntimeError: if the input that was recomputed is not the one that was given.
    """
    distance = float((x - given).abs().max()) if x.numel() else 0.0
    allowed = torch.finfo(x.dtype).eps ** 0.5 * (1 + float(given.abs().max())) if x.numel() else 0.0
    if not distance <= allowed:
        raise RuntimeError(
            f"the input that the inverses recompute differs by {distance:.1e} from the one that was given (allowed is "
            f"{allowed:.1e}): a layer is badly conditioned, was changed since the forward pass, or its inverse is "
            "wrong; recompute=False keeps activations instead"
        )
