"""SLL blocks with stride and channel change, fused with orthogonal kernels (the paper's appendix on SLL).

``post ∘ SLL ∘ pre`` with orthogonal convolutions ``pre`` and ``post``, the second with a stride, is multiplied out:

    y = (post ∘ pre) x - 2 (post ∘ Kᵀ) σ((K ∘ pre) x + b)

so that it runs as a residual block with two convolutions in one branch and a strided one in the other. With 2x2
kernels all three are 3x3.

The Jacobian is ``post (I - 2 KᵀDK) pre`` for slopes ``D``. Its transpose belongs to ``preᵀ ∘ SLL ∘ postᵀ``, a block
that makes maps larger:

    y = (post ∘ pre)ᵀ x - 2 (K ∘ pre)ᵀ σ((post ∘ Kᵀ)ᵀ x + b)

with the same fused kernels, the strided ones as transposed convolutions.

With zero padding the hidden map is cut off at the border. That is an activation of slope 0 outside, so the block stays
1-Lipschitz although the three padded layers, one after the other, would compute something else near the border.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Unpack, cast

import torch
from torch import Tensor, nn

from trysquare.nn.geometry import Pads, Sizes, check_groups
from trysquare.nn.layers.block import ResamplingBlock, Sum
from trysquare.nn.layers.packing import PackedKernels, Shapes
from trysquare.nn.layers.sll import RowContraction
from trysquare.nn.linalg.kernels import adjoint, compose
from trysquare.nn.linalg.lattice import ROUND_UP, SMALL, LatticeMap, residual_bound, tap_norms
from trysquare.nn.parametrizations import Parametrization
from trysquare.nn.parametrizations.base import Factory

__all__ = [
    "SLLAOCBlock1d",
    "SLLAOCBlock2d",
    "SLLAOCBlock3d",
    "SLLAOCBlockTranspose1d",
    "SLLAOCBlockTranspose2d",
    "SLLAOCBlockTranspose3d",
]


def _halves(kernel_size: Sizes) -> tuple[Sizes, Sizes]:
    """Return the sizes of ``K``, and of ``pre`` and ``post``, whose compositions have ``kernel_size`` taps."""
    inner = tuple(k // 2 + 1 for k in kernel_size)
    return inner, tuple(k + 1 - i for k, i in zip(kernel_size, inner, strict=True))


class FusedKernels(PackedKernels):
    """Fused kernels from the free tensors of ``pre``, ``post`` and ``K``: shortcut, first and second of the branch.

    They are ``post ∘ pre``, ``K ∘ pre`` and ``-2 post ∘ Kᵀ``, or those of the transposed block:
    ``post ∘ pre`` and ``post ∘ Kᵀ`` for transposed convolutions, and ``-2 (K ∘ pre)ᵀ``.
    """

    def __init__(
        self,
        pre: Parametrization,
        post: Parametrization,
        inner: RowContraction,
        transposed: bool,
        **factory: Unpack[Factory],
    ) -> None:
        super().__init__((pre, post, inner), **factory)
        self.groups, self.transposed = inner.groups, transposed
        (_, inputs, *outer), (hidden, _, *middle) = pre.weight_shape, inner.weight_shape
        outputs = post.weight_shape[0]
        shortcut = tuple(2 * size - 1 for size in outer)
        branch = tuple(a + b - 1 for a, b in zip(middle, outer, strict=True))
        hidden_of_group = hidden // self.groups
        first = (outputs, hidden_of_group) if transposed else (hidden, inputs)
        second = (inputs * self.groups, hidden_of_group) if transposed else (outputs, hidden_of_group)
        self._shapes = (outputs, inputs, *shortcut), (*first, *branch), (*second, *branch)

    @property
    def kernel_shapes(self) -> Shapes:
        return self._shapes

    def build_kernels(self, *tensors: Tensor) -> list[Tensor]:
        """Compose the kernels of the shortcut and of the branch."""
        pre, post, inner = tensors
        fine = compose(inner, pre, self.groups)
        strided = compose(post, adjoint(inner, self.groups), self.groups)
        branch = [strided, -2 * adjoint(fine, self.groups)] if self.transposed else [fine, -2 * strided]
        return [compose(post, pre, self.groups), *branch]


class _FusedBlock(ResamplingBlock):
    """Constructor and forward pass of both blocks; ``pre`` and ``K`` act on the fine side."""

    _shown = (*ResamplingBlock._shown, "mid_channels")
    _options = ("mid_channels",)

    def _kernels(self, factory: Factory, mid_channels: int | None = None) -> FusedKernels:
        fine, coarse = self._sides
        self.mid_channels = fine if mid_channels is None else mid_channels
        check_groups(self.groups, mid_channels=self.mid_channels)
        inner, outer = _halves(self.kernel_size)
        shape = (self.hidden_channels, self.mid_channels // self.groups, *inner)
        kernels = FusedKernels(
            self._orthogonal(self._geometry("pre", (fine, self.mid_channels), outer, False, "mid_channels"), factory),
            self._orthogonal(self._geometry("post", (self.mid_channels, coarse), outer, True, "mid_channels"), factory),
            RowContraction(shape, self.groups, **factory),
            self.transposed,
            **factory,
        )
        self._apply_with(*self._paddings(inner, outer), kernels.kernel_shapes)
        return kernels

    def _apply_with(self, shortcut: Pads, fine: Pads, strided: Pads, shapes: Shapes) -> None:
        """Set how the kernels are applied, from the padding of ``post ∘ pre``, ``K ∘ pre`` and ``post ∘ Kᵀ``."""
        around, branch = shapes[0][2:], shapes[1][2:]
        self._shortcut = self._convolution(around, shortcut, strided=True)
        self._first = self._convolution(branch, fine, strided=False)
        self._second = self._convolution(branch, strided, strided=True)
        if self.transposed:
            self._shortcut = self._shortcut.adjoint()
            self._first, self._second = self._second.adjoint(), self._first.flipped()

    def _paddings(self, inner: Sizes, outer: Sizes) -> tuple[Pads, Pads, Pads]:
        """Return the padding of ``post ∘ pre``, ``K ∘ pre`` and ``post ∘ Kᵀ``.

        The fused ones agree with the three single ones if every padding is the sum of those of its
        parts, and that of ``Kᵀ`` is that of ``K`` flipped.
        """

        def axis(inner: int, outer: int, dilation: int) -> tuple[tuple[int, int], ...]:
            pre, middle, post = (outer - 1) // 2, inner // 2, outer // 2
            lefts = (pre + post, pre + middle, post + inner - 1 - middle)
            totals = (2 * outer - 2, inner + outer - 2, inner + outer - 2)
            sides = ((left, total - left) for left, total in zip(lefts, totals, strict=True))
            return tuple((dilation * left, dilation * right) for left, right in sides)

        shortcut, fine, strided = zip(*map(axis, inner, outer, self.dilation), strict=True)
        return shortcut, fine, strided

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        """Add the branch to the shortcut.

        Raises:
            ValueError: if the padding is circular and the stride does not divide the input of a block that is not
                transposed.
        """
        shortcut, first, second = self.kernels
        return self._shortcut(input, shortcut) + self._branch(input, first, second)

    @torch.no_grad()
    def lipschitz_constant(self, input_shape: Sizes, dtype: torch.dtype) -> float:
        """Bound ``post (I - 2 KᵀDK) pre``, and what fusing and rounding add; see ``linalg.operator.LipschitzLayer``.

        With ``A + S D T`` exact and ``A'``, ``S'``, ``T'`` used, the difference is at most ``|A' - A| + |S'| |T' - T| +
        |S' - S| |T|`` for every diagonal ``D`` between 0 and 1. A transposed block has the transposed matrices. Without
        its parts, a block is bounded by its kernels alone.
        """
        shortcut, first, second = maps = self._maps(self._shortcut, self._first, self._second)
        circle = self._circle(maps, input_shape)
        fine = tuple(size * s for size, s in zip(circle, shortcut.stride, strict=True))
        made_of = self._before_fusing()
        if made_of is None:
            first, second = (second.transposed(), first) if self.transposed else (first, second)
            apart = (shortcut.norm(circle) + second.norm(circle) * first.norm(fine)) * ROUND_UP
            return min(apart, residual_bound(shortcut, first, second, circle))
        pre, post, inner = made_of

        def norm(kernel: Tensor, strided: bool) -> float:
            stride = shortcut.stride if strided else (1,) * len(fine)
            return replace(shortcut, kernel=kernel, stride=stride).norm(circle if strided else fine)

        def off(used: LatticeMap, exact: Tensor, strided: bool) -> float:
            # Fusing kernels in float64 is below the roundings that this leaves room for.
            difference = used.kernel - exact
            quick = tap_norms(difference)
            far = quick if quick < SMALL else norm(difference, strided)
            return far + 1e-12 * tap_norms(exact)

        kernels = cast("FusedKernels", self.parametrization)
        exact, strided = kernels.build_kernels(pre, post, inner), (True, self.transposed, not self.transposed)
        around, before, after = (off(*each) for each in zip(maps, exact, strided, strict=True))
        theorem = norm(post, True) * norm(pre, False) * max(1.0, 2 * norm(inner, False) ** 2 - 1)
        rounded = around + norm(second.kernel, strided[2]) * before + after * norm(exact[1], strided[1])
        return (theorem + rounded) * ROUND_UP

    def as_torch(self) -> nn.Module:
        """Return the sum of a plain convolution, and of two with the activation between them."""
        shortcut, first, second = self.kernels
        around = self._shortcut.plain(shortcut, None, self.training)
        return Sum(around, self._plain_branch(first, second)).train(self.training).as_torch()


class SLLAOCBlock1d(_FusedBlock):
    """The block in one dimension; see ``SLLAOCBlock2d``."""

    dims = 1


class SLLAOCBlock2d(_FusedBlock):
    """Residual block that changes resolution and channels, 1-Lipschitz: ``post ∘ SLL ∘ pre``, fused.

    Two convolutions of ``kernel_size`` in the branch, the second with the stride; one strided
    convolution in the shortcut.

    Args:
        in_channels: channels of the input.
        out_channels: channels of the output.
        kernel_size: size of the kernels of the branch.
        stride: stride; must divide the input if the padding is circular.
        dilation: spacing of the taps of all kernels.
        groups: number of independent groups of channels.
        bias: whether the hidden layer has a learnable bias.
        padding_mode: ``"circular"`` or ``"zeros"``.
        device: device of the parameters.
        dtype: dtype of the weights; free tensors are kept in float32 or float64.
        hidden_channels: channels between the convolutions of the branch; ``out_channels`` if not
            given.
        mid_channels: channels of the SLL block between ``pre`` and ``post``; ``in_channels`` if not
            given.
        activation: acts entry by entry with slopes between 0 and 1; ReLU if not given.
        method: how ``pre`` and ``post`` are parametrized: ``"aoc"``, ``"bcop"``, ``"sc-fac"`` or
            ``"bro"``, which make orthogonal kernels of exactly the size that is asked for.
        orthogonalizer: how their matrices are made orthonormal.

    Raises:
        ValueError: if no orthogonal ``pre`` or ``post`` has these numbers.

    >>> SLLAOCBlock2d(8, 16, stride=2)(torch.randn(1, 8, 6, 6)).shape
    torch.Size([1, 16, 3, 3])
    """

    dims = 2


class SLLAOCBlock3d(_FusedBlock):
    """The block in three dimensions; see ``SLLAOCBlock2d``."""

    dims = 3


class _SLLAOCBlockTranspose(_FusedBlock):
    transposed = True


class SLLAOCBlockTranspose1d(_SLLAOCBlockTranspose):
    """The block in one dimension; see ``SLLAOCBlockTranspose2d``."""

    dims = 1


class SLLAOCBlockTranspose2d(_SLLAOCBlockTranspose):
    """Residual block that makes maps larger, 1-Lipschitz: ``preᵀ ∘ SLL ∘ postᵀ``, fused.

    Its Jacobians are transposes of those of an ``SLLAOCBlock2d`` from ``out_channels`` to
    ``in_channels``. Shortcut and first convolution of the branch are transposed convolutions with
    the stride, the second is a plain one. The output has ``stride`` times the size of the input;
    with zero padding what falls past its border is cut off.

    Arguments are those of ``SLLAOCBlock2d``, with ``in_channels`` for ``hidden_channels`` and
    ``out_channels`` for ``mid_channels`` if not given: the SLL block acts on the larger map.

    >>> SLLAOCBlockTranspose2d(16, 8, stride=2)(torch.randn(1, 16, 3, 3)).shape
    torch.Size([1, 8, 6, 6])
    """

    dims = 2


class SLLAOCBlockTranspose3d(_SLLAOCBlockTranspose):
    """The block in three dimensions; see ``SLLAOCBlockTranspose2d``."""

    dims = 3
