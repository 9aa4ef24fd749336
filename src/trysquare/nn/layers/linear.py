"""Orthogonal linear layers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trysquare.naming import require_known
from trysquare.nn.geometry import flag, positive
from trysquare.nn.layers.convolution import Convolution
from trysquare.nn.layers.invertible import AffineInverse, Isometry
from trysquare.nn.linalg.operator import LinearOperator
from trysquare.nn.parametrizations import ManifoldMatrix, OrthonormalMatrix
from trysquare.nn.parametrizations.base import Device, ParametrizedWeight, check_dtype, factory_of
from trysquare.nn.parametrizations.spectral import SpectralMatrix

__all__ = ["OrthoLinear", "OrthoLinearTranspose", "SpectralLinear"]

L = TypeVar("L", "OrthoLinear", "OrthoLinearTranspose")
DType = torch.dtype | None

_METHODS = {"free": OrthonormalMatrix, "manifold": ManifoldMatrix}


class ParametrizedLinear(ParametrizedWeight, nn.Linear):
    """An ``nn.Linear`` with a parametrized weight, whatever that is."""

    _product: ClassVar[Convolution] = Convolution()

    def __init__(self, in_features: int, out_features: int, bias: bool, device: Device, dtype: DType) -> None:
        in_features, out_features = positive("in_features", in_features), positive("out_features", out_features)
        check_dtype(dtype)
        super().__init__(in_features, out_features, flag("bias", bias), device, dtype)

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        """Return ``input @ weight.T + bias``."""
        return F.linear(input, self._current_weight(), self.bias)

    def linear_operator(self, input_shape: Sequence[int], weight: Tensor | None = None) -> LinearOperator:
        """Return the layer without its bias as a linear operator; see ``linalg.operator.LinearLayer``."""
        return self._product.linear_operator(self.exact_weight(weight), tuple(input_shape))

    def as_torch(self) -> nn.Module:
        """Return a plain ``nn.Linear``."""
        return self._product.plain(self.weight, self.bias, self.training)


class _TransposedLinear(nn.Module):
    """An ``nn.Linear`` whose weight is kept transposed, ``(in_features, out_features)``."""

    weight: Tensor

    def __init__(self, in_features: int, out_features: int, bias: bool, device: Device, dtype: DType) -> None:
        super().__init__()
        plain = ParametrizedLinear(in_features, out_features, bias, device, dtype)
        self.in_features, self.out_features, self.bias = plain.in_features, plain.out_features, plain.bias
        self.weight = nn.Parameter(plain.weight.detach().mT.contiguous())


class _Orthonormal(Isometry, ParametrizedWeight):
    """What a layer with an orthonormal matrix and its adjoint have in common; the next class holds a plain weight."""

    in_features: int
    out_features: int
    orthogonalizer: str
    method: str

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: Device = None,
        dtype: DType = None,
        *,
        orthogonalizer: str = "cholesky",
        method: str = "free",
    ) -> None:
        super().__init__(in_features, out_features, bias, device, dtype)
        if not isinstance(method, str) or method not in _METHODS:
            require_known(method, _METHODS, "method")
        if method == "manifold" and orthogonalizer != "cholesky":
            raise ValueError(f"orthogonalizer={orthogonalizer!r} has no meaning for method='manifold'; leave it out")
        self.orthogonalizer, self.method = orthogonalizer, method
        made = _METHODS[method](tuple(self.weight.shape), orthogonalizer, **factory_of(self.weight))
        self._parametrize_weight(made)

    def _adjoint_as(self, kind: type[L]) -> L:
        twin = kind(
            self.out_features, self.in_features, bias=False, device="meta",
            orthogonalizer=self.orthogonalizer, method=self.method,
        )  # fmt: skip
        self._lend_weight(twin)
        return twin

    def adjoint(self) -> _Orthonormal:
        """Return the layer, without bias, whose matrix is the transpose; it shares the free tensors of this one."""
        raise NotImplementedError

    def inverse(self) -> nn.Module:
        """Return the exact inverse, which subtracts the bias and applies the adjoint; it shares all parameters.

        Raises:
            ValueError: if the layer is not square.

        >>> layer, x = OrthoLinear(8, 8), torch.randn(2, 8)
        >>> bool(torch.allclose(layer.inverse()(layer(x)), x, atol=1e-5))
        True
        """
        if self.in_features != self.out_features:
            raise ValueError(
                f"only a square layer has an inverse, not one with in_features={self.in_features} and "
                f"out_features={self.out_features}; .adjoint() is a one-sided inverse"
            )
        return self.adjoint() if self.bias is None else AffineInverse(self.adjoint(), self.bias, 0)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}, " + (
            "method=manifold" if self.method == "manifold" else f"orthogonalizer={self.orthogonalizer}"
        )


class OrthoLinear(_Orthonormal, ParametrizedLinear):
    """An ``nn.Linear`` whose weight has orthonormal rows, or columns if there are more outputs than inputs.

    Args:
        in_features: size of each input sample.
        out_features: size of each output sample.
        bias: whether to add a learnable bias.
        device: device of the parameters.
        dtype: dtype of the weight; free tensors are kept in float32 or float64.
        orthogonalizer: how the free matrix is made orthonormal (see
            ``linalg.orthogonalize``).
        method: ``"free"``, a free matrix that is made orthonormal; or ``"manifold"``, the orthonormal matrix itself,
            for ``ts.optim.RiemannianAdam``.

    >>> layer = OrthoLinear(512, 10)
    >>> bool(torch.allclose(layer.weight @ layer.weight.T, torch.eye(10), atol=1e-5))
    True
    """

    def adjoint(self) -> OrthoLinearTranspose:
        return self._adjoint_as(OrthoLinearTranspose)


class SpectralLinear(ParametrizedLinear):
    """An ``nn.Linear`` whose weight is divided by an upper bound of its norm: 1-Lipschitz, and nothing else.

    ``nn.utils.parametrizations.spectral_norm`` divides by an estimate from below, which certifies nothing.
    ``OrthoConv2d(..., method="spectral")`` is the same for convolutions.

    Args:
        in_features: size of each input sample.
        out_features: size of each output sample.
        bias: whether to add a learnable bias.
        device: device of the parameters.
        dtype: dtype of the weight; free tensors are kept in float32 or float64.
        steps: squarings in ``trysquare.linalg.norm_bound``: more are tighter and cost more.

    >>> layer = SpectralLinear(16, 8)
    >>> 0.9 < float(torch.linalg.matrix_norm(layer.weight.detach(), 2)) < 1.0001
    True
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: Device = None,
        dtype: DType = None,
        *,
        steps: int = 4,
    ) -> None:
        super().__init__(in_features, out_features, bias, device, dtype)
        self.steps = steps
        self._parametrize_weight(SpectralMatrix(tuple(self.weight.shape), steps=steps, **factory_of(self.weight)))

    def extra_repr(self) -> str:
        return f"{nn.Linear.extra_repr(self)}, steps={self.steps}"


class OrthoLinearTranspose(_Orthonormal, _TransposedLinear):
    """The adjoint of ``OrthoLinear(out_features, in_features)``: ``input @ weight``, as transposed convolutions do.

    ``weight`` is ``(in_features, out_features)``, that of the layer whose adjoint this is. ``OrthoLinear.adjoint``
    returns it.

    Args:
        in_features: size of each input sample.
        out_features: size of each output sample.
        bias: whether to add a learnable bias.
        device: device of the parameters.
        dtype: dtype of the weight; free tensors are kept in float32 or float64.
        orthogonalizer: how the free matrix is made orthonormal.
        method: ``"free"`` or ``"manifold"``.

    >>> layer, x = OrthoLinear(8, 3, bias=False), torch.randn(2, 3)
    >>> torch.allclose(layer(layer.adjoint()(x)), x, atol=1e-5)  # rows are orthonormal
    True
    """

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        """Return ``input @ weight + bias``."""
        return F.linear(input, self._current_weight().mT, self.bias)

    def linear_operator(self, input_shape: Sequence[int], weight: Tensor | None = None) -> LinearOperator:
        """Return the layer without its bias as a linear operator; see ``linalg.operator.LinearLayer``."""
        return LinearOperator.of_matrix(self.exact_weight(weight).mT, tuple(input_shape))

    def as_torch(self) -> nn.Module:
        """Return a plain ``nn.Linear`` with the transposed weight."""
        return Convolution().plain(self.weight.mT, self.bias, self.training)

    def adjoint(self) -> OrthoLinear:
        return self._adjoint_as(OrthoLinear)
