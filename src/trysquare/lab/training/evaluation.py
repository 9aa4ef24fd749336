"""Loss, accuracy and certified accuracy on the test images, while training."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from trysquare.lab.training.build import Parts, takes_head
from trysquare.verify.certification import certified_radius, evaluating
from trysquare.verify.lipschitz import analyse


@dataclass(frozen=True)
class Evaluation:
    """What was measured; certified accuracy by radius."""

    loss: float
    accuracy: float
    certified: dict[str, float]


def radius_key(epsilon: float) -> str:
    """A radius as the key of a JSON object.

    >>> from trysquare.lab.training.evaluation import radius_key
    >>> radius_key(36 / 255), radius_key(1.0)
    ('0.141176', '1')
    """
    return f"{epsilon:.6g}"


@torch.no_grad()
def evaluate(parts: Parts) -> Evaluation:
    """Evaluate the weights as they are now, on the shares of all processes.

    Certified accuracies use the Lipschitz bound of these weights. They leave out what ``ts.certify`` does on top: it
    takes off the error of evaluation, which is about 1e-6.
    """
    model, epsilons = parts.model, parts.recipe.evaluate.epsilons
    counts = torch.zeros(3 + len(epsilons), dtype=torch.float64)
    with evaluating(model):
        found = analyse(model, parts.input_shape, compare=False)
        options = {"head": model.head.weight} if takes_head(parts.loss) else {}
        for images, labels in parts.test.epoch(0):
            if len(labels):
                logits = model(images)
                loss = float(parts.loss(logits, labels, **options)) * len(labels)
                radii = certified_radius(logits, labels, found.features_bound, found.head_weight)
                right = int((logits.argmax(1) == labels).sum())
                counts += torch.tensor([loss, right, len(labels), *(int((radii > e).sum()) for e in epsilons)])
    loss, right, count, *certified = parts.world.total(counts.to(parts.world.device)).tolist()
    return Evaluation(
        loss / count,
        right / count,
        {radius_key(epsilon): number / count for epsilon, number in zip(epsilons, certified, strict=True)},
    )
