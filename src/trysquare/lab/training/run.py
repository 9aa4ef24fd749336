"""The directory of a run: what is in it, how it is written, and what is found out about its model after training.

``recipe.yaml`` (every default filled in), ``versions.json``, ``metrics.jsonl``, ``checkpoint.pt`` (to resume),
``model.safetensors`` (to use), and later ``certificate.json``, ``attack.json``, ``audit.json``, ``report.html`` and
``export/``.
"""

from __future__ import annotations

import json
import os
import platform
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from trysquare.files import DIGEST, JsonObject, check_writable, inside, read_file, sha256, write_whole
from trysquare.lab.checkpoint import (
    MODEL_FILES,
    REGISTRY,
    load_model,
    model_file,
    packed,
    read_checkpoint,
    require_fit,
    save_checkpoint,
    unpacked,
)
from trysquare.lab.data import Images, Loader, load
from trysquare.lab.data.sets import Subset, split_off
from trysquare.lab.models import build
from trysquare.lab.training.recipe import Recipe, read_recipe
from trysquare.naming import pick, shown
from trysquare.nn.export import FORMATS, export
from trysquare.verify.attacks import AttackReport, attack_report, autoattack_l2, pgd_l2
from trysquare.verify.auditing import AuditReport, audit
from trysquare.verify.certification import Certificate, certify

VALIDATION = "validation"


def load_images(recipe: Recipe, split: str) -> Images:
    """Return the images of the recipe's data set.

    Args:
        recipe: names the data.
        split: ``"train"``, ``"test"``, or ``"validation"`` for what the recipe holds out of the training images.

    Raises:
        ValueError: if a file is missing or damaged, or nothing is held out; files of images in folders are only listed.
    """
    held_out = recipe.data.validation
    if split == VALIDATION and not held_out:
        raise ValueError("data.validation=0: the recipe holds out no training images")
    source = "train" if split == VALIDATION else split
    images = load(recipe.data.name, recipe.data.root, source, size=recipe.data.size)
    if source == "test" or not held_out:
        return images
    if held_out >= len(images):
        raise ValueError(f"data.validation={held_out} must be less than the {len(images)} training images")
    return split_off(images, held_out)[split == VALIDATION]


def evaluated_split(recipe: Recipe) -> str:
    """Return which images a run is evaluated on while it trains."""
    return VALIDATION if recipe.data.validation else "test"


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Keep other processes from training in a directory; the lock also ends with the process.

    Raises:
        ValueError: if another one does.
    """
    try:
        import fcntl
    except ImportError:  # a system without them
        yield
        return
    folder = os.open(path, os.O_RDONLY)
    try:
        try:
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ValueError(
                f"another process is training in {path}: wait for it, stop it, or take another directory"
            ) from error
        except OSError as error:
            warnings.warn(f"{path} cannot be locked ({error}): take care that one process trains in it", stacklevel=3)
        yield
    finally:
        os.close(folder)


@dataclass(frozen=True)
class Run:
    """The directory of a run, with its recipe.

    Attributes:
        path: the directory.
        recipe: with every default filled in.
    """

    path: Path
    recipe: Recipe

    def model(self) -> nn.Module:
        """Return the trained model, in eval mode.

        Raises:
            ValueError: if the run has not saved one, or the file is damaged or holds another one.
        """
        if (path := model_file(self.path)) is not None:
            self._require_own(path, read_checkpoint(path)["arguments"])
        return load_model(self.path)

    def _require_own(self, path: Path, arguments: Mapping[str, object]) -> None:
        """Refuse a file that holds another model than the recipe describes."""
        wanted = {"name": self.recipe.model.name, **self.recipe.model.options}
        others = {name: arguments.get(name) for name, value in wanted.items() if arguments.get(name) != value}
        if others:
            described = {name: wanted[name] for name in others}
            raise ValueError(f"{path} is of another model: it has {shown(others)}, the recipe has {shown(described)}")

    def metrics(self) -> list[JsonObject]:
        """Return everything that was measured, in order, without a last line that a crash cut short.

        Raises:
            ValueError: if a line is not JSON; it names the file and the line.
        """
        path = self.path / "metrics.jsonl"
        try:
            return read_metrics(read_file(path)) if path.is_file() else []
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error

    def batches(self, split: str = "test", samples: int | None = None) -> Loader:
        """Return the images of the run's data in batches, not augmented.

        Args:
            split: ``"train"``, ``"validation"`` or ``"test"``.
            samples: how many, evenly spread over the split; all of them unless given.

        Raises:
            ValueError: if the data is missing or damaged, or there are not so many.
        """
        images = load_images(self.recipe, split)
        if samples is not None:
            if not 1 <= samples <= len(images):
                raise ValueError(f"samples={samples} must be from 1 to {len(images)}, the images of {split}")
            images = Subset(images, torch.arange(samples) * len(images) // samples)
        return Loader(images, self.recipe.evaluate.batch_size, workers=self.recipe.data.workers)

    def write(self, name: str, content: bytes | str) -> Path:
        """Write a file of the run in one step.

        Raises:
            OSError: if it cannot be written; an older one is untouched.
        """
        path = self.place(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, content)
        return path

    def place(self, name: str) -> Path:
        """Return the path to which a file of the run is written.

        Raises:
            ValueError: if it is a symbolic link, a pipe or a device.
        """
        return inside(self.path, name)

    def locked(self) -> AbstractContextManager[None]:
        """Keep other processes from training in the directory, as ``locked`` does."""
        return locked(self.path)

    def save_model(self, model: nn.Module, arguments: Mapping[str, object]) -> None:
        """Write the model with its present weights."""
        save_checkpoint(self.place(MODEL_FILES[0]), model, REGISTRY, arguments)

    def save_state(self, state: Mapping[str, object]) -> None:
        """Write the checkpoint from which training can be resumed."""
        self.write("checkpoint.pt", packed(state))

    def read_state(self) -> dict[str, Any]:
        """Read what ``save_state`` wrote, and check that its weights fit the recipe's model.

        Raises:
            ValueError: if there is none, it is damaged, or of another model.
        """
        path = self.path / "checkpoint.pt"
        if not path.is_file():
            raise ValueError(f"{path} does not exist: the run was stopped before its first checkpoint; start it anew")
        state = unpacked(path)
        arguments, weights = state.get("model_arguments"), state.get("model")
        if not isinstance(arguments, dict) or not isinstance(weights, dict):
            raise ValueError(f"{path} is not a checkpoint of a run: it has no model_arguments, or no model")
        self._require_own(path, arguments)
        try:
            # On the meta device, which takes no memory: a stranger's numbers may ask for any amount of it.
            with torch.device("meta"):
                require_fit(build(**arguments).state_dict(), weights)
        except (RuntimeError, TypeError, ValueError) as error:
            raise ValueError(f"{path} does not fit the recipe: {error}") from error
        return state

    def append_metrics(self, record: Mapping[str, object]) -> int:
        """Append a line, and return the size of the file afterwards.

        Raises:
            OSError: if it cannot be written; it names the file. What was written of the line is cut off at resume.
        """
        path = self.place("metrics.jsonl")
        try:
            if path.exists() and path.stat().st_nlink > 1:
                write_whole(path, read_file(path))  # what else has this file by a hard link keeps the old one
            with path.open("ab") as file:
                file.write(json.dumps(record).encode("utf-8") + b"\n")
                file.flush()
                return file.tell()
        except OSError as error:
            reason = f"cannot write {path}: {error.strerror or error}; go on later with --resume {self.path}"
            raise OSError(error.errno, reason) from error

    def cut_metrics(self, size: int) -> None:
        """Drop what was written after a checkpoint, by writing a new file: the old one may have other hard links."""
        path = self.place("metrics.jsonl")
        if path.is_file() and path.stat().st_size > size:
            write_whole(path, read_file(path)[:size])


def read_metrics(content: bytes) -> list[JsonObject]:
    """Return the records of ``metrics.jsonl``; what comes after the last line break was cut short by a crash.

    Raises:
        ValueError: if a line is not a JSON object; it names the line.
    """
    records = []
    for number, line in enumerate(content.split(b"\n")[:-1], 1):
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"line {number} is not JSON: {error}") from error
        if not isinstance(record, dict):
            raise ValueError(f"line {number} is not a JSON object: {shown(record)}")
        records.append(record)
    return records


@contextmanager
def starting(recipe: Recipe, path: str | os.PathLike[str] | None = None) -> Iterator[Run]:
    """Start a run in a directory of its own, and keep other processes from training there.

    Args:
        recipe: is written into it.
        path: ``runs/NAME-DATE-TIME`` unless given.

    Raises:
        ValueError: if there is something in the directory already, or another process starts there too.
        OSError: if it cannot be written to.
    """
    folder = Path(path or Path("runs") / f"{recipe.name}-{time.strftime('%Y%m%d-%H%M%S')}")
    folder.mkdir(parents=True, exist_ok=True)
    run = Run(folder, recipe)
    with run.locked():  # before it is looked at: of two that find it empty, one is to give way
        if any(folder.iterdir()):
            raise ValueError(
                f"{folder} is not empty: give another directory, or continue that run with --resume {folder}"
            )
        run.write("recipe.yaml", recipe.to_yaml())
        run.write("versions.json", json.dumps(versions(), indent=2) + "\n")
        yield run


def load_run(path: str | os.PathLike[str], overrides: Mapping[str, object] | None = None) -> Run:
    """Return the run in a directory.

    Args:
        path: the directory.
        overrides: of its recipe, by dotted keys; another ``data.root``, for example.

    Raises:
        ValueError: if it is not the directory of a run.
    """
    folder = Path(path)
    if not (folder / "recipe.yaml").is_file():
        raise ValueError(f"{folder} is not the directory of a run: there is no recipe.yaml in it")
    return Run(folder, read_recipe(folder / "recipe.yaml", overrides))


def versions() -> dict[str, object]:
    """Return the versions and settings that the numbers of a run may depend on."""
    return {
        "trysquare": _version("trysquare"),
        "torch": torch.__version__,
        "schedulefree": _version("schedulefree"),
        "numpy": np.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "threads": torch.get_num_threads(),
        "date": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    }


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


ATTACKS: dict[str, Callable[..., Tensor]] = {"pgd": pgd_l2, "autoattack": autoattack_l2}
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
    digest = _digest(run, "certificate.json")
    return _written(run, "certificate.json", digest, _certificate(run, samples, epsilons), show)


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
    """Attack the model of a run by one of ``ATTACKS``, and write ``attack.json``; otherwise as ``certify_run``."""
    chosen, digest = pick(ATTACKS, attack, "attack"), _digest(run, "attack.json")
    certificate = _certificate(run, samples, epsilons)
    report = attack_report(run.model(), run.batches(samples=samples), certificate, attack=chosen)
    return _written(run, "attack.json", {"attack": attack, **digest}, report, show)


def audit_run(run: Run, *, spectra: bool = False, show: Show[AuditReport] | None = None) -> AuditReport:
    """Audit the model of a run on inputs of its data's shape, and write ``audit.json``; as ``certify_run``."""
    digest, shape = _digest(run, "audit.json"), tuple(_examples(run).shape[1:])
    return _written(run, "audit.json", digest, audit(run.model(), shape, spectra=spectra), show)


def export_run(run: Run, file_format: str = "torch") -> tuple[Path, float]:
    """Write the model of a run as a file that can be used without this library.

    Returns:
        The file, and the largest difference of its outputs from those of the model.

    Raises:
        ValueError: before the work, if the file could not be written.
    """
    path = run.place(f"export/{pick(FORMATS, file_format, 'format')}")
    path.parent.mkdir(exist_ok=True)
    check_writable(path)
    return path, export(run.model(), path, _examples(run), file_format)


def _examples(run: Run) -> Tensor:
    images, _ = next(iter(run.batches().epoch(0)))
    return images[:_COMPARED]


def _digest(run: Run, name: str) -> dict[str, str]:
    """Return the digest that tells the present model from later ones, taken before the model is read.

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
