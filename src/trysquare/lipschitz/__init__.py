"""Lipschitz constants of whole networks."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from trysquare.lipschitz import modules as modules  # registers the rules of torch's modules
from trysquare.lipschitz import ours as ours  # registers those of ours
from trysquare.lipschitz.classifier import Classifier, follow_classifier
from trysquare.lipschitz.follow import follow
from trysquare.lipschitz.follower import Step
from trysquare.lipschitz.lower import lipschitz_lower_bound
from trysquare.lipschitz.registry import NoRuleError, rule

__all__ = [
    "Classifier",
    "NoRuleError",
    "Step",
    "follow",
    "follow_classifier",
    "lipschitz_bound",
    "lipschitz_lower_bound",
    "rule",
]


def lipschitz_bound(model: nn.Module, input_shape: Sequence[int]) -> float:
    """Certified upper bound on the l2 Lipschitz constant of a network, in the mode that it is in.

    The forward pass is followed with ``torch.fx``. Each module contributes the bound of its rule (linear and
    convolution layers: ``spectral_norm_bound``); bounds multiply along a path, add where paths are summed, and join as
    the root of the sum of squares where they are concatenated. A scaling of the data in front (mean and deviation) is
    part of the constant. 0 means that the output provably does not change; what is too small or too large for float64
    is its smallest normal number or infinity.

    Proved: for all inputs ``x``, ``y`` of this shape, ``|f(x) - f(y)| <= bound * |x - y|`` for the function of the
    graph with the weights that the forward pass uses, in exact arithmetic. The rounding of the forward pass in its
    dtype is not included. That the graph is the model's function of each sample on its own is seen on random inputs
    in batches of two sizes. What has no rule raises; nothing is taken to be 1 in silence.

    A network that starts with an embedding takes tokens: its constant is that with respect to one-hot vectors over
    the vocabulary, so that changing ``k`` tokens changes the output by at most ``bound * sqrt(2 k)``.

    Args:
        model: not changed. In eval mode if it has layers that behave differently in training (dropout, batch
            normalisation, spectral normalisation); training mode is refused for them.
        input_shape: shape of one input without the batch.

    Raises:
        NoRuleError: if a module or function is not Lipschitz or has no rule, or the forward pass is not a fixed
            function of each sample; it names the module and how to register a rule.
        ValueError: if the shape does not fit, or weights are not finite.

    >>> model = nn.Sequential(OrthoConv2d(3, 12, 2, stride=2), nn.ReLU(), nn.Flatten(), nn.Linear(768, 10))
    >>> bound = lipschitz_bound(model, (3, 16, 16))
    """
    return follow(model, input_shape)[0]
