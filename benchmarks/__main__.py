"""``python -m benchmarks QUESTION``: measure, write JSON and print tables; or render the page."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

import torch

from benchmarks import page, peers, results
from benchmarks.page import QUESTIONS, question


def parser() -> argparse.ArgumentParser:
    """Return the parser, with one sub-command for each question."""
    top = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__, allow_abbrev=False)
    commands = top.add_subparsers(dest="question", required=True, metavar="QUESTION")
    for name in (*QUESTIONS, "counts"):
        text = question(name).__doc__ or ""
        style = argparse.RawDescriptionHelpFormatter
        sub = commands.add_parser(name, help=text.splitlines()[0], description=text, formatter_class=style)
        sub.add_argument("--quick", action="store_true", help="measure a few small cases, within two minutes")
        sub.add_argument("--threads", type=int, choices=range(1, (os.cpu_count() or 1) + 1), help="threads of torch")
        sub.add_argument("--out", type=Path, help="file to write; benchmarks/results/[quick/]QUESTION.json")
        if hasattr(question(name), "add_arguments"):
            question(name).add_arguments(sub)
    sub = commands.add_parser("page", help="render docs/benchmarks.md from the results")
    sub.add_argument("--results", type=Path, default=results.FOLDER, help="folder of the JSON files")
    sub.add_argument("--page", type=Path, default=page.PAGE, help="file to write; figures go to figures/ next to it")
    return top


def main(line: list[str]) -> None:
    """Run a command; a request that cannot be met ends with a message before anything is measured."""
    parse = parser()
    arguments = parse.parse_args(line)
    try:
        if arguments.question == "page":
            page.write(arguments.results, arguments.page)
            path = arguments.page
        else:
            path = _measure(arguments, line)
    except (ValueError, ImportError, OSError) as error:
        parse.error(str(error))
    print(f"\nwritten to {path}")


def _measure(arguments: argparse.Namespace, line: list[str]) -> Path:
    name = arguments.question
    folder = "." if name in QUESTIONS and not arguments.quick else "quick"  # which is not on the page, nor in git
    path: Path = arguments.out or results.FOLDER / folder / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.is_dir() or not os.access(path.parent, os.W_OK):  # an error now, not after hours
        raise ValueError(f"cannot write {path}")
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    for sentence in peers.missing():
        print(sentence, file=sys.stderr)
    torch.manual_seed(0)
    data = question(name).run(arguments)
    results.write(results.record(name, line, arguments.quick, peers.missing(), data), path)
    print("\n\n".join(part if isinstance(part, str) else part.text() for part in question(name).describe(data)))
    return path


if __name__ == "__main__":
    main(sys.argv[1:])
