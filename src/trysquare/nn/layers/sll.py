"""SDP-based Lipschitz layers (Araujo et al., 2023): residual blocks made 1-Lipschitz by rescaling hidden channels."""

from __future__ import annotations

import torch
from torch import Tensor

from trysquare.nn.layers.potential import PotentialConv, PotentialLinear
from trysquare.nn.linalg.rescaling import channel_sums, contract_rows, free_of_factors, gram, positive_factors
from trysquare.nn.parametrizations.spectral import Contraction

__all__ = ["SLLBlock1d", "SLLBlock2d", "SLLBlock3d", "SLLLinear"]


class RowContraction(Contraction):
    """``T^(-1/2) K`` for a free kernel ``K`` and free positive weights ``q`` that ``T`` depends on."""

    @property
    def free_shapes(self) -> tuple[tuple[int, ...], ...]:
        return self.shape, self.shape[:1]

    def draw(self) -> list[Tensor]:
        """Return a normal kernel and equal weights."""
        return [self._draw_kernel(), torch.zeros(self.shape[0], dtype=torch.float64)]

    def build(self, *free: Tensor) -> Tensor:
        kernel, q = (self._by_group(tensor) for tensor in free)
        return contract_rows(kernel, positive_factors(q), dims=self.dims).flatten(0, 1)

    def solve(self, weight: Tensor) -> list[Tensor]:
        """Return the weight itself, with the weights ``q`` that leave it as it is.

        For a kernel that ``contract_rows`` made, the row sums of ``|K Kᵀ|`` have Perron eigenvalue 1
        (its eigenvector is ``T^(1/2) q``), and with the eigenvector for ``q`` they are all 1.
        """
        sums = channel_sums(gram(self._by_group(weight), dims=self.dims), dims=self.dims)
        perron = torch.linalg.eigh(sums).eigenvectors[..., -1].abs().clamp_min(1e-30)
        # Only ratios matter: the middle of their range goes to 1, the middle of what ``positive_factors`` reaches.
        middle = (perron.amax(-1, keepdim=True) * perron.amin(-1, keepdim=True)).sqrt()
        return [weight, free_of_factors(perron / middle).flatten()]

    def extra_repr(self) -> str:
        return f"{self.shape}, rescaled by row sums of K Kᵀ"


class SLLLinear(PotentialLinear):
    """``x - 2 W T⁻¹ σ(Wᵀ x + b)`` for vectors, 1-Lipschitz.

    ``T`` is diagonal with ``T_i = Σ_j |WᵀW|_ij q_j / q_i`` for learnable positive ``q``, split
    evenly between the two sides of the activation.

    Args:
        features: size of input and output.
        hidden_features: columns of ``W``; ``features`` if not given.
        bias: whether there is a learnable ``b``.
        device: device of the parameters.
        dtype: dtype of the weight; free tensors are kept in float32 or float64.
        activation: acts entry by entry with slopes between 0 and 1; ReLU if not given.

    >>> SLLLinear(16)(torch.randn(2, 16)).shape
    torch.Size([2, 16])
    """

    contraction = RowContraction


class _SLLBlock(PotentialConv):
    contraction = RowContraction


class SLLBlock1d(_SLLBlock):
    """The block in one dimension; see ``SLLBlock2d``."""

    dims = 1


class SLLBlock2d(_SLLBlock):
    """``x - 2 Kᵀ σ(K x + b)`` with a convolution ``K`` that is rescaled to be 1-Lipschitz; the block is so too.

    Each hidden channel is divided by ``sqrt(T_i)``, ``T_i = Σ_j |K Kᵀ|_ij q_j / q_i`` over channels
    and taps with learnable positive ``q``: 1-Lipschitz on feature maps of every size.
    ``SLLAOCBlock2d`` also changes the number of channels and the resolution.

    Args:
        channels: channels of input and output.
        hidden_channels: channels of ``K x``; ``channels`` if not given.
        kernel_size: size of the kernel.
        dilation: spacing of the taps.
        groups: number of independent groups of channels.
        bias: whether there is a learnable ``b``.
        padding_mode: ``"circular"`` or ``"zeros"``.
        device: device of the parameters.
        dtype: dtype of the weight; free tensors are kept in float32 or float64.
        activation: acts entry by entry with slopes between 0 and 1; ReLU if not given.

    >>> SLLBlock2d(8, 16)(torch.randn(1, 8, 6, 6)).shape
    torch.Size([1, 8, 6, 6])
    """

    dims = 2


class SLLBlock3d(_SLLBlock):
    """The block in three dimensions; see ``SLLBlock2d``."""

    dims = 3
