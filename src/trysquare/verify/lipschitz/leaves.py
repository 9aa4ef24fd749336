"""Modules that are bounded as a whole: blocks whose constant is not the product of what they are made of.

A rule is about exactly one class. Where anything could make a module compute something else (an override in a subclass,
in the class or in the module itself, a hook), it is not used, and what the module really calls is followed instead.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from trysquare.nn.linalg.precision import coarsest_dtype
from trysquare.verify.lipschitz.graph import Node, NoRuleError, Shape, Value, class_name
from trysquare.verify.lipschitz.rules import Weights, scaled, split_of_terms
from trysquare.verify.lipschitz.trace import calls_are_torchs_own
from trysquare.verify.operators import as_defined, has_hooks, remember

LeafRule = Callable[..., float | Sequence[float]]
R = TypeVar("R", bound=LeafRule)

_LEAVES: dict[type[nn.Module], tuple[LeafRule, Callable[[Any], bool]]] = {}
_INPUT_DTYPE: ContextVar[torch.dtype] = ContextVar("dtype of the input of the module that a rule is asked about")


def rule(*classes: type[nn.Module]) -> Callable[[R], R]:
    """Register the Lipschitz constant of modules: a decorator.

    The function gets the module and the shape of its input, without the batch (as many shapes as the module has tensor
    inputs), and returns a certified upper bound on the l2 Lipschitz constant: a float, or one for each input (the
    changes of the inputs then add up). It is about modules that treat the samples of a batch, the first axis, one by
    one and get their inputs as tensors, by position. It holds for subclasses too, unless they override anything that
    the class has besides its constructor. A later rule replaces an earlier one.

    >>> class Swish(nn.Module):
    ...     def forward(self, x):
    ...         return x * torch.sigmoid(x)
    >>> @ts.lipschitz.rule(Swish)
    ... def swish(layer, input_shape):
    ...     return 1.0999
    >>> round(ts.lipschitz_bound(nn.Sequential(Swish(), nn.Flatten()), (3, 4)), 4)
    1.0999
    """
    return leaf(*classes)


def leaf(*classes: type[nn.Module], when: Callable[[Any], bool] = lambda module: True) -> Callable[[R], R]:
    """As ``rule``, for modules that also meet a condition."""

    def register(function: R) -> R:
        for cls in classes:
            _LEAVES[cls] = function, when
            remember(cls)
        return function

    return register


def find_rule(module: nn.Module) -> LeafRule | None:
    """Return the rule of a module that computes what its class does, and nothing around it."""
    for base in type(module).__mro__:
        if base in _LEAVES:
            function, when = _LEAVES[base]
            pure = as_defined(module, base) and not has_hooks(module) and calls_are_torchs_own()
            return function if pure and when(module) else None
    return None


def is_leaf(module: nn.Module) -> bool:
    """Whether a module is bounded by its rule."""
    return find_rule(module) is not None


@contextmanager
def asked_for(dtype: torch.dtype) -> Iterator[None]:
    """Context in which rules are asked about inputs of ``dtype``."""
    token = _INPUT_DTYPE.set(dtype)
    try:
        yield
    finally:
        _INPUT_DTYPE.reset(token)


def input_dtype() -> torch.dtype:
    """Dtype of the input that a rule is asked about: what modules round their factors to."""
    return _INPUT_DTYPE.get(torch.get_default_dtype())


def leaf_constants(node: Node) -> list[float]:
    """Return the constants of a leaf, one for each input.

    Raises:
        ValueError: if its rule gives something else.
    """
    if node.constants is None:
        node.constants = _asked(node)
    return node.constants


def _asked(node: Node) -> list[float]:
    module = node.module
    assert module is not None
    found, shapes = find_rule(module), [shape[1:] for shape in node.args["shapes"]]
    assert found is not None
    try:
        with asked_for(node.args["dtype"]):
            answer = found(module, *shapes)
        constants = [float(c) for c in answer] if isinstance(answer, Sequence) else [float(answer)] * len(shapes)
    except OverflowError:
        constants = [math.inf] * len(shapes)
    except ValueError:
        raise
    except Exception as error:  # whatever a rule of somebody raises
        raise ValueError(f"its rule gave no number for inputs of shape {shapes}: {error!r}") from error
    if len(constants) != len(shapes) or not all(constant >= 0 for constant in constants):
        raise ValueError(f"its rule gave {constants}, which is not a Lipschitz constant for each input")
    if any(cls.__module__.startswith("trysquare.") for cls in type(module).__mro__):
        _refuse_steeper(module, shapes, constants, node.args["dtype"])
    return constants


@torch.no_grad()
def _refuse_steeper(module: nn.Module, shapes: list[Shape], constants: list[float], dtype: torch.dtype) -> None:
    """Refuse a block of ours that a few random inputs show not to be what its theorem is about.

    ``as_defined`` compares its methods; somebody may have changed what these call.
    """
    generator = torch.Generator().manual_seed(0)
    like = next(module.parameters(), torch.empty(0, dtype=dtype))
    points = [torch.randn(2 * _PAIRS, *shape, generator=generator).to(like.device, dtype) for shape in shapes]
    for scale in (1.0, 0.01):
        pairs = [torch.cat([p[:_PAIRS], p[:_PAIRS] + scale * p[_PAIRS:]]) for p in points]
        values = module(*pairs).double().flatten(1)
        change = (values[_PAIRS:] - values[:_PAIRS]).norm(dim=1)
        moved = [(p[_PAIRS:] - p[:_PAIRS]).double().flatten(1).norm(dim=1) for p in pairs]
        allowed = sum(c * m for c, m in zip(constants, moved, strict=True))
        eps, product_eps = (torch.finfo(each).eps for each in (dtype, coarsest_dtype(points[0])))
        rounding = max(64 * eps, 16 * product_eps) * (values.norm(dim=1)[:_PAIRS] + 1)
        if bool((change > 1.01 * allowed + rounding).any()):
            raise NoRuleError("it computes something else than its class does: a function that it calls was replaced")


# Of random inputs.
_PAIRS = 4


def leaf_terms(node: Node) -> list[tuple[Value, float]]:
    """Return the inputs of a leaf, whose changes add up."""
    return list(zip(node.args["inputs"], leaf_constants(node), strict=True))


def leaf_weights(node: Node, given: list[Tensor]) -> Weights:
    """Return the largest weight of each sample, times the constant of each input."""
    terms, batch = leaf_terms(node), given[0].shape[0] if given[0].ndim else 0
    if any(value.labels.ndim == 0 or value.labels.shape[0] != batch for value, _ in terms):
        raise NoRuleError(f"{class_name(node.module)} changes the size of the batch, which its rule is not about")
    tops = given[0].reshape(batch, -1).amax(1)
    shares = split_of_terms(node, terms) if len(terms) > 1 else [1.0]
    return [
        (value.labels, scaled(tops * share, c).view(-1, *(1,) * (value.labels.ndim - 1)).expand(value.labels.shape))
        for (value, c), share in zip(terms, shares, strict=True)
    ]
