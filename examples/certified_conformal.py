"""Sets of classes that hold the right one nine times out of ten, also under an attack.

python examples/certified_conformal.py [--quick] [--run FOLDER] [--data FOLDER] [--out FOLDER]

Trains a 1-Lipschitz network on the digits that come with the package (or takes one that ``trysquare train`` made, with
the folder of its data), calibrates on images that it was not trained with, and predicts sets of classes for the rest:
as they are, and moved by an attack that pushes the right class out. Plain conformal prediction promises its coverage
only without the attack. The robust sets add the classes that the network's Lipschitz constant cannot exclude, for no
more than one forward pass. A plain network of similar size shows what an attack does without a constant. Takes about
a minute on two cores.
"""

import argparse
import tempfile
from pathlib import Path

import matplotlib as mpl
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import trysquare as ts

mpl.use("agg")
from matplotlib import pyplot as plt

STEPS = 20


def attacked(model: nn.Module, images: Tensor, labels: Tensor, radius: float) -> Tensor:
    """Return images that are moved by at most ``radius`` so that the right class has a small logit."""
    moved = images.clone()
    for step in range(STEPS if radius else 0):
        moved.requires_grad_()
        (gradient,) = torch.autograd.grad(model(moved).gather(1, labels[:, None]).sum(), moved)
        length = 2 * radius / (1 + step)
        with torch.no_grad():
            away = moved - length * F.normalize(gradient.flatten(1)).view_as(images) - images
            norms = away.flatten(1).norm(dim=1).clamp_min(1e-12).view(-1, *(1,) * (images.ndim - 1))
            # A hair inside, so that rounding does not lead out of the ball.
            moved = images + away * (radius * (1 - 1e-6) / norms).clamp_max(1.0)
    return moved.detach()


def trained(quick: bool) -> nn.Module:
    """Return a network for the digits, trained in seconds."""
    changes = {"train.epochs": 10 if quick else 60, "data.validation": 300, "evaluate.every": 100}
    with tempfile.TemporaryDirectory() as folder:
        return ts.training.train(ts.training.read_recipe("digits", changes), Path(folder) / "run", quiet=True).model()


def plain_twin(images: Tensor, labels: Tensor, epochs: int) -> nn.Module:
    """Return a network of plain layers, trained by cross-entropy."""
    torch.manual_seed(0)
    layers = [nn.Conv2d(images.shape[1], 16, 2, 2), nn.ReLU(), nn.Flatten(), nn.LazyLinear(128), nn.ReLU()]
    model = nn.Sequential(*layers, nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10))
    model(images[:1])
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    for _ in range(epochs):
        for rows in torch.randperm(len(images)).split(128):
            optimizer.zero_grad()
            F.cross_entropy(model(images[rows]), labels[rows]).backward()
            optimizer.step()
    return model.eval()


def tensors(images: ts.data.Images) -> tuple[Tensor, Tensor]:
    """Return all images and labels of a data set."""
    pairs = list(ts.data.Loader(images, 500).epoch(0))
    return torch.cat([x for x, _ in pairs]), torch.cat([y for _, y in pairs])


def main(argv: list[str] | None = None) -> dict[float, dict[str, float]]:
    """Calibrate, attack, predict, draw; return the figures by radius."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="train for fewer epochs")
    parser.add_argument("--run", type=Path, help="folder that trysquare train wrote; digits are trained unless given")
    parser.add_argument("--data", type=Path, help="folder of the data that the run was trained with")
    parser.add_argument("--alpha", type=float, default=0.1, help="probability of missing the right class")
    parser.add_argument("--out", type=Path, default=Path(), help="folder of the picture")
    options = parser.parse_args(argv)
    run = None if options.run is None else ts.training.load_run(options.run)
    name, root = ("digits", None) if run is None else (run.recipe.data.name, options.data or run.recipe.data.root)
    model = (trained(options.quick) if run is None else run.model()).eval()
    images, labels = tensors(ts.data.load(name, root, "test"))
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    known, fresh = order[: len(order) // 2], order[len(order) // 2 :]
    predictor = ts.conformal.calibrate(model, (images[known], labels[known]), options.alpha)
    radii = [0.0, 0.03, 36 / 255, 0.25, 0.5] if name == "digits" else [0.0, 0.03, 36 / 255, 72 / 255, 108 / 255]
    x, y = images[fresh], labels[fresh]
    plain = None
    if name == "digits":
        plain = plain_twin(*tensors(ts.data.load(name, split="train")), epochs=10 if options.quick else 40)
        with torch.no_grad():
            right = plain(images[known]).gather(1, labels[known, None])[:, 0]
        threshold = right.kthvalue(int(options.alpha * (len(known) + 1))).values
    print(
        f"{name}: {len(known)} images to calibrate with, {len(fresh)} to predict; promised coverage "
        f"{1 - options.alpha:.0%}\n{'':16}{'coverage under attack':>48}{'mean size of the sets':>32}\n"
        + "".join(f"{title:>16}" for title in ("radius", "plain network", *["1-Lipschitz", "robust sets"] * 2))
    )
    figures = {}
    for radius in radii:
        moved = attacked(model, x, y, radius)
        usual, robust = predictor.sets(moved), predictor.sets(moved, radius)
        row = {
            "usual": ts.conformal.coverage(usual, y), "robust": ts.conformal.coverage(robust, y),
            "usual size": ts.conformal.mean_size(usual), "robust size": ts.conformal.mean_size(robust),
        }  # fmt: skip
        if plain is not None:
            logits = plain(attacked(plain, x, y, radius)).detach()
            row["plain"] = ts.conformal.coverage(logits >= threshold, y)
        figures[radius] = row
        shown = f"{row['plain']:16.1%}" if plain is not None else f"{'':16}"
        shown += f"{row['usual']:16.1%}{row['robust']:16.1%}{row['usual size']:16.2f}{row['robust size']:16.2f}"
        print(f"{radius:16.3f}{shown}")
    draw(figures, 1 - options.alpha, options.out / "certified_conformal.png")
    return figures


def draw(figures: dict[float, dict[str, float]], promised: float, path: Path) -> None:
    """Write the picture: coverage under attack and size of the sets by radius."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.6), layout="constrained")
    radii = list(figures)
    for name, key in (("plain network", "plain"), ("1-Lipschitz, usual sets", "usual"), ("robust sets", "robust")):
        if key in figures[radii[0]]:
            left.plot(radii, [figures[radius][key] for radius in radii], marker="o", label=name)
    left.axhline(promised, color="gray", linestyle=":", label="promised")
    left.set(xlabel="radius of the attack", ylabel="coverage", ylim=(0, 1.02))
    left.legend()
    right.plot(radii, [figures[radius]["usual size"] for radius in radii], marker="o", color="C1", label="usual sets")
    right.plot(radii, [figures[radius]["robust size"] for radius in radii], marker="o", color="C2", label="robust sets")
    right.set(xlabel="radius of the attack", ylabel="mean size of the sets", ylim=(0, None))
    right.legend()
    figure.savefig(path, dpi=150)
    plt.close(figure)


if __name__ == "__main__":
    main()
