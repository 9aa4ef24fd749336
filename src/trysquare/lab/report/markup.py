"""HTML and SVG from nested calls, and numbers as people read them.

Text is escaped unless it was made here, so nothing can be forgotten. What is certified is never rounded up.
"""

from __future__ import annotations

import html
import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

# Not templates of Jinja2: the header of the page, tried as one, came out the same in 82 lines (40 of template, 42 that
# prepare its values) in place of 93. The charts, half of all, are SVG whose numbers are computed. Here the calls that
# write elements are checked as Python, and there is one language to read.
_VOID = {"br", "hr", "img", "meta", "wbr"}
# Not allowed in HTML, or (lone surrogates, which JSON may hold) not in UTF-8.
_FORBIDDEN = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]")


class Markup(str):
    """Text that is HTML already."""

    __slots__ = ()


def escape(value: object) -> Markup:
    """Return any value as text of a page.

    >>> escape("<b> & 'c'")
    '&lt;b&gt; &amp; &#x27;c&#x27;'
    """
    if isinstance(value, Markup):
        return value
    return Markup(html.escape(_FORBIDDEN.sub("\N{REPLACEMENT CHARACTER}", str(value))))


def join(*parts: object) -> Markup:
    """Join parts, and lists and generators of parts; ``None`` is left out."""
    return Markup("".join(_flat(part) for part in parts))


def _flat(part: object) -> str:
    if part is None:
        return ""
    return escape(part) if isinstance(part, str) or not hasattr(part, "__iter__") else join(*part)


def tag(name: str, /, *children: object, **attributes: object) -> Markup:
    """Return an element.

    Args:
        name: such as ``"td"``; a constant of the program, like the names of the attributes.
        children: as for ``join``.
        attributes: underscores become hyphens, and one at the end is dropped; ``None`` leaves an attribute out.

    >>> tag("p", "a < b", tag("br"), class_="note", aria_label='"')
    '<p class="note" aria-label="&quot;">a &lt; b<br></p>'
    """
    given = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escape(value)}"'
        for key, value in attributes.items()
        if value is not None
    )
    return Markup(f"<{name}{given}>" if name in _VOID else f"<{name}{given}>{join(*children)}</{name}>")


def section(key: str, title: str, *content: object) -> Markup:
    """Return a section whose heading can be linked to."""
    heading = tag("h2", title, id=f"{key}-heading")
    return tag("section", heading, *content, id=key, aria_labelledby=f"{key}-heading")


def absent(what: str, command: str) -> Markup:
    """Say that something is missing, and which command makes it."""
    return tag("p", what, " Make it with ", tag("code", command), " and write the report again.", class_="absent")


def table(caption: str, header: Sequence[str], rows: Sequence[Sequence[object]], class_: str = "") -> Markup:
    """Return a table that scrolls where it is too wide; the first cell of a row is its header."""
    head = tag("tr", [tag("th", name, scope="col") for name in header])
    body = [tag("tr", tag("th", row[0], scope="row"), [tag("td", cell) for cell in row[1:]]) for row in rows]
    inner = tag("table", tag("caption", caption), tag("thead", head), tag("tbody", body), class_=class_ or None)
    return tag("div", inner, class_="scroll", tabindex="0", role="region", aria_label=caption)


def legend(entries: Sequence[tuple[str, str]]) -> Markup:
    """Return a legend: for each mark its class of the style sheet, and its meaning."""
    items = [tag("li", tag("span", class_=f"key {class_}", aria_hidden="true"), text) for class_, text in entries]
    return tag("ul", items, class_="legend")


# Decimal fractions such as 0.29 are a little below themselves in binary.
_SLACK = 1e-9
NO_BREAK = "\N{NO-BREAK SPACE}"
_RAISED = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


def percent(share: float) -> str:
    r"""Rounded down, so that the order of accuracies is kept and 100 % means all.

    >>> percent(0.9996), percent(0.29)
    ('99.9\xa0%', '29.0\xa0%')
    """
    return f"{math.floor(share * 1000 + _SLACK) / 10:.1f}{NO_BREAK}%"


def radius(value: float) -> str:
    """A certified radius, rounded down to thousandths.

    >>> radius(0.12399), radius(math.inf)
    ('0.123', '∞')
    """
    if value >= 1e6:
        return "∞" if math.isinf(value) else f"{value:.3g}"
    return f"{math.floor(value * 1000 + _SLACK) / 1000:.3f}"


def number(value: float | None) -> str:
    """Seven digits, as many as float32 has; a dash for what is not known.

    >>> number(1.23456789), number(None), number(math.inf)
    ('1.234568', '–', '∞')
    """
    if value is None:
        return "–"
    return "∞" if math.isinf(value) else f"{value:.7g}"


def bound(value: float) -> str:
    """A certified upper bound, rounded up to millionths.

    >>> bound(1.0), bound(1.0000002), bound(2.5)
    ('1', '1.000001', '2.5')
    """
    if math.isinf(value):
        return "∞"
    # Of large numbers, doubles do not have millionths.
    return f"{math.ceil(value * 1e6) / 1e6:.6f}".rstrip("0").rstrip(".") if value < 1e6 else f"{value * (1 + 1e-6):.6e}"


def scientific(value: float) -> str:
    r"""Two digits and a power of ten, rounded up.

    >>> scientific(3.91e-7), scientific(0.0)
    ('4.0\xa0×\xa010⁻⁷', '0')
    """
    if not value:
        return "0"
    exponent = math.floor(math.log10(value))
    digits = math.ceil(value / 10.0**exponent * 10 - 1e-6) / 10
    if digits >= 10:
        digits, exponent = 1.0, exponent + 1
    return f"{digits:.1f}{NO_BREAK}×{NO_BREAK}10{str(exponent).translate(_RAISED)}"


def count(value: int) -> str:
    """With commas.

    >>> count(2300000)
    '2,300,000'
    """
    return f"{value:,}"


def duration(seconds: float) -> str:
    """Seconds, minutes or hours, whichever are few.

    >>> from trysquare.lab.report.markup import duration
    >>> duration(12.4), duration(1800), duration(9000)
    ('12 s', '30 min', '2.5 h')
    """
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def shortened(text: str, length: int) -> str:
    """At most ``length`` characters, the beginning left out: ends of layers' names tell them apart.

    >>> shortened("features.stage1.conv", 11)
    '…tage1.conv'
    """
    return text if len(text) <= length else f"…{text[len(text) - length + 1 :]}"


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
class Axis:
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
    ) -> Axis:
        """Return an axis that has room for all values, within limits."""
        finite = [value for value in values if abs(value) <= LARGEST] or [0.0]
        low, high = min(finite), max(finite)
        size = max(abs(low), abs(high))
        flat = high - low <= max(1e-9 * size, 1e-100)
        room = 0.06 * (high - low) if not flat else 0.05 * size if size > 1e-100 else 1.0
        return cls(max(low - room, limits[0]), min(high + room, limits[1]), label, write)


@dataclass(frozen=True)
class Frame:
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
        frame: sizes.
        x: from left to right.
        y: from bottom to top.
    """

    def __init__(self, key: str, title: str, description: str, frame: Frame, x: Axis, y: Axis) -> None:
        self.key, self.title, self.description = key, title, description
        self.frame, self.x, self.y = frame, x, y
        self.parts: list[Markup] = []

    def across(self, value: float) -> float:
        """Return the distance of a value from the left, in pixels."""
        start, end = self.frame.left, self.frame.width - self.frame.right
        return start + _share(value, self.x) * (end - start)

    def down(self, value: float) -> float:
        """Return the distance of a value from the top, in pixels."""
        start, end = self.frame.height - self.frame.bottom, self.frame.top
        return start + _share(value, self.y) * (end - start)

    def add(self, name: str, /, *children: object, **attributes: object) -> None:
        """Add an SVG element; numbers are rounded to a tenth of a pixel."""
        rounded = {key: _pixel(value) if isinstance(value, float) else value for key, value in attributes.items()}
        self.parts.append(tag(name, *children, **rounded))

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
        self.add("circle", tag("title", hint), cx=x, cy=y, r=4.5, class_=f"marker {class_}")

    def diamond(self, point: Point, class_: str, hint: str) -> None:
        """Draw another kind of point, which can be told apart without its colour."""
        x, y = _pixel(self.across(point[0])), _pixel(self.down(point[1]))
        self.add("path", tag("title", hint), d=f"M{x} {y}m0 -6l6 6l-6 6l-6 -6Z", class_=f"marker {class_}")

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
        frame = self.frame
        return frame.left, frame.width - frame.right, frame.top, frame.height - frame.bottom

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
        frame, ids = self.frame, (f"{self.key}-title", f"{self.key}-text")
        return tag(
            "svg",
            tag("title", self.title, id=ids[0]),
            tag("desc", self.description, id=ids[1]),
            self.parts,
            viewBox=f"0 0 {frame.width:g} {frame.height:g}",
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
        x: Axis,
        names: Sequence[str],
        *,
        pitch: float,
        letters: int,
        remarks: Sequence[str] = (),
    ) -> None:
        shown = [shortened(name, letters) for name in names]
        frame = Frame(
            width,
            len(names) * pitch + 68,
            left=_LETTER * max(map(len, shown)) + 14,
            right=_LETTER * max(map(len, remarks), default=0) + 22,
            top=24,
        )
        super().__init__(key, title, description, frame, x, Axis(len(names), 0, ""))
        for row, name in enumerate(names):
            middle = self.down(row + 0.5) + 4
            full = tag("title", name) if shown[row] != name else None
            self.add("text", shown[row], full, x=frame.left - 12, y=middle, class_="name", text_anchor="end")
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


def _share(value: float, axis: Axis) -> float:
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
