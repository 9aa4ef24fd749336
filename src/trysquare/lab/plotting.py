"""Spectra and curves as pictures."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from trysquare.files import check_writable, replacing
from trysquare.verify.auditing import AuditReport


def plot_spectra(report: AuditReport, path: str | os.PathLike[str]) -> None:
    """Draw the singular values of every layer, largest first, and write the picture.

    Args:
        report: of ``audit(..., spectra=True)``; layers whose spectrum was too large show their extremes as a bar.
        path: file to write; its ending names the format.

    Raises:
        ValueError: if matplotlib is not installed or does not know the format, the file cannot be written, or there is
            nothing to draw.
    """
    check_picture(path)
    rows = [(row, row.largest) for row in report.layers if row.largest is not None]
    if not rows:
        raise ValueError("the network has no linear layer: there is no spectrum to draw")
    figure = _figure()
    axes = figure.subplots()
    for row, largest in rows:
        if row.spectrum:
            share = [i / max(1, len(row.spectrum) - 1) for i in range(len(row.spectrum))]
            axes.plot(share, row.spectrum, label=row.name)
        elif row.smallest is not None:
            axes.plot([0, 1], [largest, row.smallest], ":", label=f"{row.name} (extremes)")
        else:
            axes.plot([0], [largest], "o", label=f"{row.name} (largest)")
    axes.axhline(1, color="black", linewidth=0.5)
    axes.set(xlabel="share of the singular values", ylabel="singular value", title=report.summary)
    if len(rows) <= 40:
        axes.legend(fontsize="xx-small", ncols=2)
    with replacing(path) as file:
        figure.savefig(file, format=_format(path))


def plot_curves(
    curves: Mapping[str, Sequence[tuple[float, float]]], labels: tuple[str, str], path: str | os.PathLike[str]
) -> None:
    """Draw lines by name, the first above the others, and write the picture; ``labels`` are those of the axes.

    Raises:
        ValueError: if matplotlib is not installed or does not know the format, or the file cannot be written.
    """
    check_picture(path)
    figure = _figure()
    axes = figure.subplots()
    for place, (name, points) in enumerate(curves.items()):
        axes.plot(*zip(*points, strict=True), "o-", markersize=3, label=name, zorder=len(curves) - place)
    axes.set(xlabel=labels[0], ylabel=labels[1])
    if 0 < len(curves) <= 40:
        axes.legend(fontsize="xx-small")
    with replacing(path) as file:
        figure.savefig(file, format=_format(path))


def check_picture(path: str | os.PathLike[str]) -> None:
    """Refuse a picture that could not be drawn or written, before the work of which it is to show the result.

    Raises:
        ValueError: if matplotlib is not installed or does not know the format, or the file cannot be written.
    """
    known = _figure().canvas.get_supported_filetypes()
    if _format(path) not in known:
        raise ValueError(f"{path} must end in the name of a format: one of {', '.join(sorted(known))}")
    check_writable(path)


def _format(path: str | os.PathLike[str]) -> str:
    return Path(path).suffix.removeprefix(".").lower()


def _figure() -> Any:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ValueError("a plot needs matplotlib: pip install 'trysquare[plot]'") from error
    return Figure(figsize=(10, 5), layout="constrained")
