"""A weight as a function of free tensors: the contract of a method, and what all methods share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from trysquare.nn.geometry import Sizes
from trysquare.nn.linalg.precision import at_least_float32, full_precision, protected
from trysquare.nn.parametrizations import reconditioning
from trysquare.nn.parametrizations.assignment import free_tensors_for
from trysquare.nn.parametrizations.cache import Caching, WeightCache, WriteGuard


class Parametrization(Caching, ABC):
    """A weight as a function of free tensors, which an optimizer trains instead of it.

    Subclasses say which free tensors there are (``free_shapes``), how they start (``draw``), which weight they give
    (``build``, of the shape ``weight_shape``), and, if there is a closed form, which ones give a wanted weight
    (``solve``). They compute in float32 or float64. This class does the rest: building in the right precision, caching,
    reconditioning and assignment.

    Free tensors stay in float32 when the layer is cast to a shorter dtype: the weight is built from
    them in float32 and rounded once. In eval mode a weight that needs no gradient is built once and
    kept until a free tensor is written to, moved or replaced, an optimizer steps, or the mode
    changes. The exception are writes that torch's version counter does not see: through ``.data``,
    outside of an optimizer, to a free tensor, and from another process.

    Writes into the weight that was returned raise at the next use. Not noticed are writes through
    ``.data`` to a weight on an accelerator, or to one after which the weight was read again, and a
    compiled graph notices nothing.
    """

    like: Tensor
    # Whether the weight of a layer is orthogonal in every geometry, so that geometries without an orthogonal kernel are
    # refused. Methods that are only 1-Lipschitz take every geometry.
    orthogonal: ClassVar[bool] = True
    # Whether it is so exactly. Without a stride the only exactly orthogonal kernels of one channel are signed shifts,
    # which leave nothing to learn; a method with a stated error has more.
    exact: ClassVar[bool] = True
    # Whether the weight has the size that is asked for, whatever the options.
    keeps_kernel_size: ClassVar[bool] = True
    # Whether a free matrix is made orthonormal on the way, by an orthogonalizer that can be chosen.
    uses_orthogonalizer: ClassVar[bool] = True
    # Keyword arguments that the method has besides those of every method.
    options: ClassVar[tuple[str, ...]] = ()

    def __init__(self, dtype: torch.dtype | None = None, device: torch.device | str | None = None) -> None:
        super().__init__()
        self.register_buffer("like", torch.empty(0, dtype=dtype, device=device), persistent=False)
        self._slots: dict[str, Any] = {}  # the free tensors, as parameters of the module that it is attached to
        self.writes = WriteGuard()
        reconditioning.parametrizations.add(self)

    @classmethod
    def full_kernel_size(cls, kernel_size: Sizes, stride: Sizes, dilation: Sizes, **options: Any) -> Sizes:
        """Return the size of the weight that ``kernel_size`` asks for."""
        return kernel_size

    @property
    def note(self) -> str:
        """What the layer's ``repr`` says besides the method and its options."""
        return ""

    @property
    def is_orthogonal(self) -> bool:
        """Whether this weight is orthogonal, up to ``truncation_error`` and rounding."""
        return self.orthogonal

    @property
    def truncation_error(self) -> float:
        """Certified distance of the singular values from 1 that the method itself leaves; 0 if it is exact."""
        return 0.0

    @property
    @abstractmethod
    def free_shapes(self) -> tuple[tuple[int, ...], ...]:
        """Shapes of the free tensors."""

    @property
    @abstractmethod
    def weight_shape(self) -> tuple[int, ...]:
        """Shape of the weight."""

    @abstractmethod
    def draw(self) -> list[Tensor]:
        """Return fresh free tensors, on the CPU in float64."""

    @abstractmethod
    def build(self, *free: Tensor) -> Tensor:
        """Return the weight, in the dtype of the free tensors."""

    def reconditioned(self, *free: Tensor) -> Sequence[Tensor]:
        """Return well conditioned free tensors that give the same weight; ``free`` itself if it is well conditioned."""
        return free

    def solve(self, weight: Tensor) -> list[Tensor]:
        """Return free tensors that give ``weight``, or a guess from which to search for them."""
        return self.guess(weight)

    def guess(self, weight: Tensor) -> list[Tensor]:
        """Return random free tensors from which to search for those that give ``weight``."""
        return self.draw()

    def forward(self, *free: Tensor) -> Tensor:
        """Return the weight in the layer's dtype, from the cache where that is right.

        Raises:
            RuntimeError: if somebody has written into the one that was returned before.
        """
        if torch.compiler.is_compiling():
            return self._built(free)
        self.refuse_writes()
        weight = self._from_cache(lambda: self._built(free), free, self.cache)
        self.writes.watch(weight)
        return weight

    def refuse_writes(self) -> None:
        """Refuse to go on, once, if somebody has written into a weight that was returned.

        Raises:
            RuntimeError: if somebody has.
        """
        if self.writes.found():
            self.writes.forget()
            self.forget()  # the weight in the cache may be what was written to
            raise RuntimeError(
                "layer.weight was written to in place (by nn.init, copy_, .data or the like), which has no effect: it "
                "is built from the layer's free tensors at every use. Assign it (layer.weight = tensor, an orthogonal "
                "one), draw new ones (layer.reset_parameters()), or write to layer.free_tensors"
            )

    # -- building

    def _built(self, free: Sequence[Tensor]) -> Tensor:
        exact = [tensor.to(at_least_float32(tensor.dtype)) for tensor in free]
        return _plainly_laid_out(protected(self.build, exact).to(self.like.dtype))

    # -- caching

    def _from_cache(self, build: Callable[[], Tensor], free: Sequence[Tensor], cache: WeightCache) -> Tensor:
        # As a part of a block, a parametrization is not attached and owns no parameters.
        return self.cached(build, free, self._slots, self._slots, cache=cache) if self._slots else build()

    # -- reconditioning

    @torch.no_grad()
    def recondition(self, trained: set[int]) -> None:
        """Replace free tensors that degenerate by others of the same weight, if they are among the ``trained``.

        Old and new ones differ by a factor that the weight does not depend on, and so does every mean of them: averages
        that an optimizer takes of positions keep their meaning. Momentum is that of the old ones for a few steps.
        """
        free = list(self._slots.values())
        if not free or not all(type(tensor) is nn.Parameter and id(tensor) in trained for tensor in free):
            return
        with full_precision(free[0]):
            for tensor, better in zip(free, self.reconditioned(*free), strict=True):
                tensor.copy_(better)

    def __setstate__(self, state: Any) -> None:
        super().__setstate__(state)
        reconditioning.parametrizations.add(self)  # a deep copy, or a pickled one

    # -- attaching, initial values and assignment

    def attach(self, module: nn.Module, name: str) -> None:
        """Make ``module.name`` this function of freshly drawn free tensors."""
        parametrize.register_parametrization(module, name, self, unsafe=True)
        held: Any = module.parametrizations
        self._slots = held[name]._parameters
        self.redraw(list(self._slots.values()))

    @torch.no_grad()
    def redraw(self, free: Sequence[Tensor]) -> None:
        """Write fresh values into the free tensors."""
        self.writes.forget()
        for tensor, fresh in zip(free, self.draw(), strict=True):
            tensor.copy_(fresh)

    def right_inverse(self, weight: Tensor) -> Sequence[Tensor]:
        """Return free tensors that give ``weight``; assigning to the layer's weight calls this.

        Torch also calls it to learn the shapes of the free tensors while it registers the parametrization; ``attach``
        writes the initial values afterwards.

        Raises:
            ValueError: if ``weight`` has the wrong shape, or no free tensors were found that give it.
        """
        if not self._slots:
            return [weight.new_empty(shape, dtype=at_least_float32(weight.dtype)) for shape in self.free_shapes]
        return free_tensors_for(weight, self, [tensor.detach() for tensor in self._slots.values()])


def _plainly_laid_out(weight: Tensor) -> Tensor:
    """Return ``weight`` with the strides of a new tensor: others of axes of size 1 torch takes for channels last."""
    step = 1
    for size, stride in zip(reversed(weight.shape), reversed(weight.stride()), strict=True):
        if stride != step:
            return weight.reshape(-1).view(weight.shape)
        step *= size
    return weight


def random_orthonormal(*shape: int) -> Tensor:
    """Return uniformly distributed matrices ``(..., n, m)`` with orthonormal rows or columns, float64 on the CPU."""
    normal = torch.randn(*shape, dtype=torch.float64)
    tall = normal if shape[-2] >= shape[-1] else normal.mT
    basis, upper = torch.linalg.qr(tall)
    basis = basis * torch.where(upper.diagonal(dim1=-2, dim2=-1) < 0, -1.0, 1.0).unsqueeze(-2)
    return (basis if shape[-2] >= shape[-1] else basis.mT).contiguous()
