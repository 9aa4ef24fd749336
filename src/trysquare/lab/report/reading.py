"""Read the directory of a run. Errors name the damaged file, and say what was expected of it."""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TypeVar

from trysquare.files import DIGEST, LARGEST_RECIPE, LARGEST_TEXT, read_file, sha256
from trysquare.lab.checkpoint import MODEL_FILES, read_checkpoint
from trysquare.lab.training.recipe import parse_yaml
from trysquare.lab.training.run import read_metrics
from trysquare.naming import shown
from trysquare.verify.attacks import AttackReport
from trysquare.verify.auditing import AuditReport
from trysquare.verify.certification import Certificate, radius_text

T = TypeVar("T")

KINDS = ("train", "evaluation")
# What is known about a model, and the command that finds it out.
COMMANDS = {"certificate": "certify", "attack": "attack", "audit": "audit"}
_DAMAGE = (ArithmeticError, AttributeError, KeyError, RecursionError, TypeError, ValueError)


@dataclass(frozen=True)
class Record:
    """A line of the metrics.

    Attributes:
        kind: ``"train"`` or ``"evaluation"``.
        step: optimizer steps until then.
        values: the numbers of the line by name, those that are none or not finite left out.
        certified: certified accuracy by radius.
    """

    kind: str
    step: float
    values: Mapping[str, float]
    certified: Mapping[float, float]


@dataclass(frozen=True)
class Level:
    """What is known at one radius.

    Attributes:
        epsilon: the radius.
        name: as it is written.
        asked: whether the certificate names it; otherwise only the attack does.
        certified: share of images whose answer is proved to stay right.
        attacked: share that the attack has left right; ``None`` if it was not tried at this radius.
    """

    epsilon: float
    name: str
    asked: bool
    certified: float
    attacked: float | None


@dataclass(frozen=True)
class Results:
    """Everything that a report shows about a run.

    Attributes:
        path: the directory.
        recipe: text of the resolved recipe.
        sections: the recipe itself.
        versions: of everything used.
        metrics: in the order in which they were written.
        parameters: of the model.
        certificate: of the model on the test data.
        attack: ``None`` if there is none yet, as with ``audit``.
        audit: layer by layer.
        outdated: what the report shows of other weights than those of the model: ``"certificate"``, ``"attack"`` or
            ``"audit"``.
    """

    path: Path
    recipe: str
    sections: Mapping[str, object]
    versions: Mapping[str, object]
    metrics: tuple[Record, ...]
    parameters: int
    certificate: Certificate
    attack: AttackReport | None
    audit: AuditReport | None
    outdated: tuple[str, ...]

    @cached_property
    def levels(self) -> list[Level]:
        """What is known at each radius: those of the certificate in its order, then others of the attack."""
        asked = dict.fromkeys(self.certificate.epsilons, True)
        attacked = {} if self.attack is None else dict(zip(self.attack.epsilons, self.attack.attacked, strict=True))
        shares = {e: self.certificate.certified_accuracy(e) for e in asked | dict.fromkeys(attacked, False)}
        return [Level(e, radius_text(e), e in asked, share, attacked.get(e)) for e, share in shares.items()]

    def command(self, name: str) -> str:
        """Return the command that does this to the run."""
        return f"trysquare {name} {shlex.quote(str(self.path))}"

    def setting(self, section: str, key: str) -> object:
        """Return a value of the recipe; ``None`` if it is not there."""
        part = self.sections.get(section)
        return part.get(key) if isinstance(part, dict) else None


def read_results(path: Path) -> Results:
    """Read all files of a run; its recipe may be one that could not be trained today.

    Raises:
        ValueError: if one is missing that must be there, or is damaged.
    """
    if not path.is_dir():
        raise ValueError(f"{path}: expected the directory of a run, found none")
    recipe, sections = recipe_sections(path)
    return Results(
        path,
        recipe,
        sections,
        _read(path / "versions.json", "a JSON object of versions", _object),
        _read(path / "metrics.jsonl", "a JSON object with kind and step on each line", _metrics),
        _parameters(_model(path)),
        _read(path / "certificate.json", "a certificate", _certificate, f"trysquare certify {path}"),
        _optional(path / "attack.json", "an attack report", _attack),
        _optional(path / "audit.json", "an audit", _audit),
        _outdated(path),
    )


def recipe_sections(path: Path) -> tuple[str, Mapping[str, object]]:
    """Return text and sections of the recipe of a run.

    Raises:
        ValueError: if it is missing or damaged.
        ImportError: if PyYAML is not installed.
    """
    return _read(
        path / "recipe.yaml",
        "a recipe: YAML with named sections",
        lambda content: (content.decode("utf-8"), _mapping(parse_yaml(content))),
        most=LARGEST_RECIPE,
    )


def _outdated(path: Path) -> tuple[str, ...]:
    """Return the files that name the digest of another model; a file without a digest is believed."""
    digest = sha256(_model(path))
    files = {name: path / f"{name}.json" for name in COMMANDS}
    about = {name: json.loads(read_file(file)).get(DIGEST, digest) for name, file in files.items() if file.is_file()}
    return tuple(name for name, found in about.items() if found != digest)


def _optional(path: Path, expected: str, parse: Callable[[bytes], T]) -> T | None:
    return _read(path, expected, parse) if path.exists() else None


def _read(
    path: Path, expected: str, parse: Callable[[bytes], T], maker: str = "trysquare train", most: int = LARGEST_TEXT
) -> T:
    try:
        return parse(read_file(_present(path, maker), most))
    except _MissingError:
        raise
    except _DAMAGE as error:
        raise ValueError(f"{path}: expected {expected}, found something else ({_brief(error)})") from error


class _MissingError(ValueError):
    """Raised for a file that is not there."""


def _present(path: Path, maker: str) -> Path:
    if not path.is_file():
        raise _MissingError(f"{path}: expected this file, found none; {maker} writes it")
    return path


def _brief(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return text if len(text) <= 300 else f"{text[:300]} …"


def _object(content: bytes) -> Mapping[str, object]:
    return _mapping(json.loads(content))


def _mapping(value: object) -> Mapping[str, object]:
    if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
        raise ValueError(f"{type(value).__name__} where names with values should be")
    return value


def _model(path: Path) -> Path:
    found = next((path / name for name in MODEL_FILES if (path / name).is_file()), path / MODEL_FILES[0])
    return _present(found, "trysquare train")


def _parameters(path: Path) -> int:
    try:
        return int(read_checkpoint(path)["parameters"])
    except ValueError as error:
        raise ValueError(f"{path}: expected a checkpoint of a model, found something else ({_brief(error)})") from error


def _certificate(content: bytes) -> Certificate:
    certificate = Certificate.from_json(content.decode("utf-8"))
    shapes = {tuple(values.shape) for values in (certificate.radii, certificate.predictions, certificate.labels)}
    if len(shapes) != 1 or len(shapes.pop()) != 1 or not len(certificate.radii):
        raise ValueError("radii, predictions and labels must be lists of one length, not empty")
    if not bool((certificate.radii >= 0).all()) or int(certificate.labels.min()) < 0:
        raise ValueError("a radius or a label is negative or not a number")
    errors = (certificate.evaluation_error, certificate.rounding)
    if not certificate.lipschitz >= 0 or not all(0 <= error < math.inf for error in errors):
        raise ValueError("lipschitz, evaluation_error and rounding must be numbers, at least 0")
    if not certificate.epsilons or not all(0 <= epsilon < math.inf for epsilon in certificate.epsilons):
        raise ValueError("epsilons must be finite radii, at least one")
    return certificate


def _attack(content: bytes) -> AttackReport:
    attack = AttackReport.from_json(content.decode("utf-8"))
    if not all(0 <= share <= 1 for share in (*attack.certified, *attack.attacked, attack.clean)):
        raise ValueError("an accuracy is not from 0 to 1")
    if not all(0 <= epsilon < math.inf for epsilon in attack.epsilons):
        raise ValueError("epsilons must be finite radii")
    return attack


def _audit(content: bytes) -> AuditReport:
    audit = AuditReport.from_json(content.decode("utf-8"))
    values = [audit.bound, audit.lower_bound]
    for layer in audit.layers:
        values += [layer.smallest, layer.largest, layer.bound, layer.bound_so_far, *(layer.spectrum or ())]
    if not all(value is None or value >= 0 for value in values):
        raise ValueError("a bound or a singular value is negative or not a number")
    return audit


def _metrics(content: bytes) -> tuple[Record, ...]:
    records: list[Record] = []
    for number, line in enumerate(read_metrics(content), 1):
        try:
            record = _record(line)
        except _DAMAGE as error:
            raise ValueError(f"line {number}: {_brief(error)}") from error
        # A run that was interrupted goes on from a checkpoint, and writes the steps after it again.
        if records and records[-1].step > record.step:
            records = [earlier for earlier in records if earlier.step < record.step]
        records.append(record)
    return tuple(records)


_MOST_STEPS = 2**53  # from there on a float cannot tell a step from the next


def _record(content: Mapping[str, object]) -> Record:
    kind, step = content.get("kind"), _finite(content.get("step"))
    if kind not in KINDS or step is None or not 0 <= step <= _MOST_STEPS:
        raise ValueError(
            f"kind {shown(kind)} must be one of {KINDS}, and step {shown(content.get('step'))} a number from 0 to "
            f"{_MOST_STEPS}"
        )
    values = {name: found for name, value in content.items() if (found := _finite(value)) is not None}
    certified = _mapping(content.get("certified") or {})
    shares = {float(radius): found for radius, share in certified.items() if (found := _finite(share)) is not None}
    if not all(0 <= radius < math.inf for radius in shares):
        raise ValueError(f"certified at {sorted(certified)} must be at finite radii")
    if not all(0 <= share <= 1 for share in (values.get("accuracy", 0), *shares.values())):
        raise ValueError("an accuracy is not from 0 to 1")
    return Record(kind, step, values, shares)


def _finite(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if math.isfinite(value) else None
