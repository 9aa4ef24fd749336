"""A hundred layers without skips or normalisation: orthogonal ones train from the first step, plain ones do not.

python examples/very_deep.py [--quick] [--out FOLDER]

An orthogonal layer keeps the length of what passes through it, forward and backward, and MaxMin only permutes. So the
gradient is as long at the first layer as at the last, however many are between ("dynamical isometry"). The example
measures that at the start, then trains on the digits that come with the package, beside the same network of plain
convolutions: with torch's own initial weights, with He's, which keep the mean length, and with orthogonal ones that are
free to drift. Takes about ten minutes on two cores, and 15 seconds with --quick.
"""

import argparse
import math
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path

import matplotlib as mpl
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import trysquare as ts

mpl.use("agg")
from matplotlib import pyplot as plt

CHANNELS, BATCH = 8, 128


def network(depth: int, layer: Callable[[], nn.Module], activation: Callable[[], nn.Module]) -> nn.Sequential:
    """Return ``depth`` layers on maps of 8 channels between two orthogonal ends."""
    body = [part for _ in range(depth) for part in (layer(), activation())]
    return nn.Sequential(
        nn.ConstantPad3d((0, 0, 0, 0, 0, CHANNELS - 1), 0.0), *body, nn.Flatten(), ts.OrthoLinear(64 * CHANNELS, 10)
    )


def plain(init: Callable[[Tensor], object] | None = None) -> Callable[[], nn.Module]:
    """Return a maker of plain convolutions with these initial weights, without bias if they are given."""

    def make() -> nn.Module:
        layer = nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1, padding_mode="circular", bias=init is None)
        if init is not None:
            init(layer.weight)
        return layer

    return make


NETWORKS: dict[str, tuple[Callable[[], nn.Module], Callable[[], nn.Module]]] = {
    "OrthoConv2d, MaxMin": (lambda: ts.OrthoConv2d(CHANNELS, CHANNELS, 3), ts.MaxMin),
    "nn.Conv2d, torch's start, ReLU": (plain(), nn.ReLU),
    "nn.Conv2d, He's start, ReLU": (
        plain(lambda weight: nn.init.kaiming_normal_(weight, nonlinearity="relu")),
        nn.ReLU,
    ),
    "nn.Conv2d, orthogonal start, MaxMin": (plain(ts.init.orthogonal_), ts.MaxMin),
}


def gradient_lengths(model: nn.Sequential, images: Tensor, labels: Tensor) -> list[float]:
    """Return the norm of the loss's gradient with respect to the input of each activation."""
    seen: list[Tensor] = []
    hooks = [
        module.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
        for module in model
        if isinstance(module, ts.MaxMin | nn.ReLU)
    ]
    loss = F.cross_entropy(model(images), labels)
    gradients = torch.autograd.grad(loss, seen)
    for hook in hooks:
        hook.remove()
    return [float(gradient.norm()) for gradient in gradients]


def batches(images: Tensor, labels: Tensor, steps: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield random batches."""
    for _ in range(steps):
        rows = torch.randint(len(images), (BATCH,))
        yield images[rows], labels[rows]


def train(model: nn.Sequential, data: dict[str, tuple[Tensor, Tensor]], steps: int) -> list[tuple[int, float]]:
    """Train by Adam, and return the accuracy on the test images by step; stop where the loss is no number."""
    # Small changes of all layers add up: the deeper the network, the smaller the steps.
    optimizer = torch.optim.Adam(model.parameters(), lr=0.3 / len(model))
    curve = []
    for step, (images, labels) in enumerate(batches(*data["train"], steps), start=1):
        optimizer.zero_grad()
        # All orthogonal kernels of the network are built as one job.
        with ts.built(model) if isinstance(model[1], ts.OrthoConv2d) else nullcontext():
            loss = F.cross_entropy(10 * model(images), labels)
            loss.backward()
        if not math.isfinite(float(loss.detach())):
            print(f"    the loss is {float(loss.detach())} at step {step}")
            break
        optimizer.step()
        if step % max(1, steps // 10) == 0:
            curve.append((step, accuracy(model, *data["test"])))
    return curve or [(0, accuracy(model, *data["test"]))]


@torch.no_grad()
def accuracy(model: nn.Sequential, images: Tensor, labels: Tensor) -> float:
    """Return the share of right answers."""
    right = (model.eval()(images).argmax(1) == labels).float().mean()
    model.train()
    return float(right)


def draw(gradients: dict[str, list[float]], curves: dict[str, list[tuple[int, float]]], path: Path) -> None:
    """Write the picture: gradients by layer at the start, accuracy by step."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.8), layout="constrained")
    for name, norms in gradients.items():
        left.semilogy(range(1, len(norms) + 1), [max(norm, 1e-30) for norm in norms], label=name)
    for name, curve in curves.items():
        right.plot(*zip(*curve, strict=True), marker=".", label=name)
    left.set(xlabel="layer", ylabel="norm of the gradient", title="at the start")
    right.set(xlabel="step", ylabel="accuracy on test images", ylim=(0, 1), title="while training")
    right.legend(fontsize=8, loc="center right")
    figure.savefig(path, dpi=150)
    plt.close(figure)


def main(argv: list[str] | None = None) -> dict[str, dict[str, float]]:
    """Measure, train, draw; return the figures by network."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="60 layers and 30 steps")
    parser.add_argument("--depth", type=int, help="layers; 100 unless given")
    parser.add_argument("--out", type=Path, default=Path(), help="folder of the picture")
    options = parser.parse_args(argv)
    depth, steps = options.depth or (60 if options.quick else 100), 30 if options.quick else 60
    data = {
        split: (images.images.float() / 16, images.labels)
        for split in ("train", "test")
        for images in [ts.data.load("digits", split)]
    }
    sample = data["train"][0][:64], data["train"][1][:64]
    gradients, curves, figures = {}, {}, {}
    print(f"{depth} layers, {steps} steps\n{'network':38s} gradient at the first over the last layer    accuracy")
    for name, parts in NETWORKS.items():
        torch.manual_seed(0)
        began, model = time.perf_counter(), network(depth, *parts)
        gradients[name] = gradient_lengths(model, *sample)
        curves[name] = train(model, data, steps)
        ratio = gradients[name][0] / gradients[name][-1] if gradients[name][-1] else math.nan
        figures[name] = {"ratio": ratio, "accuracy": curves[name][-1][1]}
        seconds = time.perf_counter() - began
        print(f"{name:38s} {ratio:44.2e} {figures[name]['accuracy']:11.1%}  ({seconds:.0f} s)", flush=True)
    draw(gradients, curves, options.out / "very_deep.png")
    return figures


if __name__ == "__main__":
    main()
