"""Lipschitz constants of whole networks."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from trysquare.lipschitz import modules as modules  # registers the rules of torch's modules
from trysquare.lipschitz import ours as ours  # registers those of ours
from trysquare.lipschitz.follow import follow
from trysquare.lipschitz.follower import Step
from trysquare.lipschitz.lower import lipschitz_lower_bound
from trysquare.lipschitz.registry import NoRuleError, rule

__all__ = ["NoRuleError", "Step", "follow", "lipschitz_bound", "lipschitz_lower_bound", "rule"]


def lipschitz_bound(model: nn.Module, input_shape: Sequence[int]) -> float:
    """Certified upper bound on the l2 Lipschitz constant of a network in eval mode.

    The forward pass is followed with ``torch.fx``. Each module contributes the bound of its rule (linear and
    convolution layers: ``spectral_norm_bound``); bounds multiply along a path, add where paths are summed, and join as
    the root of the sum of squares where they are concatenated. A scaling of the data in front (mean and deviation) is
    part of the constant.

    Proved: for all inputs ``x``, ``y`` of this shape, ``|f(x) - f(y)| <= bound * |x - y|`` for the function that the
    weights define in exact arithmetic. The rounding of the forward pass in float32 is not included. What has no rule
    raises; nothing is taken to be 1 in silence.

    Args:
        model: in eval mode if it has dropout or batch normalisation.
        input_shape: shape of one input without the batch.

    Raises:
        NoRuleError: if a module or function is not Lipschitz or has no rule; it names the module and how to register
            one.
        ValueError: if the shape does not fit, or weights are not finite.

    >>> model = nn.Sequential(OrthoConv2d(3, 12, 2, stride=2), nn.ReLU(), nn.Flatten(), nn.Linear(768, 10))
    >>> bound = lipschitz_bound(model, (3, 16, 16))
    """
    return follow(model, input_shape)[0]
