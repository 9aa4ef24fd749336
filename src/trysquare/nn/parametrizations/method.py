"""What a method for the kernels of convolutions says about itself, besides being a ``Parametrization``."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, ClassVar, Unpack

from trysquare.nn.geometry import ConvGeometry, Sizes
from trysquare.nn.linalg.orthogonalize import orthogonalizer
from trysquare.nn.parametrizations.base import Factory, Parametrization


class KernelMethod(Parametrization):
    """A kernel ``(out, in / groups, *k)`` as a function of free tensors: an entry of ``METHODS``.

    Args:
        geometry: the numbers of the layer.
        orthogonalizer_name: how free matrices are made orthonormal, for the methods that have some.
        factory: device and dtype.
    """

    # Whether the kernel is orthogonal in every geometry, so that geometries without an orthogonal kernel are refused.
    # A method that is only 1-Lipschitz takes every geometry.
    orthogonal: ClassVar[bool] = True
    # Whether it is orthogonal exactly. Without a stride the only exactly orthogonal kernels of one channel are signed
    # shifts, which leave nothing to learn; a method with a stated error has more.
    exact: ClassVar[bool] = True
    # Whether the kernel has the size that was asked for, whatever the options.
    keeps_kernel_size: ClassVar[bool] = True
    # Whether a free matrix is made orthonormal on the way, by an orthogonalizer that the user can choose.
    uses_orthogonalizer: ClassVar[bool] = True
    # Keyword arguments that the method has besides those of every method.
    options: ClassVar[tuple[str, ...]] = ()

    def __init__(self, geometry: ConvGeometry, orthogonalizer_name: str, **factory: Unpack[Factory]) -> None:
        super().__init__(**factory)
        self.geometry, self.orthogonalizer = geometry, orthogonalizer_name
        self._orthogonalizer = orthogonalizer(orthogonalizer_name)

    @classmethod
    def full_kernel_size(cls, kernel_size: Sizes, stride: Sizes, dilation: Sizes, **options: Any) -> Sizes:
        """Return the size of the kernel that is built where ``kernel_size`` was asked for."""
        return kernel_size

    @property
    def is_orthogonal(self) -> bool:
        return self.orthogonal

    @property
    def weight_shape(self) -> tuple[int, ...]:
        return self.geometry.weight_shape

    @property
    def alike(self) -> Hashable:
        """Method, geometry and orthogonalizer: layers that share these are groups of one larger layer."""
        return type(self), self.geometry, self.orthogonalizer
