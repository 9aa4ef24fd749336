"""How much of a Wasserstein distance a critic finds, where the distance is known exactly.

python examples/wasserstein.py [--quick] [--out FOLDER]

The distance between two distributions is the largest difference of means that a 1-Lipschitz critic can have between
them. For a distribution and a copy of it that is moved by a vector it is exactly the length of that vector, so that
what a critic finds can be read as a share of the truth. A critic of constant at most 1 can only find too little.
Those with a gradient penalty or with torch's spectral normalisation, which looks at reshaped kernels, have no such
constant: what they find is divided here by the largest slope that they show on the data, which is kind to them.
Digits are moved by a fixed pattern of the same length as a typical difference between two digits. Takes about a minute
on two cores.
"""

import argparse
import time
from collections.abc import Callable
from pathlib import Path

import matplotlib as mpl
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm

import trysquare as ts

mpl.use("agg")
from matplotlib import pyplot as plt

BATCH, WIDTH = 128, 128


def critic(convolution: Callable[..., nn.Module], linear: Callable[..., nn.Module], activation: type) -> nn.Sequential:
    """Return a critic of images of 1 x 8 x 8."""
    return nn.Sequential(
        convolution(1, 16, 4, stride=2, padding=1), activation(),
        convolution(16, 64, 4, stride=2, padding=1), activation(), nn.Flatten(),
        linear(256, WIDTH), activation(), linear(WIDTH, 1),
    )  # fmt: skip


def orthogonal(method: str) -> Callable[[], nn.Module]:
    """Return a maker of critics whose convolutions are made by a method of this library."""

    def convolution(*sizes: int, stride: int, padding: int) -> nn.Module:
        return ts.OrthoConv2d(*sizes, stride=stride, method=method)

    return lambda: critic(convolution, ts.OrthoLinear, ts.MaxMin)


def spectral(activation: type) -> Callable[[], nn.Module]:
    """Return a maker of critics with torch's spectral normalisation."""
    return lambda: critic(
        lambda *sizes, **options: spectral_norm(nn.Conv2d(*sizes, padding_mode="circular", **options)),
        lambda *sizes: spectral_norm(nn.Linear(*sizes)), activation,
    )  # fmt: skip


# Each with the weight of its gradient penalty.
CRITICS: dict[str, tuple[Callable[[], nn.Module], float]] = {
    "AOC, MaxMin": (orthogonal("aoc"), 0.0),
    "RKO, MaxMin": (orthogonal("rko"), 0.0),
    "spectral_norm, MaxMin": (spectral(ts.MaxMin), 0.0),
    "spectral_norm, ReLU": (spectral(nn.ReLU), 0.0),
    "gradient penalty, ReLU": (lambda: critic(nn.Conv2d, nn.Linear, nn.ReLU), 10.0),
}


def penalty(model: nn.Module, real: Tensor, moved: Tensor) -> Tensor:
    """Return how far slopes between pairs of samples are from 1 (Gulrajani et al., 2017)."""
    share = torch.rand(len(real), 1, 1, 1)
    between = (share * real + (1 - share) * moved).requires_grad_()
    (slope,) = torch.autograd.grad(model(between).sum(), between, create_graph=True)
    return (slope.flatten(1).norm(dim=1) - 1).square().mean()


def slope_of(model: nn.Module, *images: Tensor) -> float:
    """Return the largest slope of a critic on images and between them."""
    real, moved = images
    points = torch.cat([real, moved, (real + moved) / 2]).requires_grad_()
    (slopes,) = torch.autograd.grad(model(points).sum(), points)
    return float(slopes.flatten(1).norm(dim=1).max())


def train(
    make: Callable[[], nn.Module], weight: float, data: Tensor, shift: Tensor, steps: int
) -> list[tuple[int, float]]:
    """Train a critic; return the share of the distance that it finds on held-out samples, by step."""
    train_part, test_part = data[: len(data) // 2], data[len(data) // 2 :]
    model = make()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3, betas=(0.5, 0.9))
    found = []
    for step in range(1, steps + 1):
        # Two draws of their own: the critic does not know which images belong together.
        real, moved = (train_part[torch.randint(len(train_part), (BATCH,))] for _ in range(2))
        moved = moved + shift
        with ts.built(model):
            loss = model(moved).mean() - model(real).mean()
            if weight:
                loss = loss + weight * penalty(model, real, moved)
            optimizer.zero_grad()
            loss.backward()
        optimizer.step()
        if step % max(1, steps // 20) == 0:
            model.eval()
            with torch.no_grad():
                value = float(model(test_part).mean() - model(test_part + shift).mean())
            found.append((step, value / float(shift.norm()) / max(1.0, slope_of(model, test_part, test_part + shift))))
            model.train()
    return found


def main(argv: list[str] | None = None) -> dict[str, float]:
    """Train every critic, draw; return the share that each finds at the end."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="60 steps in place of 1500")
    parser.add_argument("--out", type=Path, default=Path(), help="folder of the picture")
    options = parser.parse_args(argv)
    steps = 60 if options.quick else 1500
    torch.manual_seed(0)
    images = ts.data.load("digits", split="train").images.float() / 16
    # The mean of one digit less that of another: a direction in which digits differ anyway.
    labels = ts.data.load("digits", split="train").labels
    shift = images[labels == 1].mean(0) - images[labels == 0].mean(0)
    images = images[torch.randperm(len(images))]
    print(f"distance between digits and moved digits: exactly {shift.norm():.3f}\n{'critic':26}{'share found':>12}")
    curves, figures = {}, {}
    for name, (make, weight) in CRITICS.items():
        torch.manual_seed(0)
        began = time.perf_counter()
        curves[name] = train(make, weight, images, shift, steps)
        figures[name] = curves[name][-1][1]
        print(f"{name:26}{figures[name]:12.1%}  ({time.perf_counter() - began:.0f} s)", flush=True)
    figure, place = plt.subplots(figsize=(6, 4), layout="constrained")
    for name, curve in curves.items():
        place.plot(*zip(*curve, strict=True), marker=".", label=name)
    place.axhline(1, color="gray", linestyle=":")
    place.set(xlabel="step", ylabel="share of the distance that is found", ylim=(0.8, 1.02))
    place.legend()
    figure.savefig(options.out / "wasserstein.png", dpi=150)
    plt.close(figure)
    return figures


if __name__ == "__main__":
    main()
