"""A table that says, layer by layer, whether a network is 1-Lipschitz and where it is not."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from trysquare.auditing.report import AuditReport, LayerAudit
from trysquare.auditing.rows import layer_rows, noise
from trysquare.lipschitz import follow, lipschitz_lower_bound
from trysquare.progress import track

__all__ = ["AuditReport", "LayerAudit", "audit"]

_LOWER_BOUND_SECONDS = 3.0


def audit(
    model: nn.Module, input_shape: Sequence[int], *, inputs: Tensor | None = None, spectra: bool = False
) -> AuditReport:
    """Audit a network: built with this library or not.

    Args:
        model: in eval mode if it has dropout or batch normalisation. It returns a tensor, or tuples and dictionaries
            of them, which count as one long vector.
        input_shape: shape of one input without the batch.
        inputs: ``(batch, *input_shape)``, where to look for the lower bound; normal noise unless given. A network that
            starts with an embedding has none, because tokens have no Jacobian.
        spectra: whether to keep all singular values of layers for which they are affordable.

    Returns:
        A report: print it, or take ``.layers``, ``.bound``, ``.lower_bound``, ``.to_json()``.

    Raises:
        NoRuleError: if a part of the network has no Lipschitz rule.
        ValueError: if the shape does not fit, or weights are not finite.

    >>> report = audit(nn.Sequential(OrthoConv2d(4, 8, 3, stride=2), nn.ReLU()), (4, 8, 8))
    >>> [row.verdict for row in report.layers]
    ['orthogonal', '1-Lipschitz']
    """
    shape = tuple(input_shape)
    bound, steps = follow(model, shape)
    rows = [row for step in track(steps, "auditing layers", len(steps)) for row in layer_rows(step, spectra)]
    lower = None
    if not any(isinstance(step.module, nn.Embedding) for step in steps):
        lower = lipschitz_lower_bound(
            _OneOutput(model),
            noise(model, shape) if inputs is None else inputs,
            power_steps=4,
            ascent_steps=3,
            seconds=_LOWER_BOUND_SECONDS,
        )
    return AuditReport(rows, bound, lower, shape)


class _OneOutput(nn.Module):
    """A network with all tensors that it returns side by side."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Any:
        result = self.model(x)
        if isinstance(result, Tensor):
            return result
        tensors = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
        return torch.cat([tensor.flatten(1) for tensor in tensors], 1)
