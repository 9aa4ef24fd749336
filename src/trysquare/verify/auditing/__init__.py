"""A table that says, layer by layer, whether a network is 1-Lipschitz and where it is not."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from trysquare.nn.geometry import flag
from trysquare.nn.linalg.precision import own_tensors
from trysquare.progress import track
from trysquare.torch_internals import tree_leaves
from trysquare.verify.auditing.report import AuditReport, LayerAudit
from trysquare.verify.auditing.rows import layer_row, steps_of
from trysquare.verify.lipschitz import (
    InputShape,
    analyse,
    checked_shapes,
    input_like,
    lipschitz_lower_bound,
    random_inputs,
)
from trysquare.verify.lipschitz.checks import require_dense
from trysquare.verify.lipschitz.graph import Inputs, Shapes

__all__ = ["AuditReport", "LayerAudit", "audit"]

_LOWER_BOUND_SECONDS = 3.0


@own_tensors()
def audit(
    model: nn.Module, input_shape: InputShape, *, inputs: Tensor | None = None, spectra: bool = False
) -> AuditReport:
    """Audit a network, whether it was built with this library or not.

    Args:
        model: in eval mode if it has dropout or batch normalisation. It returns a tensor, or tuples and dictionaries
            of them, which count as one long vector.
        input_shape: shape of one input without the batch.
        inputs: ``(batch, *input_shape)``, where the search for the lower bound starts; normal noise unless given. A
            network that starts with an embedding has none, because tokens have no Jacobian.
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
    spectra = flag("spectra", spectra)
    shapes = checked_shapes(input_shape)
    found = analyse(model, input_shape)
    steps = list(steps_of(found))
    rows = [layer_row(step, spectra) for step in track(steps, "auditing layers", len(steps))]
    lower = None
    if not found.graph.tokens and found.graph.outputs:
        given = random_inputs(found.graph, shapes, input_like(model), 1) if inputs is None else [inputs]
        if inputs is not None:
            _check_given(inputs, shapes)
        packed = _OneVector(model, given)
        try:
            lower = lipschitz_lower_bound(
                packed, packed.pack(given), power_steps=4, ascent_steps=3, seconds=_LOWER_BOUND_SECONDS
            )
        except ValueError:  # a model without derivatives, or of one dtype alone: it has a bound all the same
            lower = None
        if lower is not None and lower > found.bound * (1 + 1e-6):
            raise RuntimeError(
                f"the certified bound {found.bound:.6g} is wrong: a slope of {lower:.6g} was found. This is an error "
                "of trysquare, or of a rule that was registered; please report it with the model"
            )
    each = list(shapes.values()) if isinstance(shapes, dict) else shapes
    return AuditReport(rows, found.bound, lower, each[0] if len(each) == 1 else tuple(each))


def _check_given(inputs: object, shapes: Shapes) -> None:
    wanted = list(shapes.values()) if isinstance(shapes, dict) else shapes
    if not isinstance(inputs, Tensor):
        raise TypeError(f"inputs must be a tensor (batch, ...), not {type(inputs).__name__}")
    require_dense("inputs", inputs)
    if len(wanted) != 1 or tuple(inputs.shape[1:]) != wanted[0] or not inputs.is_floating_point() or not len(inputs):
        raise ValueError(f"inputs of shape {tuple(inputs.shape)} must be floating point, a batch of {wanted}")


class _OneVector(nn.Module):
    """A network as a function from one vector to one: all tensors that it takes and returns, side by side."""

    def __init__(self, model: nn.Module, like: Inputs) -> None:
        super().__init__()
        self.model = model
        self.names = list(like) if isinstance(like, dict) else None
        self.shapes = [tensor.shape[1:] for tensor in (like.values() if isinstance(like, dict) else like)]

    def pack(self, inputs: Inputs) -> Tensor:
        """Return all inputs in one vector."""
        return torch.cat([t.flatten(1) for t in (inputs.values() if isinstance(inputs, dict) else inputs)], 1)

    def forward(self, x: Tensor) -> Tensor:
        parts = x.split([shape.numel() for shape in self.shapes], 1)
        inputs = [part.unflatten(1, shape) for part, shape in zip(parts, self.shapes, strict=True)]
        named = dict(zip(self.names, inputs, strict=True)) if self.names else {}
        result = self.model(**named) if named else self.model(*inputs)
        tensors = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
        return torch.cat([tensor.flatten(1) for tensor in tensors], 1)
