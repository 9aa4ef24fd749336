"""Gradients of one batch, with every weight built once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parametrize

from trysquare.lab.models import Classifier
from trysquare.lab.training.build import takes_head
from trysquare.nn.layers.base import ParametrizedWeight
from trysquare.nn.losses import Loss


class Gradients:
    """Computes the gradients of a batch, in parts if it does not fit into memory.

    Weights are built once, and their gradients are taken back to the free tensors once: the parts add up at the built
    weights. They are read in ``parametrize.cached()``, so a loss that wants the head's weight gets the same one.

    Args:
        model: the classifier, which may be wrapped for distribution.
        loss: of logits and labels.
        parts: in which a batch is computed.
        precision: ``"bfloat16"`` computes everything but weights and loss in it.
    """

    def __init__(self, model: nn.Module, loss: Loss, parts: int = 1, precision: str = "float32") -> None:
        self.model, self.loss, self.parts = model, loss, parts
        self.classifier: Classifier = model.module if isinstance(model, DistributedDataParallel) else model  # type: ignore[assignment]
        self.low_precision = precision == "bfloat16"
        self.takes_head = takes_head(loss)

    def __call__(self, images: Tensor, labels: Tensor) -> Tensor:
        """Add the gradients of the mean loss to the parameters.

        Returns:
            The sum of the losses, the number of right answers and that of images, ``(3,)``.
        """
        with parametrize.cached():
            if self.parts == 1:
                loss, right = self._forward(images, labels)
                loss.backward()
                return torch.stack([loss.detach() * len(labels), right, loss.new_tensor(len(labels))])
            return self._in_parts(images, labels)

    def _in_parts(self, images: Tensor, labels: Tensor) -> Tensor:
        weights = list(_built_weights(self.classifier))
        sums, counts = [torch.zeros_like(weight) for weight in weights], torch.zeros(3, device=images.device)
        batches = list(zip(images.chunk(self.parts), labels.chunk(self.parts), strict=True))
        for number, (part, classes) in enumerate(batches):
            with self._synchronized(last=number == len(batches) - 1):
                loss, right = self._forward(part, classes)
            share = loss * (len(classes) / len(labels))
            for total, gradient in zip(sums, torch.autograd.grad(share, weights, materialize_grads=True), strict=True):
                total.add_(gradient)
            counts += torch.stack([loss.detach() * len(classes), right, loss.new_tensor(len(classes))])
        torch.autograd.backward(weights, sums)
        return counts

    def _synchronized(self, last: bool) -> AbstractContextManager[Any]:
        """Processes exchange gradients once, after the last part."""
        if isinstance(self.model, DistributedDataParallel) and not last:
            return self.model.no_sync()
        return nullcontext()

    def _forward(self, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Mean loss, and number of right answers."""
        with torch.autocast(images.device.type, torch.bfloat16, enabled=self.low_precision):
            logits = self.model(images)
        options = {"head": self.classifier.head.weight} if self.takes_head else {}
        return self.loss(logits, labels, **options), (logits.detach().argmax(1) == labels).sum().float()


def _built_weights(model: nn.Module) -> Iterator[Tensor]:
    """Tensors that the layers compute with: parametrized ones built, the others as they are."""
    for module in model.modules():
        if parametrize.is_parametrized(module):
            names: Any = module.parametrizations
            for name in names:
                ours = name == "weight" and isinstance(module, ParametrizedWeight)
                yield from module._computes_with() if ours else [getattr(module, name)]  # type: ignore[operator]
        if not isinstance(module, parametrize.ParametrizationList):
            yield from (parameter for parameter in module.parameters(recurse=False) if parameter.requires_grad)
