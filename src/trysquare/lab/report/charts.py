"""The charts of the report, and how they are drawn.

A chart is drawn twice where it is large: for wide pages, and for telephones.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from trysquare.lab.report.markup import Markup, join, number, percent, radius, scientific, tag
from trysquare.lab.report.reading import Level, Record
from trysquare.verify.auditing import LayerAudit
from trysquare.verify.certification import Certificate

WIDE, NARROW, PANEL = 1000, 360, 360
CURVE_POINTS = 241
# More dots than this hide each other.
DOTS = 3000
# Of each layer and line; more cannot be told apart.
STROKES, LINE_POINTS = 160, 300
_GOLDEN = 0.6180339887498949


# -- drawing

Point = tuple[float, float]
# Beyond this, differences and squares of coordinates overflow.
LARGEST = 1e150
_LETTER = 7.0


def ticks(low: float, high: float, most: int) -> list[float]:
    """Return round numbers in a range: multiples of 1, 2 or 5 times a power of ten, at most ``most`` of them.

    >>> ticks(0.0, 1.0, 6), ticks(0.13, 0.29, 5)
    ([0.0, 0.2, 0.4, 0.6, 0.8, 1.0], [0.15, 0.2, 0.25])
    """
    if not high > low:
        return [low]
    exponent = math.floor(math.log10((high - low) / most))
    for mantissa, power in ((1, 0), (2, 0), (5, 0), (1, 1), (2, 1), (5, 1)):
        step = mantissa * 10.0 ** (exponent + power)
        first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
        if last - first < most:
            break
    digits = max(0, -(exponent + power))
    return [round(i * step, digits) + 0.0 for i in range(first, last + 1)]


@dataclass(frozen=True)
class Scale:
    """A range with a name.

    Args:
        low: its beginning.
        high: its end, above ``low``.
        label: what is measured.
        write: a tick as text.
    """

    low: float
    high: float
    label: str
    write: Callable[[float], str] = "{:g}".format

    @classmethod
    def around(
        cls,
        values: Iterable[float],
        label: str,
        write: Callable[[float], str] = "{:g}".format,
        limits: tuple[float, float] = (-LARGEST, LARGEST),
    ) -> Scale:
        """Return an axis that has room for all values, within limits."""
        finite = [value for value in values if abs(value) <= LARGEST] or [0.0]
        low, high = min(finite), max(finite)
        size = max(abs(low), abs(high))
        flat = high - low <= max(1e-9 * size, 1e-100)
        room = 0.06 * (high - low) if not flat else 0.05 * size if size > 1e-100 else 1.0
        return cls(max(low - room, limits[0]), min(high + room, limits[1]), label, write)


@dataclass(frozen=True)
class Canvas:
    """Where things are drawn, in pixels: the size of the picture, and the margins around the plot."""

    width: float
    height: float
    left: float = 46
    right: float = 18
    top: float = 30
    bottom: float = 44


class Chart:
    """A picture with two axes, to which marks are added.

    Args:
        key: unique in the page.
        title: its name, for those who do not see it.
        description: what it shows.
        canvas: sizes.
        x: from left to right.
        y: from bottom to top.
    """

    def __init__(self, key: str, title: str, description: str, canvas: Canvas, x: Scale, y: Scale) -> None:
        self.key, self.title, self.description = key, title, description
        self.canvas, self.x, self.y = canvas, x, y
        self._parts: list[tuple[str, str, str | None, dict[str, object]]] = []  # element, text, hint, attributes

    def across(self, value: float) -> float:
        """Return the distance of a value from the left, in pixels."""
        start, end = self.canvas.left, self.canvas.width - self.canvas.right
        return start + _share(value, self.x) * (end - start)

    def down(self, value: float) -> float:
        """Return the distance of a value from the top, in pixels."""
        start, end = self.canvas.height - self.canvas.bottom, self.canvas.top
        return start + _share(value, self.y) * (end - start)

    def add(self, name: str, /, text: str = "", *, hint: str | None = None, **attributes: object) -> None:
        """Add an SVG element; numbers are rounded to a tenth of a pixel, and a hint is shown when it is pointed at."""
        rounded = {key: _pixel(value) if isinstance(value, float) else value for key, value in attributes.items()}
        self._parts.append((name, text, hint, rounded))

    def line(self, points: Iterable[Point], class_: str) -> None:
        """Draw a line through points."""
        self.add("path", d=self._path(points), class_=f"line {class_}")

    def area(self, points: Sequence[Point], class_: str) -> None:
        """Fill the area between a line and the bottom."""
        closed = [(points[0][0], self.y.low), *points, (points[-1][0], self.y.low)]
        self.add("path", d=self._path(closed) + "Z", class_=f"area {class_}")

    def _path(self, points: Iterable[Point]) -> str:
        return "M" + "L".join(f"{_pixel(self.across(x))} {_pixel(self.down(y))}" for x, y in points)

    def dots(self, places: Iterable[Point], class_: str) -> None:
        """Draw small points at pixels, all in one element: there may be thousands."""
        self.add("path", d="".join(f"M{_pixel(x)} {_pixel(y)}h0" for x, y in places), class_=f"dots {class_}")

    def marker(self, point: Point, class_: str, hint: str) -> None:
        """Draw a point that says what it is when pointed at."""
        x, y = self.across(point[0]), self.down(point[1])
        self.add("circle", hint=hint, cx=x, cy=y, r=4.5, class_=f"marker {class_}")

    def diamond(self, point: Point, class_: str, hint: str) -> None:
        """Draw another kind of point, which can be told apart without its colour."""
        x, y = _pixel(self.across(point[0])), _pixel(self.down(point[1]))
        self.add("path", hint=hint, d=f"M{x} {y}m0 -6l6 6l-6 6l-6 -6Z", class_=f"marker {class_}")

    def rule(self, class_: str, *, x: float | None = None, y: float | None = None) -> None:
        """Draw a straight line through the whole plot."""
        left, right, top, bottom = self._edges()
        if x is not None:
            left = right = self.across(x)
        if y is not None:
            top = bottom = self.down(y)
        self.add("line", x1=left, x2=right, y1=top, y2=bottom, class_=class_)

    def text(self, x: float, y: float, content: str, class_: str = "", anchor: str = "start") -> None:
        """Write text at pixels."""
        self.add("text", content, x=x, y=y, class_=class_ or None, text_anchor=anchor)

    def _edges(self) -> tuple[float, float, float, float]:
        canvas = self.canvas
        return canvas.left, canvas.width - canvas.right, canvas.top, canvas.height - canvas.bottom

    def draw_x(self, class_: str = "grid") -> None:
        """Draw ticks, lines through them and the label of the horizontal axis."""
        left, right, _, bottom = self._edges()
        for value in ticks(self.x.low, self.x.high, max(2, int((right - left) // 64))):
            self.rule(class_, x=value)
            self.text(self.across(value), bottom + 18, self.x.write(value), "tick", "middle")
        self.text(right, bottom + 37, self.x.label, "label", "end")

    def draw_y(self) -> None:
        """Draw ticks, lines through them and, above, the label of the vertical axis."""
        left, _, top, bottom = self._edges()
        for value in ticks(self.y.low, self.y.high, max(2, int((bottom - top) // 30))):
            self.rule("grid", y=value)
            self.text(left - 9, self.down(value) + 4, self.y.write(value), "tick", "end")
        self.text(0.0, 12.0, self.y.label, "label")

    def rendered(self, class_: str = "") -> Markup:
        """Return the picture."""
        canvas, ids = self.canvas, (f"{self.key}-title", f"{self.key}-text")
        parts = [
            tag(name, text, None if hint is None else tag("title", hint), **attributes)
            for name, text, hint, attributes in self._parts
        ]
        return tag(
            "svg",
            tag("title", self.title, id=ids[0]),
            tag("desc", self.description, id=ids[1]),
            parts,
            viewBox=f"0 0 {canvas.width:g} {canvas.height:g}",
            role="img",
            aria_labelledby=" ".join(ids),
            class_=f"chart {class_}".rstrip(),
        )


class Rows(Chart):
    """A chart with one row for each name, from top to bottom, and a remark at the end of each."""

    def __init__(
        self,
        key: str,
        title: str,
        description: str,
        width: float,
        x: Scale,
        names: Sequence[str],
        *,
        pitch: float,
        letters: int,
        remarks: Sequence[str] = (),
    ) -> None:
        shown = [shortened(name, letters) for name in names]
        canvas = Canvas(
            width,
            len(names) * pitch + 68,
            left=_LETTER * max(map(len, shown)) + 14,
            right=_LETTER * max(map(len, remarks), default=0) + 22,
            top=24,
        )
        super().__init__(key, title, description, canvas, x, Scale(len(names), 0, ""))
        for row, name in enumerate(names):
            middle = self.down(row + 0.5) + 4
            hint = name if shown[row] != name else None
            self.add("text", shown[row], hint=hint, x=canvas.left - 12, y=middle, class_="name", text_anchor="end")
        for row, remark in enumerate(remarks):
            self.text(width, self.down(row + 0.5) + 4, remark, "tick", "end")

    def bar(self, row: int, start: float, end: float, class_: str, thickness: float) -> None:
        """Draw a bar from one value to another, in a row."""
        x, wide = self.across(start), self.across(end) - self.across(start)
        y = self.down(row + 0.5) - thickness / 2
        self.add("rect", x=x, y=y, width=max(wide, 0.8), height=thickness, class_=class_)

    def stroke(self, row: int, value: float, class_: str, height: float) -> None:
        """Draw an upright stroke at a value, in a row."""
        x, y = self.across(value), self.down(row + 0.5)
        self.add("line", x1=x, x2=x, y1=y - height / 2, y2=y + height / 2, class_=class_)


def _share(value: float, axis: Scale) -> float:
    """Return how far along the axis a value is; what is outside is drawn at its end."""
    return min(1.0, max(0.0, (value - axis.low) / (axis.high - axis.low)))


def _pixel(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")


def apart(places: Sequence[float], distance: float, lowest: float, highest: float) -> list[float]:
    """Move places apart by one sweep down and one up, so that labels there do not overlap.

    >>> apart([10.0, 12.0, 40.0], 14.0, 0.0, 100.0)
    [10.0, 24.0, 40.0]
    """
    order = sorted(range(len(places)), key=places.__getitem__)
    moved = list(places)
    floor = lowest
    for i in order:
        moved[i] = max(moved[i], floor)
        floor = moved[i] + distance
    ceiling = highest
    for i in reversed(order):
        moved[i] = min(moved[i], ceiling)
        ceiling = moved[i] - distance
    return moved


def shortened(text: str, length: int) -> str:
    """Return at most ``length`` characters, without the beginning: ends of layers' names tell them apart.

    >>> shortened("features.stage1.conv", 11)
    '…tage1.conv'
    """
    return text if len(text) <= length else f"…{text[len(text) - length + 1 :]}"


# -- the charts


def _both(draw: Callable[[int, str], Chart]) -> Markup:
    """Return a chart for wide pages and one for narrow ones; the style sheet shows one of them."""
    return join(draw(WIDE, "wide").rendered("wide"), draw(NARROW, "narrow").rendered("narrow"))


def _whole_percent(share: float) -> str:
    return f"{100 * share:.4g} %"


def curve_chart(certificate: Certificate, levels: Sequence[Level]) -> Markup:
    """Draw certified accuracy over the radius, with marks at the radii that were asked for or attacked."""
    curve = certificate.curve(CURVE_POINTS, _largest_radius(certificate, levels))
    clean = certificate.clean_accuracy
    told = "; ".join(f"{percent(level.certified)} at {level.name}" for level in levels if level.asked)
    proved = [
        ((level.epsilon, level.certified), f"certified at {level.name}: {percent(level.certified)}")
        for level in levels
        if level.asked
    ]
    left = [
        ((level.epsilon, level.attacked), f"attacked at {level.name}: {percent(level.attacked)}")
        for level in levels
        if level.attacked is not None
    ]
    description = f"It falls from {percent(curve[0][1])} at radius 0. Certified: {told}. Clean: {percent(clean)}."

    def draw(width: int, key: str) -> Chart:
        canvas = Canvas(width, 400 if width == WIDE else 300)
        x, y = Scale(0, curve[-1][0], "radius ε (l2, pixels from 0 to 1)"), Scale(0, 1, "accuracy", _whole_percent)
        chart = Chart(f"curve-{key}", "Certified accuracy by radius", description, canvas, x, y)
        chart.draw_y()
        chart.draw_x("tickline")
        chart.rule("clean", y=clean)
        chart.text(width - canvas.right, chart.down(clean) - 7, f"clean {percent(clean)}", "note", "end")
        chart.area(curve, "certified")
        chart.line(curve, "certified")
        for point, hint in proved:
            chart.marker(point, "certified", hint)
        for point, hint in left:
            chart.diamond(point, "attacked", hint)
        return chart

    return _both(draw)


def _largest_radius(certificate: Certificate, levels: Sequence[Level]) -> float:
    """Return where the curve ends: what almost all radii are below, and all radii that were asked for."""
    finite = certificate.radii[certificate.radii.isfinite()]
    seen = float(finite.quantile(0.998)) if len(finite) else 0.0
    return max(1.05 * max(seen, *(level.epsilon for level in levels)), 1e-6)


def line_chart(
    key: str,
    title: str,
    lines: Sequence[tuple[str, str, Sequence[Point]]],
    limits: tuple[float, float] | None = None,
) -> Markup:
    """Draw lines over the optimizer steps, named at their ends.

    Args:
        key: unique in the page.
        title: what is measured.
        lines: name, class of the style sheet, and points; none of the lines is empty.
        limits: of the values; shares if given, so written in percent.
    """
    canvas = Canvas(PANEL, 260, left=50, right=16 + 6.6 * max(len(name) for name, _, _ in lines))
    points = [point for _, _, line in lines for point in line]
    write: Callable[[float], str] = "{:g}".format if limits is None else _whole_percent
    y = Scale.around((value for _, value in points), title, write, limits or (-LARGEST, LARGEST))
    first, last = min(step for step, _ in points), max(step for step, _ in points)
    x = Scale(first, last if last > first else first + 1, "optimizer step", _step)
    ends = ", ".join(f"{name} {y.write(line[-1][1])}" for name, _, line in lines)
    chart = Chart(key, title, f"{title} from step {_step(first)} to {_step(last)}; at the end {ends}.", canvas, x, y)
    chart.draw_y()
    chart.draw_x("tickline")
    places = apart([chart.down(line[-1][1]) for _, _, line in lines], 14, canvas.top, canvas.height - canvas.bottom)
    for (name, class_, line), place in zip(lines, places, strict=True):
        chart.line(_thinned(line), class_)
        chart.text(canvas.width - canvas.right + 7, place + 4, name, "note")
    return chart.rendered("panel")


def _step(value: float) -> str:
    if value >= 1e6:
        return f"{value / 1e6:g}M"
    return f"{value / 1e3:g}k" if value >= 1e4 else f"{value:g}"


def _thinned(points: Sequence[Point]) -> list[Point]:
    """Return means of neighbours where there are too many points to see."""
    size = math.ceil(len(points) / LINE_POINTS)
    groups = [points[i : i + size] for i in range(0, len(points), size)]
    return [(group[-1][0], sum(y for _, y in group) / len(group)) for group in groups]


def series(records: Sequence[Record], kind: str, name: str) -> list[Point]:
    """Return a value of the lines of one kind, over the steps."""
    found = [(r.step, r.values[name]) for r in records if r.kind == kind and name in r.values]
    return [(step, value) for step, value in found if abs(value) <= LARGEST]


def certified_series(records: Sequence[Record], kind: str) -> dict[float, list[Point]]:
    """Return certified accuracy over the steps, by radius."""
    radii = sorted({r for record in records if record.kind == kind for r in record.certified})
    return {
        r: [(record.step, record.certified[r]) for record in records if record.kind == kind and r in record.certified]
        for r in radii
    }


def spectra_chart(layers: Sequence[LayerAudit]) -> Markup:
    """Draw the singular values of each layer in a row: all as strokes, or the extremes if only these are known."""
    finite = [(layer, largest) for layer in layers if (largest := layer.largest) is not None and largest <= LARGEST]
    high = max([1.0, *(largest for _, largest in finite)])
    orthogonal = sum(layer.verdict == "orthogonal" for layer, _ in finite)
    description = f"{len(finite)} layers with singular values up to {number(high)}; {orthogonal} are orthogonal."

    def draw(width: int, key: str) -> Chart:
        axis = Scale(0, 1.08 * high, "singular value")
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
    """Return how far from 1 the singular values are, in words that fit at the end of a row."""
    if layer.smallest is None or layer.largest is None:
        return f"up to {number(layer.largest)}"
    off = max(abs(layer.smallest - 1), abs(layer.largest - 1))
    return f"1 ± {scientific(off)}" if off < 0.01 else f"{layer.smallest:.3g} to {layer.largest:.3g}"


def _spread(values: Sequence[float]) -> list[float]:
    """Return some of the values, evenly in their order, and those that fall on one pixel once."""
    places = {round(i * (len(values) - 1) / STROKES) for i in range(STROKES + 1)} if values else set()
    return list({f"{values[i]:.3g}": values[i] for i in sorted(places)}.values())


def class_chart(certificate: Certificate, classes: Mapping[int, str]) -> Markup:
    """Draw the radii of classes: middle half as a box, 5 % to 95 % as a line, median as a stroke, images as dots.

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
        axis = Scale(0, 1.04 * high, "certified radius")
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
    """Return pixels of values in a row, up and down by the golden ratio: even, and the same every time."""
    spread = [((i * _GOLDEN) % 1 - 0.5) * 22 for i in range(len(values))]
    return [
        (chart.across(value), chart.down(row + 0.5) + off) for value, off in zip(values.tolist(), spread, strict=True)
    ]
