"""Sets of classes that hold the right one with a chosen probability, also of inputs that were moved by an attack.

Split conformal prediction: on ``n`` labelled samples that a model has not seen, the score of the right class is below
its ``k``-th smallest value there with probability at most ``k / (n + 1)`` for another sample of the same distribution,
whatever the model. So the set of all classes whose score reaches that value misses the right one with probability at
most ``α``, if ``k = ⌊α (n + 1)⌋``. This is exact for finite ``n``.

Under an attack the sample at hand is another one than was drawn, at most a radius away. A network with a known
Lipschitz constant bounds how far every score can have been moved down by that (Massena et al., 2025): the set of all
classes whose score can have reached the value within the radius keeps its coverage, and needs no noise and no second
pass. Scores come from float64, and what they may be off by is added on the safe side, as in ``certification``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from trysquare.naming import require_known, shown
from trysquare.nn.geometry import per_axis
from trysquare.nn.linalg.precision import own_tensors
from trysquare.verify.certification import (
    Data,
    ExactLogits,
    batches_of,
    checked_labels,
    checked_number,
    evaluating,
    norms_up,
    pairs,
    pairwise_distances,
    prepared,
)
from trysquare.verify.lipschitz.checks import require_plain_module

__all__ = ["ConformalPredictor", "calibrate", "coverage", "mean_size"]

_SCORES = ("logit", "softmax")
# Of the few operations between logits and scores, far more than they can round.
_ROUNDING = 1e-12


@dataclass(frozen=True, eq=False)
class ConformalPredictor:
    """A classifier with the threshold that ``calibrate`` found; ``sets`` predicts.

    Attributes:
        alpha: probability with which a set may miss the right class.
        threshold: score from which on a class is in the set.
        samples: number of labelled samples that the threshold is from.
        score: ``"logit"`` or ``"softmax"``.
        temperature: that softmax divides the logits by.
        logits: evaluates the model.
    """

    alpha: float
    threshold: float
    samples: int
    score: str
    temperature: float
    logits: ExactLogits

    @own_tensors()
    @torch.no_grad()
    def sets(self, images: Tensor, radius: float = 0.0) -> Tensor:
        """Return which classes are in the set of each image.

        If images are drawn as the calibration data was and then moved by at most ``radius`` (l2), however cleverly, the
        set holds the right class with probability at least ``1 - alpha``.

        Args:
            images: ``(batch, *shape)``, at least one. As in ``certify``, they are rounded to the dtype of the model,
                and the radius is about the rounded ones.
            radius: l2 distance by which they may have been moved; 0 for images as they were drawn.

        Returns:
            ``(batch, classes)``, boolean.

        Raises:
            NoRuleError: if the model is not the one that was calibrated any more.
            ValueError: if the images or the radius do not fit.
        """
        radius = checked_number("radius", radius)
        if radius == math.inf:
            raise ValueError("radius=inf must be finite: every class is possible at any distance")
        model, shape = self.logits.model, self.logits.shape
        assert shape is not None  # of the calibration data
        with evaluating(model):
            self.logits.refuse_changed()
            given = prepared(model, images, shape)
            if not len(given):
                raise ValueError("there are no images to predict sets for")
            values, errors = self.logits(given)
            self.logits.as_it_runs(given, values, errors)
        return _scores(values, errors, self, radius, 1) >= self.threshold


def _scores(logits: Tensor, errors: Tensor, about: ConformalPredictor, radius: float, side: int) -> Tensor:
    """Return scores ``(batch, classes)`` and what may be wrong with them: added if ``side`` is 1, subtracted if -1.

    At least the largest score within the radius with 1, at most that of the image itself with -1. A softmax score is
    the logarithm ``-log Σ_j exp((z_j - z_c) / T)``, in which only differences of logits occur.
    """
    head, constant = about.logits.found.head_weight, about.logits.found.features_bound
    off = side * errors.unsqueeze(1)
    if about.score == "logit":
        reach = norms_up(head.detach().cpu().double()) if head is not None else torch.ones(1, dtype=torch.float64)
        scores = logits + radius * constant * reach + off
    else:
        others = 1 - torch.eye(logits.shape[1], dtype=torch.float64)
        apart = pairwise_distances(head) if head is not None else math.sqrt(2) * others
        # z_j - z_c, at [sample, c, j]: it can have grown by as much as a pair of logits can be moved.
        differences = logits.unsqueeze(1) - logits.unsqueeze(2) - radius * constant * apart - off.unsqueeze(2) * others
        scores = -(differences / about.temperature).logsumexp(2)
    return scores + side * _ROUNDING * (1 + scores.abs())


@own_tensors()
@torch.no_grad()
def calibrate(
    model: nn.Module,
    data: Data,
    alpha: float = 0.1,
    *,
    score: str = "logit",
    temperature: float = 1.0,
    batch_size: int = 256,
) -> ConformalPredictor:
    """Find the score from which on a class belongs into a prediction set.

    Args:
        model: images to logits, with a Lipschitz bound; see ``trysquare.lipschitz_bound``.
        data: labelled samples that the model was not trained with, drawn as those that will be predicted: batches, a
            dataset, or a pair of tensors.
        alpha: probability with which a set may miss the right class.
        score: ``"logit"``, the logit of a class (a sigmoid of it at any temperature makes the same sets), or
            ``"softmax"``, its softmax probability.
        temperature: that softmax divides the logits by.
        batch_size: size of batches, for data that is not in batches already.

    Raises:
        NoRuleError: if the model has no Lipschitz bound.
        TypeError: if an argument is of another kind.
        ValueError: if there are too few samples for this ``alpha`` (at least ``1 / alpha - 1`` are needed), or an
            argument does not fit.

    >>> model = nn.Sequential(nn.Flatten(), OrthoLinear(64, 16), MaxMin(), OrthoLinear(16, 4))
    >>> known = torch.randn(99, 1, 8, 8), torch.arange(99) % 4
    >>> predictor = ts.conformal.calibrate(model, known, alpha=0.2)
    >>> predictor.sets(torch.randn(3, 1, 8, 8), radius=0.5).shape
    torch.Size([3, 4])
    """
    alpha, temperature = checked_number("alpha", alpha), checked_number("temperature", temperature)
    if not 0 < alpha < 1:
        raise ValueError(f"alpha={alpha} must be above 0 and below 1")
    if not 0 < temperature < math.inf:
        raise ValueError(f"temperature={temperature} must be above 0 and finite")
    require_known(score, _SCORES, "score")
    (batch_size,) = per_axis("batch_size", batch_size, 1)
    require_plain_module(model)
    batches, _ = batches_of(data, batch_size)
    logits, scores = ExactLogits(model), []
    with evaluating(model):
        for images, labels in pairs(batches):
            given = prepared(model, images, logits.shape or tuple(images.shape[1:]))
            if not len(given):
                continue
            values, errors = logits(given)
            logits.as_it_runs(given, values, errors)
            classes = checked_labels(labels, values)
            about = ConformalPredictor(alpha, 0.0, 0, score, temperature, logits)
            scores.append(_scores(values, errors, about, 0.0, -1).gather(1, classes.unsqueeze(1)).squeeze(1))
    samples = sum(map(len, scores))
    rank = math.floor(alpha * (samples + 1) * (1 + 1e-12))
    if not rank:
        raise ValueError(
            f"{samples} samples are too few for alpha={shown(alpha)}: no set but that of all classes has this "
            f"coverage; calibrate with at least {math.ceil(1 / alpha) - 1} samples"
        )
    threshold = float(torch.cat(scores).kthvalue(rank).values)
    return ConformalPredictor(alpha, threshold, samples, score, temperature, logits)


def coverage(sets: Tensor, labels: Tensor) -> float:
    """Return the share of samples whose right class is in their set.

    >>> coverage(torch.tensor([[True, False], [True, True]]), torch.tensor([1, 1]))
    0.5
    """
    return float(_checked_sets(sets).gather(1, checked_labels(labels, sets.double()).unsqueeze(1)).double().mean())


def mean_size(sets: Tensor) -> float:
    """Return the mean number of classes in a set.

    >>> mean_size(torch.tensor([[True, False], [True, True]]))
    1.5
    """
    return float(_checked_sets(sets).sum(1).double().mean())


def _checked_sets(sets: Tensor) -> Tensor:
    if not isinstance(sets, Tensor) or sets.dtype != torch.bool or sets.ndim != 2 or not len(sets):
        kind = f"{tuple(sets.shape)} of {sets.dtype}" if isinstance(sets, Tensor) else type(sets).__name__
        raise TypeError(f"sets must be (samples, classes) of booleans, at least one sample, not {kind}")
    return sets.cpu()
