"""What every layer with a parametrized weight shares."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from math import prod
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from trysquare.nn.linalg.precision import as_autocast, at_least_float32
from trysquare.nn.parametrizations import Parametrization


class ParametrizedWeight(nn.Module):
    """Mixin for torch layers whose ``weight`` is a function of free tensors.

    The free tensors are ``layer.parametrizations.weight.original0`` and so on, as everywhere in
    ``torch.nn.utils.parametrize``.
    """

    bias: Any
    weight: Any
    _cache: Any
    _writes: Any
    parametrizations: Any

    def _parametrize_weight(self, parametrization: Parametrization) -> None:
        parametrization.attach(self, "weight")
        self._cache, self._writes = parametrization.cache, parametrization.writes

    def _current_weight(self) -> Tensor:
        """``self.weight`` for a pass, without torch's detour over the parametrization where the cache has it."""
        if torch.compiler.is_compiling():
            return self.weight
        if not torch.is_grad_enabled() and not self._writes.found() and self._cache.fresh() and self._is_as_made():
            return self._cache.weight
        self._writes.inside = True
        try:
            return self.weight
        finally:
            self._writes.inside = False

    def _is_as_made(self) -> bool:
        """Whether the weight is ours: nobody has taken our parametrization off, or added another one after it."""
        held: Any = self._modules.get("parametrizations")
        chain = held and held._modules.get("weight")
        if not chain or len(chain._modules) != 1:
            return False
        return getattr(chain._modules["0"], "cache", None) is self._cache

    def used_weight(self) -> Tensor:
        """Return the weight that a forward pass uses, with the casts of autocast."""
        return as_autocast(self.weight)

    def _computes_with(self) -> list[Tensor]:
        """Return tensors that a forward pass depends on; within ``parametrize.cached()`` always the same ones."""
        return [self.weight]

    @property
    def parametrization(self) -> Parametrization:
        """The function that makes the weight."""
        first = self.parametrizations["weight"][0]
        assert isinstance(first, Parametrization)
        return first

    @property
    def free_tensors(self) -> list[Tensor]:
        """The tensors that an optimizer trains instead of the weight."""
        return [tensor for name, tensor in self.parametrizations["weight"].named_parameters(recurse=False)]

    def reset_parameters(self) -> None:
        """Draw new free tensors and a new bias (uniform, as torch does)."""
        made = parametrize.is_parametrized(self, "weight")
        self._reset(self.parametrization.weight_shape if made else self.weight.shape)

    def _reset(self, shape: Sequence[int]) -> None:
        """Draw new free tensors, and the bias of a layer whose kernel has this shape."""
        if parametrize.is_parametrized(self, "weight"):
            self.parametrization.redraw(self.free_tensors)
        if self.bias is not None:
            bound = prod(shape[1:]) ** -0.5
            nn.init.uniform_(self.bias, -bound, bound)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Move and cast, but keep free tensors in float32 or better: the weight is rounded, not its sources."""
        if not parametrize.is_parametrized(self, "weight"):
            return super()._apply(fn, recurse)
        return super()._apply(keeping_precision(fn, self.free_tensors), recurse)

    def as_torch(self) -> nn.Module:
        """The same function in plain ``torch.nn`` layers, with the present weight."""
        raise NotImplementedError

    def _get_name(self) -> str:
        return next(c for c in type(self).__mro__ if not c.__name__.startswith("Parametrized")).__name__

    def __repr__(self) -> str:
        """One line: geometry and method."""
        return f"{self._get_name()}({self.extra_repr()})"


def keeping_precision(fn: Callable[[Tensor], Tensor], tensors: Iterable[Tensor]) -> Callable[[Tensor], Tensor]:
    """``fn``, except that it does not cast ``tensors`` and their gradients below float32."""
    keep = {id(t) for tensor in tensors for t in (tensor, tensor.grad) if t is not None}

    def cast(tensor: Tensor) -> Tensor:
        if id(tensor) not in keep:
            return fn(tensor)
        # Shown to `fn` as matrices, so that a memory format for images leaves them alone.
        moved = fn(tensor.view(-1, *tensor.shape[-2:]) if tensor.ndim > 3 else tensor).view(tensor.shape)
        return moved if moved.dtype == at_least_float32(moved.dtype) else tensor.to(moved.device)

    return cast


def copy_weights(plain: nn.Module, weight: Tensor, bias: Tensor | None, training: bool) -> nn.Module:
    """Fill a plain layer made on the meta device with detached copies of the tensors."""
    plain.weight = nn.Parameter(weight.detach().clone(memory_format=torch.contiguous_format), weight.requires_grad)
    if bias is not None:
        plain.bias = nn.Parameter(bias.detach().clone(), bias.requires_grad)
    return plain.train(training)


def check_dtype(dtype: Any) -> None:
    """Refuse what a weight cannot have.

    Raises:
        ValueError: if ``dtype`` is given and is not a real floating point type.
    """
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise ValueError(f"dtype={dtype} must be a real floating point type")


def factory_of(weight: Tensor) -> dict[str, Any]:
    """``device`` and ``dtype`` of a tensor, as keyword arguments."""
    return {"device": weight.device, "dtype": weight.dtype}
