"""What the public functions of ``linalg`` do around those that the library calls: checks, and full precision."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor

from trysquare.naming import shown
from trysquare.nn.geometry import flag, per_axis
from trysquare.nn.linalg.precision import protected

P = ParamSpec("P")
R = TypeVar("R")

# Tensors whose last axes are those of a matrix, and those that must have numbers at all.
_MATRICES = ("matrix", "rows", "basis", "kernel", "after", "before", "a", "b")
_KERNELS = ("kernel", "after", "before")


def for_everybody(function: Callable[P, R]) -> Callable[P, R]:
    """Return ``function``, which now refuses arguments of the wrong kind by their names.

    It and its derivatives are computed in full precision, which layers see to for all that their weights are built by.

    Raises:
        TypeError: if a tensor, an integer or a flag is something else.
        ValueError: if a tensor has numbers that nothing can be computed with, or too few axes, or ``dims`` does not
            fit it.
    """
    signature = inspect.signature(function)
    kinds = {name: str(each.annotation) for name, each in signature.parameters.items()}

    @wraps(function)
    def checked(*args: P.args, **kwargs: P.kwargs) -> R:
        given = signature.bind(*args, **kwargs).arguments
        tensors: dict[str, Tensor] = {}
        for name, value in given.items():
            kind = kinds[name]
            if value is None and kind.endswith("| None"):
                continue
            if kind.startswith("Tensor"):
                _check_tensor(name, value)
                tensors[name] = value
            elif kind == "bool":
                flag(name, value)
            elif kind.startswith("int"):
                per_axis(name, value, 1, least=0)
        if len({(tensor.device, tensor.dtype) for tensor in tensors.values()}) > 1:
            kinds_found = ", ".join(f"{name} is {each.dtype} on {each.device}" for name, each in tensors.items())
            raise ValueError(f"all tensors must have one dtype and device: {kinds_found}")
        dims, axes = given.get("dims"), [tensor.ndim for name, tensor in tensors.items() if name in _KERNELS]
        if dims is not None and axes and dims > min(axes) - 2:
            raise ValueError(f"dims={shown(dims)} must be at most {min(axes) - 2} for a kernel of {min(axes)} axes")
        if not tensors:
            return function(*args, **kwargs)

        def build(*values: Tensor) -> R:
            full = inspect.BoundArguments(signature, given | dict(zip(tensors, values, strict=True)))
            return function(*full.args, **full.kwargs)

        return protected(build, list(tensors.values()))

    return checked


def require_dense(name: str, value: object, *, meta: bool = True) -> Tensor:
    """Return a tensor of which each number has a place of its own to be read from, or is on the meta device.

    Args:
        name: what the error calls it.
        value: the tensor.
        meta: whether it may be on the meta device, which holds no numbers.

    Raises:
        TypeError: if it is something else.
        ValueError: if it is a nested, sparse or quantized tensor.
    """
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} must be a tensor, not {type(value).__name__}")
    if value.is_nested or value.layout != torch.strided or value.is_quantized:
        raise ValueError(f"{name} must be a dense tensor, not a nested, sparse or quantized one")
    if value.is_meta and not meta:
        raise ValueError(f"{name} is on the meta device, which holds no numbers: make it on another one")
    return value


def _check_tensor(name: str, value: Tensor) -> None:
    require_dense(name, value)
    if not (value.is_floating_point() or value.is_complex()) or value.element_size() < 2:
        raise ValueError(f"{name} must hold real or complex floating point numbers, not {value.dtype}")
    if name == "rows" and (value.is_complex() or value.element_size() < 4):
        raise ValueError(f"{name} must be float32 or float64, not {value.dtype}")
    if name in _MATRICES and value.ndim < 2:
        raise ValueError(f"{name} of shape {tuple(value.shape)} must have at least two axes, those of a matrix")
    if name in _KERNELS and not value.numel():
        raise ValueError(f"{name} of shape {tuple(value.shape)} has no numbers")
