"""Our own layers and blocks, bounded as a whole by what they say about themselves.

A theorem makes each of them 1-Lipschitz for weights that are exactly orthogonal, contractions or convex. Weights that
were rounded to the layer's dtype are nearly so, and ``lipschitz_constant`` of the layer uses the theorem with a
certified bound of what they are. What is added here is whether a layer may be taken at its word.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import nn

from trysquare.nn.layers.activations import MONOTONE, with_slopes_in_unit_interval
from trysquare.nn.layers.conv import OrthogonalConvolution
from trysquare.nn.layers.residual import AdjointResidual
from trysquare.nn.linalg.lattice import ROUND_UP
from trysquare.nn.linalg.operator import LipschitzLayer
from trysquare.nn.linalg.precision import coarsest_dtype
from trysquare.torch_internals import hooks_of
from trysquare.verify.lipschitz.checks import input_like
from trysquare.verify.lipschitz.graph import NoRuleError, Shape
from trysquare.verify.lipschitz.leaves import find_rule, input_dtype, leaf
from trysquare.verify.operators import as_defined, has_hooks, is_ours, read_layer, remember
from trysquare.verify.spectrum import norm_range


def _sets_no_weight(layer: nn.Module) -> bool:
    """Whether no hook sets the weight before each pass, so that the one that the layer knows of is the present one."""
    return not hooks_of(layer)[0]


def block(layer: LipschitzLayer, shape: Shape) -> float:
    """Return the constant that the layer gives itself, if the activation in it is what its theorem is about."""
    _check_activation(layer)
    return float(layer.lipschitz_constant(shape, input_dtype()))


def _check_activation(layer: object) -> None:
    if isinstance(inner := getattr(layer, "activation", None), nn.Module):
        activation = with_slopes_in_unit_interval(inner)
        known = next(cls for cls in type(activation).__mro__ if cls.__module__.startswith("torch.nn.modules"))
        if not as_defined(activation, known) or has_hooks(activation):
            raise NoRuleError(
                f"activation={activation!r} overrides forward or has hooks, so its slopes are not known to be between "
                "0 and 1"
            )


def linear_layer(layer: nn.Module, shape: Shape) -> float:
    """Return the certified spectral norm of a layer that computes what its weight says, as a random input shows."""
    operator = read_layer(layer, shape)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1, *shape, generator=generator, dtype=torch.float64)
    layer_input = x.to(input_like(layer))
    with torch.no_grad():
        found = layer(layer_input).double().cpu()
        bias = getattr(layer, "bias", None)
        shift = 0.0 if bias is None else bias.detach().double().cpu().view(-1, *(1,) * len(operator.axes))
    expected = operator.transpose(x) if operator.transposed else operator.apply(x)
    if operator.transposed:
        # The crop of a circular layer only turns the circle that its operator is about.
        found, expected = ((t - s).abs().flatten().sort().values for t, s in ((found, shift), (expected, 0.0)))
        shift = 0.0
    eps, product_eps = (torch.finfo(dtype).eps for dtype in (layer_input.dtype, coarsest_dtype(layer_input)))
    tolerance = max(8 * eps**0.5, 16 * product_eps) * (float(expected.abs().max()) + 1)
    if not torch.allclose(found, expected + shift, rtol=0, atol=tolerance):
        raise NoRuleError("it computes something else than its weight and its numbers say; make a new layer instead")
    return norm_range(operator, lowest=False)[1]


@leaf(AdjointResidual)
def step(layer: AdjointResidual, shape: Shape) -> float:
    """``I - 2 WᵀDW``, whose eigenvalues are between ``1 - 2 |W|²`` and 1, with the weight as it was rounded."""
    _check_activation(layer)
    own = find_rule(layer.layer)
    found = linear_layer(layer.layer, shape) if own is None else own(layer.layer, shape)
    norm = max(found) if isinstance(found, Sequence) else float(found)
    return max(1.0, 2 * norm**2 - 1) * ROUND_UP


def _makes_several_calls(layer: OrthogonalConvolution) -> bool:
    """Whether a pass makes several calls, which add up to less than each of them could be."""
    return not layer.is_one_call


def _modules_of_ours(above: type[nn.Module] = nn.Module) -> Iterator[type[nn.Module]]:
    for cls in above.__subclasses__():
        if is_ours(cls):
            yield cls
        yield from _modules_of_ours(cls)


for _class in set(_modules_of_ours()):
    if "lipschitz_constant" in vars(_class):
        leaf(_class, when=_sets_no_weight)(block)
    elif "forward" in vars(_class) and hasattr(_class, "is_one_call"):
        leaf(_class, when=_makes_several_calls)(linear_layer)

for _known in (nn.ReLU, nn.LeakyReLU, nn.ELU, nn.CELU, *MONOTONE):
    remember(_known)
