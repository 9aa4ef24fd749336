"""From differences of logits to distances."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def least_radius(margins: Tensor, constants: Tensor, labels: Tensor) -> Tensor:
    """``min_j margins_j / constants_j`` over the classes ``j`` other than the label.

    A difference that nothing moves (constant 0) is safe for ever if positive, lost for ever if negative, and undecided
    (distance 0) at a tie.

    Args:
        margins: ``(..., classes)``: logit of the label less that of each class.
        constants: ``(..., classes)``: Lipschitz constants of these differences.
        labels: ``(...)``.

    >>> from trysquare.nn.linalg.margins import least_radius
    >>> least_radius(torch.tensor([0.0, 3.0, 1.0]), torch.tensor([0.0, 2.0, 0.0]), torch.tensor(0))
    tensor(1.5000)
    """
    moves = constants > 0
    still = torch.where(margins > 0, math.inf, torch.where(margins < 0, -math.inf, 0.0))
    radii = torch.where(moves, margins / torch.where(moves, constants, 1.0), still.to(margins.dtype))
    return radii.scatter(-1, labels.unsqueeze(-1), math.inf).amin(-1)
