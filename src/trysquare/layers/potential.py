"""Steps along the gradient of a convex potential: what SLL and CPL blocks have in common.

``x - 2 Mᵀ σ(M x + b)`` is 1-Lipschitz if ``‖M‖ <= 1`` and ``σ`` acts entry by entry with slopes ``D`` in ``[0, 1]``:
its Jacobian ``I - 2 MᵀDM`` is symmetric with eigenvalues in ``[-1, 1]``. Zero padding restricts ``M``, which leaves
its norm at most 1. The two blocks differ in how a free kernel becomes a contraction.
"""

from __future__ import annotations

import copy
from abc import abstractmethod
from math import prod
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trysquare.geometry import per_axis
from trysquare.layers.activations import with_slopes_in_unit_interval
from trysquare.layers.base import ParametrizedWeight, factory_of
from trysquare.layers.conv import Size
from trysquare.layers.explicit import (
    Sum,
    check_padding_mode,
    convolve,
    flipped,
    hidden_bias,
    plain_convolution,
    plain_linear,
)
from trysquare.linalg.kernels import adjoint
from trysquare.parametrizations import Parametrization


class Contraction(Parametrization):
    """A kernel ``(hidden, channels, *k)`` of norm at most 1 on every domain."""

    def __init__(self, shape: tuple[int, ...], **factory: Any) -> None:
        super().__init__(**factory)
        self.shape = shape

    @property
    def weight_shape(self) -> tuple[int, ...]:
        """Shape of the kernel."""
        return self.shape

    def _draw_kernel(self) -> Tensor:
        return torch.randn(self.shape, dtype=torch.float64) / prod(self.shape[1:]) ** 0.5


class _PotentialStep(ParametrizedWeight):
    """``x - 2 Mᵀ σ(M x + b)`` with the contraction ``M`` as ``weight``."""

    def __init__(
        self,
        shape: tuple[int, ...],
        bias: bool,
        activation: nn.Module | None,
        device: Any,
        dtype: Any,
        **options: Any,
    ) -> None:
        super().__init__()
        for name, size in (("channels", shape[1]), ("hidden channels", shape[0])):
            if not isinstance(size, int) or size < 1:
                raise ValueError(f"{name}={size!r} must be a positive integer")
        self.activation = with_slopes_in_unit_interval(activation)
        self.weight = nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
        self.bias = hidden_bias(shape[0], bias, factory_of(self.weight))
        self._parametrize_weight(self._contraction(shape, **options, **factory_of(self.weight)))
        self.reset_parameters()

    @abstractmethod
    def _contraction(self, shape: tuple[int, ...], **options: Any) -> Contraction:
        """What makes the kernel a contraction."""

    def extra_repr(self) -> str:
        """Channels and bias."""
        hidden, channels, *kernel = self.parametrization.weight_shape
        taps = f", kernel_size={tuple(kernel)}" if kernel else ""
        return f"{channels}, hidden={hidden}{taps}, bias={self.bias is not None}, activation={self.activation}"


class PotentialLinear(_PotentialStep):
    """The step for vectors ``(..., features)``."""

    def __init__(
        self,
        features: int,
        hidden_features: int | None = None,
        bias: bool = True,
        device: Any = None,
        dtype: Any = None,
        *,
        activation: nn.Module | None = None,
        **options: Any,
    ) -> None:
        shape = (features if hidden_features is None else hidden_features, features)
        super().__init__(shape, bias, activation, device, dtype, **options)

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        """Take one step."""
        weight = self._current_weight()
        hidden = self.activation(F.linear(input, weight, self.bias))
        return input - 2 * F.linear(hidden, weight.mT)

    def as_torch(self) -> nn.Module:
        """The sum of the input and two plain ``nn.Linear`` with the activation between them."""
        weight = self.weight.detach()
        step = nn.Sequential(
            plain_linear(weight, self.bias, self.training),
            copy.deepcopy(self.activation),
            plain_linear(-2 * weight.mT, None, self.training),
        )
        return Sum(nn.Identity(), step).train(self.training)


class PotentialConv(_PotentialStep):
    """The step for feature maps ``(batch, channels, *sizes)``."""

    dims: ClassVar[int] = 2

    def __init__(
        self,
        channels: int,
        hidden_channels: int | None = None,
        kernel_size: Size = 3,
        bias: bool = True,
        padding_mode: str = "circular",
        device: Any = None,
        dtype: Any = None,
        *,
        activation: nn.Module | None = None,
        **options: Any,
    ) -> None:
        check_padding_mode(padding_mode)
        taps = per_axis("kernel_size", kernel_size, self.dims)
        hidden = channels if hidden_channels is None else hidden_channels
        super().__init__((hidden, channels, *taps), bias, activation, device, dtype, **options)
        self.padding_mode = padding_mode
        self._pads = tuple(((k - 1) // 2, k // 2) for k in taps)

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        """Take one step."""
        weight = self._current_weight()
        hidden = self.activation(convolve(input, weight, self.bias, self._pads, self.padding_mode))
        return input - 2 * convolve(hidden, adjoint(weight), None, flipped(self._pads), self.padding_mode)

    def as_torch(self) -> nn.Module:
        """The sum of the input and two plain ``nn.Conv*d`` with the activation between them."""
        weight, mode, training = self.weight.detach(), self.padding_mode, self.training
        step = nn.Sequential(
            plain_convolution(weight, self.bias, self._pads, mode, training),
            copy.deepcopy(self.activation),
            plain_convolution(-2 * adjoint(weight), None, flipped(self._pads), mode, training),
        )
        return Sum(nn.Identity(), step).train(self.training)

    def extra_repr(self) -> str:
        """Channels, kernel and padding."""
        return f"{super().extra_repr()}, padding_mode={self.padding_mode}"
