"""What every parametrization shares: precision, cache, initialisation and assignment."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from trysquare.nn.geometry import Sizes
from trysquare.nn.linalg.precision import at_least_float32, full_precision, protected
from trysquare.nn.parametrizations.search import search_free_tensors
from trysquare.nn.parametrizations.upkeep import Caching, WeightCache, tend
from trysquare.progress import track

# Largest entry, in units of the dtype's rounding, by which an assigned weight and the one built for it may differ.
_ASSIGNMENT_ROUNDINGS = {torch.float64: 1e8, torch.float32: 50.0}
# Random starts of the search where there is no closed form: many lead to local minima. It gives up after so many, or
# when so many seconds have passed.
_ASSIGNMENT_STARTS = 64
_ASSIGNMENT_SECONDS = 60.0


class Parametrization(Caching, ABC):
    """Free tensors to a weight.

    Subclasses say which free tensors there are (``free_shapes``), how they start (``draw``), what
    they mean (``build``), and, if there is a closed form, which ones give a weight (``solve``).
    They compute in float32 or float64 and know nothing else.

    Free tensors stay in float32 when the layer is cast to a shorter dtype: the weight is built from
    them in float32 and rounded once. In eval mode a weight that needs no gradient is built once and
    kept until a free tensor is written to, moved or replaced, an optimizer steps, or the mode
    changes. The exception are writes that torch's version counter does not see: through ``.data``,
    outside of an optimizer, to a free tensor or to the weight that was returned, and from another
    process.
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
        self._slots: dict[str, Any] = {}
        self._tended_as = 0
        self._written = _Writes()
        self._initial: Sequence[Tensor] | None = None

    @classmethod
    def full_kernel_size(cls, kernel_size: Sizes, stride: Sizes, dilation: Sizes, **options: Any) -> Sizes:
        """Size of the weight that ``kernel_size`` asks for; another one only if the method says so."""
        return kernel_size

    @property
    def note(self) -> str:
        """What the layer's line should say besides the method and its options."""
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

    @abstractmethod
    def draw(self) -> list[Tensor]:
        """Fresh free tensors, on the CPU in float64."""

    @abstractmethod
    def build(self, *free: Tensor) -> Tensor:
        """The weight, in the dtype of the free tensors."""

    def reconditioned(self, *free: Tensor) -> Sequence[Tensor]:
        """Free tensors that give the same weight and are well conditioned; ``free`` where it is."""
        return free

    def solve(self, weight: Tensor) -> list[Tensor]:
        """Free tensors from which ``build`` makes ``weight`` if it can, or a guess."""
        return self.guess(weight)

    def guess(self, weight: Tensor) -> list[Tensor]:
        """Random free tensors from which a search for those of ``weight`` may start."""
        return self.draw()

    def forward(self, *free: Tensor) -> Tensor:
        """The weight in the layer's dtype, from the cache where that is right.

        Raises:
            RuntimeError: if somebody has written into the one that was returned before.
        """
        if torch.compiler.is_compiling():
            return self._from(self.cache, lambda: self._built(free), free)
        self._be_tended()
        self._written.check()
        weight = self._from(self.cache, lambda: self._built(free), free)
        self._written.watch(weight)
        return weight

    def _from(self, cache: WeightCache, build: Callable[[], Tensor], free: Sequence[Tensor]) -> Tensor:
        """What is built from ``free``, from the cache where that is right."""
        if not self._slots or not self.may_cache(free, self._slots, self._slots):
            return build()
        return cache.kept(build, self._slots, self._slots)

    def _be_tended(self) -> None:
        # A deep copy was never attached; its identity tells.
        if self._tended_as != id(self) and not torch.compiler.is_compiling():
            self._tended_as = id(self)
            tend(self)

    @torch.no_grad()
    def keep_well_conditioned(self, trained: set[int]) -> None:
        """Replace free tensors that degenerate by others of the same weight, if they are among the ``trained``.

        Old and new ones differ by a factor that the weight does not depend on, and so does every mean of them: averages
        that an optimizer takes of positions keep their meaning. Momentum is that of the old ones for a few steps.
        """
        free = list(self._slots.values())
        ours = all(type(tensor) is nn.Parameter for tensor in free)
        if not free or not ours or not trained.issuperset(map(id, free)):
            return
        with full_precision(free[0]):
            for tensor, better in zip(free, self.reconditioned(*free), strict=True):
                tensor.copy_(better)

    def _built(self, free: Sequence[Tensor]) -> Tensor:
        exact = [tensor.to(at_least_float32(tensor.dtype)) for tensor in free]
        return _plainly_laid_out(protected(self.build, exact).to(self.like.dtype))

    def attach(self, module: nn.Module, name: str) -> None:
        """Make ``module.name`` this function of freshly drawn free tensors."""
        weight = getattr(module, name)
        self._initial = [tensor.to(weight.device, at_least_float32(weight.dtype)) for tensor in self.draw()]
        parametrize.register_parametrization(module, name, self, unsafe=True)
        held: Any = module.parametrizations
        self._slots = held[name]._parameters
        self._be_tended()

    @torch.no_grad()
    def redraw(self, free: Sequence[Tensor]) -> None:
        """Write fresh values into the free tensors."""
        self._written.forget()
        for tensor, fresh in zip(free, self.draw(), strict=True):
            tensor.copy_(fresh)

    def right_inverse(self, weight: Tensor) -> Sequence[Tensor]:
        """Free tensors that give ``weight``; what assigning to the layer's weight calls.

        Raises:
            ValueError: if ``weight`` has the wrong shape, or no free tensors were found that give
                it.
        """
        if self._initial is not None:
            free, self._initial = self._initial, None
            return free
        if not isinstance(weight, Tensor) or not weight.dtype.is_floating_point:
            raise ValueError("weight must be a tensor of a real floating point type")
        exact = weight.detach().double().cpu()
        self._check_assignable(exact)
        tolerance = _ASSIGNMENT_ROUNDINGS.get(weight.dtype, 2.0) * torch.finfo(weight.dtype).eps
        present = [tensor.detach() for tensor in self._slots.values()]
        if float((self.build(*(tensor.double().cpu() for tensor in present)) - exact).abs().max()) <= tolerance:
            return present
        free, missed = search_free_tensors(self.build, self._starts(exact), exact, tolerance)
        if missed > tolerance:
            raise ValueError(
                f"no free tensors were found that give this weight: the nearest one found differs by {missed:.1e}. "
                f"It must be an output of the same parametrization ({self.extra_repr()})"
            )
        return [tensor.to(like.device, like.dtype) for tensor, like in zip(free, present, strict=True)]

    def _starts(self, weight: Tensor) -> Iterator[list[Tensor]]:
        began = time.monotonic()
        yield self.solve(weight)
        for _ in track(range(_ASSIGNMENT_STARTS), "searching for free tensors", _ASSIGNMENT_STARTS):
            if time.monotonic() - began > _ASSIGNMENT_SECONDS:
                break
            yield self.guess(weight)

    def _check_assignable(self, weight: Tensor) -> None:
        expected = self.weight_shape
        if tuple(weight.shape) != tuple(expected):
            raise ValueError(f"weight has shape {tuple(weight.shape)}, the layer's is {tuple(expected)}")
        if not bool(weight.isfinite().all()):
            raise ValueError("weight holds values that are not finite")

    @property
    @abstractmethod
    def weight_shape(self) -> tuple[int, ...]:
        """Shape of the weight."""


# Weights that were handed out and are watched for writes.
_WATCHED = 4


@cache
def _nothing_of(dtype: torch.dtype, device: torch.device) -> Tensor:
    with torch.inference_mode(False):  # it serves later passes too
        return torch.empty(0, dtype=dtype, device=device)


class _Writes:
    """Notices writes into a weight that was handed out, which have no effect: the next one is built anew.

    Without keeping the weight alive: a tensor without memory shares its counter of writes.
    """

    def __init__(self) -> None:
        # Somebody may hold on to one while others are built.
        self._watched: deque[tuple[Tensor, int]] = deque(maxlen=_WATCHED)

    def watch(self, weight: Tensor) -> None:
        """Count from now on."""
        if type(weight) is Tensor and not weight.is_inference() and not torch._C._are_functorch_transforms_active():
            counter = torch.Tensor._make_subclass(Tensor, weight)
            counter.data = _nothing_of(weight.dtype, weight.device)
            self._watched.append((counter, weight._version))

    def forget(self) -> None:
        """Take what was written as settled."""
        self._watched.clear()

    def check(self) -> None:
        """Refuse to go on as if nothing had been written, once.

        Raises:
            RuntimeError: if something was.
        """
        if any(counter._version != seen for counter, seen in self._watched):
            self.forget()
            raise RuntimeError(
                "layer.weight was written to in place (by nn.init, copy_ or the like), which has no effect: it is "
                "built from the layer's free tensors at every use. Assign it (layer.weight = tensor, an orthogonal "
                "one), draw new ones (layer.reset_parameters()), or write to layer.free_tensors"
            )

    def __reduce__(self) -> Any:
        return _Writes, ()


def _plainly_laid_out(weight: Tensor) -> Tensor:
    """The same with the strides of a new tensor: torch takes others of axes of size 1 for channels last."""
    step = 1
    for size, stride in zip(reversed(weight.shape), reversed(weight.stride()), strict=True):
        if stride != step:
            return weight.flatten().view(weight.shape)
        step *= size
    return weight


def random_orthonormal(*shape: int) -> Tensor:
    """Uniformly distributed matrices ``(..., n, m)`` with orthonormal rows or columns, float64 on the CPU."""
    normal = torch.randn(*shape, dtype=torch.float64)
    tall = normal if shape[-2] >= shape[-1] else normal.mT
    basis, upper = torch.linalg.qr(tall)
    basis = basis * torch.where(upper.diagonal(dim1=-2, dim2=-1) < 0, -1.0, 1.0).unsqueeze(-2)
    return (basis if shape[-2] >= shape[-1] else basis.mT).contiguous()
