"""The theorems about two linear maps with an activation between them are in ``linalg.lattice``."""

from trysquare.nn.linalg.lattice import ROUND_UP as ROUND_UP
from trysquare.nn.linalg.lattice import SMALL as SMALL
from trysquare.nn.linalg.lattice import LatticeMap as LatticeMap
from trysquare.nn.linalg.lattice import circle_around as circle_around
from trysquare.nn.linalg.lattice import looks_like_sandwich as looks_like_sandwich
from trysquare.nn.linalg.lattice import residual_bound as residual_bound
from trysquare.nn.linalg.lattice import sandwich_bound as sandwich_bound
from trysquare.nn.linalg.lattice import tap_norms as tap_norms
