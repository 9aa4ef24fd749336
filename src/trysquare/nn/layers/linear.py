"""Orthogonal linear layers."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from trysquare.nn.geometry import flag, positive
from trysquare.nn.layers.base import ParametrizedWeight, check_dtype, copy_weights, factory_of
from trysquare.nn.parametrizations import OrthonormalMatrix

__all__ = ["OrthoLinear"]


class OrthoLinear(ParametrizedWeight, nn.Linear):
    """An ``nn.Linear`` whose weight has orthonormal rows, or columns if there are more outputs than inputs.

    Args:
        in_features: size of each input sample.
        out_features: size of each output sample.
        bias: whether to add a learnable bias.
        device: device of the parameters.
        dtype: dtype of the weight; free tensors are kept in float32 or float64.
        orthogonalizer: how the free matrix is made orthonormal (see
            ``linalg.orthogonalize``).

    >>> layer = OrthoLinear(512, 10)
    >>> bool(torch.allclose(layer.weight @ layer.weight.T, torch.eye(10), atol=1e-5))
    True
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: Any = None,
        dtype: Any = None,
        *,
        orthogonalizer: str = "cholesky",
    ) -> None:
        in_features, out_features = positive("in_features", in_features), positive("out_features", out_features)
        check_dtype(dtype)
        super().__init__(in_features, out_features, flag("bias", bias), device, dtype)
        self.orthogonalizer = orthogonalizer
        self._parametrize_weight(
            OrthonormalMatrix((out_features, in_features), orthogonalizer, **factory_of(self.weight))
        )

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        """``input @ weight.T + bias``."""
        return F.linear(input, self._current_weight(), self.bias)

    def as_torch(self) -> nn.Module:
        """A plain ``nn.Linear``."""
        plain = nn.Linear(self.in_features, self.out_features, self.bias is not None, device="meta")
        return copy_weights(plain, self.weight, self.bias, self.training)

    def extra_repr(self) -> str:
        """Sizes and orthogonalizer."""
        return f"{nn.Linear.extra_repr(self)}, orthogonalizer={self.orthogonalizer}"
