"""Losses for classifiers with a known Lipschitz constant, and a check that the last layer is what a loss is for.

All of them take logits ``(batch, classes)`` of any floating point type and labels ``(batch,)``, compute in float32 or
better, and are finite for logits up to 1e30. Notation: ``z`` the logits, ``y`` the label, ``m`` a margin.
"""

from __future__ import annotations

import inspect
import math
import sys
import warnings
from abc import abstractmethod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trysquare.naming import pick, require_known, shown
from trysquare.nn.linalg.precision import at_least_float32, full_precision

_REDUCTIONS = ("mean", "sum", "none")
_SQRT2 = math.sqrt(2)
# Size of the logits below which the cosine loss is linear.
_FLAT = 1e-4
# Of weights in float32 and half precision, which nobody needs to be warned of.
_ROUNDED = 1e-2


def margin_for_radius(radius: float, lipschitz: float = 1.0, scale: float = 1.0) -> float:
    """Return the difference of logits that certifies an l2 radius: ``√2 · radius · lipschitz / scale``.

    A network of constant ``L`` behind a division of the pixels by ``α`` is ``L/α``-Lipschitz in the pixels, so the
    difference ``m`` of two of its logits is certified up to ``ε = m α / (√2 L)``. The paper prints ``m = ε√2 / (αL)``;
    the two agree for its 1-Lipschitz networks, but for ``L ≠ 1`` that formula has ``L`` on the wrong side: a network
    that amplifies more needs a larger margin.

    Args:
        radius: wanted radius ``ε``, in the units of the pixels before scaling.
        lipschitz: Lipschitz constant ``L`` from the scaled data to all logits.
        scale: number ``α`` that the pixels are divided by in front (their standard deviation); the smallest if
            channels have different ones.

    Raises:
        ValueError: if an argument is negative or not finite, ``scale`` is 0, or the margin is not finite.

    >>> round(margin_for_radius(1.5), 4)  # the paper's robust networks
    2.1213
    """
    _check_number("radius", radius)
    _check_number("lipschitz", lipschitz)
    _check_number("scale", scale, positive=True)
    margin = _SQRT2 * radius * lipschitz / scale
    if not math.isfinite(margin):
        raise ValueError(
            f"radius={radius}, lipschitz={lipschitz} and scale={scale} need a margin beyond all floats: take a smaller "
            "radius"
        )
    return margin


def _check_number(name: str, value: float, *, positive: bool = False, most: float = math.inf) -> None:
    """Refuse what is not a finite number, or out of range."""
    # An integer may be beyond all floats.
    number = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max
    if not number or value < 0 or (positive and value == 0) or value > most:
        lowest = "positive" if positive else "at least 0"
        raise ValueError(
            f"{name}={shown(value)} must be a finite number, {lowest}" + f" and at most {most}" * (most < 1e9)
        )


class Loss(nn.Module):
    """What all losses of logits and labels share.

    Args:
        reduction: ``"mean"``, ``"sum"`` or ``"none"`` over the batch.
    """

    def __init__(self, *, reduction: str = "mean") -> None:
        super().__init__()
        if reduction not in _REDUCTIONS:
            raise ValueError(f"reduction={shown(reduction)} must be one of {', '.join(map(repr, _REDUCTIONS))}")
        self.reduction = reduction

    def forward(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the loss.

        Args:
            logits: ``(batch, classes)``.
            labels: ``(batch,)``, integers below ``classes``.

        Raises:
            ValueError: if the shapes or types are others.
        """
        check_batch(logits, labels)
        with full_precision(logits):
            return self._reduced(self.per_sample(_widened(logits), labels.long()))

    @abstractmethod
    def per_sample(self, logits: Tensor, labels: Tensor) -> Tensor:
        """``(batch,)``, of logits in float32 or float64."""

    def _reduced(self, values: Tensor) -> Tensor:
        if self.reduction == "none":
            return values
        return values.mean() if self.reduction == "mean" else values.sum()

    def extra_repr(self) -> str:
        numbers = {name: value for name, value in vars(self).items() if type(value) in (int, float)}
        return ", ".join(f"{name}={value:g}" for name, value in numbers.items() if not name.startswith("_"))


def _widened(logits: Tensor) -> Tensor:
    return logits.to(at_least_float32(logits.dtype))


def check_batch(logits: Tensor, labels: Tensor) -> None:
    """Refuse what are not logits and labels.

    Raises:
        TypeError: if they are no tensors.
        ValueError: if shapes or types do not fit.
    """
    for name, value in (("logits", logits), ("labels", labels)):
        if not isinstance(value, Tensor):
            raise TypeError(f"{name} must be a tensor, not {type(value).__name__}")
        if value.is_nested or value.layout != torch.strided:
            raise ValueError(f"{name} must be a dense tensor, not a nested or sparse one")
    if not logits.is_floating_point() or logits.ndim != 2 or logits.shape[1] < 2:
        raise ValueError(
            f"logits of shape {tuple(logits.shape)} and {logits.dtype} must be floating point, (batch, classes) with "
            "at least 2 classes"
        )
    _check_labels(logits, labels)


def _check_labels(logits: Tensor, labels: Tensor) -> None:
    integers = not (labels.is_floating_point() or labels.is_complex())
    if labels.shape != logits.shape[:1] or not integers or labels.dtype == torch.bool:
        raise ValueError(
            f"labels of shape {tuple(labels.shape)} and {labels.dtype} must be integers, one for each of the "
            f"{logits.shape[0]} rows of logits"
        )


def _true(logits: Tensor, labels: Tensor) -> Tensor:
    """``z_y``, as a column."""
    return logits.gather(1, labels.unsqueeze(1))


def _is_true(logits: Tensor, labels: Tensor) -> Tensor:
    """Return a mask of the entries of the logits that belong to the labels."""
    return torch.zeros_like(logits, dtype=torch.bool).scatter(1, labels.unsqueeze(1), True)


def _pair_constants(labels: Tensor, logits: Tensor, head: Tensor | None) -> Tensor:
    """Return the constants ``(batch, classes)`` of ``z_y - z_j`` for 1-Lipschitz features; 0 for ``j = y``."""
    if head is None:
        return torch.where(_is_true(logits, labels), 0.0, _SQRT2).to(logits)
    rows = _widened(head)
    distinct, places = labels.unique(return_inverse=True)
    # Made by a matrix product if there are many, which leaves a little where a row meets itself.
    return torch.where(_is_true(logits, labels), 0.0, torch.cdist(rows[distinct], rows)[places].to(logits))


class OffsetCrossEntropy(Loss):
    """Cross-entropy with a margin and a temperature: ``τ · CE((z - m e_y) / τ, y)`` (Prach & Lampert, 2022).

    The true logit has to win by ``m`` before the loss gets small; ``τ`` says how sharply. The value is between
    ``max(0, m - margin)`` and that plus ``τ log classes``. Defaults: the robust networks of the AOC paper.

    Args:
        margin: ``m``; ``margin_for_radius`` gives the one for a wanted radius.
        temperature: ``τ``.
        smoothing: share of the target that is spread over all classes (label smoothing), which keeps samples that
            have their margin from growing it without end.
        reduction: over the batch.

    >>> loss = ts.losses.OffsetCrossEntropy(margin=1.0, temperature=0.125)
    >>> round(float(loss(torch.tensor([[3.0, 0.0]]), torch.tensor([0]))), 6)
    0.0
    """

    def __init__(
        self,
        margin: float = 1.5 * _SQRT2,
        temperature: float = 0.125,
        smoothing: float = 0.0,
        *,
        reduction: str = "mean",
    ) -> None:
        super().__init__(reduction=reduction)
        _check_number("margin", margin)
        _check_number("temperature", temperature, positive=True)
        _check_number("smoothing", smoothing, most=1.0)
        self.margin, self.temperature, self.smoothing = margin, temperature, smoothing

    def per_sample(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the loss of each sample."""
        return self.temperature * _offset_cross_entropy(logits, labels, self.margin, self.temperature, self.smoothing)


def _offset_cross_entropy(
    logits: Tensor, labels: Tensor, margin: float, temperature: float, smoothing: float = 0.0
) -> Tensor:
    offset = logits - margin * _is_true(logits, labels).to(logits)
    return F.cross_entropy(offset / temperature, labels, reduction="none", label_smoothing=smoothing)


class CategoricalHinge(Loss):
    """``max(0, m - (z_y - max_j z_j))`` over ``j ≠ y``: no more is asked for than the margin.

    Args:
        margin: ``m``; ``margin_for_radius`` gives the one for a wanted radius.
        reduction: over the batch.

    >>> loss = ts.losses.CategoricalHinge(margin=1.0)
    >>> float(loss(torch.tensor([[3.0, 2.5]]), torch.tensor([0])))
    0.5
    """

    def __init__(self, margin: float = 1.5 * _SQRT2, *, reduction: str = "mean") -> None:
        super().__init__(reduction=reduction)
        _check_number("margin", margin)
        self.margin = margin

    def per_sample(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the loss of each sample."""
        others = logits.masked_fill(_is_true(logits, labels), -math.inf).amax(1)
        return F.relu(self.margin - (_true(logits, labels).squeeze(1) - others))


class CosineLoss(Loss):
    """``1 - cos(z, e_y) = 1 - z_y / |z|``: for accuracy, since the scale of the logits does not matter.

    The loss of the accurate networks of the AOC paper (which omits the constant 1). Its slope is ``1 / |z|``, so for
    logits below 1e-4 it is ``1 - z_y / 1e-4``, in which half precision does not overflow.

    >>> ts.losses.CosineLoss()(torch.tensor([[2.0, 0.0], [0.0, 5.0]]), torch.tensor([0, 0]))
    tensor(0.5000)
    """

    def per_sample(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the loss of each sample."""
        # No scale changes the cosine, so none has to be differentiated: squares neither overflow nor vanish.
        unit = logits / logits.detach().abs().amax(1, keepdim=True).clamp_min(_FLAT)
        norms = unit.square().sum(1).clamp_min(1.0).sqrt()
        return 1 - _true(unit, labels).squeeze(1) / norms


class _HKR(Loss):
    """What the variants of the hinge-Kantorovich-Rubinstein loss share."""

    def __init__(self, alpha: float = 0.9, min_margin: float = 1.0, *, reduction: str = "mean") -> None:
        super().__init__(reduction=reduction)
        _check_number("alpha", alpha, most=1.0)
        _check_number("min_margin", min_margin, positive=True)
        self.alpha, self.min_margin = alpha, min_margin

    def _mixed(self, hinge: Tensor, distance: Tensor) -> Tensor:
        return self.alpha * hinge - (1 - self.alpha) * distance

    def _hinge(self, signed: Tensor) -> Tensor:
        return F.relu(self.min_margin / 2 - signed)


class _Binary(Loss):
    """A loss of one logit for each question that is answered by yes or no."""

    def forward(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the loss.

        Args:
            logits: ``f``, of shape ``(batch,)`` or ``(batch, 1)``, or ``(batch, questions)``.
            labels: ``(batch,)``, or as many as logits if there are several; integers, positive for ``s = 1`` and
                otherwise ``s = -1``.

        Raises:
            ValueError: if the shapes or types are others.
        """
        several = labels.ndim == 2 and labels.shape == logits.shape
        if not logits.is_floating_point() or not (several or logits.shape[1:] in ((), (1,))) or logits.ndim == 0:
            raise ValueError(
                f"logits of shape {tuple(logits.shape)} must be (batch,) or (batch, 1), floating point, or have a "
                f"label each, not labels of shape {tuple(labels.shape)}"
            )
        _check_labels(logits, labels if not several else labels[:, 0])
        with full_precision(logits):
            values = _widened(logits)
            return self._reduced(
                self.per_sample(values if several else values.view(-1, 1), labels.view(len(labels), -1))
            )


class BinaryCrossEntropy(_Binary):
    """``τ log(1 + exp((m/2 - s f) / τ))``: ``OffsetCrossEntropy`` of one logit, or the mean of that over several.

    Args:
        margin: ``m``, between the two answers.
        temperature: ``τ``; ``nn.BCEWithLogitsLoss`` is this without margin at temperature 1.
        reduction: over the batch.

    >>> loss = ts.losses.BinaryCrossEntropy(margin=1.0, temperature=0.1)
    >>> round(float(loss(torch.tensor([2.0, -0.5]), torch.tensor([1, 0]))), 4)
    0.0347
    """

    def __init__(self, margin: float = 0.0, temperature: float = 1.0, *, reduction: str = "mean") -> None:
        super().__init__(reduction=reduction)
        _check_number("margin", margin)
        _check_number("temperature", temperature, positive=True)
        self.margin, self.temperature = margin, temperature

    def per_sample(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the loss of each sample."""
        signed = torch.where(labels > 0, logits, -logits)
        return self.temperature * F.softplus((self.margin / 2 - signed) / self.temperature).mean(1)


class BinaryHKR(_Binary, _HKR):
    """``α E[max(0, m/2 - s f)] - (1 - α) (E[f | s = 1] - E[f | s = -1])`` (Serrurier et al., 2021).

    The second term is the Kantorovich-Rubinstein estimate of the Wasserstein distance between the classes in this
    batch; a class that is absent counts as mean 0. Of several questions (labels that do not exclude each other) it is
    the mean over them.

    Args:
        alpha: weight of the hinge, from 0 (distance only) to 1 (hinge only).
        min_margin: ``m``, the margin between both classes.
        reduction: over the batch; with ``"none"``, terms whose mean is the loss.

    >>> loss = ts.losses.BinaryHKR(alpha=0.5)
    >>> loss(torch.tensor([2.0, -2.0]), torch.tensor([1, 0]))
    tensor(-2.)
    """

    def per_sample(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return terms whose mean is the loss."""
        positive = labels > 0
        signs = torch.where(positive, 1.0, -1.0).to(logits)
        return self._mixed(self._hinge(signs * logits), _kantorovich_rubinstein(logits, positive)).mean(1)


def _kantorovich_rubinstein(values: Tensor, positive: Tensor) -> Tensor:
    """Return terms whose mean over the batch is the mean of the positive values less that of the others."""
    counts = positive.sum(0, keepdim=True).to(values), (~positive).sum(0, keepdim=True).to(values)
    weights = torch.where(positive, 1 / counts[0].clamp_min(1), -1 / counts[1].clamp_min(1))
    return len(values) * weights * values


class MulticlassHKR(_HKR):
    """``BinaryHKR`` of each class against the rest, averaged over the classes.

    Hinges of true classes count ``classes - 1`` times, as often as all the others together.

    Args:
        alpha: weight of the hinge, from 0 to 1.
        min_margin: ``m``.
        reduction: over the batch; with ``"none"``, terms whose mean is the loss.
    """

    def per_sample(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return terms whose mean is the loss."""
        true = _is_true(logits, labels)
        hinge = self._hinge(torch.where(true, logits, -logits)) * torch.where(true, logits.shape[1] - 1, 1)
        return self._mixed(hinge, _kantorovich_rubinstein(logits, true)).mean(1)


class SoftHKR(_HKR):
    """One-against-the-rest HKR where the other classes weigh by their softmax (Serrurier et al., 2024).

    ``α (h(z_y) + Σ_j w_j h(-z_j)) - (1 - α) (z_y - Σ_j w_j z_j)`` with ``h(s) = max(0, m/2 - s)``, ``j ≠ y`` and ``w``
    the softmax of ``t z_j``, where ``t = temperature · m / max(m, mean |z|)`` over the batch (no gradient). The
    published version takes a running mean; this one has no state to save.

    Args:
        alpha: weight of the hinge, from 0 to 1.
        min_margin: ``m``.
        temperature: from 0 (all other classes alike) upwards (the strongest only).
        reduction: over the batch.
    """

    def __init__(
        self, alpha: float = 0.9, min_margin: float = 1.0, temperature: float = 1.0, *, reduction: str = "mean"
    ) -> None:
        super().__init__(alpha, min_margin, reduction=reduction)
        _check_number("temperature", temperature)
        self.temperature = temperature

    def per_sample(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the loss of each sample."""
        true = _true(logits, labels).squeeze(1)
        size = logits.detach().abs().mean().clamp_min(self.min_margin)
        scaled = self.temperature * self.min_margin / size * logits
        weights = scaled.masked_fill(_is_true(logits, labels), -math.inf).softmax(1)
        hinge = self._hinge(true) + (weights * self._hinge(-logits)).sum(1)
        return self._mixed(hinge, true - (weights * logits).sum(1))


class LogSumExpHKR(_HKR):
    """One-against-the-rest HKR where the other classes count by a smooth maximum.

    ``α (h(z_y) + h(-M)) - (1 - α) (z_y - M)`` with ``h(s) = max(0, m/2 - s)`` and ``M = log(Σ_j exp(t z_j)) / t`` over
    ``j ≠ y``, where ``t`` is such that ``max z_j <= M <= max z_j + penalty · m/2``.

    Args:
        alpha: weight of the hinge, from 0 to 1.
        min_margin: ``m``.
        penalty: how far above the maximum ``M`` may be, relative to ``m/2``.
        reduction: over the batch.
    """

    def __init__(
        self, alpha: float = 0.9, min_margin: float = 1.0, penalty: float = 1.0, *, reduction: str = "mean"
    ) -> None:
        super().__init__(alpha, min_margin, reduction=reduction)
        _check_number("penalty", penalty, positive=True)
        self.penalty = penalty

    def per_sample(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the loss of each sample."""
        true, rivals = _true(logits, labels).squeeze(1), logits.shape[1] - 1
        # Of one number the smooth maximum is that number, for every t.
        sharpness = math.log(rivals) / (self.penalty * self.min_margin / 2) if rivals > 1 else 1.0
        scaled = (sharpness * logits).masked_fill(_is_true(logits, labels), -math.inf)
        largest = scaled.logsumexp(1) / sharpness
        return self._mixed(self._hinge(true) + self._hinge(-largest), true - largest)


class _HeadLoss(Loss):
    """What the two losses share that know how sensitive differences of logits are.

    ``forward`` takes the weight of the last layer, if it is linear, and ``lipschitz`` is then that of the features.
    """

    def __init__(self, lipschitz: float = 1.0, *, reduction: str = "mean") -> None:
        super().__init__(reduction=reduction)
        _check_number("lipschitz", lipschitz, positive=True)
        self.lipschitz = lipschitz

    def forward(self, logits: Tensor, labels: Tensor, head: Tensor | None = None) -> Tensor:
        """Return the loss.

        Args:
            logits: ``(batch, classes)``.
            labels: ``(batch,)``, integers below ``classes``.
            head: weight of the last layer, ``(classes, features)``; without it, all logits together have the constant
                ``lipschitz``.

        Raises:
            ValueError: if the shapes or types are others.
        """
        check_batch(logits, labels)
        if head is not None and (head.ndim != 2 or len(head) != logits.shape[1]):
            raise ValueError(
                f"head of shape {tuple(head.shape)} must be (classes, features) with {logits.shape[1]} classes"
            )
        with full_precision(logits):
            return self._reduced(self.per_sample(_widened(logits), labels.long(), head))

    def per_sample(self, logits: Tensor, labels: Tensor, head: Tensor | None = None) -> Tensor:
        """Return the loss of each sample."""
        return self.per_pair(logits, labels, self.lipschitz * _pair_constants(labels, logits, head))

    @abstractmethod
    def per_pair(self, logits: Tensor, labels: Tensor, constants: Tensor) -> Tensor:
        """Return the loss of each sample, from the Lipschitz constants of ``z_y - z_j``."""


def _base(base: Loss | str | None) -> Loss:
    """The loss that another one is made of.

    Raises:
        ValueError: if it is none of all logits, or has a Lipschitz constant of its own.
    """
    if isinstance(base, str):
        base = make_loss(base)
    if base is not None and (not isinstance(base, Loss) or isinstance(base, _Binary | _HeadLoss)):
        raise ValueError(f"base={base!r} must be a loss of all logits, without a Lipschitz constant of its own")
    return OffsetCrossEntropy(margin=0.0, temperature=1.0) if base is None else base


class EMMALoss(_HeadLoss):
    """Efficient margin maximisation: cross-entropy against the worst change of every class (Hu et al., 2023).

    ``CE(z + (ε_j L_yj)_j, y)`` where ``L_yj`` is the Lipschitz constant of ``z_y - z_j``: ``√2 L``, or ``L |w_y -
    w_j|`` with a head. Classes that a change of size ``ε`` cannot reach are attacked by all of it, the others by as
    much as brings them level: ``ε_j = ε · clip((z_y - z_j) / (ε L_yj), floor, 1)``, without gradient. With ``base`` it
    is another loss of the moved logits, such as ``LogitAnnealing``, as the authors of that do.

    Args:
        radius: ``ε``; the authors raise it while they train.
        lipschitz: ``L``.
        floor: smallest part of ``ε`` that is used, for classes that win already.
        base: a loss, or the name of one; cross-entropy unless given.
        reduction: over the batch.

    >>> loss = ts.losses.EMMALoss(radius=0.5)
    >>> value = loss(torch.randn(8, 10), torch.arange(8))
    """

    def __init__(
        self,
        radius: float = 36 / 255,
        lipschitz: float = 1.0,
        floor: float = 0.01,
        base: Loss | str | None = None,
        *,
        reduction: str = "mean",
    ) -> None:
        super().__init__(lipschitz, reduction=reduction)
        _check_number("radius", radius)
        _check_number("floor", floor, most=1.0)
        self.radius, self.floor, self.base = radius, floor, _base(base)

    def per_pair(self, logits: Tensor, labels: Tensor, constants: Tensor) -> Tensor:
        """Return the loss of each sample."""
        reach = self.radius * constants
        margins = (_true(logits, labels) - logits).detach()
        share = (margins / torch.where(reach > 0, reach, 1.0).detach()).clamp(self.floor, 1.0)
        return self.base.per_sample(logits + share * reach, labels)


class TradesLoss(_HeadLoss):
    """``CE(z, y) + λ KL(p ‖ p')``: cross-entropy, and how much the worst change takes from the answer.

    ``p`` is the softmax of the logits, with a further class of probability 0; in ``p'`` that class has the logit
    ``max_j (z_j + ε L_aj)`` over ``j ≠ a``, where ``a`` is the answer: what another class can reach (the loss of TRADES
    with the class of robust networks of Leino et al., 2021). The second term is ``log(1 + exp(z' - log Σ_j exp z_j))``.

    Args:
        radius: ``ε``.
        weight: ``λ``.
        lipschitz: ``L``.
        reduction: over the batch.
    """

    def __init__(
        self, radius: float = 36 / 255, weight: float = 1.0, lipschitz: float = 1.0, *, reduction: str = "mean"
    ) -> None:
        super().__init__(lipschitz, reduction=reduction)
        _check_number("radius", radius)
        _check_number("weight", weight)
        self.radius, self.weight = radius, weight

    def per_sample(self, logits: Tensor, labels: Tensor, head: Tensor | None = None) -> Tensor:
        """Return the loss of each sample."""
        answers = logits.detach().argmax(1)
        reached = logits + self.radius * self.lipschitz * _pair_constants(answers, logits, head)
        other = reached.masked_fill(_is_true(logits, answers), -math.inf).amax(1)
        return F.cross_entropy(logits, labels, reduction="none") + self.weight * F.softplus(other - logits.logsumexp(1))

    def per_pair(self, logits: Tensor, labels: Tensor, constants: Tensor) -> Tensor:
        """Not used: the constants are those of the answer and not of the label."""
        raise NotImplementedError


class CosineVRALoss(_HeadLoss):
    """``(1 - γ) (1 - cos(z, e_y)) + γ Σ_j softmax(h)_j h_j`` with ``h_j = max(0, ε - (z_y - z_j) / L_yj)``, ``j ≠ y``.

    The cosine loss, and by how much each class misses a certificate of radius ``ε``.

    Args:
        gamma: ``γ``, from 0 (accuracy only) to 1.
        radius: ``ε``.
        lipschitz: ``L``.
        reduction: over the batch.
    """

    def __init__(
        self, gamma: float = 0.1, radius: float = 36 / 255, lipschitz: float = 1.0, *, reduction: str = "mean"
    ) -> None:
        super().__init__(lipschitz, reduction=reduction)
        _check_number("gamma", gamma, most=1.0)
        _check_number("radius", radius)
        self.gamma, self.radius, self.cosine = gamma, radius, CosineLoss()

    def per_pair(self, logits: Tensor, labels: Tensor, constants: Tensor) -> Tensor:
        """Return the loss of each sample."""
        others, usable = ~_is_true(logits, labels), constants > 0
        radii = (_true(logits, labels) - logits) / torch.where(usable, constants, 1.0)
        missed = F.relu(self.radius - radii) * (others & usable)
        weights = missed.masked_fill(~others, -math.inf).softmax(1)
        return (1 - self.gamma) * self.cosine.per_sample(logits, labels) + self.gamma * (weights * missed).sum(1)


class LogitAnnealing(Loss):
    """``-T (1 - p)^β log p`` with ``p = softmax((z - ξ e_y) / T)_y`` (Lai et al., 2025).

    The offset cross-entropy, faded out for samples that have their margin, so that the others get the capacity.

    Args:
        temperature: ``T``.
        offset: ``ξ``, the margin.
        beta: ``β``; 0 is ``OffsetCrossEntropy``.
        reduction: over the batch.
    """

    def __init__(
        self, temperature: float = 0.75, offset: float = 2.0, beta: float = 5.0, *, reduction: str = "mean"
    ) -> None:
        super().__init__(reduction=reduction)
        _check_number("temperature", temperature, positive=True)
        _check_number("offset", offset)
        _check_number("beta", beta)
        self.temperature, self.offset, self.beta = temperature, offset, beta

    def per_sample(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the loss of each sample."""
        entropy = _offset_cross_entropy(logits, labels, self.offset, self.temperature)
        # Powers below 1 have no slope at 0.
        doubt = -torch.expm1(-entropy.clamp_min(torch.finfo(entropy.dtype).tiny))
        return self.temperature * doubt**self.beta * entropy


class CertificateRegularizer(_HeadLoss):
    """A loss less ``γ`` times the certified radius: ``base(z, y) - γ max(0, min_j (z_y - z_j) / L_yj)``.

    Certificate regularisation (Singla et al., 2022). ``L_yj`` is ``√2 L``, or ``L |w_y - w_j|`` with a head. Samples
    that are wrong have no radius and only the base loss.

    Args:
        gamma: ``γ``.
        base: a loss, or the name of one; cross-entropy unless given.
        lipschitz: ``L``.
        reduction: over the batch.

    >>> loss = ts.losses.CertificateRegularizer(gamma=0.5, base=ts.losses.OffsetCrossEntropy(margin=0.5))
    >>> value = loss(torch.randn(8, 10), torch.arange(8))
    """

    def __init__(
        self, gamma: float = 0.5, base: Loss | str | None = None, lipschitz: float = 1.0, *, reduction: str = "mean"
    ) -> None:
        super().__init__(lipschitz, reduction=reduction)
        _check_number("gamma", gamma)
        self.gamma, self.base = gamma, _base(base)

    def per_pair(self, logits: Tensor, labels: Tensor, constants: Tensor) -> Tensor:
        """Return the loss of each sample."""
        margins, usable = _true(logits, labels) - logits, constants > 0
        radii = torch.where(usable, margins / torch.where(usable, constants, 1.0), math.inf).amin(1)
        # No radius where all rows of the head are alike: nothing changes the answer.
        return self.base.per_sample(logits, labels) - self.gamma * F.relu(torch.where(radii.isinf(), 0.0, radii))


LOSSES: dict[str, type[Loss]] = {
    "offset-cross-entropy": OffsetCrossEntropy,
    "categorical-hinge": CategoricalHinge,
    "cosine": CosineLoss,
    "cosine-vra": CosineVRALoss,
    "binary-cross-entropy": BinaryCrossEntropy,
    "hkr-binary": BinaryHKR,
    "hkr": MulticlassHKR,
    "hkr-soft": SoftHKR,
    "hkr-logsumexp": LogSumExpHKR,
    "emma": EMMALoss,
    "trades": TradesLoss,
    "logit-annealing": LogitAnnealing,
    "certificate-regularizer": CertificateRegularizer,
}


def make_loss(name: str, **params: Any) -> Loss:
    """Return a loss by its name in ``LOSSES``.

    Raises:
        ValueError: if there is no such loss, or it has no such parameter; names the nearest one.

    >>> ts.losses.make_loss("offset-cross-entropy", margin=0.5)
    OffsetCrossEntropy(margin=0.5, temperature=0.125, smoothing=0)
    """
    loss = pick(LOSSES, name, "loss")
    for param in params:
        require_known(param, inspect.signature(loss).parameters, f"parameter of loss {name}")
    return loss(**params)


def check_last_layer(model: nn.Module, loss: Loss) -> None:
    """Warn if the last layer of a classifier is not what the numbers of a loss are about.

    Margins, and radii without a ``head``, take the logits together for ``L``-Lipschitz: two of them then differ by at
    most ``√2 L`` for each unit of the input. Behind 1-Lipschitz features that holds for ``OrthoLinear``, and not for
    rows ``w`` of other layers that are further apart. The last layer is the linear one that was registered last.

    Args:
        model: a classifier.
        loss: one of ``LOSSES``.

    Raises:
        TypeError: if they are something else.
        ValueError: if there is no linear layer.

    >>> import warnings
    >>> with warnings.catch_warnings(record=True, action="always") as found:
    ...     ts.losses.check_last_layer(nn.Sequential(UnitNormLinear(8, 4)), ts.losses.OffsetCrossEntropy(margin=1.0))
    >>> "certifies a radius of" in str(found[0].message)
    True
    """
    if not isinstance(model, nn.Module) or not isinstance(loss, Loss):
        raise TypeError(f"a model and a loss of LOSSES are checked, not {type(model).__name__}, {type(loss).__name__}")
    heads = [module for module in model.modules() if isinstance(module, nn.Linear)]
    if not heads:
        raise ValueError(f"{type(model).__name__} has no linear layer")
    if isinstance(loss, CosineLoss):  # whatever the scale of the logits
        return
    rows, constant = heads[-1].weight.detach().double(), loss.lipschitz if isinstance(loss, _HeadLoss) else 1.0
    if isinstance(loss, _Binary):  # each logit is a question of its own, and has the margin on both sides
        largest, allowed, sides, what = float(rows.norm(dim=1).max()), constant, 2, "a row of norm"
    else:
        largest, allowed, sides, what = float(torch.cdist(rows, rows).max()), _SQRT2 * constant, 1, "rows at a distance"
    if largest <= allowed * (1 + _ROUNDED):
        return
    advice = "use OrthoLinear as the last layer"
    numbers = [getattr(loss, name) for name in ("margin", "min_margin", "offset") if hasattr(loss, name)]
    if isinstance(loss, _HeadLoss):
        advice += ", or give its weight to the loss: loss(logits, labels, head=layer.weight)"
    elif numbers:
        radius = numbers[0] / sides / largest
        advice += f", or know that a margin of {numbers[0]:.4g} certifies a radius of {radius:.3g}"
    found = f"{heads[-1]._get_name()} has {what} {largest:.4g}, not at most {allowed:.4g}"
    warnings.warn(f"{type(loss).__name__} is for 1-Lipschitz logits, and {found}: {advice}", stacklevel=2)
