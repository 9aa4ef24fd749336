"""Attacks inside l2 balls: a check of certificates, which no attack may break."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from trysquare.files import JsonObject, or_infinite, read_json, without_infinities
from trysquare.naming import require_known, shown
from trysquare.nn.export import with_fixed_weights
from trysquare.nn.geometry import per_axis, positive
from trysquare.progress import track
from trysquare.verify.certification import (
    Certificate,
    Data,
    batches_of,
    checked_epsilons,
    checked_labels,
    checked_logits,
    checked_number,
    evaluating,
    pairs,
    prepared,
    radius_text,
)
from trysquare.verify.lipschitz import input_like
from trysquare.verify.lipschitz.checks import require_dense, require_plain_module

Box = tuple[float, float] | None
Attack = Callable[..., Tensor]

# Balls are shrunk by this much, so that the rounding of a norm in float64 does not matter.
_INSIDE = 1 - 1e-12
# Rounds of a projection, which seldom takes more than five; stopping earlier is safe.
_ROUNDS = 30
# Largest radius without a box: squares must fit in float64.
_LARGEST = 1e100
# Classes that an attack tries for, strongest first.
_RIVALS = 10
# Columns of a report, with one number for each radius.
_COLUMNS = ("epsilons", "certified", "attacked")
# Stands for an infinite certified radius.
_FAR = 1e6


class CertificateError(AssertionError):
    """A certificate that an attack has shown to be wrong."""


def pgd_l2(
    model: nn.Module,
    images: Tensor,
    labels: Tensor,
    radius: float | Tensor,
    steps: int = 40,
    restarts: int = 3,
    box: Box = (0.0, 1.0),
    generator: torch.Generator | None = None,
) -> Tensor:
    """Projected gradient descent on the margin ``z_y - max_j z_j``, which does not saturate as probabilities do.

    Steps of decreasing length along the normalised gradient, from twice the radius on, each projected to the
    intersection of ball and box. The first run starts at the image and attacks the class that is the strongest at each
    step; each further one starts at random in the ball and attacks one class: first that which would have the smallest
    margin at the edge of the ball if the model were linear, then the second, and so on. What is kept is the smallest
    margin of any step.

    Args:
        model: images to logits; it is attacked in eval mode, and its gradients are left alone.
        images: ``(batch, ...)``, inside of ``box``.
        labels: ``(batch,)``.
        radius: radius of the ball; a number, or one for each image.
        steps: steps of each run.
        restarts: number of runs, at least 1.
        box: range of a pixel, or ``None``.
        generator: source of the random starts, on the CPU.

    Returns:
        Images of the shape and dtype of ``images``, for which in float64 ``|result - image| <= radius`` holds exactly,
        and inside of the box.

    Raises:
        ValueError: if an image is outside of the box or not finite, or a number is out of range.

    >>> model = nn.Sequential(nn.Flatten(), OrthoLinear(64, 10))
    >>> images, labels = torch.rand(4, 1, 8, 8), torch.arange(4)
    >>> moved = ts.attacks.pgd_l2(model, images, labels, radius=0.5, steps=5)
    >>> bool((moved - images).flatten(1).norm(dim=1).max() <= 0.5)
    True
    """
    _check_attacked(model, images, box)
    for name, number in (("steps", steps), ("restarts", restarts)):
        positive(name, number)
    region = _Region(images.detach().to(input_like(model).device), radius, box)
    with evaluating(model):
        target = _Target(model, region, labels)
        best = region.still
        best_margin = target.margins(target.logits(best))
        for run in range(restarts):
            start = region.random_move(generator) if run else best
            rival = target.rival(run - 1) if run else None
            for move, margin in _descend(target, start, rival, steps):
                better = margin < best_margin
                best_margin = torch.where(better, margin, best_margin)
                best = torch.where(_as_columns(better, best), move, best)
    return region.moved(best).to(images.device)


def _check_attacked(model: nn.Module, images: Tensor, box: Box) -> None:
    """Refuse models, images and boxes that cannot be attacked."""
    require_plain_module(model)
    if not isinstance(images, Tensor):
        raise TypeError(f"images must be a tensor (batch, ...), not {type(images).__name__}")
    require_dense("images", images)
    if box is None:
        return
    if not isinstance(box, tuple | list) or len(box) != 2 or not all(map(_is_number, box)):
        raise ValueError(f"box={shown(box)} must be the smallest and the largest value of a pixel, or None")


def _is_number(value: object) -> bool:
    """Whether a value is a number that a float can hold; an integer may be beyond all of them."""
    return isinstance(value, int | float) and (value in (-math.inf, math.inf) or abs(value) <= sys.float_info.max)


class _Region:
    """Where images may be moved to: the intersections of their balls with the box.

    Moves are kept apart from the images, in float64: a sum of both would round them.
    """

    def __init__(self, images: Tensor, radius: float | Tensor, box: Box) -> None:
        self.images, self.box = images, box
        self.radii = _checked_radii(radius, images, box)
        self.origin = images.double()
        self.still = torch.zeros_like(self.origin)

    def _room(self, move: Tensor) -> Tensor:
        """Return how far each coordinate may go in the direction of the move."""
        if self.box is None:
            return torch.full_like(move, math.inf)
        return torch.where(move > 0, self.box[1] - self.origin, self.origin - self.box[0])

    def projected(self, move: Tensor) -> Tensor:
        """Return the nearest move that stays inside.

        By the conditions of Karush, Kuhn and Tucker it is ``clip(s · move)`` for the largest ``s <= 1`` that is in the
        ball, and with the clipped coordinates known that is a quadratic equation for ``s``. Starting from none, the
        solution is too small, so at most too few coordinates are known to be clipped the next time: ``s`` grows to its
        end and is in the ball all along.
        """
        size, room = move.flatten(1).abs(), self._room(move).flatten(1)
        share = torch.zeros_like(self.radii)
        for _ in range(_ROUNDS):
            clipped = share.unsqueeze(1) * size > room
            left = (self.radii * _INSIDE).square() - torch.where(clipped, room, 0.0).square().sum(1)
            free = torch.where(clipped, 0.0, size).square().sum(1)
            solved = (left.clamp_min(0.0) / torch.where(free > 0, free, 1.0)).sqrt().clamp_max(1.0)
            grown = torch.where(free > 0, solved, 1.0)
            if bool((grown <= share).all()):
                break
            share = torch.maximum(share, grown)
        scaled = torch.minimum(share.unsqueeze(1) * size, room).view_as(move)
        return scaled.copysign(move)

    def random_move(self, generator: torch.Generator | None) -> Tensor:
        """Move to the edge of the ball in a uniformly distributed direction, as far as the box allows."""
        noise = torch.randn(self.images.shape, dtype=torch.float64, generator=generator).to(self.images.device)
        return self.projected(noise * _as_columns(self.radii / _norms(noise).clamp_min(1e-300), noise))

    def moved(self, move: Tensor) -> Tensor:
        """Return the images after a move, in their dtype.

        Each coordinate is rounded towards where it was, so that rounding adds no distance.
        """
        rounded = (self.origin + move).to(self.images.dtype)
        too_far = (rounded.double() - self.origin).abs() > move.abs()
        inwards = torch.where(too_far, torch.nextafter(rounded, self.images), rounded)
        return inwards if self.box is None else inwards.clamp(*self.box)


def _as_columns(values: Tensor, like: Tensor) -> Tensor:
    """Return ``(batch,)`` as ``(batch, 1, ...)``."""
    return values.view(-1, *(1,) * (like.ndim - 1))


def _norms(differences: Tensor) -> Tensor:
    return differences.flatten(1).norm(dim=1)


def _checked_radii(radius: float | Tensor, images: Tensor, box: Box) -> Tensor:
    """Return a radius for each image, in float64 and at most the diagonal of the box."""
    if images.ndim < 2 or not images.is_floating_point() or not bool(images.isfinite().all()):
        raise ValueError(
            f"images of shape {tuple(images.shape)} and {images.dtype} must be floating point, finite and (batch, ...)"
        )
    if isinstance(radius, Tensor):
        require_dense("radius", radius)
    given = radius if isinstance(radius, Tensor) else checked_number("radius", radius)
    radii = torch.as_tensor(given, dtype=torch.float64, device=images.device)
    if radii.ndim > 1 or (radii.ndim == 1 and len(radii) != len(images)) or not bool((radii >= 0).all()):
        raise ValueError(f"radius={radius!r} must be at least 0: a number, or one for each of {len(images)} images")
    if box is None:
        if not bool((radii <= _LARGEST).all()):
            raise ValueError(f"radius is above {_LARGEST:g}: give a box, or a smaller radius")
        return radii.expand(len(images))
    low, high = box
    if not low < high:
        raise ValueError(f"box={box} must be the smallest and the largest value of a pixel")
    if images.numel() and not low <= float(images.min()) <= float(images.max()) <= high:
        raise ValueError(
            f"images from {float(images.min()):g} to {float(images.max()):g} must be inside of box={box}; give their "
            "range, or box=None"
        )
    return radii.clamp_max((high - low) * math.sqrt(images[:1].numel())).expand(len(images))


class _Target:
    """The model under attack; its weights are built once, not at every step."""

    def __init__(self, model: nn.Module, region: _Region, labels: Tensor) -> None:
        self.model, self.region = with_fixed_weights(model), region
        self.given = prepared(model, region.images, tuple(region.images.shape[1:]))
        with torch.no_grad():
            self.clean = checked_logits(_answer(self.model, self.given))
        self.labels = checked_labels(labels, self.clean).to(self.given.device)

    def logits(self, move: Tensor) -> Tensor:
        with torch.no_grad():
            return self.model(self.region.moved(move).to(self.given))

    def margins(self, logits: Tensor, rival: Tensor | None = None) -> Tensor:
        """Return ``z_y`` less the logit of the rival, or of the strongest other class."""
        true = logits.gather(1, self.labels.unsqueeze(1)).squeeze(1)
        if rival is not None:
            return true - logits.gather(1, rival.unsqueeze(1)).squeeze(1)
        return true - logits.scatter(1, self.labels.unsqueeze(1), -math.inf).amax(1)

    def gradient(self, move: Tensor, rival: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return logits, and the gradients of the margins in float64, with 0 for what is not a number."""
        given = self.region.moved(move).to(self.given).requires_grad_()
        with torch.enable_grad():
            logits = self.model(given)
            (gradient,) = torch.autograd.grad(self.margins(logits, rival).sum(), given)
        return logits.detach(), gradient.double().nan_to_num(0.0, 0.0, 0.0)

    def rival(self, place: int) -> Tensor:
        """Return for each image the class that is so many places behind the one most likely to win."""
        return self._order[:, place % self._order.shape[1]]

    @cached_property
    def _order(self) -> Tensor:
        others = self.clean.to(self.labels.device).scatter(1, self.labels.unsqueeze(1), -math.inf)
        strongest = others.argsort(1, descending=True)[:, : min(_RIVALS, others.shape[1] - 1)]
        expected = torch.stack([self._expected(rival) for rival in strongest.unbind(1)], 1)
        return strongest.gather(1, expected.argsort(1))

    def _expected(self, rival: Tensor) -> Tensor:
        """Return the margin that a linear model would have at the edge of the ball."""
        logits, gradient = self.gradient(self.region.still, rival)
        return self.margins(logits, rival).double() - self.region.radii * _norms(gradient)


def _descend(target: _Target, start: Tensor, rival: Tensor | None, steps: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the moves of one run, and the true margins there."""
    move = start
    for step in range(steps):
        logits, gradient = target.gradient(move, rival)
        yield move, target.margins(logits)
        length = 2 * target.region.radii * (1 - step / steps)
        move = target.region.projected(move - _as_columns(length, move) * _normalised(gradient))
    yield move, target.margins(target.logits(move))


def _normalised(gradient: Tensor) -> Tensor:
    """Scale each gradient to norm 1, unless it is 0."""
    largest = _as_columns(gradient.flatten(1).abs().amax(1), gradient)
    scaled = gradient / torch.where(largest > 0, largest, 1.0)  # so that squares do not vanish
    return scaled / _as_columns(_norms(scaled).clamp_min(1.0), scaled)


def autoattack_l2(
    model: nn.Module,
    images: Tensor,
    labels: Tensor,
    radius: float,
    *,
    attacks: Sequence[str] | None = None,
    box: Box = (0.0, 1.0),
    batch_size: int = 250,
    seed: int = 0,
) -> Tensor:
    """AutoAttack (Croce & Hein, 2020) by the package ``pyautoattack``.

    Args:
        model: images to logits; it is attacked in eval mode.
        images: ``(batch, channels, height, width)`` in ``[0, 1]``.
        labels: ``(batch,)``.
        radius: radius of the ball, positive and the same for all images.
        attacks: some of ``apgd-ce``, ``apgd-dlr``, ``apgd-t``, ``fab``, ``fab-t``, ``square``; unless given the
            standard four, or for fewer than 4 classes those that work there.
        box: must be ``(0, 1)``, which is what the package knows.
        batch_size: batch size of the evaluation.
        seed: seed of its random numbers; those of torch are left as they were.

    Returns:
        Images of the shape and dtype of ``images``, projected as those of ``pgd_l2`` are.

    Raises:
        ImportError: if the package is not installed.
        ValueError: if an image is outside of the box or not finite, or a number is out of range.
    """
    if not isinstance(box, tuple | list) or not all(map(_is_number, box)) or tuple(box) != (0.0, 1.0):
        raise ValueError(f"box={shown(box)} must be (0, 1): AutoAttack knows no other")
    _check_attacked(model, images, box)
    if not checked_number("radius", radius) > 0:
        raise ValueError(f"radius={shown(radius)} must be positive")
    batch_size, (seed,) = positive("batch_size", batch_size), per_axis("seed", seed, 1, least=0)
    for name in [] if attacks is None else _names(attacks):
        require_known(name, _AUTOATTACK, "attack")
    region = _Region(images.detach().to(input_like(model).device), radius, box)
    with evaluating(model), _left_alone(region.images):
        target = _Target(model, region, labels)
        run = _autoattack(target, float(radius), attacks, seed)
        found, _ = run.run_standard_evaluation(target.given.clone(), target.labels, batch_size=batch_size)
    return region.moved(region.projected(found.double() - region.origin)).to(images.device)


# The attacks of the package that AutoAttack is made of.
_AUTOATTACK = ("apgd-ce", "apgd-dlr", "apgd-t", "fab", "fab-t", "square")


def _names(attacks: object) -> list[str]:
    if not isinstance(attacks, list | tuple) or not attacks:
        raise TypeError(f"attacks={shown(attacks)} must be a list of some of {', '.join(_AUTOATTACK)}")
    return list(attacks)


def _autoattack(target: _Target, radius: float, attacks: Sequence[str] | None, seed: int) -> Any:
    try:
        from pyautoattack import AutoAttack
    except ImportError as error:
        raise ImportError("AutoAttack needs pyautoattack: pip install 'trysquare[attack]'") from error
    rivals = target.clean.shape[1] - 1
    if attacks is None:
        # The targeted loss compares with the third and fourth logit.
        attacks = ["apgd-ce", "apgd-t", "fab-t", "square"] if rivals >= 3 else ["apgd-ce", "fab", "square"]
    device = target.given.device
    run = AutoAttack(
        target.model, norm="L2", eps=radius, version="custom", attacks=list(attacks), seed=seed, device=device
    )
    run.apgd.n_restarts = run.fab.n_restarts = run.apgd_targeted.n_restarts = 1
    run.apgd_targeted.n_target_classes = run.fab.n_target_classes = min(9, rivals)
    return run


@contextmanager
def _left_alone(images: Tensor) -> Iterator[None]:
    """Put back torch's random state and the debugger's hook, which AutoAttack sets and drops."""
    hook = sys.gettrace()
    try:
        with torch.random.fork_rng([images.device] if images.is_cuda else []):
            yield
    finally:
        sys.settrace(hook)


@dataclass(frozen=True)
class Violation:
    """A sample that was given another class inside of its certified radius.

    Attributes:
        index: index of the sample in the data.
        radius: its certified radius.
        distance: distance at which another class was found.
        label: its label.
        prediction: the class that was found.
    """

    index: int
    radius: float
    distance: float
    label: int
    prediction: int

    @classmethod
    def from_dict(cls, content: JsonObject) -> Violation:
        """Read a violation from its part of a report in JSON."""
        radius, distance = (or_infinite(content[name]) for name in ("radius", "distance"))
        index, label, prediction = (int(content[name]) for name in ("index", "label", "prediction"))
        return cls(index, radius, distance, label, prediction)


@dataclass(frozen=True)
class AttackReport:
    """Certified, attacked and clean accuracy side by side.

    Attributes:
        epsilons: radii.
        certified: certified accuracy at each radius.
        attacked: accuracy under attack at each radius.
        clean: accuracy without attack.
        samples: number of samples.
        violations: samples that disprove the certificate.
    """

    epsilons: tuple[float, ...]
    certified: tuple[float, ...]
    attacked: tuple[float, ...]
    clean: float
    samples: int
    violations: tuple[Violation, ...]

    def check(self) -> None:
        """Check that no attack got inside of a certified radius, and certified <= attacked <= clean at each radius.

        Raises:
            CertificateError: if not; the certificate is wrong, or the model or the data is another one.
        """
        if self.violations:
            first = self.violations[0]
            raise CertificateError(
                f"{len(self.violations)} of {self.samples} certified samples fell inside of their radius; the first at "
                f"index {first.index}: label {first.label} became {first.prediction} at distance {first.distance:.6g}, "
                f"certified up to {first.radius:.6g}"
            )
        for epsilon, certified, attacked in zip(self.epsilons, self.certified, self.attacked, strict=True):
            if not certified <= attacked <= self.clean:
                raise CertificateError(
                    f"at {radius_text(epsilon)} certified {certified:.4f} <= attacked {attacked:.4f} <= clean "
                    f"{self.clean:.4f} does not hold"
                )

    def to_json(self) -> str:
        """Return everything as JSON; infinite radii become ``null``. ``from_json`` reads it."""
        return json.dumps(without_infinities(asdict(self)), indent=2, allow_nan=False)

    @classmethod
    def from_json(cls, text: str) -> AttackReport:
        """Return the report that ``to_json`` wrote.

        Raises:
            ValueError: if the text is something else.
        """
        return read_json(text, "an attack report", cls._from_content)

    @classmethod
    def _from_content(cls, content: JsonObject) -> AttackReport:
        epsilons, certified, attacked = (tuple(map(float, content[name])) for name in _COLUMNS)
        if not len(epsilons) == len(certified) == len(attacked):
            raise ValueError(f"{_COLUMNS} differ in length")
        violations = tuple(Violation.from_dict(violation) for violation in content["violations"])
        clean, samples = float(content["clean"]), int(content["samples"])
        return cls(epsilons, certified, attacked, clean, samples, violations)

    def __str__(self) -> str:
        lines = [f"{'radius':<10}{'certified':>10}{'attacked':>10}{'clean':>10}"]
        for epsilon, certified, attacked in zip(self.epsilons, self.certified, self.attacked, strict=True):
            lines.append(f"{radius_text(epsilon):<10}{certified:>10.2%}{attacked:>10.2%}{self.clean:>10.2%}")
        try:
            self.check()
        except CertificateError as error:
            return "\n".join([*lines, f"WRONG: {error}"])
        return "\n".join([*lines, f"certified <= attacked <= clean holds; no violation on {self.samples} samples"])


def attack_report(
    model: nn.Module,
    data: Data,
    certificate: Certificate,
    epsilons: Sequence[float] | None = None,
    *,
    attack: Attack = pgd_l2,
    box: Box = (0.0, 1.0),
    batch_size: int = 256,
) -> AttackReport:
    """Attack a model at each radius, and every sample at the edge of its own certified radius.

    A sample that falls at one radius counts as fallen at all larger ones. Violations are recorded; ``check`` raises if
    there are any.

    Args:
        model: images to logits.
        data: the data of the certificate, in the same order.
        certificate: what ``certify`` returned.
        epsilons: radii; those of the certificate unless given.
        attack: called as ``attack(model, images, labels, radius, box=box)``; bind its settings by
            ``functools.partial``. The attack at certified radii is always ``pgd_l2``.
        box: range of a pixel, or ``None``.
        batch_size: for data that is not in batches already.

    Raises:
        ValueError: if the data is not that of the certificate.

    >>> model = nn.Sequential(nn.Flatten(), OrthoLinear(64, 10))
    >>> data = torch.rand(16, 1, 8, 8), torch.randint(10, (16,))
    >>> report = ts.attacks.attack_report(model, data, certify(model, data), [0.01, 0.1])
    >>> report.check()
    """
    require_plain_module(model)
    if not isinstance(certificate, Certificate):
        raise TypeError(f"certificate must be what certify returned, not {type(certificate).__name__}")
    (batch_size,) = per_axis("batch_size", batch_size, 1)
    radii = tuple(sorted(checked_epsilons(certificate.epsilons if epsilons is None else epsilons)))
    batches, total = batches_of(data, batch_size)
    results, start = [], 0
    for images, labels in track(pairs(batches), "attacking", total):
        # The certificate is about images in the dtype of the model.
        images = prepared(model, images, certificate.input_shape)
        part = slice(start, start + len(labels))
        if not torch.equal(labels.cpu().long(), certificate.labels[part]):
            raise ValueError(f"samples {part.start} to {part.stop - 1} do not have the labels of the certificate")
        results.append(_attack_batch(model, images, labels, certificate.program_radii[part], radii, attack, box))
        start = part.stop
    if start != len(certificate.radii):
        raise ValueError(f"the certificate is of {len(certificate.radii)} samples, the data has {start}")
    found = torch.cat([distances for distances, _ in results])
    answers = torch.cat([predictions for _, predictions in results])
    return _report(certificate, radii, found, answers)


def _report(certificate: Certificate, radii: tuple[float, ...], found: Tensor, answers: Tensor) -> AttackReport:
    broken = (found < certificate.program_radii).nonzero().flatten().tolist()
    violations = tuple(
        Violation(
            i, float(certificate.program_radii[i]), float(found[i]), int(certificate.labels[i]), int(answers[i])
        )
        for i in broken
    )  # fmt: skip
    return AttackReport(
        radii, tuple(map(certificate.certified_accuracy, radii)), tuple(_share(found > radius) for radius in radii),
        _share(found > 0), len(found), violations,
    )  # fmt: skip


def _share(mask: Tensor) -> float:
    return float(mask.double().mean())


def _attack_batch(
    model: nn.Module,
    images: Tensor,
    labels: Tensor,
    certified: Tensor,
    radii: tuple[float, ...],
    attack: Attack,
    box: Box,
) -> tuple[Tensor, Tensor]:
    """Return the distance at which each sample fell (0 if it is wrong, inf if it did not), and the class it became."""
    found, truth = torch.full(labels.shape, math.inf, dtype=torch.float64), labels.cpu().long()
    answers = truth.clone()

    def note(indices: Tensor, points: Tensor) -> None:
        predictions, distances = _predictions(model, points), _norms(points.double() - images[indices].double()).cpu()
        fell = (predictions != truth[indices]) & (distances < found[indices])
        found[indices[fell]], answers[indices[fell]] = distances[fell], predictions[fell]

    note(torch.arange(len(labels)), images)
    certain = ((certified > 0) & (found > 0)).nonzero().flatten()
    if len(certain):
        limits = certified[certain].clamp_max(_FAR).to(images.device)
        note(certain, pgd_l2(model, images[certain], labels[certain], limits, box=box))
    for radius in radii:
        standing = (found > radius).nonzero().flatten()
        if len(standing) and radius > 0:
            note(standing, attack(model, images[standing], labels[standing], radius, box=box))
    return found, answers


def _answer(model: nn.Module, images: Tensor) -> object:
    """Return the answer to images that the model sees for the first time, and whose shape it may not take.

    Raises:
        ValueError: if the model raises anything but that there is no memory left.
    """
    try:
        return model(images)
    except (MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        shape = tuple(images.shape[1:])
        raise ValueError(f"model: {type(model).__name__} fails on images of shape {shape}: {error}") from error


def _predictions(model: nn.Module, images: Tensor) -> Tensor:
    with evaluating(model), torch.no_grad():
        return checked_logits(_answer(model, prepared(model, images, tuple(images.shape[1:])))).argmax(1)
