"""Lipschitz constants of our own layers and blocks, with the weights that their forward pass really uses.

A theorem makes each of them 1-Lipschitz for weights that are exactly orthogonal, contractions or convex. Weights that
were rounded to the layer's dtype are nearly so, and the theorem is used with a certified bound of what they are.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trysquare.layers import activations
from trysquare.layers.activations import MONOTONE, with_slopes_in_unit_interval
from trysquare.layers.conv import _Convolution, _TransposedConvolution
from trysquare.layers.fourier import _FourierConvolution, _Plain, _Transposed
from trysquare.layers.packing import PackedKernels, unpack
from trysquare.layers.pooling import EuclideanNorm
from trysquare.layers.potential import _PotentialStep
from trysquare.layers.sandwich import _ExplicitSandwich, _Sandwich
from trysquare.layers.sandwich_fourier import _FourierSandwich
from trysquare.layers.sllaoc import _FusedBlock
from trysquare.linalg.bounds import domain_range, normalized, rescaled_up, singular_value_range
from trysquare.linalg.kernels import adjoint
from trysquare.linalg.precision import at_least_float32, full_precision
from trysquare.linalg.rescaling import positive
from trysquare.linalg.spectrum import UNIT_ROUNDOFF, Polyphase, polyphase
from trysquare.lipschitz.leaves import input_dtype, leaf, rule
from trysquare.lipschitz.rules import matrix_norm
from trysquare.lipschitz.trace import NoRuleError, Shape, input_like
from trysquare.operators import (
    LinearOperator,
    as_defined,
    checked_weight,
    convolution_axes,
    has_hooks,
    read_layer,
    remember,
    used_weight,
)
from trysquare.spectrum import norm_range

# Covers the roundings of a rule that takes more than a handful of steps.
ROUND_UP = 1 + 2.0**-48
_CHUNK_NUMBERS = 1 << 23
# Distances of kernels below which the quick bound will do.
_SMALL = 1e-6

# Slopes are 1 and -1, whatever the kinks; a norm is 1-Lipschitz.
rule(activations.NActivation, EuclideanNorm)(lambda layer, *shapes: 1.0)


def _by_series(layer: Any) -> bool:
    return bool(layer._goes_by_series())


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


@rule(_PotentialStep)
def potential_step(layer: _PotentialStep, shape: Shape) -> float:
    """``I - 2 MᵀDM`` is symmetric with eigenvalues from ``1 - 2 |M|²`` to 1."""
    _check_activation(layer)
    kernel, step = used_weight(layer), layer._first
    if not step.dims:
        norm = matrix_norm(kernel)
    else:
        axes = convolution_axes(shape[1:], step.extent, step.stride, step.pads, step.mode)
        norm = norm_range(LinearOperator(kernel, step.dilation, step.groups, axes), lowest=False)[1]
    return max(1.0, (2 * norm**2 - 1) * ROUND_UP)


def _built_parts(layer: Any) -> tuple[list[Tensor], tuple[Tensor, ...]]:
    """Weights of the parts that the kernels are made of before they are fused and rounded, and the extra tensors."""
    if not nn.utils.parametrize.is_parametrized(layer, "weight"):
        raise NoRuleError("its parametrization was taken off, and with it what is known about its kernels")
    kernels = layer.parametrization
    assert isinstance(kernels, PackedKernels)
    with full_precision(layer.free_tensors[0]):
        owned, extra = kernels._owned(tuple(tensor.detach() for tensor in layer.free_tensors))
        weights = [part.build(*own) for part, own in zip(kernels.parts, owned, strict=True)]
    return [checked_weight(weight, type(layer).__name__) for weight in weights], extra


def _used_kernels(layer: Any) -> list[Tensor]:
    """The kernels as the forward pass uses them, in float64."""
    return unpack(used_weight(layer), layer._kernel_shapes)


def _tap_norms(kernel: Tensor) -> float:
    """Sum over the taps of Frobenius norms: at least the norm of the convolution on every domain."""
    return float(kernel.flatten(2).norm(dim=(0, 1)).sum()) * (1 + kernel.numel() * UNIT_ROUNDOFF)


def _domain_norm(convolution: Polyphase, coarse: tuple[int, ...]) -> float:
    """Certified norm on a circular domain, or on every domain where that one has too many frequencies."""
    coefficients, exponent = normalized(convolution.coefficients)
    scaled = Polyphase(convolution.positions, coefficients)
    return rescaled_up(domain_range(scaled, coarse, scaled, lowest=False)[1], exponent)


def _rounding(after: Tensor, before: Tensor) -> float:
    """Bound on the norm of the rounding error of ``2 compose(after, before)`` in float64."""
    products = after.shape[1] * min(after[0, 0].numel(), before[0, 0].numel())
    return 4 * (products + 8) * UNIT_ROUNDOFF * _tap_norms(after) * _tap_norms(before)


def _coarse_sizes(layer: Any, sizes: Shape, reach: int) -> Shape:
    """Sizes, on the coarse side, of a circular domain that has the block as a part.

    That is the domain of the block if it is circular. With zero padding it must be so large that no window that is
    ``reach`` wide on the fine side meets the map again on its other side.
    """
    fine = [size * s if layer.transposed else size for size, s in zip(sizes, layer.stride, strict=True)]
    wider = 0 if layer.padding_mode == "circular" else reach
    return tuple(-(-(size + wider) // s) for size, s in zip(fine, layer.stride, strict=True))


@rule(_FusedBlock)
def sll_aoc_block(layer: _FusedBlock, shape: Shape) -> float:
    """``post (I - 2 KᵀDK) pre``, and what fusing and rounding the three kernels adds.

    With ``S + G D F`` exact and ``S'``, ``G'``, ``F'`` used, the difference is at most ``|S' - S| + |G'| |F' - F| +
    |G' - G| |F|`` for every diagonal ``D`` between 0 and 1. With zero padding all of them are parts of convolutions on
    a larger circle, with ``D = 0`` outside of the hidden map. A transposed block has the transposed matrices.
    """
    _check_activation(layer)
    (pre, post, inner), _ = _built_parts(layer)
    maps = layer._shortcut, layer._first, layer._second
    coarse = _coarse_sizes(layer, shape[1:], max(max(each.extent) for each in maps))
    fine = tuple(size * s for size, s in zip(coarse, layer.stride, strict=True))
    strides: dict[bool, Shape] = {True: layer.stride, False: (1,) * layer.dims}

    def norm(kernel: Tensor, strided: bool) -> float:
        convolution = polyphase(kernel, strides[strided], layer.dilation, layer.groups)
        return _domain_norm(convolution, coarse if strided else fine)

    def distance(kernel: Tensor, other: Tensor, strided: bool) -> float:
        quick = _tap_norms(kernel - other) + UNIT_ROUNDOFF * _tap_norms(kernel)
        return quick if quick < _SMALL else norm(kernel - other, strided) + UNIT_ROUNDOFF * _tap_norms(kernel)

    kernels: Any = layer.parametrization
    used, exact = _used_kernels(layer), kernels.build_kernels(pre, post, inner)
    first_strided = layer.transposed
    roundings = [_rounding(inner, pre), _rounding(post, inner.transpose(0, 1))]
    roundings = [_rounding(post, pre), *(reversed(roundings) if first_strided else roundings)]
    pairs = zip(used, exact, (True, first_strided, not first_strided), roundings, strict=True)
    shortcut, first, second = (distance(ours, theirs, strided) + error for ours, theirs, strided, error in pairs)
    inner_norm, pre_norm, post_norm = norm(inner, False), norm(pre, False), norm(post, True)
    theorem = post_norm * pre_norm * max(1.0, 2 * inner_norm**2 - 1)
    first_norm = inner_norm * (post_norm if first_strided else pre_norm)
    rounded = shortcut + norm(used[2], not first_strided) * first + second * first_norm
    return (theorem + rounded) * ROUND_UP


def _halved_square(norm: float) -> float:
    """``|[A B]|²`` for ``[A B]`` of ``norm / √2``: the constant of ``√2 Aᵀ Ψ σ(√2 Ψ⁻¹ B x)``."""
    return norm**2 / 2 * ROUND_UP


@rule(_Sandwich)
def sandwich(layer: _Sandwich, shape: Shape) -> float:
    """``Q σ(P x)`` has the constant ``|[Qᵀ Ψ⁻¹, Ψ P]|² / 2`` for every positive diagonal ``Ψ``, so for the layer's.

    The proof of ``trysquare.linalg.sandwich`` with ``A = Ψ⁻¹ Qᵀ / √2`` and ``B = Ψ P / √2``: nothing is assumed of the
    two kernels, which may be rounded in any way.
    """
    _check_activation(layer)
    psi = checked_weight(positive(_built_parts(layer)[1][0].double()), type(layer).__name__)
    first, second = _used_kernels(layer)
    psi = psi.view(-1, *(1,) * (first.ndim - 1))
    before, after = layer._first, layer._second
    a, b = (second if after.transposed else adjoint(second, after.groups)) / psi, first * psi
    if not isinstance(layer, _ExplicitSandwich):
        both = torch.cat((a, b), 1)
        return _halved_square(matrix_norm(both) + UNIT_ROUNDOFF * float(both.norm()) * 1.01)
    convolutions = [
        polyphase(kernel, way.stride, way.dilation, way.groups) for kernel, way in ((a, after), (b, before))
    ]
    coarse = _coarse_sizes(layer, shape[1:], max(before.extent) * max(layer.stride))
    norm = _domain_norm(_side_by_side(*convolutions), coarse)
    return _halved_square(norm + UNIT_ROUNDOFF * (_tap_norms(a) + _tap_norms(b)))


def _side_by_side(left: Polyphase, right: Polyphase) -> Polyphase:
    """``[A B]`` for two convolutions to the same channels; shifting one against the other does not change its norm."""
    columns = left.block_shape[2], right.block_shape[2]
    coefficients = torch.cat((F.pad(left.coefficients, (0, columns[1])), F.pad(right.coefficients, (columns[0], 0))))
    return Polyphase(torch.cat((left.positions, right.positions)), coefficients)


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
    return _halved_square(_blocks_norm(both, type(layer).__name__) + rounding)


for _known in (nn.ReLU, nn.LeakyReLU, nn.ELU, nn.CELU, *MONOTONE):
    remember(_known)
