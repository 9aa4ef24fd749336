"""The command line: parse, call, print."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from trysquare.auditing import AuditReport, audit
from trysquare.checkpoint import load_model
from trysquare.files import check_writable, replacing
from trysquare.plotting import check_picture, plot_spectra
from trysquare.report import recipe_images, write_report


def main(arguments: Sequence[str] | None = None) -> int:
    """Run ``trysquare`` with the given arguments; the exit code: 1 after an error, 130 after an interrupt."""
    options = _parser().parse_args(arguments)
    try:
        {"audit": _audit, "report": _report}[options.command](options)
    except KeyboardInterrupt:
        return _fail("interrupted", 130)
    except (ValueError, TypeError, OSError) as error:
        return _fail(str(error), 1)
    except Exception as error:  # of somebody else's model, so the type is part of what happened
        return _fail(f"{type(error).__name__}: {error}", 1)
    return 0


def _fail(message: str, code: int) -> int:
    """Say on one line what failed."""
    print(f"trysquare: {' '.join(message.split())}", file=sys.stderr)
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="trysquare", description="Orthogonal and 1-Lipschitz networks.")
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("audit", help="check a network layer by layer, and bound its Lipschitz constant")
    command.add_argument("model", metavar="MODEL", help="checkpoint file, or package.module:factory")
    command.add_argument(
        "--input-shape", type=_shape, required=True, metavar="C,H,W", help="one input, without the batch"
    )
    command.add_argument("--json", type=Path, metavar="FILE", help="write the report as JSON")
    command.add_argument("--plot", type=Path, metavar="FILE", help="write the spectra as a picture")
    command = commands.add_parser("report", help="write a run as one HTML page with pictures")
    command.add_argument("run", type=Path, metavar="RUN", help="directory of the run")
    return parser


def _shape(text: str) -> tuple[int, ...]:
    try:
        shape = tuple(int(part) for part in text.replace("x", ",").split(","))
    except ValueError:
        shape = ()
    if not shape or min(shape) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} must be positive integers separated by commas, such as 3,32,32")
    return shape


def _audit(options: argparse.Namespace) -> None:
    if options.json is not None:
        check_writable(options.json)
    if options.plot is not None:
        check_picture(options.plot)
    report = audit(load_model(options.model), options.input_shape, spectra=options.plot is not None)
    _show(report)
    if options.json is not None:
        with replacing(options.json) as file:
            file.write(f"{report.to_json()}\n".encode())
    if options.plot is not None:
        plot_spectra(report, options.plot)


def _report(options: argparse.Namespace) -> None:
    images, why = recipe_images(options.run)
    print(write_report(options.run, images, why_no_images=why))


def _show(report: AuditReport) -> None:
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
