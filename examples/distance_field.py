"""The signed distance of a shape, learned from which points are inside, and safe to march along.

python examples/distance_field.py [--quick] [--out FOLDER]

A 1-Lipschitz function cannot grow faster than the distance to where it is zero, so it never overestimates that: a ray
that steps by its value cannot jump through the surface (sphere tracing), whatever was learned. The hinge-KR loss makes
such a function as large as it can be outside of a shape, and as small as it can be inside, which is the signed distance
(Bethune et al., 2023). No distance is shown to the network, only which points are inside. The plain network beside it
is shown true distances, and its rays still cross the surface. Takes about a minute on two cores.
"""

import argparse
import math
import time
from pathlib import Path

import matplotlib as mpl
import torch
from torch import Tensor, nn

import trysquare as ts

mpl.use("agg")
from matplotlib import pyplot as plt

WIDTH, DEPTH, BATCH = 128, 5, 1024
MARGIN, WEIGHT = 0.01, 50.0
# A try square: a thick blade at a right angle to a thin one, turned a little.
CORNERS = torch.tensor([[-0.6, -0.6], [0.55, -0.6], [0.55, -0.25], [-0.35, -0.25], [-0.35, 0.65], [-0.6, 0.65]])
TURN = 0.3


def true_distance(points: Tensor) -> Tensor:
    """Return the signed distance to the polygon: negative inside."""
    turn = torch.tensor([[math.cos(TURN), math.sin(TURN)], [-math.sin(TURN), math.cos(TURN)]])
    a = (CORNERS @ turn).to(points)
    b = a.roll(-1, 0)
    edge, to = b - a, points[:, None] - a
    along = ((to * edge).sum(-1) / edge.square().sum(-1)).clamp(0, 1)
    distance = (to - along[..., None] * edge).norm(dim=-1).amin(1)
    x, y = points.T[:, :, None]
    spans = (a[:, 1] > y) != (b[:, 1] > y)
    crosses = spans & (x < a[:, 0] + (y - a[:, 1]) * edge[:, 0] / torch.where(edge[:, 1] == 0, 1.0, edge[:, 1]))
    return torch.where(crosses.sum(1) % 2 == 1, -distance, distance)


def orthogonal() -> nn.Sequential:
    """Return a network of constant 1."""
    layers: list[nn.Module] = [ts.OrthoLinear(2, WIDTH), ts.MaxMin()]
    for _ in range(DEPTH - 1):
        layers += [ts.OrthoLinear(WIDTH, WIDTH), ts.MaxMin()]
    return nn.Sequential(*layers, ts.OrthoLinear(WIDTH, 1))


def plain() -> nn.Sequential:
    """Return a network of the same size, without a constant."""
    layers: list[nn.Module] = [nn.Linear(2, WIDTH), nn.ReLU()]
    for _ in range(DEPTH - 1):
        layers += [nn.Linear(WIDTH, WIDTH), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(WIDTH, 1))


def train(model: nn.Module, steps: int, knows_distances: bool) -> nn.Module:
    """Train by the hinge-KR loss on which points are inside, or by squares of errors of the distance."""
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3 if not knows_distances else 1e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, optimizer.param_groups[0]["lr"], total_steps=steps)
    for _ in range(steps):
        # Half of the points near the surface, where the hinge matters.
        points = 2 * torch.rand(4 * BATCH, 2) - 1
        distance = true_distance(points)
        near = distance.abs().topk(BATCH // 2, largest=False).indices
        chosen = torch.cat([near, torch.randint(len(points), (BATCH // 2,))])
        points, distance = points[chosen], distance[chosen]
        found = model(points).squeeze(1)
        if knows_distances:
            loss = (found - distance).square().mean()
        else:
            signed = found * distance.sign()
            loss = WEIGHT * (MARGIN - signed).relu().mean() - signed.mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    return model.eval()


@torch.no_grad()
def crossed(model: nn.Module, rays: int = 2000, most: int = 60) -> tuple[float, float]:
    """March rays from the corners' side inwards by the values of a model.

    Returns:
        The share that jumped over the surface of the model: was outside of it before a step, and met a point inside of
        it on the way. And the mean number of steps until a ray stopped at the surface or left the square.
    """
    made = torch.Generator().manual_seed(0)
    angle = 2 * math.pi * torch.rand(rays, generator=made)
    start = 1.2 * torch.stack([angle.cos(), angle.sin()], 1)
    aim = torch.rand(rays, 2, generator=made) - 0.5 - start
    direction = aim / aim.norm(dim=1, keepdim=True)
    moving, jumped, steps = torch.ones(rays, dtype=torch.bool), torch.zeros(rays, dtype=torch.bool), 0.0
    for _ in range(most):
        value = model(start).squeeze(1)
        moving &= (value > 1e-3) & (start.norm(dim=1) < 1.5)
        steps += float(moving.double().mean())
        for part in torch.linspace(0.1, 1.0, 10):
            jumped |= moving & (model(start + part * value[:, None] * direction).squeeze(1) < -1e-4)
        start = torch.where(moving[:, None], start + value[:, None] * direction, start)
    return float(jumped.double().mean()), steps


def main(argv: list[str] | None = None) -> dict[str, dict[str, float]]:
    """Train both, measure on a grid, march rays, draw; return the figures by network."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="300 steps in place of 3000")
    parser.add_argument("--out", type=Path, default=Path(), help="folder of the picture")
    options = parser.parse_args(argv)
    steps = 300 if options.quick else 3000
    side = torch.linspace(-1, 1, 301)
    grid = torch.stack(torch.meshgrid(side, side, indexing="xy"), -1).view(-1, 2)
    truth, fields, figures = true_distance(grid), {}, {}
    print(f"{'network':32}{'mean error':>12}{'overestimate':>14}{'rays that jump':>16}{'steps':>8}{'slope':>8}")
    for name, make, knows in (
        ("1-Lipschitz, inside or outside", orthogonal, False),
        ("plain, true distances", plain, True),
    ):
        torch.manual_seed(0)
        began, model = time.perf_counter(), train(make(), steps, knows)
        with torch.no_grad():
            field = model(grid).squeeze(1)
        fields[name] = field.view(301, 301)
        jumps, marched = crossed(model)
        # Over the distance to the surface of the network itself: points of the grid beside a change of sign.
        signs = fields[name] > 0
        surface = grid[(signs != signs.roll(1, 0)).flatten() | (signs != signs.roll(1, 1)).flatten()]
        nearest = torch.cat([torch.cdist(part, surface).amin(1) for part in grid.split(5000)])
        figures[name] = {
            "error": float((field - truth).abs().mean()),
            "overestimate": float((field.abs() - nearest - 2 / 300).max().clamp_min(0)),
            "jumps": jumps, "steps": marched, "bound": ts.lipschitz_bound(model, (2,)),
            "slope": ts.lipschitz_lower_bound(model, grid[:: len(grid) // 2000]),
        }  # fmt: skip
        row = figures[name]
        print(
            f"{name:32}{row['error']:12.4f}{row['overestimate']:14.4f}{row['jumps']:16.1%}{row['steps']:8.1f}"
            f"{row['slope']:8.3f}  ({time.perf_counter() - began:.0f} s)"
        )
    draw({"true distance": truth.view(301, 301), **fields}, options.out / "distance_field.png")
    return figures


def draw(fields: dict[str, Tensor], path: Path) -> None:
    """Write the picture: level lines a tenth apart, the surface in black."""
    figure, places = plt.subplots(1, len(fields), figsize=(4 * len(fields), 4), layout="constrained")
    for place, (name, field) in zip(places, fields.items(), strict=True):
        place.contourf(field, levels=[level / 10 for level in range(-4, 15)], cmap="RdBu", extent=(-1, 1, -1, 1))
        place.contour(field, levels=[0], colors="black", extent=(-1, 1, -1, 1))
        place.set(title=name, aspect="equal", xticks=[], yticks=[])
    figure.savefig(path, dpi=150)
    plt.close(figure)


if __name__ == "__main__":
    main()
