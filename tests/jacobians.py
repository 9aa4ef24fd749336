"""The oracle for nonlinear layers: float64 Jacobians by autograd, and ratios of distances, which need no derivative."""

import copy

import torch
from torch import Tensor, nn


def exact(layer: nn.Module) -> nn.Module:
    """A float64 copy in eval mode, with nothing to train."""
    return copy.deepcopy(layer).double().eval().requires_grad_(False)


def jacobian(layer: nn.Module, x: Tensor) -> Tensor:
    """Matrix of the derivative of ``layer`` at one input without batch axis."""

    def flat(point):
        return layer(point.view(1, *x.shape)).flatten()

    return torch.autograd.functional.jacobian(flat, x.double().flatten())


def norms(layer: nn.Module, x: Tensor) -> tuple[float, float]:
    """Smallest and largest singular value of the Jacobian."""
    values = torch.linalg.svdvals(jacobian(layer, x))
    return float(values[-1]), float(values[0])


def points(shape: tuple[int, ...]) -> list[Tensor]:
    """Random points of several sizes, and the places where kinks meet: 0, constants, ties."""
    random = [scale * torch.randn(shape, dtype=torch.float64) for scale in (1e-3, 1.0, 30.0)]
    ties = torch.randint(-1, 2, shape).double()
    return [*random, torch.zeros(shape, dtype=torch.float64), torch.ones(shape, dtype=torch.float64), ties]


def largest_ratio(layer: nn.Module, shape: tuple[int, ...], pairs: int = 200) -> float:
    """Largest ``‖f(x) - f(y)‖ / ‖x - y‖`` over pairs near and far."""
    x = torch.randn(pairs, *shape, dtype=torch.float64)
    step = torch.randn(pairs, *shape, dtype=torch.float64) * torch.logspace(-3, 1, pairs).view(-1, *(1,) * len(shape))
    out = (layer(x + step.double()) - layer(x)).flatten(1).norm(dim=1)
    return float((out / step.flatten(1).norm(dim=1)).max())


def assert_one_lipschitz(layer: nn.Module, shape: tuple[int, ...], tolerance: float = 1e-9) -> float:
    """Check that a layer never amplifies, and return the largest factor seen."""
    layer = exact(layer)
    largest = max(norms(layer, x)[1] for x in points(shape))
    assert largest <= 1 + tolerance, largest
    ratio = largest_ratio(layer, shape)
    assert ratio <= 1 + tolerance, ratio
    return max(largest, ratio)


def assert_isometric(layer: nn.Module, shape: tuple[int, ...], tolerance: float = 1e-9) -> None:
    """Check that every singular value of the Jacobian is 1, also where kinks meet."""
    layer = exact(layer)
    for x in points(shape):
        low, high = norms(layer, x)
        assert abs(low - 1) <= tolerance, low
        assert abs(high - 1) <= tolerance, high


@torch.no_grad()
def randomise(layer: nn.Module, size: float = 1.0) -> nn.Module:
    """Move every parameter far from its start, as training may."""
    for parameter in layer.parameters():
        parameter.add_(size * torch.randn_like(parameter))
    return layer


def train(layer: nn.Module, shape: tuple[int, ...], steps: int = 5, lr: float = 0.1) -> nn.Module:
    """A few steps of Adam that push the outputs away from each other."""
    optimizer = torch.optim.Adam(layer.parameters(), lr)
    layer.train()
    x = torch.randn(4, *shape)
    target = torch.randn_like(layer(x).detach())
    for _ in range(steps):
        optimizer.zero_grad()
        (layer(x) - 3 * target).square().mean().backward()
        optimizer.step()
    return layer
