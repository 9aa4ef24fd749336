"""Lipschitz constants of a classifier: of all logits together, and of the features that its last layer reads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx, nn

from trysquare.lipschitz.follow import followed
from trysquare.lipschitz.modules import linear_layer
from trysquare.lipschitz.registry import find_rule


@dataclass(frozen=True)
class Classifier:
    """Bounds of a network whose outputs are logits.

    Attributes:
        bound: certified Lipschitz bound of all logits together.
        head: the linear layer whose output is the output of the network, if there is one.
        features_bound: certified bound of what the head reads; ``bound`` if there is no head.
    """

    bound: float
    head: nn.Linear | None
    features_bound: float


def follow_classifier(model: nn.Module, input_shape: Sequence[int]) -> Classifier:
    """Bounds of a classifier; its head is read off the forward pass, not off names.

    Raises:
        NoRuleError: if a module or function has no rule, or the forward pass cannot be followed.
        ValueError: if the shape does not fit, or weights are not finite.

    >>> from trysquare.lipschitz import follow_classifier
    >>> found = follow_classifier(nn.Sequential(OrthoLinear(8, 6), nn.ReLU(), nn.Linear(6, 3)), (8,))
    >>> found.head, round(found.features_bound, 4)
    (Linear(in_features=6, out_features=3, bias=True), 1.0)
    """
    follower = followed(model, input_shape)
    (output,) = (node for node in follower.graph.nodes if node.op == "output")
    last = output.args[0]
    # Something else that reads the logits may write to them.
    if isinstance(last, fx.Node) and last.op == "call_module" and list(last.users) == [output]:
        head = follower.fetch_attr(str(last.target))
        if isinstance(head, nn.Linear) and find_rule(head) is linear_layer:
            features: Any = last.args[0]
            return Classifier(follower.result_bounds[0], head, follower.bounds[features] or 0.0)
    return Classifier(follower.result_bounds[0], None, follower.result_bounds[0])
