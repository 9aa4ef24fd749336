"""Write ``docs/benchmarks.md`` and its figures from the results in ``benchmarks/results/``."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks import results
from benchmarks.commands import TITLES, command, has_peers, peer_wins
from benchmarks.report import AHEAD, NOISE, Part, Plot, Table
from trysquare.files import write_whole

PAGE = results.ROOT / "docs" / "benchmarks.md"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of this command."""
    parser.add_argument("--results", type=Path, default=results.FOLDER, help="folder of the JSON files")
    parser.add_argument("--page", type=Path, default=PAGE, help="file to write; figures go to figures/ next to it")


def run(arguments: argparse.Namespace) -> Path:
    """Draw the figures, then write the page; returns its path.

    Raises:
        ValueError: if there are no results, or one of them is damaged.
        ImportError: without matplotlib.
    """
    found = results.read(arguments.results)
    if not found:
        raise ValueError(f"there are no results in {arguments.results}")
    text = render(found)
    for plot in plots(found):
        plot.save(arguments.page.parent / "figures")
    path: Path = arguments.page
    write_whole(path, text)
    return path


def plots(found: dict[str, dict[str, Any]]) -> list[Plot]:
    """All figures of the page."""
    return [part for name, result in found.items() for part in _parts(name, result) if isinstance(part, Plot)]


def _parts(name: str, result: dict[str, Any]) -> list[Part]:
    with _as_written_now(name):
        return command(name).describe(result["data"])


@contextmanager
def _as_written_now(name: str) -> Iterator[None]:
    """Say whose result is not what its command writes."""
    try:
        yield
    except (LookupError, TypeError, AttributeError, ValueError, ArithmeticError) as error:
        what = f"damaged, or of another version of the benchmark ({type(error).__name__}: {error})"
        raise ValueError(f"the result of {name} is {what}: run python -m benchmarks {name} again") from error


def render(found: dict[str, dict[str, Any]]) -> str:
    """The page."""
    lines = [
        "# Benchmarks",
        "",
        "This page is made by `python -m benchmarks page` from the JSON files in `benchmarks/results/`, which hold "
        "every sample. Do not edit it. Times depend on the machine; ratios are within one run. Contestants take turns "
        "within a table, but for augmentations and trainings by method or by orthogonalizer, which come one after the "
        "other. Unless said otherwise times are medians, and a ratio is the median of those within each turn: it need "
        "not be that of the medians beside it.",
        "",
        "The peer is [orthogonium](https://pypi.org/project/orthogonium/), by the authors of *An Adaptive Orthogonal "
        "Convolution Scheme for Efficient and Flexible CNN Architectures*, called the paper below. "
        "[Methods](methods.md) says what AOC, BCOP, SOC, Cayley and the others are, and what each can do.",
        "",
        "## Where a peer is better",
        "",
        f"Found in the data, section by section: less time or memory than ours of the same method, by more than "
        f"{NOISE - 1:.0%} and in three turns out of four; a share of the test images larger by more than "
        f"{100 * AHEAD:g} points; smaller errors, beyond rounding; what only the peer could do. Only turns that both "
        "have are compared, so that figures may differ from those of the tables; of one turn, or of peaks of memory, "
        "some may be noise.",
        "",
        *_wins(found),
    ]
    for name, title in TITLES.items():
        lines += ["", f"## {title}", "", *_section(name, found.get(name))]
    return "\n".join(lines) + "\n"


def _wins(found: dict[str, dict[str, Any]]) -> list[str]:
    """A line for each, by section."""
    wins = {title: _wins_of(name, found[name]) for name, title in TITLES.items() if name in found}
    sections = [[f"{title}:", "", *(f"* {win}" for win in lines), ""] for title, lines in wins.items() if lines]
    if sections:
        return [line for section in sections for line in section][:-1]
    with_peer = [name for name, result in found.items() if has_peers(name) and not result["missing"]]
    return [f"In none of the measurements below ({', '.join(with_peer) or 'no peer took part'})."]


def _wins_of(name: str, result: dict[str, Any]) -> list[str]:
    with _as_written_now(name):
        return peer_wins(name, result["data"])


def _section(name: str, result: dict[str, Any] | None) -> list[str]:
    if result is None:
        return [f"Not measured yet: `python -m benchmarks {name}`."]
    with _as_written_now(name):
        origin = _origin(result)
    lines = [(command(name).__doc__ or "").strip().replace("``", "`"), "", *origin]
    for part in _parts(name, result):
        lines += ["", _markdown(part)]
    return lines


def _origin(result: dict[str, Any]) -> list[str]:
    machine, versions = result["machine"], result["versions"]
    with_what = ", ".join(f"{name} {version}" for name, version in versions.items() if version)
    with_what += f"; sources {result['code']} (digest)" if "code" in result else ""
    took = f" It took {_took(result)}." if "seconds" in result else ""
    kind = " A quick run: few samples of small cases." if result["quick"] else ""
    return [
        f"`{result['line']}` on {result['date']}: {machine['cpu']}, {machine['cores']} cores, "
        f"{machine['memory_gb']} GB, {result['threads']} threads; {with_what}.{took}{kind}",
        *(f"\nMissing: {lost}." for lost in result["missing"]),
        *(_again(entry) for entry in result.get("again", [])),
    ]


def _again(entry: dict[str, Any]) -> str:
    parts = ", ".join(entry["parts"])
    return f"\nMeasured again on {entry['date']}, sources {entry['code']}, in {_took(entry)}: {parts}."


def _took(entry: dict[str, Any]) -> str:
    return f"{entry['seconds'] / 60:.1f} minutes"


def _markdown(part: Part) -> str:
    if isinstance(part, Table):
        return part.markdown()
    if isinstance(part, Plot):
        return f"![{part.title}](figures/{part.name}.svg)"
    return part
