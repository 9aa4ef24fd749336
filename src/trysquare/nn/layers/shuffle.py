"""Channels in another order."""

from __future__ import annotations

from torch import Tensor, nn

from trysquare.nn.geometry import positive
from trysquare.nn.layers.invertible import Isometry
from trysquare.nn.layers.traceable import Traceable

__all__ = ["ChannelShuffle", "ChannelUnshuffle"]


class ChannelShuffle(Traceable, Isometry, nn.ChannelShuffle):
    """``nn.ChannelShuffle`` for any number of axes behind the channels. Isometric: it permutes.

    Args:
        groups: number of groups that are interleaved; must divide the number of channels.

    >>> ChannelShuffle(2)(torch.arange(6.0).view(1, 6))
    tensor([[0., 3., 1., 4., 2., 5.]])
    """

    def __init__(self, groups: int) -> None:
        super().__init__(positive("groups", groups))

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        _require_groups(input, self.groups)
        return self.plain_forward(input)

    def plain_forward(self, input: Tensor) -> Tensor:  # noqa: A002
        return input.unflatten(1, (self.groups, -1)).transpose(1, 2).flatten(1, 2)

    def inverse(self) -> ChannelUnshuffle:
        """Return the module that puts the channels back."""
        return ChannelUnshuffle(self.groups)

    adjoint = inverse


class ChannelUnshuffle(Traceable, Isometry, nn.Module):
    """Inverse of ``ChannelShuffle`` with the same ``groups``. Isometric: it permutes.

    Args:
        groups: number of groups that are taken apart; must divide the number of channels.

    >>> ChannelUnshuffle(2)(ChannelShuffle(2)(torch.arange(6.0).view(1, 6)))
    tensor([[0., 1., 2., 3., 4., 5.]])
    """

    def __init__(self, groups: int) -> None:
        super().__init__()
        self.groups = positive("groups", groups)

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        _require_groups(input, self.groups)
        return self.plain_forward(input)

    def plain_forward(self, input: Tensor) -> Tensor:  # noqa: A002
        return input.unflatten(1, (-1, self.groups)).transpose(1, 2).flatten(1, 2)

    def inverse(self) -> ChannelShuffle:
        """Return the module that interleaves the channels again."""
        return ChannelShuffle(self.groups)

    adjoint = inverse

    def extra_repr(self) -> str:
        return f"groups={self.groups}"


def _require_groups(x: Tensor, groups: int) -> None:
    if x.shape[1] % groups:
        raise ValueError(f"{x.shape[1]} channels cannot be split into groups={groups}")
