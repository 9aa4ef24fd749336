"""AOL (Prach and Lampert, 2022): a free kernel, rescaled so that the layer is 1-Lipschitz, almost orthogonal.

For a matrix ``A``, positive ``q`` and ``D`` diagonal with ``D_ii⁻² = Σ_j |AᵀA|_ij q_j / q_i``, the norm of ``A D`` is
at most 1: with ``Q = diag(q)``, the matrix ``Q (D⁻² - AᵀA) Q`` is symmetric with a nonnegative diagonal and, because
``Σ_j |AᵀA|_ij q_j = D_ii⁻² q_i``, diagonally dominant. So it is positive semidefinite, and ``D AᵀA D <= I``. Applied to
``Aᵀ`` it gives ``‖D A‖ <= 1``. Here ``A`` is the convolution on the infinite grid, and ``D`` must be a part of the
kernel:

* **few outputs** (``n <= m prod(r)``): ``D`` scales output channels. ``AAᵀ`` is a convolution; outputs ``u`` and ``u'``
  share inputs through taps ``j`` and ``j'`` with ``(j - j') d = (u' - u) s``, so its taps are the autocorrelation of
  the kernel at lags that are multiples of ``s / gcd(s, d)``.
* **many outputs**: ``D`` scales input channels, differently for each phase of the stride: the taps that read a given
  position are those of one class modulo ``s / gcd(s, d)``, so a factor for each class of taps is a diagonal matrix.
  ``AᵀA`` at a position of class ``C`` is the correlation of the taps in ``C`` with all taps.

Other domains follow. On a circular domain whose size the stride divides, the entries of ``AᵀA`` are sums of those on
the grid, so ``Σ |AᵀA|`` does not grow. Zero padding leaves out rows and columns of ``A``, which makes no norm larger.
Groups are independent blocks, and a transposed layer has the transposed matrix.
"""

from __future__ import annotations

from math import gcd, prod
from typing import ClassVar, Unpack

import torch
import torch.nn.functional as F
from torch import Tensor

from trysquare.nn.geometry import ConvGeometry, flag
from trysquare.nn.geometry import positive as positive_integer
from trysquare.nn.linalg.kernels import CONV, adjoint, compose
from trysquare.nn.linalg.orthonormal import random_orthonormal
from trysquare.nn.linalg.precision import is_reduced
from trysquare.nn.linalg.rescaling import positive_factors, scaled_to_one
from trysquare.nn.parametrizations.base import Factory
from trysquare.nn.parametrizations.method import KernelMethod
from trysquare.nn.parametrizations.projection import refuse_kernel

# Noise of a fresh kernel relative to its orthonormal taps: breaks the ties at which |x| has no gradient.
_NOISE = 0.02


def _correlation(moving: Tensor, kernel: Tensor, step: tuple[int, ...]) -> Tensor:
    """``(g, a, c, *k)`` against ``(g, b, c, *k)`` at all lags that are multiples of ``step``: ``(a, g, b, lags)``."""
    groups, b = kernel.shape[:2]
    taps = kernel.shape[3:]
    if is_reduced(kernel.device.type, "conv"):  # graphics cards convolve with fewer digits by default
        lags = compose(moving, adjoint(kernel, dims=len(taps)), dims=len(taps))  # (g, a, b, *(2 k - 1))
        for axis, (k, s) in enumerate(zip(taps, step, strict=True), start=3):
            lags = lags.narrow(axis, (k - 1) % s, 2 * k - 1 - (k - 1) % s)
            lags = lags.index_select(axis, torch.arange(0, lags.shape[axis], s, device=lags.device))
        return lags.flatten(3).movedim(1, 0)
    pads = tuple((k - 1) // s * s for k, s in zip(taps, step, strict=True))
    correlated = CONV[len(taps)](
        moving.transpose(0, 1).flatten(1, 2), kernel.flatten(0, 1), stride=step, padding=pads, groups=groups
    )
    return correlated.flatten(2).unflatten(1, (groups, b))


def nearly_orthogonal(geometry: ConvGeometry) -> Tensor:
    """Return ``(g, n, m, *k)``: orthonormal in as many middle taps as no two windows share, and a little noise."""
    groups, n, m = geometry.groups, geometry.group_out, geometry.group_in
    axes = zip(geometry.kernel_size, geometry.stride, geometry.dilation, strict=True)
    reach = tuple(min(k, s // gcd(s, d)) for k, s, d in axes)
    block = random_orthonormal(groups, n, m * prod(reach)).view(groups, n, m, *reach)
    gaps = [k - r for k, r in zip(geometry.kernel_size, reach, strict=True)]
    kernel = F.pad(block, [pad for gap in reversed(gaps) for pad in (gap // 2, gap - gap // 2)])
    return kernel + torch.randn(kernel.shape, dtype=torch.float64) * (_NOISE / prod(kernel.shape[2:]) ** 0.5)


class AOL(KernelMethod):
    """1-Lipschitz kernel ``(out, in / groups, *k)`` from a free kernel of the same shape.

    Free tensors: the kernel ``(g, n, m, *k)`` and, with ``q``, bounded logarithms ``(g, channels)`` of the weights.

    Args:
        geometry: numbers of the layer.
        orthogonalizer_name: not used; there is no orthonormal matrix.
        steps: how many times the kernel is rescaled. A further step brings singular values closer to 1 where the
            channels have been scaled unevenly, and changes little where they are balanced.
        q: whether the weights ``q`` of the sums are learned; 1 otherwise, as they are at the start. They stay within
            ``exp(±5)`` whatever the free tensor is.
        factory: device and dtype.
    """

    orthogonal: ClassVar[bool] = False
    uses_orthogonalizer: ClassVar[bool] = False
    options: ClassVar[tuple[str, ...]] = ("steps", "q")

    def __init__(
        self,
        geometry: ConvGeometry,
        orthogonalizer_name: str,
        steps: int = 1,
        q: bool = True,
        **factory: Unpack[Factory],
    ) -> None:
        super().__init__(geometry, orthogonalizer_name, **factory)
        self.steps, self.q = positive_integer("steps", steps), flag("q", q)
        self._period = tuple(s // gcd(s, d) for s, d in zip(geometry.stride, geometry.dilation, strict=True))

    @property
    def alike(self) -> None:
        """Nothing: kernels are rescaled one by one."""
        return None

    @property
    def scales_outputs(self) -> bool:
        """Whether the factors belong to output channels."""
        return self.geometry.row_orthogonal

    @property
    def free_shapes(self) -> tuple[tuple[int, ...], ...]:
        """The kernel, and the logarithms of ``q``."""
        geometry = self.geometry
        n, m = geometry.group_out, geometry.group_in
        kernel = (geometry.groups, n, m, *geometry.kernel_size)
        return (kernel, (geometry.groups, n if self.scales_outputs else m)) if self.q else (kernel,)

    def draw(self) -> list[Tensor]:
        """Orthonormal in as many middle taps as no two windows share, and a little noise; ``q = 1``."""
        weights = (torch.zeros(shape, dtype=torch.float64) for shape in self.free_shapes[1:])
        return [nearly_orthogonal(self.geometry), *weights]

    def build(self, *free: Tensor) -> Tensor:
        """Rescale ``steps`` times."""
        # The result does not depend on the scale of a group; sums of products must not overflow.
        kernel, _ = scaled_to_one(free[0], dims=self.geometry.dims)
        weights = positive_factors(free[1]) if self.q else kernel.new_ones(()).expand(self._channels(kernel))
        for _ in range(self.steps):
            kernel = (
                self._scaled_outputs(kernel, weights) if self.scales_outputs else self._scaled_inputs(kernel, weights)
            )
        return kernel.flatten(0, 1).contiguous()

    def _channels(self, kernel: Tensor) -> tuple[int, int]:
        return kernel.shape[0], kernel.shape[1 if self.scales_outputs else 2]

    def _scaled_outputs(self, kernel: Tensor, weights: Tensor) -> Tensor:
        sums = _correlation(kernel, kernel, self._period).abs().sum(-1).movedim(1, 0)  # (g, n, n)
        factors = _inverse_root(sums, weights, weights)
        return kernel * factors[(..., *(None,) * (kernel.ndim - 2))]

    def _scaled_inputs(self, kernel: Tensor, weights: Tensor) -> Tensor:
        groups, _, m, *taps = kernel.shape
        members = self._classes(kernel)  # (classes, *taps)
        moving = kernel.transpose(1, 2)  # (g, m, n, *k)
        parts = moving.unsqueeze(1) * members[:, None, None]  # (g, classes, m, n, *k)
        sums = _correlation(parts.flatten(1, 2), moving, (1,) * len(taps)).abs().sum(-1)
        sums = sums.movedim(1, 0).unflatten(1, (len(members), m))  # (g, classes, m, m)
        factors = _inverse_root(sums, weights.unsqueeze(1), weights.unsqueeze(1))  # (g, classes, m)
        return kernel * torch.einsum("gcm,ct->gmt", factors, members.flatten(1)).view(groups, 1, m, *taps)

    def _classes(self, kernel: Tensor) -> Tensor:
        """Taps that read the same positions, as masks ``(classes, *k)``."""
        index = torch.zeros((), dtype=torch.long, device=kernel.device)
        for k, period in zip(self.geometry.kernel_size, self._period, strict=True):
            index = index.unsqueeze(-1) * period + torch.arange(k, device=kernel.device) % period
        count = prod(self._period)
        masks = torch.arange(count, device=kernel.device).view(-1, *(1,) * index.ndim) == index
        return masks.to(kernel.dtype)

    def refuse_unreachable(self, weight: Tensor) -> None:
        refuse_kernel(weight, self.geometry, contraction=True)

    def solve(self, weight: Tensor) -> list[Tensor]:
        """Return the kernel itself: right up to the scale of its channels, from which a search starts."""
        kernel = weight.unflatten(0, (self.geometry.groups, -1))
        return [kernel, *(torch.zeros(shape, dtype=weight.dtype) for shape in self.free_shapes[1:])]

    def extra_repr(self) -> str:
        side = "output" if self.scales_outputs else "input"
        return f"1-Lipschitz, {side} channels rescaled {self.steps} times, q={self.q}"


def _inverse_root(sums: Tensor, own: Tensor, others: Tensor) -> Tensor:
    """``(Σ_j sums_ij others_j / own_i)^(-1/2)`` for ``sums`` of shape ``(..., i, j)``; 0 for a sum of zeros.

    Not the root of something tiny, whose second derivatives overflow.
    """
    total = torch.matmul(sums, others.unsqueeze(-1).expand(*sums.shape[:-2], -1, 1)).squeeze(-1) / own
    return total.masked_fill(total <= 0, torch.inf).rsqrt()
