"""What comes after training: certificate, attack, audit and export of a run, written into its directory."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from torch import Tensor

from trysquare.files import DIGEST, check_writable, sha256
from trysquare.lab.checkpoint import MODEL_FILES
from trysquare.lab.training.run import Run
from trysquare.naming import pick
from trysquare.nn.export import FORMATS, export
from trysquare.verify.attacks import AttackReport, attack_report, autoattack_l2, pgd_l2
from trysquare.verify.auditing import AuditReport, audit
from trysquare.verify.certification import Certificate, certify

ATTACKS: dict[str, Callable[..., Tensor]] = {
    "pgd": pgd_l2,
    "autoattack": autoattack_l2,
}
R = TypeVar("R", Certificate, AttackReport, AuditReport)
Show = Callable[[R], None]
"""Called with a result before it is written, so that a disk that is full by then takes nothing away."""
# Inputs on which an exported file is compared.
_COMPARED = 16


def certify_run(
    run: Run,
    *,
    samples: int | None = None,
    epsilons: Sequence[float] | None = None,
    show: Show[Certificate] | None = None,
) -> Certificate:
    """Certify the test images of a run, and write ``certificate.json``.

    Args:
        run: with a trained model.
        samples: how many images, evenly spread; all unless given.
        epsilons: radii; those of the recipe unless given.
        show: called with the result before it is written.

    Raises:
        ValueError: before the work, if the file could not be written.
        OSError: after it, if the file cannot be written.
    """
    about = _about(run, "certificate.json")
    return _written(run, "certificate.json", about, _certificate(run, samples, epsilons), show)


def _certificate(run: Run, samples: int | None, epsilons: Sequence[float] | None) -> Certificate:
    radii = run.recipe.evaluate.epsilons if epsilons is None else epsilons
    return certify(run.model(), run.batches(samples=samples), epsilons=radii)


def attack_run(
    run: Run,
    *,
    attack: str = "pgd",
    samples: int | None = None,
    epsilons: Sequence[float] | None = None,
    show: Show[AttackReport] | None = None,
) -> AttackReport:
    """Attack the model of a run on its test images, and write ``attack.json``.

    Args:
        run: with a trained model.
        attack: one of ``ATTACKS``.
        samples: how many images, evenly spread; all unless given.
        epsilons: radii; those of the recipe unless given.
        show: called with the result before it is written.

    Raises:
        ValueError: before the work, if the file could not be written.
        OSError: after it, if the file cannot be written.
    """
    chosen = pick(ATTACKS, attack, "attack")
    about = {"attack": attack, **_about(run, "attack.json")}
    certificate = _certificate(run, samples, epsilons)
    report = attack_report(run.model(), run.batches(samples=samples), certificate, attack=chosen)
    return _written(run, "attack.json", about, report, show)


def audit_run(run: Run, *, spectra: bool = False, show: Show[AuditReport] | None = None) -> AuditReport:
    """Audit the model of a run on inputs of its data's shape, and write ``audit.json``; as ``certify_run``."""
    about = _about(run, "audit.json")
    return _written(run, "audit.json", about, audit(run.model(), input_shape(run), spectra=spectra), show)


def _about(run: Run, name: str) -> dict[str, str]:
    """What tells the present model from later ones; asked for before it is read, so that a doubt is seen.

    Raises:
        ValueError: if the file of this name, which is to hold it, could not be written.
    """
    check_writable(run.place(name))
    path = next((run.path / model for model in MODEL_FILES if (run.path / model).is_file()), None)
    return {} if path is None else {DIGEST: sha256(path)}


def _written(run: Run, name: str, about: dict[str, str], result: R, show: Show[R] | None) -> R:
    if show is not None:
        show(result)
    run.write(name, json.dumps({**about, **json.loads(result.to_json())}, indent=2) + "\n")
    return result


def input_shape(run: Run) -> tuple[int, ...]:
    """Shape of one image of the run's data."""
    return tuple(_examples(run).shape[1:])


def _examples(run: Run) -> Tensor:
    images, _ = next(iter(run.batches().epoch(0)))
    return images[:_COMPARED]


def export_run(run: Run, file_format: str = "torch") -> tuple[Path, float]:
    """Write the model of a run as a file that needs nothing of ours.

    Returns:
        The file, and the largest difference of its outputs from those of the model.

    Raises:
        ValueError: before the work, if the file could not be written.
    """
    path = run.place(f"export/{pick(FORMATS, file_format, 'format')}")
    path.parent.mkdir(exist_ok=True)
    check_writable(path)
    return path, export(run.model(), path, _examples(run), file_format)


def summary(run: Run) -> list[tuple[str, str]]:
    """What the directory of a run holds: a row for each file, with what it is."""
    known = {
        "recipe.yaml": "the recipe, every default filled in",
        "versions.json": "versions and machine",
        "metrics.jsonl": "training, one JSON object a line",
        "checkpoint.pt": "to resume from",
        "model.safetensors": "the model, for ts.load_model",
        "model.pt": "the model, for ts.load_model",
        "certificate.json": "certified radius of every test image",
        "attack.json": "what an attack found",
        "audit.json": "every layer, and the Lipschitz bound",
        "report.html": "all of it with pictures, for a browser",
        "export/model.pt2": "the model in plain torch, for torch.export.load",
        "export/model.onnx": "the model in ONNX",
    }
    return [(str(run.path / name), what) for name, what in known.items() if (run.path / name).is_file()]
