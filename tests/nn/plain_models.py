"""Networks in plain torch as people write them: after torchvision, the papers of U-Net and MLP-Mixer, and by hand."""

import torch
import torch.nn.functional as F
from torch import nn


class Bottleneck(nn.Module):
    expansion = 4

    def __init__(self, in_channels, channels, stride=1, groups=1):
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, channels, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, stride, 1, groups=groups, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)
        self.conv3 = nn.Conv2d(channels, channels * 4, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(channels * 4)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = None
        if stride != 1 or in_channels != channels * 4:
            self.downsample = nn.Sequential(
                nn.Conv2d(in_channels, channels * 4, 1, stride, bias=False), nn.BatchNorm2d(channels * 4)
            )

    def forward(self, x):
        identity = x
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.relu(self.bn2(self.conv2(out)))
        out = self.bn3(self.conv3(out))
        if self.downsample is not None:
            identity = self.downsample(x)
        out += identity
        return self.relu(out)


class ResNet50(nn.Module):
    def __init__(self, width=64, classes=1000, layers=(3, 4, 6, 3)):
        super().__init__()
        self.conv1 = nn.Conv2d(3, width, 7, 2, 3, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, 2, 1)
        channels = width
        for stage, count in enumerate(layers, start=1):
            blocks = []
            for place in range(count):
                blocks.append(Bottleneck(channels, width * 2 ** (stage - 1), 2 if place == 0 and stage > 1 else 1))
                channels = width * 2 ** (stage - 1) * 4
            setattr(self, f"layer{stage}", nn.Sequential(*blocks))
        self.avgpool = nn.AdaptiveAvgPool2d((1, 1))
        self.fc = nn.Linear(channels, classes)

    def forward(self, x):
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        x = self.avgpool(x)
        return self.fc(torch.flatten(x, 1))


class VGG(nn.Module):
    def __init__(
        self, plan=(64, "M", 128, "M", 256, 256, "M", 512, 512, "M", 512, 512, "M"), classes=1000, hidden=4096
    ):
        super().__init__()
        layers, channels = [], 3
        for width in plan:
            if width == "M":
                layers.append(nn.MaxPool2d(2, 2))
            else:
                layers += [nn.Conv2d(channels, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(inplace=True)]
                channels = width
        self.features = nn.Sequential(*layers)
        self.avgpool = nn.AdaptiveAvgPool2d((2, 2))
        self.classifier = nn.Sequential(
            nn.Linear(channels * 4, hidden), nn.ReLU(True), nn.Dropout(), nn.Linear(hidden, hidden), nn.ReLU(True),
            nn.Dropout(), nn.Linear(hidden, classes),
        )  # fmt: skip

    def forward(self, x):
        x = self.features(x)
        x = self.avgpool(x)
        return self.classifier(x.view(x.size(0), -1))


class LayerNorm2d(nn.LayerNorm):
    def forward(self, x):
        x = x.permute(0, 2, 3, 1)
        x = F.layer_norm(x, self.normalized_shape, self.weight, self.bias, self.eps)
        return x.permute(0, 3, 1, 2)


class StochasticDepth(nn.Module):
    def __init__(self, p):
        super().__init__()
        self.p = p

    def forward(self, x):
        if not self.training or self.p == 0.0:
            return x
        return x * torch.empty(x.shape[0], 1, 1, 1).bernoulli_(1 - self.p) / (1 - self.p)


class ConvNeXtBlock(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.dwconv = nn.Conv2d(dim, dim, kernel_size=7, padding=3, groups=dim)
        self.norm = nn.LayerNorm(dim, eps=1e-6)
        self.pwconv1 = nn.Linear(dim, 4 * dim)
        self.act = nn.GELU()
        self.pwconv2 = nn.Linear(4 * dim, dim)
        self.gamma = nn.Parameter(1e-6 * torch.ones(dim))
        self.drop_path = StochasticDepth(0.1)

    def forward(self, x):
        input = x  # noqa: A001
        x = self.dwconv(x)
        x = x.permute(0, 2, 3, 1)  # (N, C, H, W) -> (N, H, W, C)
        x = self.norm(x)
        x = self.pwconv1(x)
        x = self.act(x)
        x = self.pwconv2(x)
        if self.gamma is not None:
            x = self.gamma * x
        x = x.permute(0, 3, 1, 2)
        return input + self.drop_path(x)


class ConvNeXt(nn.Module):
    def __init__(self, dims=(96, 192), depths=(1, 2), classes=1000):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, dims[0], kernel_size=4, stride=4), LayerNorm2d(dims[0], eps=1e-6))
        stages = []
        for place, (dim, depth) in enumerate(zip(dims, depths, strict=True)):
            if place:
                stages += [LayerNorm2d(dims[place - 1]), nn.Conv2d(dims[place - 1], dim, kernel_size=2, stride=2)]
            stages += [ConvNeXtBlock(dim) for _ in range(depth)]
        self.stages = nn.Sequential(*stages)
        self.norm = nn.LayerNorm(dims[-1], eps=1e-6)
        self.head = nn.Linear(dims[-1], classes)

    def forward(self, x):
        x = self.stages(self.stem(x))
        x = self.norm(x.mean([-2, -1]))  # global average pooling, (N, C, H, W) -> (N, C)
        return self.head(x)


class DoubleConv(nn.Sequential):
    def __init__(self, in_channels, out_channels):
        super().__init__(
            nn.Conv2d(in_channels, out_channels, 3, padding=1, bias=False), nn.BatchNorm2d(out_channels),
            nn.ReLU(inplace=True), nn.Conv2d(out_channels, out_channels, 3, padding=1, bias=False),
            nn.BatchNorm2d(out_channels), nn.ReLU(inplace=True),
        )  # fmt: skip


class Up(nn.Module):
    def __init__(self, in_channels, out_channels, bilinear=False):
        super().__init__()
        if bilinear:
            self.up = nn.Sequential(
                nn.Upsample(scale_factor=2, mode="bilinear", align_corners=True),
                nn.Conv2d(in_channels, in_channels // 2, 1),
            )
        else:
            self.up = nn.ConvTranspose2d(in_channels, in_channels // 2, kernel_size=2, stride=2)
        self.conv = DoubleConv(in_channels, out_channels)

    def forward(self, x1, x2):
        x1 = self.up(x1)
        dy = x2.size()[2] - x1.size()[2]
        dx = x2.size()[3] - x1.size()[3]
        if dy or dx:
            x1 = F.pad(x1, [dx // 2, dx - dx // 2, dy // 2, dy - dy // 2])
        return self.conv(torch.cat([x2, x1], dim=1))


class UNet(nn.Module):
    def __init__(self, channels=3, classes=2, width=64, bilinear=False):
        super().__init__()
        self.inc = DoubleConv(channels, width)
        self.down1 = nn.Sequential(nn.MaxPool2d(2), DoubleConv(width, 2 * width))
        self.down2 = nn.Sequential(nn.MaxPool2d(2), DoubleConv(2 * width, 4 * width))
        self.up1 = Up(4 * width, 2 * width, bilinear)
        self.up2 = Up(2 * width, width, bilinear)
        self.outc = nn.Conv2d(width, classes, kernel_size=1)

    def forward(self, x):
        x1 = self.inc(x)
        x2 = self.down1(x1)
        x3 = self.down2(x2)
        return self.outc(self.up2(self.up1(x3, x2), x1))


class MixerBlock(nn.Module):
    def __init__(self, tokens, dim, tokens_hidden, hidden):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.tokens = nn.Sequential(nn.Linear(tokens, tokens_hidden), nn.GELU(), nn.Linear(tokens_hidden, tokens))
        self.channels = nn.Sequential(nn.Linear(dim, hidden), nn.GELU(), nn.Linear(hidden, dim))

    def forward(self, x):
        x = x + self.tokens(self.norm1(x).transpose(1, 2)).transpose(1, 2)
        return x + self.channels(self.norm2(x))


class Mixer(nn.Module):
    def __init__(self, size=32, patch=4, dim=128, depth=4, classes=10):
        super().__init__()
        tokens = (size // patch) ** 2
        self.stem = nn.Conv2d(3, dim, kernel_size=patch, stride=patch)
        self.blocks = nn.Sequential(*[MixerBlock(tokens, dim, tokens * 2, dim * 4) for _ in range(depth)])
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, classes)

    def forward(self, x):
        _, _, h, w = x.shape
        assert h == w
        x = self.stem(x).flatten(2).transpose(1, 2)
        x = self.norm(self.blocks(x))
        return self.head(x.mean(dim=1))


class DenseBlock(nn.Module):
    def __init__(self, channels, growth, layers):
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(
                nn.BatchNorm2d(channels + k * growth), nn.ReLU(),
                nn.Conv2d(channels + k * growth, growth, 3, padding=1, bias=False),
            )
            for k in range(layers)
        )  # fmt: skip

    def forward(self, x):
        features = [x]
        for layer in self.layers:
            features.append(layer(torch.cat(features, 1)))
        return torch.cat(features, 1)


class DenseNet(nn.Module):
    def __init__(self, growth=8, classes=10):
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, padding=1)
        self.dense = DenseBlock(16, growth, 3)
        self.transition = nn.Sequential(nn.Conv2d(16 + 3 * growth, 20, 1), nn.AvgPool2d(2))
        self.head = nn.Linear(20, classes)

    def forward(self, x):
        x = self.transition(self.dense(self.stem(x)))
        return self.head(F.adaptive_avg_pool2d(F.relu(x), 1).flatten(1))


class ShuffleUnit(nn.Module):
    def __init__(self, channels):
        super().__init__()
        half = channels // 2
        self.branch = nn.Sequential(
            nn.Conv2d(half, half, 1, bias=False), nn.BatchNorm2d(half), nn.ReLU(),
            nn.Conv2d(half, half, 3, padding=1, groups=half, bias=False), nn.BatchNorm2d(half),
        )  # fmt: skip

    def forward(self, x):
        x1, x2 = x.chunk(2, dim=1)
        out = torch.cat((x1, self.branch(x2)), dim=1)
        b, c, h, w = out.shape
        return out.view(b, 2, c // 2, h, w).transpose(1, 2).reshape(b, c, h, w)


class ShuffleNet(nn.Module):
    def __init__(self, channels=16, classes=10):
        super().__init__()
        self.stem = nn.Conv2d(3, channels, 3, 2, 1)
        self.units = nn.Sequential(*[ShuffleUnit(channels) for _ in range(3)])
        self.head = nn.Linear(channels, classes)

    def forward(self, x):
        return self.head(self.units(self.stem(x)).mean((2, 3)))


class Functional(nn.Module):
    """Everything by calls: functions, methods and operators."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 3, 3, 3) * 0.1)
        self.matrix, self.bias = nn.Parameter(torch.randn(10, 32) * 0.1), nn.Parameter(torch.zeros(10))
        self.scale = nn.Parameter(torch.full((8, 1, 1), 3.0))
        self.position = nn.Parameter(torch.randn(1, 8, 16, 16))
        self.register_buffer("mean", torch.full((3, 1, 1), 0.5))

    def forward(self, x):
        x = x - self.mean
        x = F.conv2d(x, self.weight, stride=2, padding=1) + self.position
        x = F.batch_norm(x, None, None, training=True) if x.shape[-1] % 2 else x
        x = F.group_norm(x, 2)
        y = F.relu(x, inplace=False) * self.scale
        x = x.add(y).sub(0.25)
        x = torch.sub(x, y.tanh())
        x = F.interpolate(F.max_pool2d(x, 3, 2, 1), scale_factor=2)
        x = F.avg_pool2d(F.pad(x, (1, 1, 1, 1), mode="reflect"), 2, 2)
        x = F.dropout(F.leaky_relu(x, 0.2), 0.1, self.training)
        x = F.adaptive_max_pool2d(x, 2).flatten(1)
        return F.log_softmax(F.linear(x, self.matrix, self.bias), dim=-1)


def sequence_1d():
    return nn.Sequential(
        nn.Conv1d(3, 8, 5, padding=2, padding_mode="circular"), nn.InstanceNorm1d(8), nn.SiLU(), nn.MaxPool1d(3, 2, 1),
        nn.Conv1d(8, 12, 3, stride=2, padding=2, dilation=2), nn.PReLU(), nn.AdaptiveAvgPool1d(5), nn.Flatten(),
        nn.Linear(60, 4), nn.Softmax(1),
    )  # fmt: skip


def volume_3d():
    return nn.Sequential(
        nn.Conv3d(2, 6, 3, padding=1, padding_mode="replicate"), nn.GroupNorm(3, 6), nn.ELU(), nn.AvgPool3d(2),
        nn.ConvTranspose3d(6, 4, 3, stride=2, padding=1, output_padding=1), nn.LeakyReLU(), nn.Upsample(scale_factor=2),
        nn.ReflectionPad3d(1), nn.AdaptiveMaxPool3d(1), nn.Flatten(), nn.Linear(4, 3),
    )  # fmt: skip


class MaxFeatureMap(nn.Module):
    """Parts that are sliced, reversed, counted, compared and unpacked."""

    def __init__(self, classes=5):
        super().__init__()
        self.conv = nn.Conv2d(3, 16, 3, padding=1)
        self.deep, self.head = nn.Conv2d(4, 4, 3, padding=1), nn.Linear(8, classes)

    def forward(self, x):
        x = torch.cat(self.conv(x).chunk(4, 1)[::-1], 1)
        first, second = torch.split(x, x.shape[1] // 2, 1)
        parts = list(torch.max(first, second).chunk(2, 1))
        assert len(parts) == 2
        *_, last = parts
        return self.head(torch.cat([parts[0], self.deep(last)], 1).mean((2, 3)))


class EinopsMixer(nn.Module):
    """MLP-Mixer, with functions and layers of einops."""

    def __init__(self, size=16, patch=4, dim=16, classes=10):
        from einops.layers.torch import Rearrange, Reduce

        super().__init__()
        tokens = (size // patch) ** 2
        self.patch = patch
        self.stem, self.norm = nn.Linear(3 * patch**2, dim), nn.LayerNorm(dim)
        self.tokens = nn.Sequential(nn.Conv1d(tokens, 2 * tokens, 1), nn.GELU(), nn.Conv1d(2 * tokens, tokens, 1))
        self.channels, self.swap = nn.Linear(tokens, tokens), Rearrange("b n d -> b d n")
        self.pool, self.head = Reduce("b n d -> b d", "sum"), nn.Linear(dim, classes)

    def forward(self, x):
        from einops import rearrange, reduce

        x = rearrange(x, "b c (h p) (w q) -> b (h w) (p q c)", p=self.patch, q=self.patch, b=x.shape[0])
        x = self.stem(x)
        x = x + self.tokens(self.norm(x))
        x = x + rearrange(F.gelu(self.channels(self.swap(x))), "b d n -> b n d")
        x = reduce(x, "b (n two) d -> b n d", "mean", two=2) + reduce(x, "b (n two) d -> b n d", "max", two=2)
        return self.head(self.pool(x))
