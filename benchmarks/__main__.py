"""``python -m benchmarks COMMAND``: measure, print, write JSON; or make the page of it."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import torch

from benchmarks import page, peers, results
from benchmarks.commands import TITLES, command
from benchmarks.options import count
from benchmarks.report import to_text

# Options that leave something out.
PARTS = ("networks", "variants", "only")


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
            sub.add_argument("--threads", type=count, help="threads of torch; as many as it takes by itself")
            sub.add_argument("--out", type=Path, help="file to write; benchmarks/results/[quick/]COMMAND.json")
        module.add_arguments(sub)
    return top


def main(line: list[str]) -> None:
    """Run a command."""
    parse = parser()
    arguments = parse.parse_args(line)
    try:
        path = page.run(arguments) if arguments.command == "page" else _place(arguments)
    except (ValueError, ImportError, OSError) as error:
        parse.error(str(error))
    if arguments.command != "page":
        _measure(arguments, line, path)
    print(f"\nwritten to {path}")


def _place(arguments: argparse.Namespace) -> Path:
    """Where the result goes, before it is there.

    Raises:
        ValueError: if nothing can be written there, or a part of a measurement would replace the whole.
        OSError: if its folder cannot be made.
    """
    path: Path = arguments.out or results.default_path(arguments.command, arguments.quick)
    part = next((name for name in PARTS if getattr(arguments, name, None)), None)
    if part and not arguments.quick and not arguments.out and path.exists():
        raise ValueError(f"a part of the measurement (--{part}) would replace the whole of it in {path}: give --out")
    results.make_room(path)
    return path


def _measure(arguments: argparse.Namespace, line: list[str], path: Path) -> None:
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    lost = peers.missing()
    for sentence in lost:
        print(sentence, file=sys.stderr)
    module = command(arguments.command)
    torch.manual_seed(0)
    data = module.measure(arguments)
    results.write(results.record(arguments.command, line, arguments.quick, lost, data), path)
    print(to_text([*module.describe(data), *module.peer_wins(data)]))


if __name__ == "__main__":
    main(sys.argv[1:])
