"""Tables and figures of the benchmarks, and how numbers are shown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Radii of certified accuracy, in steps of 8-bit images.
RADII = (36, 72, 108, 255)
CERTIFIED = f"certified at {RADII[0]}/255"


@dataclass(frozen=True)
class Table:
    """Rows of cells that are ready to read; the first column holds names."""

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    title: str = ""

    def text(self) -> str:
        widths = [max(map(len, column)) for column in zip(self.columns, *self.rows, strict=True)]
        lines = [
            "  ".join(
                cell.rjust(w) if i else cell.ljust(w) for i, (cell, w) in enumerate(zip(line, widths, strict=True))
            )
            for line in (self.columns, *self.rows)
        ]
        return "\n".join([*([self.title] if self.title else []), *lines])

    def markdown(self) -> str:
        rule = ["---", *["---:"] * (len(self.columns) - 1)]
        lines = ["| " + " | ".join(cells) + " |" for cells in (self.columns, rule, *self.rows)]
        return "\n".join([*([f"**{self.title}**", ""] if self.title else []), *lines])


Part = str | Table


@dataclass(frozen=True)
class Plot:
    """A panel of lines over numbers, or of dots, one row for each name.

    Attributes:
        series: label to points: ``{x: y}`` of lines, ``{name: x}`` of dots.
        x: label of the horizontal axis.
        y: label of the vertical axis of lines; empty for dots.
        log: which axes are logarithmic, of ``"xy"``.
        reference: place of a thin vertical line among dots.
    """

    series: Mapping[str, Mapping[Any, float]]
    x: str
    y: str = ""
    log: str = ""
    reference: float | None = None

    def draw(self, axes: Any) -> None:
        names = list(dict.fromkeys(name for points in self.series.values() for name in points))
        for (label, points), marker in zip(self.series.items(), "osD^vPX*<>h8", strict=False):
            if self.y:
                axes.plot(list(points), list(points.values()), marker=marker, markersize=4, label=label)
            else:
                places = [names.index(name) for name in points]
                axes.plot(list(points.values()), places, marker, markersize=5, alpha=0.8, label=label)
        if not self.y:
            axes.set_yticks(range(len(names)), names)
            axes.invert_yaxis()
        if self.reference is not None:
            axes.axvline(self.reference, color="black", linewidth=0.8)
        axes.set(xlabel=self.x, ylabel=self.y)
        if "x" in self.log:
            axes.set_xscale("log")
        if "y" in self.log:
            axes.set_yscale("log")
        axes.grid(alpha=0.3)


class Figure:
    """Panels side by side, in rows of at most three, with one legend."""

    def __init__(self, *plots: Plot) -> None:
        self.plots = plots

    def save(self, path: Path) -> None:
        """Write an SVG; the same numbers make the same file.

        Raises:
            ImportError: without matplotlib.
        """
        try:
            from matplotlib import rc_context
            from matplotlib.figure import Figure as Canvas
        except ImportError as error:
            raise ImportError("a figure needs matplotlib: pip install 'trysquare[plot]'") from error

        columns = min(3, len(self.plots))
        rows = -(-len(self.plots) // columns)
        names = max(len({name for points in plot.series.values() for name in points}) for plot in self.plots)
        height = 3.0 * rows if self.plots[0].y else 1.0 + 0.24 * names
        # Text stays text, which is small; the white background also reads on a dark page.
        with rc_context({"svg.hashsalt": path.stem, "svg.fonttype": "none", "font.size": 9}):
            canvas = Canvas(figsize=(8, max(height, 2.6)), layout="constrained", facecolor="white")
            panels = canvas.subplots(rows, columns, squeeze=False).flatten()
            for plot, axes in zip(self.plots, panels, strict=True):
                plot.draw(axes)
            handles = {label: h for axes in panels for h, label in zip(*axes.get_legend_handles_labels(), strict=True)}
            if len(handles) > 1:
                canvas.legend(handles.values(), handles.keys(), loc="outside upper center", ncols=3, fontsize=8)
            path.parent.mkdir(parents=True, exist_ok=True)
            canvas.savefig(path, metadata={"Date": None})


def milliseconds(seconds: float) -> str:
    """Show seconds in ms, with three digits."""
    return f"{1e3 * seconds:.3g}" if seconds < 1 else f"{1e3 * seconds:.0f}"


def times(ratio: float) -> str:
    return f"{ratio:.2f}x" if ratio < 10 else f"{ratio:.0f}x"


def megabytes(number: float) -> str:
    """Show bytes in units of a million."""
    return f"{number / 1e6:.1f}" if number < 1e8 else f"{number / 1e6:.0f}"


def failures(rows: Mapping[str, Any]) -> list[Part]:
    """Return a list of the rows that hold an error in place of numbers, if there are any."""
    lines = [f"* {name}: {row['error']}" for name, row in rows.items() if "error" in row]
    return ["\n".join(["Not measured:", "", *lines])] if lines else []
