"""A training step and an evaluation, as calls to time."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def images(batch: int, size: int, classes: int = 10) -> tuple[Tensor, Tensor]:
    """Random images and labels."""
    return torch.randn(batch, 3, size, size), torch.randint(classes, (batch,))


def train_step(model: nn.Module, x: Tensor, labels: Tensor) -> Callable[[], None]:
    """Forward, backward, and a step of SGD, whose rate is too small to change what is measured."""
    optimizer = torch.optim.SGD(model.train().parameters(), lr=1e-6)

    def step() -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(x), labels).backward()
        optimizer.step()

    return step


def evaluation(model: nn.Module, x: Tensor) -> Callable[[], None]:
    """Forward in eval mode without gradients."""
    model.eval()

    def evaluate() -> None:
        with torch.no_grad():
            model(x)

    return evaluate
