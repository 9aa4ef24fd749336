"""Layers with torch's signatures."""

from trysquare.layers.activations import (
    Abs,
    FullSort,
    GroupSort,
    Householder,
    MaxMin,
    NActivation,
)
from trysquare.layers.centering import (
    BatchCentering,
    LayerCentering,
)
from trysquare.layers.conv import (
    OrthoConv1d,
    OrthoConv2d,
    OrthoConv3d,
    OrthoConvTranspose1d,
    OrthoConvTranspose2d,
    OrthoConvTranspose3d,
)
from trysquare.layers.cpl import (
    CPLBlock,
    CPLBlock1d,
    CPLBlock2d,
    CPLBlock3d,
    CPLLinear,
)
from trysquare.layers.depthwise import (
    DepthwiseResidualBlock,
    DepthwiseResidualBlock1d,
    DepthwiseResidualBlock2d,
    DepthwiseResidualBlock3d,
)
from trysquare.layers.fourier import (
    FourierOrthoConv1d,
    FourierOrthoConv2d,
    FourierOrthoConv3d,
    FourierOrthoConvTranspose1d,
    FourierOrthoConvTranspose2d,
    FourierOrthoConvTranspose3d,
)
from trysquare.layers.heads import (
    UnitNormLinear,
)
from trysquare.layers.linear import (
    OrthoLinear,
)
from trysquare.layers.pooling import (
    GlobalL2NormPool,
    GlobalMaxPool,
    GlobalScaledAvgPool,
    InvertibleDownsampling1d,
    InvertibleDownsampling2d,
    InvertibleDownsampling3d,
    InvertibleUpsampling1d,
    InvertibleUpsampling2d,
    InvertibleUpsampling3d,
    L2NormPool1d,
    L2NormPool2d,
    L2NormPool3d,
    LipschitzMaxPool1d,
    LipschitzMaxPool2d,
    LipschitzMaxPool3d,
    ScaledAvgPool1d,
    ScaledAvgPool2d,
    ScaledAvgPool3d,
)
from trysquare.layers.residual import (
    ConcatResidual,
    ConvexResidual,
    L2Residual,
    LearnableResidual,
)
from trysquare.layers.sandwich import (
    SandwichAOCConv,
    SandwichAOCConv1d,
    SandwichAOCConv2d,
    SandwichAOCConv3d,
    SandwichLinear,
)
from trysquare.layers.sandwich_fourier import (
    SandwichConv,
    SandwichConv1d,
    SandwichConv2d,
    SandwichConv3d,
)
from trysquare.layers.scaling import (
    InputScaling,
)
from trysquare.layers.shuffle import (
    ChannelShuffle,
)
from trysquare.layers.sll import (
    SLLBlock,
    SLLBlock1d,
    SLLBlock2d,
    SLLBlock3d,
    SLLLinear,
)
from trysquare.layers.sllaoc import (
    SLLAOCBlock,
    SLLAOCBlock1d,
    SLLAOCBlock2d,
    SLLAOCBlock3d,
)

__all__ = [
    "Abs",
    "BatchCentering",
    "CPLBlock",
    "CPLBlock1d",
    "CPLBlock2d",
    "CPLBlock3d",
    "CPLLinear",
    "ChannelShuffle",
    "ConcatResidual",
    "ConvexResidual",
    "DepthwiseResidualBlock",
    "DepthwiseResidualBlock1d",
    "DepthwiseResidualBlock2d",
    "DepthwiseResidualBlock3d",
    "FourierOrthoConv1d",
    "FourierOrthoConv2d",
    "FourierOrthoConv3d",
    "FourierOrthoConvTranspose1d",
    "FourierOrthoConvTranspose2d",
    "FourierOrthoConvTranspose3d",
    "FullSort",
    "GlobalL2NormPool",
    "GlobalMaxPool",
    "GlobalScaledAvgPool",
    "GroupSort",
    "Householder",
    "InputScaling",
    "InvertibleDownsampling1d",
    "InvertibleDownsampling2d",
    "InvertibleDownsampling3d",
    "InvertibleUpsampling1d",
    "InvertibleUpsampling2d",
    "InvertibleUpsampling3d",
    "L2NormPool1d",
    "L2NormPool2d",
    "L2NormPool3d",
    "L2Residual",
    "LayerCentering",
    "LearnableResidual",
    "LipschitzMaxPool1d",
    "LipschitzMaxPool2d",
    "LipschitzMaxPool3d",
    "MaxMin",
    "NActivation",
    "OrthoConv1d",
    "OrthoConv2d",
    "OrthoConv3d",
    "OrthoConvTranspose1d",
    "OrthoConvTranspose2d",
    "OrthoConvTranspose3d",
    "OrthoLinear",
    "SLLAOCBlock",
    "SLLAOCBlock1d",
    "SLLAOCBlock2d",
    "SLLAOCBlock3d",
    "SLLBlock",
    "SLLBlock1d",
    "SLLBlock2d",
    "SLLBlock3d",
    "SLLLinear",
    "SandwichAOCConv",
    "SandwichAOCConv1d",
    "SandwichAOCConv2d",
    "SandwichAOCConv3d",
    "SandwichConv",
    "SandwichConv1d",
    "SandwichConv2d",
    "SandwichConv3d",
    "SandwichLinear",
    "ScaledAvgPool1d",
    "ScaledAvgPool2d",
    "ScaledAvgPool3d",
    "UnitNormLinear",
]
