"""What a command has to say, for the terminal and for the page alike: sentences, tables and plots."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.measure import Samples, ratio, ratios

Series = Mapping[str, tuple[Sequence[float], Sequence[float]]]

# Less than this is noise, whatever the number of samples.
NOISE = 1.02
# A network is ahead of another one by more than this share of the test images.
AHEAD = 0.005
# Radii of certified accuracy, in steps of 8-bit images.
RADII = (36, 72, 108, 255)
# Of trained networks: accuracy, then certified accuracy.
_SHARES = ("accuracy", *(f"certified at {radius}/255" for radius in RADII))
CERTIFIED = _SHARES[1]


@dataclass(frozen=True)
class Table:
    """Rows of cells that are ready to read.

    Attributes:
        columns: heads; the first column is for names.
        rows: cells.
        title: a line above, in the terminal and on the page.
    """

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    title: str = ""

    def text(self) -> str:
        """Aligned for a terminal."""
        lines = [[cell.replace("**", "") for cell in line] for line in (self.columns, *self.rows)]
        widths = [max(len(line[i]) for line in lines) for i in range(len(self.columns))]
        aligned = [
            "  ".join(cell.ljust(w) if i == 0 else cell.rjust(w) for i, (cell, w) in enumerate(zip(line, widths)))  # noqa: B905
            for line in lines
        ]
        return "\n".join([*([self.title] if self.title else []), *aligned])

    def markdown(self) -> str:
        """For the page."""
        rule = ["---", *["---:"] * (len(self.columns) - 1)]
        lines = ["| " + " | ".join(cells) + " |" for cells in (self.columns, rule, *self.rows)]
        return "\n".join([*([f"**{self.title}**", ""] if self.title else []), *lines])


@dataclass(frozen=True)
class Plot:
    """Lines over numbers, or bars over names.

    Attributes:
        name: of the file, without ending.
        title: above the plot.
        series: label to ``x`` and ``y``.
        x: what the horizontal axis shows.
        y: what the vertical axis shows.
        ticks: names of the places 0, 1, ... of a plot of bars; lines otherwise.
        log: which axes are logarithmic, of ``"xy"``.
        reference: height of a thin line to compare with.
    """

    name: str
    title: str
    series: Series
    x: str
    y: str
    ticks: Sequence[str] = ()
    log: str = ""
    reference: float | None = None
    size: tuple[float, float] = field(default=(7.5, 4.2))

    def save(self, folder: Path) -> Path:
        """Draw into ``folder``; the same numbers make the same file.

        Raises:
            ImportError: without matplotlib.
        """
        try:
            from matplotlib import rc_context
            from matplotlib.figure import Figure
        except ImportError as error:
            raise ImportError("a figure needs matplotlib: pip install 'trysquare[plot]'") from error

        figure = Figure(figsize=self.size, layout="constrained")
        axes = figure.subplots()
        for number, (label, (xs, ys)) in enumerate(self.series.items()):
            if self.ticks:
                width = 0.8 / len(self.series)
                axes.bar([x + width * (number - (len(self.series) - 1) / 2) for x in xs], ys, width, label=label)
            else:
                axes.plot(xs, ys, marker=".", label=label)
        if self.ticks:
            axes.set_xticks(range(len(self.ticks)), self.ticks, rotation=35, ha="right")
        if self.reference is not None:
            axes.axhline(self.reference, color="black", linewidth=0.8)
        axes.set(title=self.title, xlabel=self.x, ylabel=self.y)
        if "x" in self.log:
            axes.set_xscale("log")
        if "y" in self.log:
            axes.set_yscale("log")
        axes.legend(fontsize="x-small", ncols=2)
        axes.grid(alpha=0.3)
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{self.name}.svg"
        with rc_context({"svg.hashsalt": self.name}):
            figure.savefig(path, metadata={"Date": None})
        return path


Part = str | Table | Plot


def to_text(parts: Sequence[Part]) -> str:
    """Sentences and tables, for the terminal."""
    return "\n\n".join(part.text() if isinstance(part, Table) else part for part in parts if not isinstance(part, Plot))


def milliseconds(seconds: float) -> str:
    """Three digits."""
    return f"{1e3 * seconds:.3g}" if seconds < 1 else f"{1e3 * seconds:.0f}"


def times(ratio: float) -> str:
    """A ratio."""
    return f"{ratio:.2f}x" if ratio < 10 else f"{ratio:.0f}x"


def megabytes(number: float) -> str:
    """Bytes in units of a million."""
    return f"{number / 1e6:.1f}" if number < 1e8 else f"{number / 1e6:.0f}"


def with_ratios(row: Samples, reference: Samples, shown: Mapping[str, Callable[[float], str]]) -> list[str]:
    """Cells of a table: for each kind of sample the median as ``shown``, and the ratio to the reference, if any."""
    cells = []
    for kind, show in shown.items():
        has = kind in row and kind in reference
        cells += [show(median(row[kind])), times(ratio(row[kind], reference[kind]))] if has else ["", ""]
    return cells


def ratio_plot(name: str, title: str, samples: Mapping[str, Samples], reference: str, kinds: Mapping[str, str]) -> Plot:
    """Bars of the ratios to the reference of each other name, for each kind of sample and its label."""
    names = [other for other in samples if other != reference]
    series = {}
    for kind, label in kinds.items():
        base = samples[reference].get(kind)
        places = [place for place, other in enumerate(names) if base and kind in samples[other]]
        series[label] = (places, [ratio(samples[names[place]][kind], base) for place in places])
    return Plot(name, title, series, "", f"times {reference}", ticks=names, log="y", reference=1)


def better_peer(
    what: str,
    name: str,
    unit: str,
    scale: float,
    ours: Sequence[float],
    theirs: Sequence[float],
    own_name: str | None = None,
) -> list[str]:
    """A sentence if a peer's samples are below ours (less is better) by more than noise, none otherwise.

    Args:
        what: is measured.
        name: of what both have, as the peer calls it.
        unit: in which it is said.
        scale: of the samples to that unit.
        ours: samples.
        theirs: taken in the same turns; further turns of one alone do not count.
        own_name: what we call it, if not the same.
    """
    turns = ratios(ours, theirs)
    if not _beyond_noise(turns):
        return []
    theirs_taken, ours_taken = (f"{_short(scale * median(samples[: len(turns)]))} {unit}" for samples in (theirs, ours))
    who = "ours" if own_name in (None, name) else f"ours ({own_name})"
    count = f"{len(turns)} turn{'s' if len(turns) > 1 else ''}"
    return [
        f"{what}: {name} of orthogonium takes {theirs_taken}, {who} {ours_taken} ({times(median(turns))}, {count})."
    ]


def _short(number: float) -> str:
    """Three digits, or all before the point."""
    return f"{number:.3g}" if number < 1000 else f"{number:.0f}"


def _beyond_noise(turns: Sequence[float]) -> bool:
    """Whether ratios are above 1 by more than noise, and above 1 in three turns out of four."""
    ordered = sorted(turns)
    return median(ordered) > NOISE and ordered[len(ordered) // 4] > 1


def better_trained(when: str, rows: Mapping[str, Any], pairs: Mapping[str, str]) -> list[str]:
    """A sentence for each share of the test images by which a peer's network is ahead, or if it alone could be trained.

    Args:
        when: end of training.
        rows: accuracy and certified accuracies by name, or an error.
        pairs: the peer's name to ours.
    """
    found = []
    for peer, ours in pairs.items():
        if peer not in rows or ours not in rows or "error" in rows[peer]:
            continue
        if "error" in rows[ours]:
            found.append(f"{when}: {peer} {rows[peer]['accuracy']:.1%}, {ours}: {rows[ours]['error']}.")
            continue
        theirs, mine = ([row["accuracy"], *row["certified"]] for row in (rows[peer], rows[ours]))
        for what, better, worse in zip(_SHARES, theirs, mine, strict=True):
            if better > worse + AHEAD:
                found.append(f"{when}, {what}: {peer} {better:.1%}, {ours} {worse:.1%}.")
    return found


def failures(rows: Mapping[str, Any]) -> list[str]:
    """A list of the rows that are an error in place of numbers, if there are any."""
    lines = [f"* {name}: {row['error']}" for name, row in rows.items() if "error" in row]
    return ["\n".join(["Not in the table:", "", *lines])] if lines else []


def absent(contestants: Iterable[str], rows: Mapping[str, Any]) -> list[str]:
    """A sentence on the contestants that there are, but not in this result."""
    names = [name for name in contestants if name not in rows]
    return [f"Not part of this run: {'; '.join(names)}."] if names else []


def accuracy_table(
    kind: str, title: str, rows: Mapping[str, Any], more: Mapping[str, Callable[[Any], str]] | None = None
) -> Table:
    """Trained networks and their certificates, but for those that failed, with ``more`` columns if asked for."""
    more = more or {}
    columns = [kind, "parameters", "steps", *more, *_SHARES, "Lipschitz"]
    cells = [
        [
            name,
            f"{row['parameters'] / 1e6:.2f} M",
            str(row["steps"]),
            *(show(row) for show in more.values()),
            *(f"{share:.1%}" for share in (row["accuracy"], *row["certified"])),
            f"{row['lipschitz']:.4f}",
        ]
        for name, row in rows.items()
        if "error" not in row
    ]
    return Table(columns, cells, title)
