"""``python -m benchmarks COMMAND``: measure, print, write JSON; or make the page of it."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch

from benchmarks import page, peers, results
from benchmarks.commands import TITLES, command
from benchmarks.report import to_text


def parser() -> argparse.ArgumentParser:
    """One sub-command a module."""
    top = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name in (*TITLES, "page"):
        module = command(name)
        text = module.__doc__ or ""
        formatter = argparse.RawDescriptionHelpFormatter
        sub = commands.add_parser(name, help=text.splitlines()[0], description=text, formatter_class=formatter)
        if name != "page":
            sub.add_argument("--quick", action="store_true", help="two minutes on two cores: few and small cases")
            sub.add_argument("--threads", type=int, help="threads of torch; as many as it takes by itself")
            sub.add_argument("--out", type=Path, help="file to write; benchmarks/results/[quick/]COMMAND.json")
        module.add_arguments(sub)
    return top


def main(line: list[str]) -> None:
    """Run a command."""
    arguments = parser().parse_args(line)
    if arguments.command == "page":
        page.run(arguments)
        return
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    lost = peers.missing()
    for sentence in lost:
        print(sentence, file=sys.stderr)
    module = command(arguments.command)
    torch.manual_seed(0)
    data = module.measure(arguments)
    print(to_text([*module.describe(data), *module.peer_wins(data)]))
    path = arguments.out or results.default_path(arguments.command, arguments.quick)
    results.write(results.record(arguments.command, line, arguments.quick, lost, data), path)
    print(f"\nwritten to {path}")


if __name__ == "__main__":
    main(sys.argv[1:])
