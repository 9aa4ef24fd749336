"""Layers with torch's signatures."""

from trysquare.nn.layers import (
    activations,
    centering,
    conv,
    cpl,
    depthwise,
    fourier,
    heads,
    invertible,
    linear,
    pooling,
    recurrent,
    residual,
    sandwich,
    sandwich_fourier,
    scaling,
    shift,
    shuffle,
    sll,
    sllaoc,
)
from trysquare.nn.layers.activations import *
from trysquare.nn.layers.centering import *
from trysquare.nn.layers.conv import *
from trysquare.nn.layers.cpl import *
from trysquare.nn.layers.depthwise import *
from trysquare.nn.layers.fourier import *
from trysquare.nn.layers.heads import *
from trysquare.nn.layers.invertible import *
from trysquare.nn.layers.linear import *
from trysquare.nn.layers.pooling import *
from trysquare.nn.layers.recurrent import *
from trysquare.nn.layers.residual import *
from trysquare.nn.layers.sandwich import *
from trysquare.nn.layers.sandwich_fourier import *
from trysquare.nn.layers.scaling import *
from trysquare.nn.layers.shift import *
from trysquare.nn.layers.shuffle import *
from trysquare.nn.layers.sll import *
from trysquare.nn.layers.sllaoc import *

__all__: list[str] = []
__all__ += activations.__all__
__all__ += centering.__all__
__all__ += conv.__all__
__all__ += cpl.__all__
__all__ += depthwise.__all__
__all__ += fourier.__all__
__all__ += heads.__all__
__all__ += invertible.__all__
__all__ += linear.__all__
__all__ += pooling.__all__
__all__ += recurrent.__all__
__all__ += residual.__all__
__all__ += sandwich.__all__
__all__ += sandwich_fourier.__all__
__all__ += scaling.__all__
__all__ += shift.__all__
__all__ += shuffle.__all__
__all__ += sll.__all__
__all__ += sllaoc.__all__
