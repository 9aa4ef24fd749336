"""Steps along the gradient of a convex potential: what SLL and CPL blocks have in common.

``x - 2 Mᵀ σ(M x + b)`` is 1-Lipschitz if ``‖M‖ <= 1`` and ``σ`` acts entry by entry with slopes ``D`` in ``[0, 1]``:
its Jacobian ``I - 2 MᵀDM`` is symmetric with eigenvalues in ``[-1, 1]``. Zero padding restricts ``M``, which leaves
its norm at most 1; dilation makes of it several copies on coarser lattices. The two blocks differ in how a free kernel
becomes a contraction.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from trysquare.naming import refuse_arguments
from trysquare.nn.geometry import Size, Sizes, check_groups, check_padding_mode, per_axis
from trysquare.nn.layers.block import Block, Sum
from trysquare.nn.layers.convolution import Convolution
from trysquare.nn.linalg.kernels import adjoint
from trysquare.nn.linalg.lattice import residual_bound
from trysquare.nn.parametrizations.base import Device, Factory, factory_for
from trysquare.nn.parametrizations.spectral import Contraction


class _PotentialStep(Block):
    """``x - 2 Mᵀ σ(M x + b)`` with the contraction ``M`` as ``weight``."""

    # What makes the kernel a contraction.
    contraction: ClassVar[type[Contraction]]

    def _take_step(
        self,
        convolution: Convolution,
        shape: tuple[int, ...],
        bias: bool,
        activation: nn.Module | None,
        factory: Factory,
        options: dict[str, Any],
    ) -> None:
        self._first, self._second = convolution, convolution.flipped()
        made = self.contraction(shape, convolution.groups, **options, **factory)
        self._finish(made, shape, bias, activation)

    @property
    def kernels(self) -> tuple[Tensor, Tensor]:
        """``M`` and ``-2 Mᵀ``."""
        weight = self._current_weight()
        return weight, -2 * adjoint(weight, self._first.groups)

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        return input + self._branch(input, *self.kernels)

    @torch.no_grad()
    def lipschitz_constant(self, input_shape: Sizes, dtype: torch.dtype) -> float:
        """Bound ``x - 2 Mᵀ σ(M x + b)`` with the kernel as it was rounded; see ``linalg.operator.LipschitzLayer``."""
        kernel = self.exact_weight()
        first = self._first.on_lattice(kernel)
        second = self._second.on_lattice(-2 * adjoint(kernel, first.groups))
        return residual_bound(first.identity(), first, second, self._circle([first, second], input_shape))

    def as_torch(self) -> nn.Module:
        """Return the sum of the input and two plain layers with the activation between them."""
        return Sum(nn.Identity(), self._plain_branch(*self.kernels)).train(self.training).as_torch()


class PotentialLinear(_PotentialStep):
    """The step for vectors ``(..., features)``."""

    _shown = ("features", "hidden_features")

    def __init__(
        self,
        features: int,
        hidden_features: int | None = None,
        bias: bool = True,
        device: Device = None,
        dtype: torch.dtype | None = None,
        *,
        activation: nn.Module | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        refuse_arguments(self._get_name(), options, self._options)
        self.features = features
        self.hidden_features = features if hidden_features is None else hidden_features
        check_groups(1, features=features, hidden_features=self.hidden_features)
        factory = factory_for(device, dtype)
        self._take_step(Convolution(), (self.hidden_features, features), bias, activation, factory, options)


class PotentialConv(_PotentialStep):
    """The step for feature maps ``(batch, channels, *sizes)``."""

    dims: ClassVar[int] = 2
    _shown = ("channels", "hidden_channels", "kernel_size", "dilation", "groups", "padding_mode")

    def __init__(
        self,
        channels: int,
        hidden_channels: int | None = None,
        kernel_size: Size = 3,
        dilation: Size = 1,
        groups: int = 1,
        bias: bool = True,
        padding_mode: str = "circular",
        device: Device = None,
        dtype: torch.dtype | None = None,
        *,
        activation: nn.Module | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        why = "the block adds to its own input, so channels and size stay; SLLAOCBlock2d changes both"
        refuse_arguments(self._get_name(), options, self._options, stride=why, out_channels=why)
        check_padding_mode(padding_mode)
        self.channels, self.groups, self.padding_mode = channels, groups, padding_mode
        self.hidden_channels = channels if hidden_channels is None else hidden_channels
        check_groups(groups, channels=channels, hidden_channels=self.hidden_channels)
        self.kernel_size = per_axis("kernel_size", kernel_size, self.dims)
        self.dilation = per_axis("dilation", dilation, self.dims)
        convolution = Convolution.same(self.kernel_size, (1,) * self.dims, self.dilation, groups, padding_mode)
        shape = (self.hidden_channels, channels // groups, *self.kernel_size)
        factory = factory_for(device, dtype)
        self._take_step(convolution, shape, bias, activation, factory, options)
