"""The charts of the report. Each is drawn twice where it is large: for wide pages, and for telephones."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from trysquare.lab.report.markup import (
    LARGEST,
    Axis,
    Chart,
    Frame,
    Markup,
    Point,
    Rows,
    apart,
    join,
    number,
    percent,
    radius,
    scientific,
)
from trysquare.lab.report.reading import Record
from trysquare.verify.attacks import AttackReport
from trysquare.verify.auditing import LayerAudit
from trysquare.verify.certification import Certificate, radius_text

WIDE, NARROW, PANEL = 1000, 360, 360
CURVE_POINTS = 241
# More dots than this hide each other.
DOTS = 3000
# Of each layer and line; more cannot be told apart.
STROKES, LINE_POINTS = 160, 300
_GOLDEN = 0.6180339887498949


def _both(draw: Callable[[int, str], Chart]) -> Markup:
    """A chart for wide pages and one for narrow ones; the style sheet shows one of them."""
    return join(draw(WIDE, "wide").rendered("wide"), draw(NARROW, "narrow").rendered("narrow"))


def _whole_percent(share: float) -> str:
    return f"{100 * share:.4g} %"


def curve_chart(certificate: Certificate, attack: AttackReport | None) -> Markup:
    """Certified accuracy over the radius, the radii that were asked for, and the accuracy under attack at them."""
    attacked = [] if attack is None else list(zip(attack.epsilons, attack.attacked, strict=True))
    curve = certificate.curve(CURVE_POINTS, _largest_radius(certificate, attacked))
    clean = certificate.clean_accuracy
    told = "; ".join(f"{percent(certificate.certified_accuracy(e))} at {radius_text(e)}" for e in certificate.epsilons)
    description = f"It falls from {percent(curve[0][1])} at radius 0. Certified: {told}. Clean: {percent(clean)}."

    def draw(width: int, key: str) -> Chart:
        frame = Frame(width, 400 if width == WIDE else 300)
        x, y = Axis(0, curve[-1][0], "radius ε (l2, pixels from 0 to 1)"), Axis(0, 1, "accuracy", _whole_percent)
        chart = Chart(f"curve-{key}", "Certified accuracy by radius", description, frame, x, y)
        chart.draw_y()
        chart.draw_x("tickline")
        chart.rule("clean", y=clean)
        chart.text(width - frame.right, chart.down(clean) - 7, f"clean {percent(clean)}", "note", "end")
        chart.area(curve, "certified")
        chart.line(curve, "certified")
        for e in certificate.epsilons:
            share = certificate.certified_accuracy(e)
            chart.marker((e, share), "certified", f"certified at {radius_text(e)}: {percent(share)}")
        for e, share in attacked:
            chart.diamond((e, share), "attacked", f"attacked at {radius_text(e)}: {percent(share)}")
        return chart

    return _both(draw)


def _largest_radius(certificate: Certificate, attacked: Sequence[Point]) -> float:
    """Where the curve ends: what almost all radii are below, and all radii that were asked for."""
    finite = certificate.radii[certificate.radii.isfinite()]
    seen = float(finite.quantile(0.998)) if len(finite) else 0.0
    return max(1.05 * max(*certificate.epsilons, seen, *(e for e, _ in attacked)), 1e-6)


def line_chart(
    key: str,
    title: str,
    lines: Sequence[tuple[str, str, Sequence[Point]]],
    limits: tuple[float, float] | None = None,
) -> Markup:
    """Lines over the optimizer steps, named at their ends.

    Args:
        key: unique in the page.
        title: what is measured.
        lines: name, class of the style sheet, and points; none of the lines is empty.
        limits: of the values; shares if given, so written in percent.
    """
    frame = Frame(PANEL, 260, left=50, right=16 + 6.6 * max(len(name) for name, _, _ in lines))
    points = [point for _, _, line in lines for point in line]
    write: Callable[[float], str] = "{:g}".format if limits is None else _whole_percent
    y = Axis.around((value for _, value in points), title, write, limits or (-LARGEST, LARGEST))
    first, last = min(step for step, _ in points), max(step for step, _ in points)
    x = Axis(first, last if last > first else first + 1, "optimizer step", _step)
    ends = ", ".join(f"{name} {y.write(line[-1][1])}" for name, _, line in lines)
    chart = Chart(key, title, f"{title} from step {_step(first)} to {_step(last)}; at the end {ends}.", frame, x, y)
    chart.draw_y()
    chart.draw_x("tickline")
    places = apart([chart.down(line[-1][1]) for _, _, line in lines], 14, frame.top, frame.height - frame.bottom)
    for (name, class_, line), place in zip(lines, places, strict=True):
        chart.line(_thinned(line), class_)
        chart.text(frame.width - frame.right + 7, place + 4, name, "note")
    return chart.rendered("panel")


def _step(value: float) -> str:
    if value >= 1e6:
        return f"{value / 1e6:g}M"
    return f"{value / 1e3:g}k" if value >= 1e4 else f"{value:g}"


def _thinned(points: Sequence[Point]) -> list[Point]:
    """Means of neighbours where there are too many to see."""
    size = math.ceil(len(points) / LINE_POINTS)
    groups = [points[i : i + size] for i in range(0, len(points), size)]
    return [(group[-1][0], sum(y for _, y in group) / len(group)) for group in groups]


def series(records: Sequence[Record], kind: str, name: str) -> list[Point]:
    """A value of the lines of one kind, over the steps."""
    found = [(r.step, r.values[name]) for r in records if r.kind == kind and name in r.values]
    return [(step, value) for step, value in found if abs(value) <= LARGEST]


def certified_series(records: Sequence[Record], kind: str) -> dict[float, list[Point]]:
    """Certified accuracy over the steps, by radius."""
    radii = sorted({r for record in records if record.kind == kind for r in record.certified})
    return {
        r: [(record.step, record.certified[r]) for record in records if record.kind == kind and r in record.certified]
        for r in radii
    }


def spectra_chart(layers: Sequence[LayerAudit]) -> Markup:
    """Singular values of layers, a row each: all of them as strokes, or the extremes where only these are known."""
    finite = [(layer, largest) for layer in layers if (largest := layer.largest) is not None and largest <= LARGEST]
    high = max([1.0, *(largest for _, largest in finite)])
    orthogonal = sum(layer.verdict == "orthogonal" for layer, _ in finite)
    description = f"{len(finite)} layers with singular values up to {number(high)}; {orthogonal} are orthogonal."

    def draw(width: int, key: str) -> Chart:
        axis = Axis(0, 1.08 * high, "singular value")
        wide = width == WIDE
        names = [f"{layer.name} · {layer.type}" if wide else layer.name for layer, _ in finite]
        remarks = [_deviation(layer) for layer, _ in finite]
        chart = Rows(
            f"spectra-{key}", "Singular values of the layers", description, width, axis, names,
            pitch=26, letters=46 if wide else 16, remarks=remarks if wide else (),
        )  # fmt: skip
        chart.draw_x("tickline")
        chart.rule("unit", x=1)
        for row, (layer, largest) in enumerate(finite):
            smallest = largest if layer.smallest is None else layer.smallest
            chart.bar(row, 0, axis.high, "track", 1)
            chart.bar(row, smallest, largest, "range" if layer.spectrum else "range unsure", 2)
            for value in _spread(layer.spectrum or [smallest, largest]):
                chart.stroke(row, value, "value" if layer.spectrum else "value unsure", 15)
        return chart

    return _both(draw)


def _deviation(layer: LayerAudit) -> str:
    """How far from 1 the singular values are, in words that fit at the end of a row."""
    if layer.smallest is None or layer.largest is None:
        return f"up to {number(layer.largest)}"
    off = max(abs(layer.smallest - 1), abs(layer.largest - 1))
    return f"1 ± {scientific(off)}" if off < 0.01 else f"{layer.smallest:.3g} to {layer.largest:.3g}"


def _spread(values: Sequence[float]) -> list[float]:
    """Some of the values, evenly in their order, those that fall on the same pixel once."""
    places = {round(i * (len(values) - 1) / STROKES) for i in range(STROKES + 1)} if values else set()
    return list({f"{values[i]:.3g}": values[i] for i in sorted(places)}.values())


def class_chart(certificate: Certificate, classes: Mapping[int, str]) -> Markup:
    """Radii of classes: middle half as a box, 5 % to 95 % as a line, the median as a stroke, images as dots.

    Args:
        certificate: what to show.
        classes: names of those to show, from top to bottom; each has images.
    """
    groups = [certificate.radii[certificate.labels == c] for c in classes]
    quantiles = [_quantiles(group) for group in groups]
    medians = [middle for _, _, middle, _, _ in quantiles]
    description = f"Medians from {radius(min(medians))} to {radius(max(medians))} over {len(classes)} classes."
    dots = sum(map(len, groups)) <= DOTS
    drawn = torch.cat(groups) if dots else torch.tensor([top for *_, top in quantiles])
    high = max([0.01, *drawn[drawn.isfinite()].tolist()])
    right = [certificate.predictions[certificate.labels == c] == c for c in classes]

    def draw(width: int, key: str) -> Chart:
        axis = Axis(0, 1.04 * high, "certified radius")
        remarks = [percent(float(answers.double().mean())) for answers in right]
        chart = Rows(
            f"classes-{key}", "Certified radius by class", description, width, axis, list(classes.values()),
            pitch=34, letters=24 if width == WIDE else 11, remarks=remarks,
        )  # fmt: skip
        chart.draw_x("tickline")
        chart.text(width, 14.0, "right", "label", "end")
        for row, (group, (low, first, middle, third, top)) in enumerate(zip(groups, quantiles, strict=True)):
            if dots:
                chart.dots(_jittered(chart, row, group), "sample")
            chart.bar(row, low, first, "whisker", 1.4)
            chart.bar(row, third, top, "whisker", 1.4)
            chart.bar(row, first, third, "box", 13)
            chart.stroke(row, middle, "median", 17)
        return chart

    return _both(draw)


def _quantiles(values: Tensor) -> tuple[float, float, float, float, float]:
    ordered = values.sort().values
    places = [min(len(ordered) - 1, math.floor(share * len(ordered))) for share in (0.05, 0.25, 0.5, 0.75, 0.95)]
    low, first, middle, third, high = ordered[torch.tensor(places)].tolist()
    return low, first, middle, third, high


def _jittered(chart: Rows, row: int, values: Tensor) -> list[Point]:
    """Pixels of values in a row, up and down by the golden ratio: even, and the same every time."""
    spread = [((i * _GOLDEN) % 1 - 0.5) * 22 for i in range(len(values))]
    return [
        (chart.across(value), chart.down(row + 0.5) + off) for value, off in zip(values.tolist(), spread, strict=True)
    ]
