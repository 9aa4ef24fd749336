"""``python -m benchmarks COMMAND``: measure, print, write JSON; or make the page of it."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from benchmarks import page, peers, results
from benchmarks.commands import TITLES, command, peer_wins
from benchmarks.options import threads
from benchmarks.parts import Parts
from benchmarks.report import to_text
from benchmarks.results import AGAIN, RESUME

# Options that leave something out.
SELECTIONS = ("networks", "batches", "variants", "only")


def parser() -> argparse.ArgumentParser:
    """One sub-command a module."""
    top = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__, allow_abbrev=False)
    options: Any = {"formatter_class": argparse.RawDescriptionHelpFormatter, "allow_abbrev": False}
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name in (*TITLES, "page"):
        module = command(name)
        text = module.__doc__ or ""
        sub = commands.add_parser(name, help=text.splitlines()[0], description=text, **options)
        if name != "page":
            sub.add_argument("--quick", action="store_true", help="two minutes on two cores: few and small cases")
            sub.add_argument("--threads", type=threads, help="threads of torch; as many as it takes by itself")
            sub.add_argument("--out", type=Path, help="file to write; benchmarks/results/[quick/]COMMAND.json")
            sub.add_argument(RESUME, action="store_true", help="go on with a run that was interrupted")
            sub.add_argument(AGAIN, action="append", metavar="PART", help="measure only this part of a result again")
        if hasattr(module, "add_arguments"):
            module.add_arguments(sub)
    return top


def main(line: list[str]) -> None:
    """Run a command."""
    parse = parser()
    arguments = parse.parse_args(line)
    if arguments.command == "page":
        with _refusing(parse):
            path = page.run(arguments)
    else:
        path = _benchmark(parse, arguments, line)
    print(f"\nwritten to {path}")


def _benchmark(parse: argparse.ArgumentParser, arguments: argparse.Namespace, line: list[str]) -> Path:
    """Measure what is planned, write it, then print it; returns where it is."""
    with _refusing(parse):
        path = _place(arguments)
        about = _about(arguments, line)
        parts = Parts(path, about)
        parts.read(arguments.resume)
        torch.manual_seed(0)
        plan = command(arguments.command).plan(arguments)
        old = _to_renew(path, parts, plan) if arguments.again else None
    with _keeping(parts):
        data = parts.carry_out(plan)
        spent = parts.spent
        written = results.renewed(old, about, spent, data) if old else results.record(about, spent, data)
        _replace(path, written)
        parts.forget()
    print(to_text([*command(arguments.command).describe(data), *_wins(arguments.command, data)]))
    return path


def _replace(path: Path, written: dict[str, Any]) -> None:
    """Write a result, beside that of another command line if there is one."""
    kept = results.set_aside(path, written)
    results.write(written, path)
    if kept:
        print(f"the result that was there, of another command line, is kept in {kept}", file=sys.stderr)


def _wins(name: str, data: Any) -> list[str]:
    found = peer_wins(name, data)
    return ["\n".join(["Where a peer is better:", *(f"* {win}" for win in found)])] if found else []


def _to_renew(path: Path, parts: Parts, plan: Any) -> dict[str, Any]:
    """The result of which only some parts are measured again, the others kept in ``parts``.

    Raises:
        ValueError: if there is none, or it is another one.
    """
    if not path.exists():
        raise ValueError(f"there is no result in {path} to measure a part of again")
    old = results.read_one(path)
    parts.keep(plan, old)
    return old


@contextmanager
def _refusing(parse: argparse.ArgumentParser) -> Iterator[None]:
    """Say what cannot be done in a line, not in a traceback."""
    try:
        yield
    except (ValueError, ImportError, OSError) as error:
        parse.error(str(error))


def _place(arguments: argparse.Namespace) -> Path:
    """Where the result goes, before it is there.

    Raises:
        ValueError: if nothing can be written there, or something else would be lost: a result of another command, or
            the whole of a measurement for a part of it.
        OSError: if its folder cannot be made.
    """
    path: Path = arguments.out or results.default_path(arguments.command, arguments.quick)
    part = next((name for name in SELECTIONS if getattr(arguments, name, None)), None)
    if part and not arguments.quick and not arguments.out and path.exists():
        raise ValueError(f"a part of the measurement (--{part}) would replace the whole of it in {path}: give --out")
    results.make_room(path)
    results.refuse_other(path, arguments.command)
    return path


def _about(arguments: argparse.Namespace, line: list[str]) -> dict[str, Any]:
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    lost = peers.missing()
    for sentence in lost:
        print(sentence, file=sys.stderr)
    return results.about(arguments.command, line, arguments.quick, lost, arguments.again or ())


@contextmanager
def _keeping(parts: Parts) -> Iterator[None]:
    """Say what is left of a run that is interrupted, or whose disk is full."""
    try:
        yield
    except (KeyboardInterrupt, results.NotWrittenError) as error:
        kept = f"; what is finished is in {parts.path}: go on with {RESUME}" if parts.path.exists() else ""
        sys.exit(f"{str(error) or 'interrupted'}{kept}")


if __name__ == "__main__":
    main(sys.argv[1:])
