"""Lipschitz constants of functions and tensor methods that a ``forward`` calls.

A rule has the signature of what it describes, after a ``Call`` that knows which arguments depend on the network's
input, and returns the Lipschitz constants of those (see ``trysquare.lipschitz.arguments``).
"""

from trysquare.lipschitz.arguments import FUNCTIONS
from trysquare.lipschitz.functions import arithmetic as arithmetic
from trysquare.lipschitz.functions import functional as functional
from trysquare.lipschitz.functions import rearrangements as rearrangements

__all__ = ["FUNCTIONS"]
