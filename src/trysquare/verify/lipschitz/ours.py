"""Lipschitz constants of our own layers and blocks, with the weights that their forward pass really uses.

A theorem makes each of them 1-Lipschitz for weights that are exactly orthogonal, contractions or convex. Weights that
were rounded to the layer's dtype are nearly so, and the theorem is used with a certified bound of what they are.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from trysquare.nn.layers import activations
from trysquare.nn.layers.activations import MONOTONE, with_slopes_in_unit_interval
from trysquare.nn.layers.conv import _Convolution, _TransposedConvolution
from trysquare.nn.layers.convolution import Convolution
from trysquare.nn.layers.fourier import _FourierConvolution, _Plain, _Transposed
from trysquare.nn.layers.packing import unpack
from trysquare.nn.layers.pooling import EuclideanNorm
from trysquare.nn.layers.potential import _PotentialStep
from trysquare.nn.layers.sandwich import _Sandwich
from trysquare.nn.layers.sandwich_fourier import _FourierSandwich
from trysquare.nn.layers.sllaoc import _FusedBlock
from trysquare.nn.linalg.bounds import singular_value_range
from trysquare.nn.linalg.kernels import adjoint
from trysquare.nn.linalg.precision import at_least_float32, full_precision
from trysquare.nn.linalg.rescaling import positive
from trysquare.nn.linalg.spectrum import UNIT_ROUNDOFF
from trysquare.verify.lipschitz.checks import input_like
from trysquare.verify.lipschitz.graph import NoRuleError, Shape
from trysquare.verify.lipschitz.leaves import input_dtype, leaf, rule
from trysquare.verify.lipschitz.theorems import (
    ROUND_UP,
    SMALL,
    LatticeMap,
    circle_around,
    residual_bound,
    sandwich_bound,
    tap_norms,
)
from trysquare.verify.operators import as_defined, checked_weight, has_hooks, read_layer, remember, used_weight
from trysquare.verify.spectrum import norm_range

_CHUNK_NUMBERS = 1 << 23

# Slopes are 1 and -1, whatever the kinks; a norm is 1-Lipschitz.
rule(activations.NActivation, EuclideanNorm)(lambda layer, *shapes: 1.0)


def _by_series(layer: Any) -> bool:
    return bool(layer._applies_terms())


def linear_layer(layer: nn.Module, shape: Shape) -> float:
    """The certified spectral norm of a layer that computes what its weight says, as a random input shows."""
    operator = read_layer(layer, shape)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1, *shape, generator=generator, dtype=torch.float64)
    layer_input = x.to(input_like(layer))
    with torch.no_grad():
        found = layer(layer_input).double().cpu()
        bias: Any = layer.bias
        shift = 0.0 if bias is None else bias.detach().double().cpu().view(-1, *(1,) * len(operator.axes))
    expected = operator.transpose(x) if operator.transposed else operator.apply(x)
    if operator.transposed:
        # The crop of a circular layer only turns the circle that its operator is about.
        found, expected = ((t - s).abs().flatten().sort().values for t, s in ((found, shift), (expected, 0.0)))
        shift = 0.0
    tolerance = 8 * torch.finfo(layer_input.dtype).eps ** 0.5 * (float(expected.abs().max()) + 1)
    if not torch.allclose(found, expected + shift, rtol=0, atol=tolerance):
        raise NoRuleError("it computes something else than its weight and its numbers say; make a new layer instead")
    return norm_range(operator, lowest=False)[1]


# These are applied in terms that add up to less than each of them could be.
leaf(_Convolution, when=_by_series)(linear_layer)
rule(_TransposedConvolution)(linear_layer)


@rule(activations.Householder)
def householder(layer: activations.Householder, shape: Shape) -> float:
    """A fold by ``I - 2 v vᵀ``, of norm ``max(1, 2 |v|² - 1)`` for normals ``v`` that were rounded.

    In order 2 four pieces, each of them a cosine and a sine that were rounded. The rounding of their borders moves the
    output as that of any sum does.
    """
    theta = layer.theta.detach().to(at_least_float32(layer.theta.dtype))
    if layer.order == 1:
        normals = torch.stack(((theta / 2).sin(), (theta / 2).cos())).to(input_dtype())
        square = 2 * checked_weight(normals, "Householder").square().sum(0) - 1
        return float(square.clamp_min(1.0).max()) * ROUND_UP
    checked_weight(theta, "Householder")
    # cos² + sin² with a rounding error of half a unit in the last place of each.
    return 1.0 + 2 * torch.finfo(input_dtype()).eps


def _check_activation(layer: Any) -> None:
    """Refuse an activation that the block's theorem does not hold for."""
    activation = with_slopes_in_unit_interval(layer.activation)
    known = next(cls for cls in type(activation).__mro__ if cls.__module__.startswith("torch.nn.modules"))
    if not as_defined(activation, known) or has_hooks(activation):
        raise NoRuleError(
            f"activation={activation!r} overrides forward or has hooks, so its slopes are not known to be between 0 "
            "and 1"
        )


def _on_lattice(convolution: Convolution, kernel: Tensor) -> LatticeMap:
    """How a kernel is applied; of a transposed convolution, the convolution that it is the adjoint of."""
    if not convolution.dims:
        return LatticeMap.of_matrix(kernel)
    start = tuple(-left for left, _ in convolution.pads)
    return LatticeMap(kernel, convolution.stride, convolution.dilation, convolution.groups, start)


def _circle(layer: Any, maps: list[LatticeMap], shape: Shape) -> Shape:
    """The circle that a block is on, or a part of, on its coarse side."""
    stride = max(each.stride for each in maps)
    if not layer._first.dims:
        return (1,)
    transposed = getattr(layer, "transposed", False)
    coarse = shape[1:] if transposed else tuple(-(-size // s) for size, s in zip(shape[1:], stride, strict=True))
    return circle_around(maps, coarse, stride, layer.padding_mode == "circular")


@rule(_PotentialStep)
def potential_step(layer: _PotentialStep, shape: Shape) -> float:
    """``x - 2 Mᵀ σ(M x + b)``."""
    _check_activation(layer)
    kernel = used_weight(layer)
    first = _on_lattice(layer._first, kernel)
    second = _on_lattice(layer._second, -2 * adjoint(kernel, first.groups) if layer._first.dims else -2 * kernel.mT)
    return residual_bound(first.identity(), first, second, _circle(layer, [first, second], shape))


def _maps(layer: Any, *ways: Convolution) -> list[LatticeMap]:
    """The kernels of a block as the forward pass uses them."""
    kernels = unpack(used_weight(layer), layer._kernel_shapes)
    return [_on_lattice(way, kernel) for way, kernel in zip(ways, kernels, strict=True)]


def _built(layer: Any) -> list[Tensor] | None:
    """What the kernels of a block are made of before they are fused and rounded, if its parametrization is there."""
    if not nn.utils.parametrize.is_parametrized(layer, "weight"):
        return None
    kernels: Any = layer.parametrization
    with full_precision(layer.free_tensors[0]):
        owned, extra = kernels._owned(tuple(tensor.detach() for tensor in layer.free_tensors))
        weights = [part.build(*own) for part, own in zip(kernels.parts, owned, strict=True)]
    return [checked_weight(weight, type(layer).__name__) for weight in (*weights, *extra)]


@rule(_FusedBlock)
def sll_aoc_block(layer: _FusedBlock, shape: Shape) -> float:
    """``post (I - 2 KᵀDK) pre``, and what fusing and rounding the three kernels adds.

    With ``A + S D T`` exact and ``A'``, ``S'``, ``T'`` used, the difference is at most ``|A' - A| + |S'| |T' - T| +
    |S' - S| |T|`` for every diagonal ``D`` between 0 and 1. A transposed block has the transposed matrices. Without its
    parts, a block is bounded by its kernels alone.
    """
    _check_activation(layer)
    shortcut, first, second = maps = _maps(layer, layer._shortcut, layer._first, layer._second)
    circle = _circle(layer, maps, shape)
    built = _built(layer)
    fine = tuple(size * s for size, s in zip(circle, shortcut.stride, strict=True))
    if built is None:
        first, second = (second.transposed(), first) if layer.transposed else (first, second)
        apart = (shortcut.norm(circle) + second.norm(circle) * first.norm(fine)) * ROUND_UP
        return min(apart, residual_bound(shortcut, first, second, circle))
    pre, post, inner = built

    def norm(kernel: Tensor, strided: bool) -> float:
        stride = shortcut.stride if strided else (1,) * len(fine)
        return replace(shortcut, kernel=kernel, stride=stride).norm(circle if strided else fine)

    def off(used: LatticeMap, exact: Tensor, strided: bool) -> float:
        # Fusing kernels in float64 is below the roundings that this leaves room for.
        difference = used.kernel - exact
        quick = tap_norms(difference)
        far = quick if quick < SMALL else norm(difference, strided)
        return far + 1e-12 * tap_norms(exact)

    kernels: Any = layer.parametrization
    exact, strided = kernels.build_kernels(pre, post, inner), (True, layer.transposed, not layer.transposed)
    around, before, after = (off(*each) for each in zip(maps, exact, strided, strict=True))
    theorem = norm(post, True) * norm(pre, False) * max(1.0, 2 * norm(inner, False) ** 2 - 1)
    rounded = around + norm(second.kernel, strided[2]) * before + after * norm(exact[1], strided[1])
    return (theorem + rounded) * ROUND_UP


@rule(_Sandwich)
def sandwich(layer: _Sandwich, shape: Shape) -> float:
    """``Q σ(P x)``, whatever the two kernels are, with the layer's ``Ψ`` where it has one."""
    _check_activation(layer)
    first, second = maps = _maps(layer, layer._first, layer._second)
    back = second if layer._second.transposed else second.transposed()
    built = _built(layer)
    psi = None if built is None else positive(built[-1])
    return sandwich_bound(first, back, _circle(layer, maps, shape), psi)


def _blocks_norm(blocks: Tensor, owner: str) -> float:
    """Certified norm of the largest of many complex matrices.

    A real convolution by half of the frequencies is at most that: the transform back projects what is not the
    transform of something real.
    """
    if not bool(torch.view_as_real(blocks).isfinite().all()):
        raise ValueError(f"the response of {owner} holds values that are not finite: it has no norm")
    flat = blocks.detach().to("cpu", torch.complex128).flatten(0, -3)
    chunk = max(1, _CHUNK_NUMBERS // math.prod(flat.shape[1:]))
    return singular_value_range(flat.split(chunk), lowest=False)[1]


@rule(_Plain, _Transposed)
def fourier_convolution(layer: _FourierConvolution, shape: Shape) -> float:
    """The largest of the blocks that the spectrum is multiplied by."""
    sizes = shape[1:]
    coarse = sizes if layer.transposed else tuple(n // s for n, s in zip(sizes, layer.stride, strict=True))
    used = layer.response(coarse).to(torch.promote_types(at_least_float32(input_dtype()), torch.complex64))
    return _blocks_norm(used, type(layer).__name__)


@rule(_FourierSandwich)
def sandwich_convolution(layer: _FourierSandwich, shape: Shape) -> float:
    """As ``sandwich``, with a pair of blocks for each frequency and group."""
    _check_activation(layer)
    sizes = shape[1:]
    coarse = sizes if layer.transposed else tuple(n // s for n, s in zip(sizes, layer.stride, strict=True))
    before, after = (response.to(torch.complex128) for response in layer.response(coarse))
    psi = positive(layer.response.free_psi.detach().double()).unsqueeze(-1)
    both = torch.cat((after / psi, before * psi), -1)
    rounding = 4 * UNIT_ROUNDOFF * float(torch.linalg.matrix_norm(both).max())
    return (_blocks_norm(both, type(layer).__name__) + rounding) ** 2 / 2 * ROUND_UP


for _known in (nn.ReLU, nn.LeakyReLU, nn.ELU, nn.CELU, *MONOTONE):
    remember(_known)
