"""Channels in another order."""

from __future__ import annotations

from torch import Tensor, nn

from trysquare.nn.geometry import positive

__all__ = ["ChannelShuffle"]


class ChannelShuffle(nn.ChannelShuffle):
    """``nn.ChannelShuffle`` for any number of axes behind the channels. Isometric: it permutes.

    Args:
        groups: number of groups that are interleaved; must divide the number of channels.

    >>> ChannelShuffle(2)(torch.arange(6.0).view(1, 6))
    tensor([[0., 3., 1., 4., 2., 5.]])
    """

    def __init__(self, groups: int) -> None:
        super().__init__(positive("groups", groups))

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        """Interleave the groups."""
        if input.shape[1] % self.groups:
            raise ValueError(f"{input.shape[1]} channels cannot be split into groups={self.groups}")
        return input.unflatten(1, (self.groups, -1)).transpose(1, 2).flatten(1, 2)
