"""From logits to certified radii, and from a model and its data to a certificate.

What is proved. Let ``f`` be the function that the model's weights define in exact arithmetic, and ``x`` an image that
it sees (pixels before any scaling in front of the network, rounded to the model's dtype). No ``x'`` with ``|x' - x|``
below the radius of ``x`` is given another class by ``f``. The Lipschitz constants come from ``trysquare.lipschitz``,
the margins from the logits of the model less the difference that was measured to a float64 evaluation with the same
weights. That has rounding errors of its own, which are taken to be at most 1e-12 of the largest logit: ten thousand
units in the last place.

What is measured, not proved. The model as it runs has rounding errors at ``x'`` too. A multiple of the largest error
that was seen on the data and on noisy copies of it is taken off every margin for them, and one rounding of the logits
in any case; worse rounding at some ``x'`` is not excluded. Fourier
layers are built anew in float64, so for them the measured error includes that of their weights.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader, Dataset, TensorDataset

from trysquare.export import with_fixed_weights
from trysquare.files import or_infinite, without_infinities
from trysquare.linalg.margins import least_radius
from trysquare.linalg.precision import autocast_dtype
from trysquare.linalg.spectrum import UNIT_ROUNDOFF
from trysquare.lipschitz import follow_classifier
from trysquare.lipschitz.follow import input_like
from trysquare.losses import check_batch
from trysquare.operators import checked_weight, used_weight
from trysquare.progress import track

EPSILONS = (36 / 255, 72 / 255, 108 / 255, 1.0)
Batches = Iterable[tuple[Tensor, Tensor]]
Data = Batches | Dataset[Any] | tuple[Tensor, Tensor]

# Quotients and roots in float64, rounded the safe way.
_ROUND_DOWN = 1 - 16 * UNIT_ROUNDOFF
_SQRT2_UP = math.nextafter(math.sqrt(2), 2)
_SHORTER = (torch.float32, torch.float16, torch.bfloat16)
# Error of an evaluation in float64, relative to the largest logit.
_FLOAT64_ERROR = 1e-12
# On the CPU, torch's convolutions in float64 unfold the whole batch: with large kernels that is 100 MB for each image.
_FLOAT64_IMAGES = 16


def certified_radius(
    logits: Tensor,
    labels: Tensor,
    lipschitz: float = 1.0,
    head: Tensor | nn.Module | None = None,
    *,
    error: float | Tensor = 0.0,
) -> Tensor:
    """Distance that an input must at least be moved (l2) before its class can be another one than its label.

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
    classes = _checked_labels(labels, logits)
    values = _checked_logits(logits)
    if not lipschitz >= 0:
        raise ValueError(f"lipschitz={lipschitz!r} must be a number, at least 0")
    if head is None:
        pairs = torch.full((values.shape[1],) * 2, _SQRT2_UP, dtype=torch.float64)
    else:
        pairs = pairwise_distances(_head_weight(head, values.shape[1]))
    constants = torch.where(pairs > 0, lipschitz * pairs * (1 + 2 * UNIT_ROUNDOFF), 0.0)
    return _radii(values, classes, constants, error)


def _radii(logits: Tensor, labels: Tensor, constants: Tensor, error: float | Tensor) -> Tensor:
    """Radii from the Lipschitz constants ``(classes, classes)`` of differences of logits."""
    errors = torch.as_tensor(error, dtype=torch.float64).cpu()
    if not bool((errors >= 0).all()):
        raise ValueError(f"error={error!r} must be numbers, at least 0")
    margins = logits.gather(1, labels.unsqueeze(1)) - logits
    # Differences are rounded relative to themselves, and the subtraction of the error once more.
    left = margins * _ROUND_DOWN - errors.view(-1, 1) * (1 + 2 * UNIT_ROUNDOFF)
    return least_radius(left, constants[labels], labels).clamp_min(0.0) * _ROUND_DOWN


def _checked_logits(logits: Tensor) -> Tensor:
    """Logits in float64 on the CPU."""
    values = logits.detach().to("cpu", torch.float64)
    if not bool(values.isfinite().all()):
        bad = (~values.isfinite()).flatten(1).any(1).nonzero().flatten()
        raise ValueError(f"the logits of {len(bad)} samples are not finite, the first of them at index {int(bad[0])}")
    return values


def _checked_labels(labels: Tensor, logits: Tensor) -> Tensor:
    """Labels as integers on the CPU, all of them classes."""
    check_batch(logits, labels)
    classes = labels.detach().to("cpu", torch.int64)
    if len(classes) and not 0 <= int(classes.min()) <= int(classes.max()) < logits.shape[1]:
        raise ValueError(
            f"labels from {int(classes.min())} to {int(classes.max())} must be from 0 to {logits.shape[1] - 1}, the "
            "classes that there are logits of"
        )
    return classes


def _head_weight(head: Tensor | nn.Module, classes: int) -> Tensor:
    weight = used_weight(head) if isinstance(head, nn.Module) else checked_weight(head, "the head")
    if weight.ndim != 2 or len(weight) != classes:
        raise ValueError(f"the head of shape {tuple(weight.shape)} must be (classes, features) with {classes} classes")
    return weight


def pairwise_distances(rows: Tensor) -> Tensor:
    """``|w_i - w_j|`` for all pairs of rows, in float64 and rounded up: 0 only where two rows are equal.

    Args:
        rows: ``(n, features)``.

    Returns:
        ``(n, n)``.
    """
    exact = rows.detach().to("cpu", torch.float64)
    # From differences, since a Gram matrix cancels for close rows; a row at a time, since there may be 1000 of them.
    return torch.stack([_norms_up(exact - row) for row in exact])


def _norms_up(vectors: Tensor) -> Tensor:
    """Norms of the last axis; scaled, so that squares neither overflow nor vanish."""
    largest = vectors.abs().amax(-1, keepdim=True)
    unit = vectors / torch.where(largest > 0, largest, 1.0)
    norms = torch.linalg.vector_norm(unit, dim=-1) * largest.squeeze(-1)
    return norms * (1 + (vectors.shape[-1] + 16) * UNIT_ROUNDOFF)


@dataclass(frozen=True, eq=False)
class Certificate:
    """What ``certify`` found: of each sample, how far it may be moved before its class can change.

    Attributes:
        radii: certified l2 radius of each sample, ``(samples,)`` in float64; 0 where the answer is wrong.
        predictions: class of each sample.
        labels: its label.
        epsilons: radii that ``print`` and ``to_json`` show.
        lipschitz: certified bound that the radii come from: of all logits, or with ``pairwise`` of the features.
        pairwise: whether the last layer was used pair by pair of classes.
        evaluation_error: largest difference of two logits' difference between the model and its evaluation in float64.
        measured_samples: how many samples it was measured on; 0 if it was given.
        safety: the error where it was not measured was taken to be this many times as large.
        input_shape: shape of one input.
    """

    radii: Tensor
    predictions: Tensor
    labels: Tensor
    epsilons: tuple[float, ...]
    lipschitz: float
    pairwise: bool
    evaluation_error: float
    measured_samples: int
    safety: float
    input_shape: tuple[int, ...]

    @property
    def clean_accuracy(self) -> float:
        """Share of the samples that are classified right."""
        return float((self.predictions == self.labels).double().mean())

    def certified_accuracy(self, epsilon: float) -> float:
        """Share of the samples that are right and stay so wherever they are moved by up to ``epsilon``."""
        return float((self.radii > epsilon).double().mean())

    def curve(self, points: int = 101, largest: float | None = None) -> list[tuple[float, float]]:
        """Certified accuracy on a grid from 0.

        Args:
            points: how many, at least 2.
            largest: last radius; where nothing is certified any more, unless given.

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
        """Everything as JSON, with the accuracies; infinite radii become ``null``. ``from_json`` reads it."""
        numbers = {name: value for name, value in vars(self).items() if not isinstance(value, Tensor)}
        accuracies = [{"epsilon": e, "certified_accuracy": self.certified_accuracy(e)} for e in self.epsilons]
        samples = {name: value.tolist() for name, value in vars(self).items() if isinstance(value, Tensor)}
        content = {"clean_accuracy": self.clean_accuracy, "certified": accuracies, **numbers, **samples}
        return json.dumps(without_infinities(content), allow_nan=False)

    @classmethod
    def from_json(cls, text: str) -> Certificate:
        """A certificate from what ``to_json`` wrote.

        Raises:
            ValueError: if it is not that.
        """
        try:
            content: dict[str, Any] = json.loads(text)
            content["radii"] = torch.tensor(list(map(or_infinite, content["radii"])), dtype=torch.float64)
            content |= {name: or_infinite(content[name]) for name in ("lipschitz", "evaluation_error", "safety")}
            content |= {name: torch.tensor(content[name], dtype=torch.int64) for name in ("predictions", "labels")}
            content |= {"epsilons": tuple(map(float, content["epsilons"]))}
            content |= {"input_shape": tuple(map(int, content["input_shape"]))}
            content |= {"measured_samples": int(content["measured_samples"])}
            return cls(**{name: content[name] for name in cls.__dataclass_fields__})
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"this is not a certificate in JSON: {error!r}") from error

    def __str__(self) -> str:
        rows = [("clean", self.clean_accuracy)]
        rows += [(f"certified at {_fraction(e)}", self.certified_accuracy(e)) for e in self.epsilons]
        width = max(len(name) for name, _ in rows)
        table = "\n".join(f"{name:<{width}}  {accuracy:7.2%}" for name, accuracy in rows)
        constant = "of the features, last layer pair by pair" if self.pairwise else "of all logits"
        return (
            f"{table}\n{len(self.radii)} samples; Lipschitz bound {self.lipschitz:.6g} ({constant}); evaluation error "
            f"{self.evaluation_error:.1e}"
        )


def _fraction(epsilon: float) -> str:
    """``36/255`` where that is what it is."""
    steps = round(epsilon * 255)
    return f"{steps}/255" if steps and abs(epsilon * 255 - steps) < 1e-9 else f"{epsilon:g}"


def certify(
    model: nn.Module,
    data: Data,
    *,
    epsilons: Sequence[float] = EPSILONS,
    input_shape: Sequence[int] | None = None,
    batch_size: int = 256,
    float64_samples: int | None = None,
    evaluation_error: float | None = None,
    safety: float = 2.0,
) -> Certificate:
    """Certify the answers of a classifier on data.

    The Lipschitz bound is computed from the weights in use, with every scaling of the data that is part of the model;
    if the output comes straight from a linear layer, that is used pair by pair of classes. The module's docstring says
    what is proved. The model is in eval mode meanwhile.

    Args:
        model: images to logits.
        data: batches of images and labels, a dataset, or a pair of tensors. Images are floating point, and are rounded
            to the dtype of the model: radii are about the rounded ones.
        epsilons: radii to report, in units of the pixels; 1 is ``255/255``.
        input_shape: shape of one image; that of the first, unless given. All must have it.
        batch_size: for data that is not in batches already.
        float64_samples: on how many samples the evaluation error is measured, at the beginning of the data (in float64,
            at 4 to 6 times the cost of the evaluation itself); all of them unless given.
        evaluation_error: bound on the error of a difference of two logits, in place of measuring it.
        safety: the evaluation error where it was not measured is taken to be this many times the largest that was
            measured: of moved images (taken off on top of a sample's own), and of samples past ``float64_samples``.

    Raises:
        NoRuleError: if a part of the model has no Lipschitz rule.
        ValueError: if logits are not finite, or the data or an argument does not fit.

    >>> model = nn.Sequential(OrthoConv2d(1, 4, 3, stride=2), MaxMin(), nn.Flatten(), OrthoLinear(64, 10))
    >>> certificate = certify(model, (torch.rand(8, 1, 8, 8), torch.arange(8)), epsilons=[0.1])
    >>> certificate.radii.shape
    torch.Size([8])
    """
    epsilons = _checked_epsilons(epsilons)
    for name, number in (("safety", safety), ("evaluation_error", evaluation_error or 0.0)):
        if not 0 <= number < math.inf:
            raise ValueError(f"{name}={number!r} must be a finite number, at least 0")
    if float64_samples == 0 and evaluation_error is None:
        raise ValueError("float64_samples=0 measures nothing: give evaluation_error in its place")
    model = getattr(model, "_orig_mod", model)
    with evaluating(model), torch.no_grad():
        measure = 0 if evaluation_error is not None else float64_samples
        logits, labels, errors, errors_around, shape, precision = _evaluate(
            model, data, input_shape, batch_size, measure
        )
        found = follow_classifier(model, shape)
        largest = float(max(errors.max(), errors_around.max())) if evaluation_error is None else evaluation_error
        elsewhere = safety * largest if evaluation_error is None else evaluation_error
        here = torch.full(labels.shape, elsewhere, dtype=torch.float64)
        here[: len(errors)] = errors
        # One rounding of the logits at least, which up to the radius are at most three times as large.
        least = _FLOAT64_ERROR + (3 * precision if evaluation_error is None else 0.0)
        allowance = here + elsewhere + least * logits.abs().amax(1)
        radii = certified_radius(logits, labels, found.features_bound, found.head, error=allowance)
    return Certificate(
        radii, logits.argmax(1), labels, epsilons, found.features_bound, found.head is not None, largest, len(errors),
        safety, shape,
    )  # fmt: skip


def _checked_epsilons(epsilons: Sequence[float]) -> tuple[float, ...]:
    checked = tuple(float(epsilon) for epsilon in epsilons)
    if not checked or not all(0 <= epsilon < math.inf for epsilon in checked):
        raise ValueError(f"epsilons={checked} must be finite radii, at least one and none negative")
    return checked


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Eval mode; afterwards each module is in the mode that it was in."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


def batches_of(data: Data, batch_size: int) -> tuple[Batches, int]:
    """Data of any kind in batches, and how many there are (0 if that is not known).

    Raises:
        ValueError: if it is a pair of tensors of different lengths.
    """
    tensors: Any = data.tensors if isinstance(data, TensorDataset) else data
    if isinstance(tensors, tuple | list) and len(tensors) == 2 and all(isinstance(part, Tensor) for part in tensors):
        images, labels = tensors
        if len(images) != len(labels):
            raise ValueError(f"{len(images)} images and {len(labels)} labels must be as many of one as of the other")
        batches: Any = list(zip(images.split(batch_size), labels.split(batch_size), strict=True))
    else:
        batches = DataLoader(data, batch_size) if isinstance(data, Dataset) else data
    return batches, len(batches) if hasattr(batches, "__len__") else 0


class _Evaluation(NamedTuple):
    """Of all data.

    Attributes:
        logits: in float64.
        labels: as given.
        errors: of the margins of the first samples.
        errors_around: of the same samples, moved a little.
        shape: of one image.
        precision: of the dtype that the logits were computed in.
    """

    logits: Tensor
    labels: Tensor
    errors: Tensor
    errors_around: Tensor
    shape: tuple[int, ...]
    precision: float


def _evaluate(
    model: nn.Module, data: Data, input_shape: Sequence[int] | None, batch_size: int, measure: int | None
) -> _Evaluation:
    batches, total = batches_of(data, batch_size)
    reference = with_fixed_weights(model).double() if measure != 0 else None
    shape = None if input_shape is None else tuple(input_shape)
    logits, labels, errors, left = [], [], [], math.inf if measure is None else measure
    moved: list[Tensor] = []
    precision = 0.0
    for images, classes in track(batches, "certifying", total):
        shape = shape or tuple(images.shape[1:])
        given = prepared(model, images, shape)
        raw = model(given)
        values = _checked_logits(raw)
        dtypes = given.dtype, raw.dtype, autocast_dtype(raw) or raw.dtype
        precision = max(torch.finfo(dtype).eps for dtype in dtypes)
        labels.append(_checked_labels(classes, values))
        logits.append(values)
        if left > 0 and reference is not None:
            count = int(min(left, len(given)))
            exact = _checked_logits(_in_float64(reference, given[:count]))
            errors.append(_margin_errors(values[:count], exact, labels[-1][:count]))
            around = _moved(given[:count])
            exact = _checked_logits(_in_float64(reference, around))
            moved.append(_margin_errors(_checked_logits(model(around)), exact, labels[-1][:count]))
            left -= count
    if not labels or shape is None or not sum(map(len, labels)):
        raise ValueError("there is no data to certify on")
    at_rest, elsewhere = (torch.cat(found) if found else torch.zeros(0) for found in (errors, moved))
    return _Evaluation(torch.cat(logits), torch.cat(labels), at_rest, elsewhere, shape, precision)


def prepared(model: nn.Module, images: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Images as the model wants them: its dtype and device.

    Raises:
        ValueError: if they are not floating point, not finite or of another shape.
    """
    if tuple(images.shape[1:]) != shape or not images.is_floating_point():
        raise ValueError(
            f"images of shape {tuple(images.shape)} and {images.dtype} must be floating point and (batch, "
            f"{', '.join(map(str, shape))})"
        )
    if not bool(images.isfinite().all()):
        raise ValueError("there are images that are not finite")
    return images.to(input_like(model))


def _moved(images: Tensor) -> Tensor:
    """Each image and noise of a tenth of the length of all ones: few images around one are computed exactly."""
    noise = torch.randn(images.shape, generator=torch.Generator().manual_seed(0))
    return images + 0.1 * noise.to(images)


class _OnlyFloat64(TorchDispatchMode):
    """Computes in float64 what a forward pass wants in a shorter dtype by name."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def longer(value: Any) -> Any:
            return torch.float64 if value in _SHORTER else value

        args = [longer(value) if isinstance(value, torch.dtype) else value for value in args]
        options = {
            name: longer(value) if isinstance(value, torch.dtype) else value for name, value in (kwargs or {}).items()
        }
        return func(*args, **options)


def _in_float64(reference: nn.Module, images: Tensor) -> Tensor:
    pieces = images.split(_FLOAT64_IMAGES) if images.device.type == "cpu" else (images,)
    try:
        with _OnlyFloat64():
            return torch.cat([reference(piece.double()) for piece in pieces])
    except RuntimeError as error:
        raise ValueError(
            f"the model does not run in float64 ({error}), so its evaluation error cannot be measured: give "
            "evaluation_error, a bound on the error of a difference of two logits"
        ) from error


def _margin_errors(logits: Tensor, exact: Tensor, labels: Tensor) -> Tensor:
    """Largest error of ``z_y - z_j`` over the other classes, of each sample."""
    difference = logits - exact
    return (difference.gather(1, labels.unsqueeze(1)) - difference).abs().amax(1)
