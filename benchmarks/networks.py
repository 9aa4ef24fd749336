"""The same network with any kind of convolution, and a training step and an evaluation of it to time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import trysquare as ts
from benchmarks import peers
from benchmarks.peers import Make
from trysquare.nn.layers.convolution import circular_convolution


class Variant(NamedTuple):
    """A convolution that takes the place of ``nn.Conv2d``; ``method`` says what it computes."""

    method: str
    make: Make


class OurPadding(nn.Conv2d):
    """Torch's convolution with circular padding as in our layers, which keep no padded map for backward."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        if self.padding_mode == "zeros":
            return super().forward(input)
        pads = self._reversed_padding_repeated_twice
        return circular_convolution(input, self.weight, self.bias, pads, self.stride, self.dilation, self.groups)


def plain_by(kind: type[nn.Conv2d]) -> Make:
    """Return an unconstrained convolution, circular like all others, so that their overhead is not that of padding."""

    def make(channels: int, outputs: int, kernel_size: int, stride: int, groups: int) -> nn.Module:
        padding = (kernel_size - 1) // 2
        mode = "circular" if padding else "zeros"  # torch would copy the map to add nothing to it
        return kind(channels, outputs, kernel_size, stride, padding, groups=groups, padding_mode=mode)

    return make


def ours(method: str, **options: object) -> Make:
    """Return our convolution by one of ``ts.METHODS``."""

    def make(channels: int, outputs: int, kernel_size: int, stride: int, groups: int) -> nn.Module:
        return ts.OrthoConv2d(channels, outputs, kernel_size, stride, groups=groups, method=method, **options)

    return make


def fourier(method: str) -> Make:

    def make(channels: int, outputs: int, kernel_size: int, stride: int, groups: int) -> nn.Module:
        return ts.FourierOrthoConv2d(channels, outputs, kernel_size, stride, groups=groups, method=method)

    return make


def odd(convolution: Make) -> Make:
    """Replace even kernel sizes by the next odd one: neither skew kernels nor orthogonium's BCOP have even ones."""
    return lambda channels, outputs, size, stride, groups: convolution(channels, outputs, size | 1, stride, groups)


def original_bcop(channels: int, outputs: int, kernel_size: int, stride: int, groups: int) -> nn.Module:
    """BCOP as Li et al. have it: Björck's iteration, and strides emulated by four times the channels."""
    convolution = ts.OrthoConv2d(
        channels * stride**2, outputs, kernel_size, groups=groups, method="bcop", orthogonalizer="bjorck"
    )
    return convolution if stride == 1 else nn.Sequential(ts.InvertibleDownsampling2d(stride), convolution)


plain = plain_by(nn.Conv2d)
REFERENCE = "Conv2d"
PADDED = "Conv2d, our padding"
VARIANTS: dict[str, Variant] = {
    REFERENCE: Variant("plain", plain),
    PADDED: Variant("plain", plain_by(OurPadding)),
    "AOC": Variant("AOC", ours("aoc")),
    "AOC parsimonious": Variant("AOC parsimonious", ours("aoc", parsimonious=True)),
    "BCOP, original style": Variant("BCOP", original_bcop),
    "SOC": Variant("SOC", odd(ours("soc"))),
    "SOC, 5 terms": Variant("SOC", odd(ours("soc", terms=5))),
    "SOC, 3 terms": Variant("adaptive SOC", odd(ours("soc", terms=3))),
    "Cayley": Variant("Cayley", fourier("cayley")),
    "orthogonium AOC": Variant("AOC", peers.aoc),
    "orthogonium AOC, QR": Variant("AOC", peers.aoc_by("QR")),
    "orthogonium AOC, Cholesky": Variant("AOC", peers.aoc_by("Cholesky")),
    "orthogonium BCOP": Variant("BCOP", odd(peers.bcop)),
    "orthogonium SOC": Variant("SOC", odd(peers.soc)),
    "orthogonium adaptive SOC": Variant("adaptive SOC", odd(peers.adaptive_soc)),
    "orthogonium Cayley": Variant("Cayley", peers.cayley),
}


def resnet34(size: int) -> nn.Module:
    """The paper's: transition blocks are one strided convolution."""
    return ts.models.build("resnet34", (3, size, size), 1000, conv="plain", head="plain")


def resnet18(size: int) -> nn.Module:
    """For small images: as usual, a 3x3 convolution without stride and no pooling come first."""
    model = ts.models.build("resnet34", (3, size, size), 10, conv="plain", head="plain", depths=(2, 2, 2, 2))
    stem, activation, _, *rest = model.features
    first = nn.Conv2d(3, stem.out_channels, 3, padding=1, padding_mode="circular")
    model.features = nn.Sequential(first, activation, *rest)
    return model


def depthwise(size: int) -> nn.Module:
    """The paper's network of residual depthwise blocks for CIFAR-10."""
    return ts.models.build("cifar10-accurate", (3, size, size), 10, head="plain")


def small(size: int) -> nn.Module:
    """The network of Li et al.; one of its strides keeps the channels, so that it has a parsimonious variant."""
    return exchange(ts.models.build("bcop-small", (3, size, size), 10), linear=nn.Linear)


NETWORKS: dict[str, Callable[[int], nn.Module]] = {
    "resnet34": resnet34,
    "resnet18": resnet18,
    "depthwise": depthwise,
    "bcop-small": small,
}


def billion() -> nn.Module:
    """Return a residual network of 10⁹ parameters: layers of 3x3 and 1x1, three stages of 512 to 2,048 channels."""
    layers: list[nn.Module] = [nn.PixelUnshuffle(4)]
    for before, width, depth in ((48, 512, 8), (512, 1024, 40), (1024, 2048, 13)):
        layers += [nn.Conv2d(before, width, 3, 1 if before == 48 else 2), ts.MaxMin()]
        for _ in range(depth):
            branch = nn.Sequential(nn.Conv2d(width, width, 3), ts.MaxMin(), nn.Conv2d(width, width, 1))
            layers += [ts.LearnableResidual(branch), ts.MaxMin()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2048, 1000))


def exchange(
    model: nn.Module, convolution: Make | None = None, linear: Callable[[int, int], nn.Module] | None = None
) -> nn.Module:
    """Put other layers in the place of every ``nn.Conv2d`` and, if asked for, of every ``nn.Linear``, ours included."""
    for name, child in list(model.named_children()):
        if isinstance(child, nn.Conv2d) and convolution is not None:
            kernel_size, stride = child.kernel_size[0], child.stride[0]
            new = convolution(child.in_channels, child.out_channels, kernel_size, stride, child.groups)
            setattr(model, name, new)
        elif isinstance(child, nn.Linear) and linear is not None:
            setattr(model, name, linear(child.in_features, child.out_features))
        else:
            exchange(child, convolution, linear)
    return model


def build(network: str, size: int, variant: str) -> nn.Module:
    """One of ``NETWORKS`` for images of a size, with the convolutions of one of ``VARIANTS``."""
    return exchange(NETWORKS[network](size), VARIANTS[variant].make)


def images(batch: int, size: int) -> tuple[Tensor, Tensor]:
    """Return random images, and labels of ten classes."""
    return torch.randn(batch, 3, size, size), torch.randint(10, (batch,))


def train_step(model: nn.Module, x: Tensor, labels: Tensor, **options: Any) -> Callable[[], None]:
    """Return a call of forward, backward and a step of SGD, whose rate is too small to change what is measured."""
    optimizer = torch.optim.SGD(model.train().parameters(), lr=1e-6, **options)

    def step() -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(x), labels).backward()
        optimizer.step()

    return step


def evaluation(model: nn.Module, x: Tensor) -> Callable[[], None]:
    """Return a call of forward in eval mode without gradients."""
    model.eval()

    def evaluate() -> None:
        with torch.no_grad():
            model(x)

    return evaluate
