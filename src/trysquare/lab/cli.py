"""The command line: parse, call, print."""

from __future__ import annotations

import argparse
import codecs
import math
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from trysquare.files import check_writable, replacing
from trysquare.lab import training
from trysquare.lab.checkpoint import load_model
from trysquare.lab.plotting import check_picture, plot_curves, plot_spectra
from trysquare.lab.report import recipe_images, write_report
from trysquare.lab.training.recipe import quotient
from trysquare.lab.training.sweep import split_choices
from trysquare.naming import shown
from trysquare.nn.export import FORMATS
from trysquare.verify.auditing import audit

_FAILED, _INTERRUPTED, _ENDED_EARLY = 1, 130, 141
# What is written where a terminal has no such letters: one for each, so that tables stay tables.
_PLAIN = {"σ": "s", "√": "r", "≤": "<", "≥": ">", "×": "x", "±": "~", "·": "*", "…": ".", "→": ">", "–": "-"}
# Of the recipe of a run that is there already.
_MOVED = ("data.root",)
_AFTERWARDS = (*_MOVED, "data.workers", "evaluate.batch_size")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run ``trysquare`` with the given arguments; the exit code: 1 after an error, 130 after an interrupt."""
    _take_any_streams()
    try:
        left, overrides = training.split_overrides(sys.argv[1:] if arguments is None else arguments)
        options = _parser().parse_args(left)
        _require_taken(options, overrides)
        options.run(options, overrides)
        sys.stdout.flush()
    except BrokenPipeError:  # whoever read has seen enough, as with ``| head -1``
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _ENDED_EARLY
    except training.StoppedError as stopped:
        return _fail(str(stopped), _INTERRUPTED)
    except KeyboardInterrupt:
        return _fail("interrupted", _INTERRUPTED)
    except (ValueError, TypeError, OSError, ImportError, ArithmeticError, AssertionError) as error:
        return _fail(str(error), _FAILED)
    except Exception as error:  # of somebody else's model, so the type is part of what happened
        return _fail(f"{type(error).__name__}: {error}", _FAILED)
    return 0


def _plainly(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeEncodeError)
    return "".join(_PLAIN.get(letter, "?") for letter in error.object[error.start : error.end]), error.end


def _take_any_streams() -> None:
    """Write plain letters where the terminal, or the file that output goes to, has no others.

    A stream that was closed (``>&-``) is ``None``: what is written to it is dropped, as with ``/dev/null``.
    """
    codecs.register_error("trysquare", _plainly)
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115 - open as long as the process
        elif hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="trysquare")


def _require_taken(options: argparse.Namespace, overrides: Mapping[str, object]) -> None:
    """Refuse overrides that the command would not look at."""
    alone = getattr(options, "input_shape", None) is not None  # an audit that asks no recipe
    command, taken = f"{options.command} with --input-shape" if alone else options.command, options.overrides
    for key in overrides:
        if alone or not (taken is None or key in taken):
            what = "it takes none" if alone or not taken else f"what it takes: --{', --'.join(taken)}"
            raise ValueError(f"{command} does not take --{key}; {what}")


def _fail(message: str, code: int) -> int:
    """Say on one line what failed; of several processes, the first does."""
    if training.first_to_fail():
        print(f"trysquare: {_brief(message)}", file=sys.stderr)
    return code


# Of a word (a path may be long) and of a whole message; of what is longer, so many letters are kept at either end.
_LONGEST_WORD, _KEPT_OF_WORD = 400, 60
_LONGEST_MESSAGE, _KEPT_OF_MESSAGE = 2000, 900


def _brief(message: str) -> str:
    """Return a message on one line, without the middle of what is too long to be read.

    Names in files of strangers are part of messages, so that what would steer a terminal is left out.
    """
    plain = "".join(letter if letter.isprintable() or letter.isspace() else "?" for letter in message)
    words = (_cut(word, _LONGEST_WORD, _KEPT_OF_WORD) for word in plain.split())
    return _cut(" ".join(words), _LONGEST_MESSAGE, _KEPT_OF_MESSAGE)


def _cut(text: str, longest: int, kept: int) -> str:
    return text if len(text) <= longest else f"{text[:kept]}...{text[-kept:]} ({len(text)} letters)"


class _Parser(argparse.ArgumentParser):
    """Argparse, which quotes arguments whole however long they are."""

    def error(self, message: str) -> NoReturn:
        """Say what is wrong with the arguments, and exit."""
        super().error(_brief(message))


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="trysquare", description="Orthogonal and 1-Lipschitz networks.")
    commands = parser.add_subparsers(dest="command", required=True)

    def add(
        name: str,
        run: Callable[..., None],
        summary: str,
        overrides: Sequence[str] | None = (),
        epilog: str | None = None,
    ) -> argparse.ArgumentParser:
        """Add a command, and the overrides of a recipe that it takes: these, or all (``None``)."""
        command = commands.add_parser(name, help=summary, description=summary, epilog=epilog)
        command.set_defaults(run=run, overrides=overrides)
        return command

    add("recipes", _recipes, "list the recipes that come with the package")

    examples = "Override values of the recipe by name: --data.root DIR --train.epochs 20 --optimizer.lr 0.01"
    train = add("train", _train, "train a model from a recipe", None, examples)
    train.add_argument("recipe", nargs="?", metavar="RECIPE", help="name of a recipe, or a YAML file; default digits")
    train.add_argument("--out", type=Path, metavar="DIR", help="directory of the run; default runs/RECIPE-DATE-TIME")
    train.add_argument("--resume", type=Path, metavar="RUN", help="continue the run in this directory")

    sweep = add("sweep", _sweep, "choose values of a recipe on held-out training images", None, examples)
    sweep.add_argument("recipe", nargs="?", metavar="RECIPE", help="name of a recipe, or a YAML file; default digits")
    sweep.add_argument(
        "--set", nargs="+", default=[], metavar="KEY=A,B", help="values to choose from, such as optimizer.lr=1e-3,3e-3"
    )
    sweep.add_argument(
        "--budget", type=_duration, metavar="TIME", help="training time of a run in the last round: 90s, 5m, 2h"
    )
    sweep.add_argument(
        "--radius", type=_radius, metavar="R", help="compare certified accuracy at this radius; default the smallest"
    )
    sweep.add_argument("--out", type=Path, metavar="DIR", help="directory; default sweeps/RECIPE-DATE-TIME")
    sweep.add_argument("--resume", type=Path, metavar="DIR", help="continue the sweep in this directory")

    find_lr = add("find-lr", _find_lr, "raise the learning rate until accuracy stops growing", None, examples)
    find_lr.add_argument("recipe", nargs="?", metavar="RECIPE", help="name of a recipe, or a YAML file; default digits")
    find_lr.add_argument("--steps", type=int, default=500, metavar="N", help="steps of each training; default 500")
    find_lr.add_argument("--start", type=float, default=1e-4, metavar="LR", help="first rate; default 1e-4")
    find_lr.add_argument("--factor", type=float, default=2.0, metavar="F", help="factor to the next rate; default 2")

    moved = "If the data has moved since: --data.root DIR"
    certify = add("certify", _certify, "certify the test images of a run", _AFTERWARDS, moved)
    attack = add(
        "attack", _attack, "attack the test images of a run, also inside their certified radii", _AFTERWARDS, moved
    )
    export = add("export", _export, "write the model as a file that does not need this library", _AFTERWARDS, moved)
    report = add("report", _report, "write a run as one HTML page with pictures", _MOVED, moved)
    for command in (certify, attack, export, report):
        command.add_argument("path", type=Path, metavar="RUN", help="directory of the run")
    attack.add_argument("--attack", choices=list(training.ATTACKS), default="pgd", help="default pgd")
    for command in (certify, attack):
        command.add_argument("--samples", type=int, metavar="N", help="number of images, evenly spread; default all")
        command.add_argument("--epsilons", type=_radius, nargs="+", metavar="R", help="radii, such as 0.5 or 36/255")
    export.add_argument("--format", choices=list(FORMATS), default="torch", help="default torch")

    audit = add("audit", _audit, "check a network layer by layer, and bound its Lipschitz constant", _AFTERWARDS)
    audit.add_argument("model", metavar="MODEL", help="directory of a run, checkpoint, or package.module:factory")
    audit.add_argument("--factory", metavar="MODULE:NAME", help="what makes the model of a checkpoint of your own")
    audit.add_argument("--input-shape", type=_shape, metavar="C,H,W", help="shape of one input; a run knows its own")
    audit.add_argument("--json", type=Path, metavar="FILE", help="write the report as JSON")
    audit.add_argument("--plot", type=Path, metavar="FILE", help="write the spectra as a picture")
    audit.add_argument(
        "--spectra", action=argparse.BooleanOptionalAction, default=None,
        help="compute every singular value of every layer; on for a run, whose report shows them, else off",
    )  # fmt: skip
    return parser


# Of one input: more of either is beyond torch, or beyond any memory.
_MOST_AXES, _LARGEST_INPUT = 32, 2**31


def _shape(text: str) -> tuple[int, ...]:
    try:
        shape = tuple(int(part) for part in text.replace("x", ",").split(","))
    except ValueError:
        shape = ()
    if not shape or min(shape) < 1:
        raise argparse.ArgumentTypeError(
            f"{shown(text)} must be positive integers separated by commas, such as 3,32,32"
        )
    if len(shape) > _MOST_AXES or math.prod(shape) > _LARGEST_INPUT:
        raise argparse.ArgumentTypeError(
            f"{shown(text)} must be at most {_MOST_AXES} axes and {_LARGEST_INPUT} numbers, one input without the batch"
        )
    return shape


def _radius(text: str) -> float:
    try:
        radius = quotient(text)
    except (ValueError, ZeroDivisionError):
        radius = math.nan
    if not 0 <= radius < math.inf:
        raise argparse.ArgumentTypeError(f"{shown(text)} must be a radius, such as 0.5 or 36/255")
    return radius


_UNITS = {"s": 1, "m": 60, "h": 3600}


def _duration(text: str) -> float:
    number, unit = (text[:-1], text[-1]) if text[-1:] in _UNITS else (text, "s")
    try:
        seconds = float(number) * _UNITS[unit]
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise argparse.ArgumentTypeError(f"{shown(text)} must be a time, such as 90s, 5m or 2h")
    return seconds


def _recipes(options: argparse.Namespace, overrides: Mapping[str, object]) -> None:
    found = training.recipes()
    width = max(map(len, found))
    for name, summary in found.items():
        print(f"{name:<{width}}  {summary}")


def _train(options: argparse.Namespace, overrides: Mapping[str, object]) -> None:
    if options.resume is None:
        run = training.train(training.read_recipe(options.recipe or "digits", overrides), options.out)
    elif options.recipe or options.out:
        raise ValueError("--resume takes recipe and directory from the run: leave out RECIPE and --out")
    else:
        run = training.resume(options.resume, overrides)
    if training.is_main_process():
        print(run.path)


def _sweep(options: argparse.Namespace, overrides: Mapping[str, object]) -> None:
    given = (options.recipe, options.set, options.budget, options.radius, options.out)
    if options.resume is not None:
        if any(given) or overrides:
            raise ValueError("--resume takes all else from the sweep: leave out RECIPE, --set, --budget and the rest")
        sweep = training.load_sweep(options.resume)
    else:
        if not options.set or options.budget is None:
            raise ValueError("say what to choose from, and how long: --set optimizer.lr=1e-3,3e-3 --budget 5m")
        recipe = training.read_recipe(options.recipe or "digits", overrides)
        choices = split_choices(options.set)
        sweep = training.start_sweep(recipe, choices, options.budget, options.out, radius=options.radius)
    for line in sweep.run():
        print(line, file=sys.stderr, flush=True)
    print(sweep)
    best = sweep.best().path
    print(f"best run: {best}; its recipe: {sweep.path / 'best.yaml'}; on the test images: trysquare certify {best}")
    labels = "seconds of training", "certified accuracy, validation"
    picture = sweep.place("sweep.png")
    plot_curves(sweep.curves(), labels, picture)
    print(f"picture: {picture}")


def _find_lr(options: argparse.Namespace, overrides: Mapping[str, object]) -> None:
    recipe, rates = training.read_recipe(options.recipe or "digits", overrides), []
    found = training.find_lr(recipe, steps=options.steps, start=options.start, factor=options.factor)
    print(f"learning rate  accuracy after {options.steps} steps, on images held out of training", flush=True)
    for rate in found:
        rates.append(rate)
        print(f"{rate.lr:<13.4g}  {'not finite' if rate.found is None else f'{rate.found.accuracy:.1%}'}", flush=True)
    print(f"take --optimizer.lr {training.best_rate(rates).lr:.4g}")


def _certify(options: argparse.Namespace, overrides: Mapping[str, object]) -> None:
    run = training.load_run(options.path, overrides)
    training.certify_run(run, samples=options.samples, epsilons=options.epsilons, show=_show)
    print(f"written to {run.path / 'certificate.json'}")


def _attack(options: argparse.Namespace, overrides: Mapping[str, object]) -> None:
    run = training.load_run(options.path, overrides)
    report = training.attack_run(
        run, attack=options.attack, samples=options.samples, epsilons=options.epsilons, show=_show
    )
    print(f"written to {run.path / 'attack.json'}")
    report.check()


def _audit(options: argparse.Namespace, overrides: Mapping[str, object]) -> None:
    if options.json is not None:
        check_writable(options.json)
    if options.plot is not None:
        check_picture(options.plot)
    spectra = options.input_shape is None if options.spectra is None else options.spectra
    spectra = spectra or options.plot is not None
    if options.input_shape is None:
        if options.factory is not None:
            raise ValueError(
                "--factory is for a checkpoint: say the shape of its inputs too, such as --input-shape 3,32,32"
            )
        if not Path(options.model).is_dir():
            raise ValueError(
                f"{options.model} is not the directory of a run: say the shape of its inputs, such as "
                "--input-shape 3,32,32"
            )
        report = training.audit_run(training.load_run(options.model, overrides), spectra=spectra, show=_show)
    else:
        report = audit(load_model(options.model, options.factory), options.input_shape, spectra=spectra)
        _show(report)
    if options.json is not None:
        with replacing(options.json) as file:
            file.write(f"{report.to_json()}\n".encode())
    if options.plot is not None:
        plot_spectra(report, options.plot)


def _report(options: argparse.Namespace, overrides: Mapping[str, object]) -> None:
    root = overrides.get("data.root")
    images, why = recipe_images(options.path, None if root is None else str(root))
    print(write_report(options.path, images, why_no_images=why))


def _export(options: argparse.Namespace, overrides: Mapping[str, object]) -> None:
    path, difference = training.export_run(training.load_run(options.path, overrides), options.format)
    print(f"{path}\nread back and compared: outputs differ by at most {difference:.1e}")


def _show(report: object) -> None:
    """A table with colours where ``rich`` is installed and somebody looks, plain text otherwise."""
    if sys.stdout.isatty():
        try:
            from rich.console import Console
        except ImportError:
            pass
        else:
            Console().print(report)
            return
    print(report)
