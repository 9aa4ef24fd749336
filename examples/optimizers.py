"""What weight decay of free tensors does, and what matrix optimizers make of them: speed of the weights, and accuracy.

python examples/optimizers.py

Needs nothing but the package; takes about a minute.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

import trysquare as ts
from convert_digits import digits

EPOCHS, BATCH = 6, 64
Make = Callable[[nn.Module], list[torch.optim.Optimizer]]


def network() -> nn.Module:
    """Return a small orthogonal network."""
    return nn.Sequential(
        ts.OrthoConv2d(1, 32, 3, padding_mode="zeros"), ts.MaxMin(), ts.OrthoConv2d(32, 64, 3, stride=2), ts.MaxMin(),
        ts.OrthoConv2d(64, 64, 3), ts.MaxMin(), nn.Flatten(), ts.OrthoLinear(1024, 128), ts.MaxMin(),
        ts.OrthoLinear(128, 10),
    )  # fmt: skip


def weights(model: nn.Module) -> list[Tensor]:
    """Return the present weights of all orthogonal layers."""
    return [layer.weight.detach().clone() for layer in model.modules() if hasattr(layer, "free_tensors")]


def adamw(weight_decay: float, by_group: bool = False) -> Make:
    """Return a maker of AdamW with a decay of everything, or of plain weights only."""

    def make(model: nn.Module) -> list[torch.optim.Optimizer]:
        groups = ts.parameter_groups(model, weight_decay=weight_decay) if by_group else model.parameters()
        return [torch.optim.AdamW(groups, lr=1e-2, weight_decay=weight_decay)]

    return make


def muon(lr: float) -> Make:
    """Return a maker of Muon for free tensors with two axes (those of linear layers), and AdamW for all others."""

    def make(model: nn.Module) -> list[torch.optim.Optimizer]:
        matrices = [p for p in model.parameters() if p.ndim == 2]
        others = [p for p in model.parameters() if p.ndim != 2]
        return [
            torch.optim.Muon(matrices, lr=lr, weight_decay=0.0),
            torch.optim.AdamW(others, lr=1e-2, weight_decay=0.0),
        ]

    return make


def train(make: Make) -> tuple[float, float, float]:
    """Return by how much weights move in a step, relative to their size, in the first and last epoch; the accuracy."""
    torch.manual_seed(0)
    model = network()
    optimizers, (images, labels), speeds = make(model), digits("train"), []
    for _ in range(EPOCHS):
        moved = []
        for rows in torch.randperm(len(images)).split(BATCH):
            before = weights(model)
            with ts.built(model):
                nn.functional.cross_entropy(10 * model(images[rows]), labels[rows]).backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            pairs = list(zip(weights(model), before, strict=True))
            moved += [float((after - old).norm() / old.norm()) for after, old in pairs]
        speeds.append(sum(moved) / len(moved))
    images, labels = digits("test")
    with torch.no_grad():
        accuracy = float((model.eval()(images).argmax(1) == labels).float().mean())
    return speeds[0], speeds[-1], accuracy


def main() -> None:
    """Print a line for each optimizer."""
    print(f"{'optimizer':<40} {'first epoch':>11} {'last epoch':>10} {'accuracy':>8}")
    for name, make in {
        "AdamW": adamw(0.0),
        "AdamW, everything decays by 0.1": adamw(0.1),
        "AdamW, everything decays by 1": adamw(1.0),
        "AdamW, ts.parameter_groups, 1": adamw(1.0, by_group=True),
        "Muon 0.02 (linear layers), AdamW": muon(0.02),
        "Muon 0.1 (linear layers), AdamW": muon(0.1),
    }.items():
        first, last, accuracy = train(make)
        print(f"{name:<40} {first:>11.4f} {last:>10.4f} {accuracy:>8.3f}")


if __name__ == "__main__":
    main()
