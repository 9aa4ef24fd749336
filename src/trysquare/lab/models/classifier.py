"""What every model is: features, then a linear head."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from trysquare.nn.layers import OrthoLinear, UnitNormLinear

HEADS: dict[str, Callable[[int, int], nn.Linear]] = {
    "orthogonal": OrthoLinear,
    "unit-norm": UnitNormLinear,
    "plain": nn.Linear,
}


class Classifier(nn.Module):
    """``head(features(x))``: a network in two parts, because certificates know more about a linear head.

    The margin between two classes is as sensitive as ``‖w_i - w_j‖`` times the Lipschitz constant of ``features``.

    Args:
        features: from images to ``(batch, features)``.
        head: from features to logits.

    >>> model = ts.models.Classifier(nn.Sequential(nn.Flatten(), OrthoLinear(64, 32), MaxMin()), OrthoLinear(32, 10))
    >>> model(torch.randn(2, 1, 8, 8)).shape
    torch.Size([2, 10])
    """

    def __init__(self, features: nn.Sequential, head: nn.Linear) -> None:
        super().__init__()
        self.features = features
        self.head = head

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        """Logits ``(batch, classes)``."""
        return self.head(self.features(input))  # type: ignore[no-any-return]
