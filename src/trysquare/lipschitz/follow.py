"""Follow a network's forward pass, and the Lipschitz bound of every value in it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn.utils import parametrize

from trysquare.layers.base import ParametrizedWeight
from trysquare.lipschitz import guards
from trysquare.lipschitz.follower import Follower, Step
from trysquare.lipschitz.memory import tensors
from trysquare.lipschitz.registry import NoRuleError, Shape, input_dtype, way_out
from trysquare.lipschitz.tracing import is_embedding, traced, vocabulary

# Samples of the two batches that are sent through. What is seen with both does not depend on the size of the batch.
_BATCH, _SMALLER_BATCH = 5, 3
# Bounds of both batches agree to the rounding of their arithmetic.
_SAME_BOUND = 1e-9


def follow(model: nn.Module, input_shape: Sequence[int]) -> tuple[float, list[Step]]:
    """Certified bound of a network, and the steps that it is made of.

    Raises:
        NoRuleError: if a module or function has no rule, the forward pass cannot be followed, or is not a fixed
            function of each sample on its own.
        TypeError: if the model is no module.
        ValueError: if the shape does not fit, or weights are not finite.
    """
    follower = followed(model, input_shape)
    return follower.result_bounds[0], follower.steps


def followed(model: nn.Module, input_shape: Sequence[int]) -> Follower:
    """What ``follow`` reads its answer from: the graph, and the bound of each of its nodes."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, not {type(model).__name__}: put a function in a module")
    shape = _checked_shape(input_shape)
    model = _uncompiled(model)
    guards.refuse_unreadable(model)
    return _followed(model, shape, input_like(model))[0]


def follow_part(part: nn.Module, shape: Shape) -> tuple[float, torch.dtype]:
    """Certified bound of a part of the module that a rule is asked about, and the dtype of what it returns.

    Args:
        part: a module that gets an input of ``shape`` and of the dtype that the rule is asked about.
        shape: shape of one input without the batch.
    """
    guards.refuse_unreadable(part)
    follower, result = _followed(part, shape, input_like(part).to(input_dtype()))
    if not isinstance(result, Tensor):
        raise NoRuleError(f"{type(part).__name__} must return one tensor, not {type(result).__name__}")
    return follower.result_bounds[0], result.dtype


def _checked_shape(input_shape: Sequence[int]) -> Shape:
    shape = tuple(input_shape) if isinstance(input_shape, list | tuple) else ()
    if not shape or not all(isinstance(size, int) and not isinstance(size, bool) and size > 0 for size in shape):
        raise ValueError(f"input_shape={input_shape!r} must be positive integers: one input without the batch")
    return shape


def _uncompiled(model: nn.Module) -> nn.Module:
    """The module behind ``torch.compile``."""
    original = getattr(model, "_orig_mod", None)
    if not isinstance(original, nn.Module):
        return model
    guards.refuse_hooks_around(model)
    return original


def input_like(model: nn.Module) -> Tensor:
    """A tensor of the dtype and device that the model's inputs should have: those of its first weight.

    Free tensors of our layers may be longer than the weight that is made of them, so they are asked last.
    """
    weights = (_own_weight(module) for module in model.modules())
    others = (t for t in (*model.parameters(), *model.buffers()))
    floats = (t for group in (weights, others) for t in group if t is not None and t.is_floating_point())
    return next(floats, torch.empty(0))


def _own_weight(module: nn.Module) -> Tensor | None:
    if isinstance(module, ParametrizedWeight) and parametrize.is_parametrized(module, "weight"):
        return module.parametrization.like
    return module._parameters.get("weight")


def _followed(model: nn.Module, shape: Shape, like: Tensor) -> tuple[Follower, Any]:
    """Follow two batches through the graph, and see that the model does with them what the graph does."""
    owner = type(model).__name__
    with torch.no_grad(), guards.untouched(model), guards.fixed(owner):
        graph = traced(model)
        x = _random_inputs(graph, shape, like)
        follower = Follower(graph, like.dtype)
        result = follower.run(x.clone())
        with _works_for_any_batch(owner):
            smaller = follower.again(x[:_SMALLER_BATCH].clone())
        pairs = [(result, model(x.clone())), (smaller, model(x[:_SMALLER_BATCH].clone()))]
        with torch.enable_grad():  # what an attack computes
            pairs.append((smaller, model(x[:_SMALLER_BATCH].clone())))
    other_values = (
        f"{owner} returns other values than the graph that torch.fx made of its forward pass, which cannot see what "
        f"depends on the type of a value or on anything but the input. {way_out(owner)}"
    )
    for of_graph, of_model in pairs:
        guards.refuse_difference(tensors(of_graph), tensors(of_model), other_values)
    full, part = follower.dependent_results
    guards.refuse_difference(
        part,
        [tensor[:_SMALLER_BATCH] for tensor in full],
        f"the outputs of {owner} depend on the other samples of a batch. {way_out(owner)}",
    )
    if not math.isclose(*follower.result_bounds, rel_tol=_SAME_BOUND):
        raise NoRuleError(f"the Lipschitz bound of {owner} depends on the size of the batch. {way_out(owner)}")
    return follower, result


@contextmanager
def _works_for_any_batch(owner: str) -> Iterator[None]:
    try:
        yield
    except NoRuleError:
        raise
    except ValueError as error:
        raise NoRuleError(
            f"{owner} works for a batch of {_BATCH} and not for one of {_SMALLER_BATCH}: it does not treat the samples "
            f"of a batch one by one ({error}). {way_out(owner)}"
        ) from error


def _random_inputs(graph: fx.GraphModule, shape: Shape, like: Tensor) -> Tensor:
    """A batch of normal noise, or of tokens if an embedding is what takes it."""
    generator = torch.Generator().manual_seed(0)
    (entry,) = (node for node in graph.graph.nodes if node.op == "placeholder")
    words = [vocabulary(graph, user) for user in entry.users if is_embedding(graph, user)]
    if words:
        return torch.randint(min(words), (_BATCH, *shape), generator=generator).to(like.device)
    return torch.randn(_BATCH, *shape, generator=generator).to(like)
