"""Orthogonal linear layers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trysquare.nn.geometry import flag, positive
from trysquare.nn.layers.convolution import Convolution
from trysquare.nn.linalg.operator import LinearOperator
from trysquare.nn.parametrizations import OrthonormalMatrix
from trysquare.nn.parametrizations.base import Device, ParametrizedWeight, check_dtype, factory_of

__all__ = ["OrthoLinear"]


class ParametrizedLinear(ParametrizedWeight, nn.Linear):
    """An ``nn.Linear`` with a parametrized weight, whatever that is."""

    _product: ClassVar[Convolution] = Convolution()

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        """``input @ weight.T + bias``."""
        return F.linear(input, self._current_weight(), self.bias)

    def linear_operator(self, input_shape: Sequence[int], weight: Tensor | None = None) -> LinearOperator:
        """Return the layer without its bias as a linear operator; see ``linalg.operator.LinearLayer``."""
        return self._product.linear_operator(self.exact_weight(weight), tuple(input_shape))

    def as_torch(self) -> nn.Module:
        """A plain ``nn.Linear``."""
        return self._product.plain(self.weight, self.bias, self.training)


class OrthoLinear(ParametrizedLinear):
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
        device: Device = None,
        dtype: torch.dtype | None = None,
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

    def extra_repr(self) -> str:
        return f"{nn.Linear.extra_repr(self)}, orthogonalizer={self.orthogonalizer}"
