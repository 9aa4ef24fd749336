"""Two linear maps with an activation between them: what residual and sandwich blocks have in common."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from trysquare.naming import refuse_arguments
from trysquare.nn.geometry import ConvGeometry, Pads, Size, Sizes, check_groups, check_padding_mode, flag, per_axis
from trysquare.nn.layers.activations import with_slopes_in_unit_interval
from trysquare.nn.layers.convolution import Convolution
from trysquare.nn.layers.packing import PackedKernels, Shapes, unpack
from trysquare.nn.layers.traceable import Traceable
from trysquare.nn.linalg.lattice import LatticeMap, circle_around
from trysquare.nn.linalg.operator import checked_weight
from trysquare.nn.linalg.precision import full_precision
from trysquare.nn.parametrizations import Parametrization, orthogonal_kernel
from trysquare.nn.parametrizations.base import Device, Factory, ParametrizedWeight, factory_for, factory_of


class Block(ParametrizedWeight):
    """The branch ``W₂ σ(W₁ x + b)`` with kernels that are made together.

    Subclasses set ``_first`` and ``_second``, how the two kernels are applied, and call ``_finish``.
    """

    activation: nn.Module
    _first_shape: tuple[int, ...]
    transposed: ClassVar[bool] = False
    _first: Convolution
    _second: Convolution
    # Attributes that ``repr`` shows.
    _shown: ClassVar[tuple[str, ...]]
    # Further keyword arguments of the constructor, which go to what makes the kernels.
    _options: ClassVar[tuple[str, ...]] = ()

    def _finish(
        self,
        parametrization: Parametrization,
        first_shape: Sequence[int],
        bias: bool,
        activation: nn.Module | None,
    ) -> None:
        """Parametrize; ``first_shape`` is that of ``W₁``, hidden channels first."""
        self.activation = with_slopes_in_unit_interval(activation)
        factory = factory_of(parametrization.like)
        self.weight = nn.Parameter(torch.empty(0, **factory))
        self.bias = nn.Parameter(torch.empty(first_shape[0], **factory)) if flag("bias", bias) else None
        self._first_shape = tuple(first_shape)
        self._parametrize_weight(parametrization)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw new free tensors and a new bias (uniform, as torch does)."""
        self._reset(self._first_shape)

    def _branch(self, x: Tensor, first: Tensor, second: Tensor) -> Tensor:
        return self._second(self.activation(self._first(x, first, self.bias)), second)

    def _circle(self, maps: list[LatticeMap], shape: Sizes) -> Sizes:
        """Return the circle that the block is on, or a part of, on its coarse side."""
        if not self._first.dims:
            return (1,)
        stride = max(each.stride for each in maps)
        coarse = shape[1:] if self.transposed else tuple(-(-n // s) for n, s in zip(shape[1:], stride, strict=True))
        return circle_around(maps, coarse, stride, self._first.mode == "circular")

    def _plain_branch(self, first: Tensor, second: Tensor) -> nn.Module:
        """Return two plain layers of torch with the activation between them."""
        before = self._first.plain(first, self.bias, self.training)
        after = self._second.plain(second, None, self.training)
        return nn.Sequential(before, copy.deepcopy(self.activation), after).train(self.training)

    def extra_repr(self) -> str:
        shown = [f"{name}={getattr(self, name)}" for name in self._shown]
        return ", ".join([*shown, f"bias={self.bias is not None}", f"activation={self.activation}"])


class PackedBlock(Block):
    """A block whose kernels are laid out in one vector, the ``weight``."""

    _kernel_shapes: Shapes

    @property
    def kernels(self) -> list[Tensor]:
        """The kernels, in the order of ``parametrization.kernel_shapes``."""
        return unpack(self._current_weight(), self._kernel_shapes)

    def _maps(self, *ways: Convolution) -> list[LatticeMap]:
        """Return the kernels as a forward pass uses them, on the lattice."""
        kernels = unpack(self.exact_weight(), self._kernel_shapes)
        return [way.on_lattice(kernel) for way, kernel in zip(ways, kernels, strict=True)]

    def _before_fusing(self) -> list[Tensor] | None:
        """Return what the kernels are made of before they are fused and rounded, if they are still parametrized."""
        if not parametrize.is_parametrized(self, "weight"):
            return None
        made = cast("PackedKernels", self.parametrization)
        with full_precision(self.free_tensors[0]):
            weights = made.parts_from(*(tensor.detach() for tensor in self.free_tensors))
        return [checked_weight(weight, type(self).__name__) for weight in weights]

    def _finish(self, parametrization: Parametrization, *args: Any) -> None:
        self._kernel_shapes = cast("PackedKernels", parametrization).kernel_shapes
        super()._finish(parametrization, *args)


class ResamplingBlock(PackedBlock):
    """A block of orthogonal kernels that has a stride, or the transpose of one, which makes maps larger.

    The coarse side is the output, or the input of a transposed block. Channels that are not given
    are those of one of the sides, so that a transposed block has the kernels of the other one with
    its sides exchanged. Subclasses make their kernels in ``_kernels``.
    """

    dims: ClassVar[int] = 2
    # Called with device, dtype and the options of the block; sets how the kernels are applied.
    _kernels: Callable[..., PackedKernels]
    _shown: ClassVar[tuple[str, ...]] = (
        "in_channels", "out_channels", "kernel_size", "stride", "dilation", "groups", "hidden_channels", "padding_mode",
        "method",
    )  # fmt: skip

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Size = 3,
        stride: Size = 1,
        dilation: Size = 1,
        groups: int = 1,
        bias: bool = True,
        padding_mode: str = "circular",
        device: Device = None,
        dtype: torch.dtype | None = None,
        *,
        hidden_channels: int | None = None,
        activation: nn.Module | None = None,
        method: str = "aoc",
        orthogonalizer: str = "cholesky",
        **options: Any,
    ) -> None:
        super().__init__()
        refuse_arguments(self._get_name(), options, self._options)
        check_padding_mode(padding_mode)
        self._sides = (out_channels, in_channels) if self.transposed else (in_channels, out_channels)
        self.hidden_channels = self._sides[1] if hidden_channels is None else hidden_channels
        check_groups(groups, in_channels=in_channels, out_channels=out_channels, hidden_channels=self.hidden_channels)
        self.in_channels, self.out_channels, self.groups, self.padding_mode = (
            in_channels, out_channels, groups, padding_mode,
        )  # fmt: skip
        self.kernel_size = per_axis("kernel_size", kernel_size, self.dims)
        self.stride = per_axis("stride", stride, self.dims)
        self.dilation = per_axis("dilation", dilation, self.dims)
        self.method, self.orthogonalizer = method, orthogonalizer
        kernels = self._kernels(factory_for(device, dtype), **options)
        first_shape = (self.hidden_channels, in_channels // groups, *self._first.kernel_size)
        self._finish(kernels, first_shape, bias, activation)

    def _geometry(
        self, name: str, channels: tuple[int, int], kernel_size: Sizes, strided: bool, inside: str
    ) -> ConvGeometry:
        """Return the geometry of the orthogonal kernel ``name``, one side of which has ``inside`` channels.

        Raises:
            ValueError: if there is none with these numbers.
        """
        stride = self.stride if strided else (1,) * self.dims
        try:
            return ConvGeometry(*channels, kernel_size, stride, self.dilation, self.groups)
        except ValueError as error:
            inputs, outputs = channels
            raise ValueError(
                f"{name} of this block, one side of which is {inside}, maps {inputs} in_channels to {outputs} "
                f"out_channels: {error}"
            ) from None

    def _orthogonal(self, geometry: ConvGeometry, factory: Factory) -> Parametrization:
        return orthogonal_kernel(self.method, geometry, self.orthogonalizer, **factory)

    def _convolution(self, kernel_size: Sizes, pads: Pads, strided: bool) -> Convolution:
        stride = self.stride if strided else (1,) * self.dims
        return Convolution(kernel_size, stride, self.dilation, self.groups, pads, self.padding_mode)


class Sum(Traceable, nn.Module):
    """``first(x) + second(x)``, which exported residual blocks need in addition to layers of torch."""

    def __init__(self, first: nn.Module, second: nn.Module) -> None:
        super().__init__()
        self.first = first
        self.second = second

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        total: Tensor = self.first(input) + self.second(input)
        return total

    plain_forward = forward
