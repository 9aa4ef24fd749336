"""Networks as others write them, with their true constant where it is known: what the table in the documents is made of."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import trysquare as ts
from tests.resnet import resnet18


class Halves(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        a, b = x.chunk(2, 1)
        return torch.cat([torch.max(a, b), torch.min(a, b)], 1)


class Neighbours(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        a, b = x[:, ::2], x[:, 1::2]
        return torch.stack([torch.maximum(a, b), torch.minimum(a, b)], 2).flatten(1, 2)


class SortedPairs(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.view(len(x), -1, 2, *x.shape[2:]).sort(2).values.reshape(x.shape)


class ByWhere(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        a, b = x.split(x.shape[1] // 2, 1)
        swap = a < b
        return torch.cat([torch.where(swap, b, a), torch.where(swap, a, b)], 1)


class AbsByMax(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.max(x, -x)


class PutBack(nn.Module):
    """Slices that are put back together in four ways."""

    def forward(self, x: Tensor) -> Tensor:
        x = torch.cat(x.chunk(2, 1)[::-1], 1)
        x = torch.stack(x.unbind(1), 1)
        out = torch.zeros(x.shape, dtype=x.dtype)
        out[:, ::2], out[:, 1::2] = x[:, 1::2].relu(), x[:, ::2].tanh()
        return torch.cat(out.split([1, x.shape[1] - 1], 1), 1)


class ReflectorInForward(nn.Module):
    """A block reflector whose weight is built at every pass, as a convolution with circular padding of its own."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.v = nn.Parameter(torch.randn(channels, channels // 2))

    def forward(self, x: Tensor) -> Tensor:
        v = self.v / self.v.norm()
        weight = torch.eye(len(v), dtype=v.dtype) - 2 * v @ torch.linalg.solve(v.mT @ v, v.mT)
        return F.conv2d(x, weight[:, :, None, None])


class Rescaled(nn.Module):
    """A linear layer divided by the norm of its weight."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(features, features))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight / torch.linalg.matrix_norm(self.weight, 2))


class ZeroChannels(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x, torch.zeros(x.shape[0], 5, *x.shape[2:], dtype=x.dtype)], 1)


class FlatByLength(nn.Module):
    """The batch read off by ``len``, and the shape by a condition."""

    def forward(self, x: Tensor) -> Tensor:
        return x.view(len(x), -1) if len(x.shape) > 2 else x.reshape(x.shape[0], -1)


class MeanByReshape(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        b, c, h, w = x.shape
        return 2 * x.view(b, c, h // 2, 2, w // 2, 2).mean((3, 5))


class Unet(nn.Module):
    """Skips that are concatenated, and joined by an orthogonal layer over twice the channels."""

    def __init__(self, channels: int = 8) -> None:
        super().__init__()
        self.first = ts.OrthoConv2d(3, channels, 3)
        self.down = ts.OrthoConv2d(channels // 2, 2 * channels, 2, stride=2)
        self.up = ts.OrthoConvTranspose2d(2 * channels, channels // 2, 2, stride=2)
        self.last = ts.OrthoConv2d(channels, 3, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = ts.MaxMin()(self.first(x))
        kept, deep = x.chunk(2, 1)
        return self.last(torch.cat([kept, self.up(ts.MaxMin()(self.down(deep)))], 1))  # type: ignore[no-any-return]


class GroupSortByExtremes(nn.Module):
    """Pairs in order, by the smallest and the largest of each."""

    def forward(self, x: Tensor) -> Tensor:
        pairs = x.view(len(x), -1, 2, *x.shape[2:])
        return torch.cat([pairs.min(2, keepdim=True)[0], pairs.max(2, keepdim=True)[0]], 2).view(x.shape)


class Einops(nn.Module):
    """Pooling, squeezing and channel mixing in einops."""

    def __init__(self) -> None:
        super().__init__()
        self.mixing = nn.Parameter(torch.linalg.qr(torch.randn(16, 16))[0])

    def forward(self, x: Tensor) -> Tensor:
        from einops import rearrange, reduce

        x = rearrange(x, "b c (h i) (w j) -> b (c i j) h w", i=2, j=2)
        x = torch.einsum("b c h w, d c -> b d h w", x, self.mixing)
        return 2 * reduce(x, "b c (h i) (w j) -> b (c h w)", "mean", i=2, j=2)


class NormPooling(nn.Module):
    """Euclidean norms of windows, spelled out in two ways."""

    def forward(self, x: Tensor) -> Tensor:
        x = F.lp_pool2d(x, 2.0, 2)
        return (x.pow(2).sum(1) + 1e-6).sqrt()


class PotentialStep(nn.Module):
    """SLL and CPL blocks as their authors write them: ``x - 2 Wᵀ (t relu(W x + b))``."""

    def __init__(self, channels: int, hidden: int) -> None:
        super().__init__()
        self.kernel = nn.Parameter(torch.randn(hidden, channels, 3, 3) / 4)
        self.bias = nn.Parameter(torch.randn(hidden))
        self.q = nn.Parameter(0.1 * torch.randn(hidden))

    def forward(self, x: Tensor) -> Tensor:
        gram = F.conv2d(self.kernel, self.kernel, padding=2).abs().sum((2, 3))
        t = 1 / (gram * (self.q[None] - self.q[:, None]).exp()).sum(1)
        hidden = t.view(-1, 1, 1) * torch.relu(F.conv2d(x, self.kernel, self.bias, padding=1))
        return x - 2 * F.conv_transpose2d(hidden, self.kernel, padding=1)


def fixed(model: nn.Module) -> nn.Module:
    """Every parametrized weight replaced by its value: what the error about iterated weights says to do."""
    for module in model.modules():
        for name in list(getattr(module, "parametrizations", ())):
            nn.utils.parametrize.remove_parametrizations(module, name)
    return model


def _orthogonium() -> nn.Module:
    from orthogonium.layers import AdaptiveOrthoConv2d, AdaptiveOrthoConvTranspose2d, MaxMin
    from orthogonium.layers.conv.SLL import SDPBasedLipschitzResBlock, SLLxAOCLipschitzResBlock
    from orthogonium.layers.residual import L2NormResidual

    around = {"padding": 1, "padding_mode": "circular"}
    model = nn.Sequential(
        AdaptiveOrthoConv2d(3, 8, 3, **around), MaxMin(), L2NormResidual(AdaptiveOrthoConv2d(8, 8, 3, **around)),
        AdaptiveOrthoConv2d(8, 16, 3, stride=2, **around), MaxMin(), SDPBasedLipschitzResBlock(16, 2, 3),
        SLLxAOCLipschitzResBlock(16, 16, 2, 3), AdaptiveOrthoConvTranspose2d(16, 8, 2, stride=2),
    )  # fmt: skip
    return fixed(model)


def _torchlip() -> nn.Module:
    from deel import torchlip

    return nn.Sequential(
        torchlip.SpectralConv2d(3, 8, 1), torchlip.GroupSort2(), torchlip.ScaledL2NormPool2d(2),
        torchlip.InvertibleDownSampling(2), torchlip.LayerCentering(), nn.Flatten(), torchlip.SpectralLinear(128, 16),
        torchlip.MaxMin(), torchlip.FullSort(), torchlip.LPReLU(), torchlip.SpectralLinear(32, 10),
    )  # fmt: skip


def _between(activation: nn.Module) -> nn.Module:
    layers = [nn.utils.parametrizations.orthogonal(nn.Linear(8, 8)) for _ in range(5)]
    return nn.Sequential(*(part for layer in layers for part in (layer, activation)))


class TwoSides(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([F.relu(x), F.relu(-x)], 1)


def _blocks() -> nn.Module:
    blocks = ts.SLLBlock2d(8), ts.CPLBlock2d(8), ts.SLLAOCBlock2d(8, 16, stride=2), ts.SandwichAOCConv2d(16, 16, 3)
    return ts.to_torch(nn.Sequential(*blocks, ts.SLLAOCBlockTranspose2d(16, 4, stride=2), ts.L2NormPool2d(2)))


def _own_padding() -> nn.Module:
    plain = ts.to_torch(ts.OrthoConv2d(4, 4, 3, padding=0))
    return nn.Sequential(nn.CircularPad2d(1), plain, nn.ReLU(), nn.CircularPad2d((1, 1, 0, 2)), plain)


# Name, network, shape of its input, and its constant (``None`` where only a lower bound is known).
ZOO = {
    "MaxMin of halves, 5 layers": (lambda: _between(Halves()), (8,), 1.0),
    "MaxMin of neighbours (stack, flatten), 5 layers": (lambda: _between(Neighbours()), (8,), 1.0),
    "MaxMin by sort of pairs, 5 layers": (lambda: _between(SortedPairs()), (8,), 1.0),
    "MaxMin by torch.where, 5 layers": (lambda: _between(ByWhere()), (8,), 1.0),
    "absolute value as max(x, -x), 5 layers": (lambda: _between(AbsByMax()), (8,), 1.0),
    "cat of chunk, unbind, split, slices written back": (PutBack, (8, 4, 4), 1.0),
    "circular padding as a layer of its own": (_own_padding, (4, 8, 8), 1.0),
    "block reflector built in forward": (lambda: ReflectorInForward(6), (6, 5, 5), 1.0),
    "weight divided by its norm in forward": (lambda: Rescaled(6), (6,), 1.0),
    "zero channels concatenated": (ZeroChannels, (3, 4, 4), 1.0),
    "x.view(len(x), -1)": (lambda: nn.Sequential(FlatByLength(), Rescaled(48)), (3, 4, 4), 1.0),
    "average pooling by view and mean, times 2": (MeanByReshape, (3, 8, 8), 1.0),
    "U-Net of orthogonal layers": (Unet, (3, 16, 16), 1.0),
    "pairs in order by min and max, 5 layers": (lambda: _between(GroupSortByExtremes()), (8,), 1.0),
    "both sides of x: relu(x), relu(-x)": (lambda: nn.Sequential(_between(nn.Identity()), TwoSides()), (8,), 1.0),
    "einops: squeezing, einsum, mean": (Einops, (4, 8, 8), 1.0),
    "norms of windows, spelled out": (NormPooling, (3, 8, 8), 1.0),
    "SLL block, written out, 3 of them": (lambda: nn.Sequential(*(PotentialStep(4, 6) for _ in range(3))), (4, 8, 8), 1.0),
    "orthogonium 0.0.4: AOC, SLL and residual blocks, weights fixed": (_orthogonium, (3, 8, 8), 1.0),
    "deel-torchlip 1.0.5: as it is": (_torchlip, (3, 8, 8), 1.0),
    "plain torch from to_torch, transposed": (lambda: ts.to_torch(ts.OrthoConvTranspose2d(8, 4, 3, stride=2)), (8, 4, 4), 1.0),
    "plain torch from to_torch, tiny-cifar": (lambda: ts.to_torch(ts.models.build("tiny-cifar", (3, 16, 16), 10)), (3, 16, 16), 1.0),
    "plain torch from to_torch, SLL, CPL, SLL-AOC and sandwich blocks": (_blocks, (8, 8, 8), 1.0),
    "ResNet-18, untrained, BatchNorm in eval mode": (resnet18, (3, 32, 32), None),
}  # fmt: skip
