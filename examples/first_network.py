"""Train a small orthogonal network for a few seconds, then show that every layer is orthogonal.

python examples/first_network.py
"""

import time

import torch
from torch import Tensor, nn

import trysquare as ts

SECONDS = 5.0


class MaxMin(nn.Module):
    """Sort pairs of channels: a gradient-preserving activation."""

    def forward(self, x: Tensor) -> Tensor:
        """Larger halves first."""
        a, b = x.chunk(2, dim=1)
        return torch.cat([torch.maximum(a, b), torch.minimum(a, b)], dim=1)


def synthetic(count: int) -> tuple[Tensor, Tensor]:
    """Images of stripes whose direction is the class."""
    labels = torch.randint(4, (count,))
    angle = labels * torch.pi / 4 + 0.2 * torch.randn(count)
    rows, columns = torch.meshgrid(torch.arange(16.0), torch.arange(16.0), indexing="ij")
    wave = angle.cos()[:, None, None] * rows + angle.sin()[:, None, None] * columns
    phase = 6.28 * torch.rand(count, 1, 1)
    return torch.sin(0.9 * wave + phase).unsqueeze(1) + 0.5 * torch.randn(count, 1, 16, 16), labels


def main() -> None:
    """Build, train, check."""
    torch.manual_seed(0)
    model = nn.Sequential(
        ts.OrthoConv2d(1, 16, 3, stride=2),
        MaxMin(),
        ts.OrthoConv2d(16, 32, 3, stride=2),
        MaxMin(),
        ts.OrthoConv2d(32, 32, 3),
        MaxMin(),
        nn.Flatten(),
        ts.OrthoLinear(512, 4),
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    start, steps = time.perf_counter(), 0
    print(f"training on synthetic stripes for {SECONDS:.0f} s")
    while time.perf_counter() - start < SECONDS:
        images, labels = synthetic(64)
        loss = nn.functional.cross_entropy(4 * model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        steps += 1
    model.eval()
    with torch.no_grad():
        images, labels = synthetic(1000)
        accuracy = (model(images).argmax(1) == labels).float().mean()
    print(f"{steps} steps, accuracy on fresh images {accuracy:.1%}\n")

    print(f"{'layer':<14}{'input':<14}{'smallest':>14}{'largest':>14}   singular value")
    x = images[:1]
    for layer in model:
        if hasattr(layer, "weight"):
            shape = tuple(x.shape[1:])
            values = ts.singular_values(layer, shape)
            name = type(layer).__name__.removeprefix("Parametrized")
            print(f"{name:<14}{shape!s:<14}{values.min():>14.9f}{values.max():>14.9f}")
        x = layer(x)

    down = ts.OrthoConv2d(16, 64, 3, stride=2)
    up = down.inverse()
    x = torch.randn(8, 16, 32, 32)
    error = (up(down(x)) - x).abs().max()
    print(f"\nup(down(x)) - x, for a strided 16 -> 64 layer and its inverse: {error:.1e} at most")


if __name__ == "__main__":
    main()
