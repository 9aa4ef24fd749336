"""Last layers of classifiers."""

from __future__ import annotations

from typing import Unpack

import torch
from torch import Tensor, nn

from trysquare.nn.layers.linear import ParametrizedLinear
from trysquare.nn.linalg.margins import least_radius
from trysquare.nn.linalg.rescaling import unit_rows
from trysquare.nn.parametrizations import Parametrization
from trysquare.nn.parametrizations.base import Device, Factory, factory_of

__all__ = ["UnitNormLinear"]


class UnitRows(Parametrization):
    """A matrix with rows of norm 1, from a free matrix; its rows of zeros count as rows of the identity."""

    def __init__(self, shape: tuple[int, int], **factory: Unpack[Factory]) -> None:
        super().__init__(**factory)
        self.shape = shape

    @property
    def free_shapes(self) -> tuple[tuple[int, ...], ...]:
        return (self.shape,)

    @property
    def weight_shape(self) -> tuple[int, ...]:
        return self.shape

    def draw(self) -> list[Tensor]:
        """Uniformly distributed directions."""
        return [unit_rows(torch.randn(self.shape, dtype=torch.float64))]

    def build(self, *free: Tensor) -> Tensor:
        """Normalise the rows."""
        return unit_rows(free[0])

    def reconditioned(self, *free: Tensor) -> list[Tensor]:
        """Unit rows: gradients are orthogonal to the rows, which otherwise only ever grow."""
        return [unit_rows(free[0])]

    @property
    def solves(self) -> bool:
        """The weight is its own free matrix."""
        return True

    def refuse_unreachable(self, weight: Tensor) -> None:
        """Refuse rows whose norm is not 1."""
        norms = weight.norm(dim=1)
        if bool(((norms - 1).abs() > 0.01).any()):
            raise ValueError(
                f"the rows of this matrix have norms from {float(norms.min()):.3g} to {float(norms.max()):.3g}, and "
                "must have norm 1. layer.project_(weight) sets the nearest weight that the layer can have"
            )

    def solve(self, weight: Tensor) -> list[Tensor]:
        """Return the weight itself."""
        return [weight]

    def extra_repr(self) -> str:
        return f"{self.shape[0]}x{self.shape[1]}, rows of norm 1"


class UnitNormLinear(ParametrizedLinear):
    """An ``nn.Linear`` whose rows have norm 1: every output is 1-Lipschitz, but not all of them together.

    For a classifier that is enough: the difference of two outputs has Lipschitz constant ``‖w_i -
    w_j‖``, which ``pairwise_norms`` gives and ``certified_radii`` uses.

    Args:
        in_features: size of each input sample.
        out_features: size of each output sample.
        bias: whether to add a learnable bias.
        device: device of the parameters.
        dtype: dtype of the weight; free tensors are kept in float32 or float64.

    >>> head = UnitNormLinear(16, 3)
    >>> head.weight.norm(dim=1).detach().round(decimals=4)
    tensor([1., 1., 1.])
    >>> head.certified_radii(head(torch.randn(5, 16))).shape
    torch.Size([5])
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(in_features, out_features, bias, device, dtype)
        self._parametrize_weight(UnitRows((self.out_features, self.in_features), **factory_of(self.weight)))

    def pairwise_norms(self) -> Tensor:
        """``‖w_i - w_j‖`` for every pair of outputs, ``(out_features, out_features)`` in float64."""
        rows = self._current_weight().double()
        # From differences: through the Gram matrix, close rows would cancel.
        return torch.linalg.vector_norm(rows.unsqueeze(0) - rows.unsqueeze(1), dim=-1)

    def certified_radii(self, logits: Tensor, labels: Tensor | None = None) -> Tensor:
        """Distance that the input of this layer must move before the decision can change.

        It is ``min_j (y_i - y_j) / ‖w_i - w_j‖``: exact for this layer, and a lower bound for a
        network that is 1-Lipschitz up to here.

        Args:
            logits: outputs of this layer, ``(..., out_features)``.
            labels: classes whose decision is certified, ``(...)``; the largest logits if not given.

        Returns:
            ``(...)`` in float64, negative where the label does not win, 0 at a tie. Classes with equal rows differ
            by the bias alone, which no input changes: they are no threat, or an infinite one.
        """
        values = logits.double()
        chosen = values.argmax(-1) if labels is None else labels
        margins = values.gather(-1, chosen.unsqueeze(-1)) - values
        return least_radius(margins, self.pairwise_norms()[chosen], chosen)

    def extra_repr(self) -> str:
        return nn.Linear.extra_repr(self)
