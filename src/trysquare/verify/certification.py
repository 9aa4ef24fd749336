"""From logits to certified radii, and from a model and its data to a certificate.

What is proved. Let ``f`` be the function that the model's calls and weights define in exact arithmetic, and ``x`` an
image that it sees (pixels before any scaling in front of the network, rounded to the model's dtype). No ``x'`` with
``|x' - x|`` below the radius of ``x`` is given another class by ``f``. The Lipschitz constants come from
``trysquare.lipschitz``, the margins from an evaluation of the same calls in float64, less a bound on the rounding
errors of that evaluation (``lipschitz.evaluate``).

What is measured, not proved. The model as it runs has rounding errors of its dtype, at ``x`` and at ``x'``. How far its
margins are from those in float64 is measured on some of the images and on noisy copies of them, and reported beside the
radii: ``program_radii`` are those with twice the largest difference that was seen also subtracted from the margins.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from numbers import Real
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from trysquare.files import JsonObject, or_infinite, read_json, without_infinities
from trysquare.naming import shown
from trysquare.nn.geometry import per_axis
from trysquare.nn.linalg.operator import checked_weight
from trysquare.nn.linalg.precision import coarsest_dtype, own_tensors, users_device
from trysquare.nn.linalg.spectrum import UNIT_ROUNDOFF
from trysquare.nn.losses import check_batch
from trysquare.progress import track
from trysquare.verify.lipschitz import (
    BATCH,
    Analysis,
    ExactEvaluation,
    analyse,
    input_like,
    refuse_changed,
    refuse_difference,
)
from trysquare.verify.lipschitz.checks import require_dense, require_plain_module
from trysquare.verify.operators import used_weight

EPSILONS = (36 / 255, 72 / 255, 108 / 255, 1.0)
Batches = Iterable[tuple[Tensor, Tensor]]
Data = Batches | Dataset[Any] | tuple[Tensor, Tensor]

# Quotients and roots in float64, rounded the safe way.
_ROUND_DOWN = 1 - 32 * UNIT_ROUNDOFF
_SQRT2_UP = math.nextafter(math.sqrt(2), 2)
# Images that the model as it runs is compared with float64 on.
_MEASURED_SAMPLES = 512
# Images that are evaluated together in float64, and numbers that all calls on them may make.
_LARGEST_BATCH = 256
_FLOAT64_NUMBERS = 1 << 20


@own_tensors()
def certified_radius(
    logits: Tensor,
    labels: Tensor,
    lipschitz: float = 1.0,
    head: Tensor | nn.Module | None = None,
    *,
    error: float | Tensor = 0.0,
) -> Tensor:
    """Return the least l2 distance by which an input must be moved before its class can differ from its label.

    ``min_j (z_y - z_j - error) / C_yj`` over the other classes, where ``C_yj`` is the Lipschitz constant of ``z_y -
    z_j``: ``√2 · lipschitz`` in general, and ``lipschitz · |w_y - w_j|`` if the last layer is linear with rows ``w``.
    The second is never worse. All roundings are towards smaller radii.

    Args:
        logits: ``(batch, classes)``.
        labels: ``(batch,)``.
        lipschitz: certified Lipschitz bound of all logits, or with ``head`` of what the head reads.
        head: weight ``(classes, features)`` of the last layer, or the layer; without it, nothing is known about it.
        error: bound on the error of differences of two logits; a number, or ``(batch,)``.

    Returns:
        ``(batch,)`` in float64 on the CPU. 0 where the label does not win (never negative), infinite where nothing can
        make another class win (equal rows of the head, or ``lipschitz=0``).

    Raises:
        ValueError: if shapes do not fit, labels are not classes, or a number is not one.

    >>> certified_radius(torch.tensor([[3.0, 1.0], [0.0, 1.0]]), torch.tensor([0, 0])).round(decimals=4)
    tensor([1.4142, 0.0000], dtype=torch.float64)
    >>> certified_radius(torch.tensor([[3.0, 1.0]]), torch.tensor([0]), head=torch.eye(2)).round(decimals=4)
    tensor([1.4142], dtype=torch.float64)
    """
    values = checked_logits(logits)
    classes = checked_labels(labels, logits)
    lipschitz = checked_number("lipschitz", lipschitz)
    if head is None:
        pairs = torch.full((values.shape[1],) * 2, _SQRT2_UP, dtype=torch.float64)
    else:
        pairs = pairwise_distances(_head_weight(head, values.shape[1]))
    # Differences of the largest numbers would overflow.
    shrink = 1 if len(values) and float(values.abs().max()) > 2.0**1000 else 0
    errors = _checked_errors(error, len(values)) * 0.5**shrink
    values = values * 0.5**shrink
    margins = values.gather(1, classes.unsqueeze(1)) - values
    lowered = margins - errors - 4 * UNIT_ROUNDOFF * (margins.abs() + errors)
    margins = torch.where(errors > 0, lowered, margins).nan_to_num(-math.inf, math.inf)
    return _radii(margins, pairs[classes], lipschitz, classes, shrink)


def checked_number(name: str, value: object) -> float:
    """Return ``value`` as a float; it may be infinite, and may come in a tensor.

    Raises:
        TypeError: if it is no number.
        ValueError: if it is negative, nan, or an integer beyond all floats.
    """
    if isinstance(value, Tensor):
        require_dense(name, value)
        real = value.numel() == 1 and not value.is_complex() and value.dtype != torch.bool
    else:
        real = isinstance(value, Real) and not isinstance(value, bool)
    if not real:
        raise TypeError(f"{name}={shown(value)} must be a number, at least 0")
    try:
        number = float(cast("float", value))
    except OverflowError:
        number = math.nan
    if not number >= 0:
        raise ValueError(
            f"{name}={shown(value)} must be a number, at least 0 and at most {sys.float_info.max:.2g} or inf"
        )
    return number


def _checked_errors(error: float | Tensor, samples: int) -> Tensor:
    if isinstance(error, Tensor):
        require_dense("error", error)
    given = error if isinstance(error, Tensor) else checked_number("error", error)
    errors = torch.as_tensor(given, dtype=torch.float64).detach().cpu()
    if errors.ndim and errors.shape != (samples,):
        raise ValueError(f"error of shape {tuple(errors.shape)} must be a number, or one for each of {samples} samples")
    if not bool((errors >= 0).all()):
        raise ValueError(f"error={error!r} must be numbers, at least 0")
    return errors.expand(samples).unsqueeze(1)


def _radii(margins: Tensor, distances: Tensor, lipschitz: float, labels: Tensor, exponent: int) -> Tensor:
    """Return ``min_j margin_j 2^exponent / (lipschitz · distance_j)`` over the other classes, rounded down.

    Fractions and exponents are computed apart, so that products neither vanish nor overflow on the way. A difference of
    logits that no input can change is safe at every radius if it is positive, and lost if it is not.
    """
    parts = (torch.frexp(torch.as_tensor(t, dtype=torch.float64)) for t in (margins, distances, lipschitz))
    (top, above), (distance, below), (constant, beside) = parts
    moves = (distances > 0) & (lipschitz > 0)
    fraction = top / torch.where(moves, distance * constant, 1.0) * _ROUND_DOWN
    exponents = (above - below - beside + exponent).double()
    half = (exponents / 2).floor()  # in two factors: 2^1074 is not a float64
    radii = (fraction * 2.0**half * 2.0 ** (exponents - half)).clamp_max(sys.float_info.max)
    radii = torch.where(radii > 0, torch.nextafter(radii, torch.zeros_like(radii)), radii)
    still = torch.where(margins > 0, math.inf, 0.0).to(radii.dtype)
    radii = torch.where(distances.isinf() | (torch.as_tensor(lipschitz) == math.inf), 0.0, radii)
    return torch.where(moves, radii, still).scatter(-1, labels.unsqueeze(-1), math.inf).amin(-1).clamp_min(0.0)


def checked_logits(logits: object) -> Tensor:
    """Return the logits in float64 on the CPU."""
    if isinstance(logits, Tensor):
        require_dense("logits", logits)
    if not isinstance(logits, Tensor) or logits.ndim != 2:
        kind = f"a tensor of shape {tuple(logits.shape)}" if isinstance(logits, Tensor) else type(logits).__name__
        raise TypeError(f"a classifier must return logits (batch, classes), not {kind}")
    values = logits.detach().to("cpu", torch.float64)
    if not bool(values.isfinite().all()):
        bad = (~values.isfinite()).flatten(1).any(1).nonzero().flatten()
        raise ValueError(f"the logits of {len(bad)} samples are not finite, the first of them at index {int(bad[0])}")
    return values


def checked_labels(labels: Tensor, logits: Tensor) -> Tensor:
    """Return a copy of the labels as integers on the CPU, after a check that all of them are classes."""
    if isinstance(labels, Tensor):
        require_dense("labels", labels)
    check_batch(logits, labels)
    classes = labels.detach().to("cpu", torch.int64, copy=True)  # a loader may fill its tensors anew for each batch
    if len(classes) and not 0 <= int(classes.min()) <= int(classes.max()) < logits.shape[1]:
        raise ValueError(
            f"labels from {int(classes.min())} to {int(classes.max())} must be from 0 to {logits.shape[1] - 1}, the "
            "classes that there are logits of"
        )
    return classes


def _head_weight(head: Tensor | nn.Module, classes: int) -> Tensor:
    if not isinstance(head, Tensor) and not isinstance(getattr(head, "weight", None), Tensor):
        raise TypeError(f"head must be a weight (classes, features) or a layer that has one, not {type(head).__name__}")
    if isinstance(head, Tensor):
        require_dense("head", head)
    weight = used_weight(head) if isinstance(head, nn.Module) else checked_weight(head, "the head")
    if weight.ndim != 2 or len(weight) != classes:
        raise ValueError(f"the head of shape {tuple(weight.shape)} must be (classes, features) with {classes} classes")
    return weight


def pairwise_distances(rows: Tensor) -> Tensor:
    """Return ``|w_i - w_j|`` for all pairs of rows, in float64 and rounded up: 0 only where two rows are equal.

    Args:
        rows: ``(n, features)``.

    Returns:
        ``(n, n)``.
    """
    exact = rows.detach().to("cpu", torch.float64)
    # From differences, since a Gram matrix cancels for close rows; a row at a time, since there may be 1000 of them.
    return torch.stack([norms_up(exact - row) for row in exact])


def norms_up(vectors: Tensor) -> Tensor:
    """Return norms along the last axis, rounded up; scaling keeps the squares in range."""
    largest = vectors.abs().amax(-1, keepdim=True)
    unit = vectors / torch.where(largest > 0, largest, 1.0)
    norms = torch.linalg.vector_norm(unit, dim=-1) * largest.squeeze(-1)
    norms = norms * (1 + (vectors.shape[-1] + 16) * UNIT_ROUNDOFF)
    return torch.where(largest.squeeze(-1).isinf(), math.inf, norms)  # a difference that is no float64 any more


@dataclass(frozen=True, eq=False)
class Certificate:
    """What ``certify`` found: how far each sample may be moved before its class can change.

    Attributes:
        radii: certified l2 radius of each sample, ``(samples,)`` in float64; 0 where the answer is wrong.
        predictions: class of each sample, by float64.
        labels: its label.
        epsilons: radii that ``print`` and ``to_json`` show.
        lipschitz: certified bound that the radii come from: of all logits, or with ``pairwise`` of the features.
        pairwise: whether the last layer was used pair by pair of classes.
        rounding: largest bound on the rounding error of a margin in float64, which is subtracted: proved.
        reserves: how much shorter the radii are for the model as it runs, where twice ``evaluation_error``, and one
            rounding of the logits, is also subtracted from the margins: measured, not proved.
        evaluation_error: largest difference between a margin of the model as it runs and in float64, seen at some of
            the images and at noisy copies of them.
        measured_samples: number of those images.
        disagreements: number of those images to which the model as it runs gives another class than float64 does.
        input_shape: shape of one input.
    """

    radii: Tensor
    predictions: Tensor
    labels: Tensor
    epsilons: tuple[float, ...]
    lipschitz: float
    pairwise: bool
    rounding: float
    reserves: Tensor
    evaluation_error: float
    measured_samples: int
    disagreements: int
    input_shape: tuple[int, ...]

    @property
    def program_radii(self) -> Tensor:
        """Radii for the model as it runs: shortened by what its rounding errors cost, as far as they were measured."""
        return torch.where(self.radii.isinf(), self.radii, (self.radii - self.reserves).clamp_min(0.0))

    @property
    def clean_accuracy(self) -> float:
        """Share of the samples that are classified correctly."""
        return float((self.predictions == self.labels).double().mean())

    def certified_accuracy(self, epsilon: float) -> float:
        """Return the share of samples whose class is correct, and stays so however they are moved by ``epsilon``."""
        return float((self.radii > epsilon).double().mean())

    def curve(self, points: int = 101, largest: float | None = None) -> list[tuple[float, float]]:
        """Return the certified accuracy on a grid of radii that starts at 0.

        Args:
            points: number of radii, at least 2.
            largest: last radius; the one beyond which nothing is certified, unless given.

        Returns:
            Pairs of a radius and the certified accuracy there.
        """
        if points < 2:
            raise ValueError(f"points={points} must be at least 2")
        if largest is None:
            finite = self.radii[self.radii.isfinite()]
            largest = max(float(finite.max()) if len(finite) else 0.0, *self.epsilons)
        grid = [largest * i / (points - 1) for i in range(points)]
        return [(epsilon, self.certified_accuracy(epsilon)) for epsilon in grid]

    def to_json(self) -> str:
        """Return everything as JSON, with the accuracies; infinite radii become ``null``. ``from_json`` reads it."""
        numbers = {name: value for name, value in vars(self).items() if not isinstance(value, Tensor)}
        accuracies = [{"epsilon": e, "certified_accuracy": self.certified_accuracy(e)} for e in self.epsilons]
        samples = {name: value.tolist() for name, value in vars(self).items() if isinstance(value, Tensor)}
        content = {"clean_accuracy": self.clean_accuracy, "certified": accuracies, **numbers, **samples}
        return json.dumps(without_infinities(content), allow_nan=False)

    @classmethod
    def from_json(cls, text: str) -> Certificate:
        """Return the certificate that ``to_json`` wrote.

        Raises:
            ValueError: if the text is something else.
        """
        return read_json(text, "a certificate", cls._from_content)

    @classmethod
    def _from_content(cls, content: JsonObject) -> Certificate:
        for name in ("radii", "reserves"):
            content[name] = torch.tensor(list(map(or_infinite, content[name])), dtype=torch.float64)
        content |= {name: or_infinite(content[name]) for name in ("lipschitz", "evaluation_error", "rounding")}
        content |= {name: torch.tensor(content[name], dtype=torch.int64) for name in ("predictions", "labels")}
        content |= {"epsilons": tuple(map(float, content["epsilons"]))}
        content |= {"input_shape": tuple(map(int, content["input_shape"]))}
        content |= {name: int(content[name]) for name in ("measured_samples", "disagreements")}
        return cls(**{name: content[name] for name in cls.__dataclass_fields__})

    def __str__(self) -> str:
        rows = [("clean", self.clean_accuracy)]
        rows += [(f"certified at {radius_text(e)}", self.certified_accuracy(e)) for e in self.epsilons]
        width = max(len(name) for name, _ in rows)
        table = "\n".join(f"{name:<{width}}  {accuracy:7.2%}" for name, accuracy in rows)
        constant = "of the features, last layer pair by pair" if self.pairwise else "of all logits"
        measured = (
            f"measured on {self.measured_samples} of them, the model as it runs: margins off by up to "
            f"{self.evaluation_error:.1e}, another class for {self.disagreements}"
        )
        return (
            f"{table}\n{len(self.radii)} samples; Lipschitz bound {self.lipschitz:.6g} ({constant}); rounding of "
            f"margins at most {self.rounding:.1e}, subtracted\n{measured}"
        )


def radius_text(epsilon: float) -> str:
    """Return a radius as tables, reports and progress lines show it: to six digits, as ``36/255`` where it is that.

    >>> from trysquare.verify.certification import radius_text
    >>> radius_text(36 / 255), radius_text(0.141176), radius_text(0.3), radius_text(1.0), radius_text(0.0)
    ('36/255', '36/255', '0.3', '255/255', '0')
    """
    text, steps = f"{epsilon:.6g}", round(min(epsilon, 1e6) * 255)  # 255 times the largest floats overflows
    # Compared as text: ``metrics.jsonl`` keeps six digits of a radius, and what is read from there has the same name.
    return f"{steps}/255" if steps and text == f"{steps / 255:.6g}" else text


@own_tensors()
def certify(
    model: nn.Module,
    data: Data,
    *,
    epsilons: Sequence[float] = EPSILONS,
    input_shape: Sequence[int] | None = None,
    batch_size: int = 256,
    measured_samples: int = _MEASURED_SAMPLES,
) -> Certificate:
    """Certify the answers of a classifier on data.

    The Lipschitz bound is computed from the weights in use, with every scaling of the data that is part of the model.
    If the output comes straight from a linear layer, its rows are used for each pair of classes. The module's docstring
    says what is proved and what is measured. The model is put in eval mode meanwhile.

    Args:
        model: images to logits.
        data: batches of images and labels, a dataset, or a pair of tensors. Images are floating point, and are rounded
            to the dtype of the model: radii are about the rounded ones.
        epsilons: radii to report, in units of the pixels; 1 is ``255/255``.
        input_shape: shape that all images must have; that of the first one unless given.
        batch_size: size of batches, for data that is not in batches already.
        measured_samples: number of samples, from the first on, on which the model as it runs is compared with float64.

    Raises:
        NoRuleError: if a part of the model has no Lipschitz rule.
        TypeError: if the model is no module or one of ``torch.jit``, or the data is of another kind.
        ValueError: if logits are not finite, or the data or an argument does not fit.

    >>> model = nn.Sequential(OrthoConv2d(1, 4, 3, stride=2), MaxMin(), nn.Flatten(), OrthoLinear(64, 10))
    >>> certificate = certify(model, (torch.rand(8, 1, 8, 8), torch.arange(8)), epsilons=[0.1])
    >>> certificate.radii.shape
    torch.Size([8])
    """
    epsilons = checked_epsilons(epsilons)
    (batch_size,) = per_axis("batch_size", batch_size, 1)
    (measured_samples,) = per_axis("measured_samples", measured_samples, 1, least=0)
    require_plain_module(model)
    if input_shape is not None and not isinstance(input_shape, Sequence):
        raise TypeError(f"input_shape={shown(input_shape)} must be the shape of one image, such as (3, 32, 32)")
    shape = None if input_shape is None else tuple(input_shape)
    if shape is not None:
        shape = per_axis("input_shape", shape, len(shape))
    exact = ExactLogits(model, shape)
    logits, labels, errors, off = [], [], [], torch.zeros(0, dtype=torch.float64)
    disagreements, precision = 0, 0.0
    with evaluating(model), torch.no_grad():
        batches, total = batches_of(data, batch_size)
        for images, classes in track(pairs(batches), "certifying", total):
            given = prepared(model, images, exact.shape or tuple(images.shape[1:]))
            if not len(given):
                continue
            values, rounding = exact(given)
            precision = torch.finfo(coarsest_dtype(given)).eps
            plain = exact.as_it_runs(given, values, rounding)
            logits.append(values)
            labels.append(checked_labels(classes, values))
            errors.append(rounding)
            here = given[: max(0, measured_samples - len(off))]
            if len(here):
                seen, differ = _measured(exact, here, plain[: len(here)], values[: len(here)], labels[-1][: len(here)])
                off, disagreements = torch.cat([off, seen]), disagreements + differ
        if len(logits) > 1:
            exact.refuse_changed()
    if exact.shape is None or not sum(map(len, labels)):
        raise ValueError("there is no data to certify on")
    answers, truth, inexact = torch.cat(logits), torch.cat(labels), torch.cat(errors)
    measured = float(off.max()) if len(off) else 0.0
    lipschitz, head = exact.found.features_bound, exact.found.head_weight
    radii = certified_radius(answers, truth, lipschitz, head, error=inexact)
    # One rounding of the logits in any case, which up to the radius are at most three times as large.
    logit_rounding = 3 * precision * answers.abs().amax(1)
    around = certified_radius(answers, truth, lipschitz, head, error=inexact + 2 * measured + logit_rounding)
    return Certificate(
        radii, answers.argmax(1), truth, epsilons, lipschitz, head is not None, float(inexact.max()),
        torch.where(radii.isinf() & around.isinf(), 0.0, radii - around), measured,
        len(off), disagreements, exact.shape,
    )  # fmt: skip


class ExactLogits:
    """The logits of a classifier in float64, with a bound on their error; analysed at the first batch.

    Attributes:
        model: the classifier, which must be in eval mode.
        shape: of one image; that of the first batch unless given.
        found: its bounds, from the first batch on.
    """

    found: Analysis

    def __init__(self, model: nn.Module, shape: tuple[int, ...] | None = None) -> None:
        self.model, self.shape = model, shape
        self._evaluation: ExactEvaluation | None = None

    def __call__(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Return logits, and for each image a bound on the error of a difference of two of them."""
        if self._evaluation is None:
            self.shape = self.shape or tuple(images.shape[1:])
            self.found = _analysed(self.model, self.shape, len(images))
            self._evaluation = ExactEvaluation(self.found.graph, self.found.gains)
        batch = self.found.graph.batch
        logits, errors = [], []
        for part in images.split(batch):
            filled = torch.cat([part, part[-1:].expand(batch - len(part), *part.shape[1:])])
            values, error = self._evaluation(filled)
            logits.append(checked_logits(values)[: len(part)])
            errors.append(torch.full((len(part),), _SQRT2_UP * error, dtype=torch.float64))
        return torch.cat(logits), torch.cat(errors)

    def as_it_runs(self, images: Tensor, values: Tensor, rounding: Tensor) -> Tensor:
        """Logits of the model as it runs, for images that were just evaluated.

        Raises:
            NoRuleError: if they differ from those in float64 by more than rounding: it is not what was traced any more.
        """
        assert self._evaluation is not None
        with users_device():
            plain = checked_logits(self.model(images.clone()))  # it may write into its input
        short = coarsest_dtype(images)
        reason = (
            f"{type(self.model).__name__} does not do the same for every batch: what it returns for this one is not "
            "what the calls give that were traced and bounded"
        )
        error = self._evaluation.in_short(float(rounding.max()), short)
        refuse_difference([plain], [values], short, error, reason)
        return plain

    def refuse_changed(self) -> None:
        """See that the model still makes the calls that were analysed, with the same constants.

        Raises:
            NoRuleError: if not.
        """
        if self._evaluation is not None and self.shape is not None:
            refuse_changed(self.model, self.found, self.shape)


def _analysed(model: nn.Module, shape: tuple[int, ...], images: int) -> Analysis:
    """Analyse a model at the size of the batches that it is evaluated with."""
    found = analyse(model, shape)
    numbers = sum(node.size for node in found.graph.nodes) // BATCH + math.prod(shape)
    parts = math.ceil(images / max(BATCH, min(_LARGEST_BATCH, _FLOAT64_NUMBERS // numbers)))
    batch = max(BATCH, math.ceil(images / max(1, parts)))
    return found if batch == BATCH else analyse(model, shape, batch=batch)


def _measured(exact: ExactLogits, images: Tensor, plain: Tensor, values: Tensor, labels: Tensor) -> tuple[Tensor, int]:
    """Return how far margins of the model as it runs are off at and near images, and how many images change class."""
    near = _moved(images)
    with users_device():
        around = checked_logits(exact.model(near.clone()))
    around = _margin_errors(around, exact(near)[0], labels)
    differ = int((plain.argmax(1) != values.argmax(1)).sum())
    return torch.maximum(_margin_errors(plain, values, labels), around), differ


def checked_epsilons(epsilons: Sequence[float]) -> tuple[float, ...]:
    """Return radii as a tuple, after a check that there is one, and that all are finite and none negative."""
    if not isinstance(epsilons, Sequence | Tensor) or isinstance(epsilons, str):
        raise TypeError(f"epsilons={shown(epsilons)} must be a list of radii")
    if isinstance(epsilons, Tensor):
        require_dense("epsilons", epsilons)
    wanted = f"epsilons={shown(epsilons)} must be finite radii, at least one and none negative"
    try:
        checked = tuple(checked_number("a radius", epsilon) for epsilon in epsilons)
    except (TypeError, ValueError) as error:
        raise type(error)(f"{wanted}: {error}") from error
    if not checked or math.inf in checked:
        raise ValueError(wanted)
    return checked


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put a model in eval mode, and afterwards each module back in the mode that it was in."""
    modes = [(module, module.training) for module in model.modules()]
    with suppress(NotImplementedError):  # of torch.export, whose modules have no modes
        model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


def batches_of(data: Data, batch_size: int) -> tuple[Batches, int]:
    """Return data of any kind in batches, and the number of batches (0 if it is not known).

    Raises:
        ValueError: if it is a pair of tensors of different lengths, or of tensors that are not dense.
    """
    if isinstance(data, Tensor):
        raise TypeError("data must be batches of images and labels, a dataset, or a pair of tensors, not a Tensor")
    tensors: object = data.tensors if isinstance(data, TensorDataset) else data
    if isinstance(tensors, tuple | list) and len(tensors) == 2 and all(isinstance(part, Tensor) for part in tensors):
        images, labels = tensors
        for name, tensor in (("images", images), ("labels", labels)):
            require_dense(name, tensor)
            if not tensor.ndim:
                raise ValueError(f"{name} must be a batch, not a single number")
        batch_size = min(batch_size, max(1, len(images)))
        if len(images) != len(labels):
            raise ValueError(f"{len(images)} images and {len(labels)} labels: there must be one label for each image")
        batches: Any = list(zip(images.split(batch_size), labels.split(batch_size), strict=True))
    else:
        batches = DataLoader(data, batch_size) if isinstance(data, Dataset) else data
    return batches, len(batches) if hasattr(batches, "__len__") else 0


def pairs(batches: Batches) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield images and labels, after a check that each batch consists of these.

    Raises:
        TypeError: if one does not.
    """
    wanted = "data must be batches of images and labels, a dataset, or a pair of tensors"
    if isinstance(batches, Tensor | str) or not isinstance(batches, Iterable):
        raise TypeError(f"{wanted}, not {type(batches).__name__}")
    for batch in batches:
        if (
            not isinstance(batch, tuple | list)
            or len(batch) != 2
            or not all(isinstance(part, Tensor) for part in batch)
        ):
            found = [type(part).__name__ for part in batch] if isinstance(batch, tuple | list) else type(batch).__name__
            raise TypeError(f"{wanted}; found a batch of {found}")
        for name, part in zip(("images", "labels"), batch, strict=True):
            require_dense(name, part)
        yield batch[0], batch[1]


def prepared(model: nn.Module, images: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return images in the dtype and on the device of the model.

    Raises:
        ValueError: if they are not floating point, not finite or of another shape.
    """
    if not isinstance(images, Tensor):
        raise TypeError(f"images must be a tensor, not {type(images).__name__}")
    require_dense("images", images)
    if tuple(images.shape[1:]) != shape or not images.is_floating_point():
        raise ValueError(
            f"images of shape {tuple(images.shape)} and {images.dtype} must be floating point and (batch, "
            f"{', '.join(map(str, shape))})"
        )
    if not bool(images.isfinite().all()):
        raise ValueError("there are images that are not finite")
    return images.to(input_like(model))


def _moved(images: Tensor) -> Tensor:
    """Add noise a tenth as long as an image of ones: what happens to be exact at an image seldom is so around it."""
    noise = torch.randn(images.shape, generator=torch.Generator().manual_seed(0))
    return images + 0.1 * noise.to(images)


def _margin_errors(logits: Tensor, exact: Tensor, labels: Tensor) -> Tensor:
    """Return the largest error of ``z_y - z_j`` over the other classes, for each sample."""
    difference = logits - exact
    return (difference.gather(1, labels.unsqueeze(1)) - difference).abs().amax(1)
