"""HTML and SVG from nested calls, and numbers as people read them.

Text is escaped unless it was made here, so nothing can be forgotten. What is certified is never rounded up.
"""

from __future__ import annotations

import html
import math
import re
from collections.abc import Sequence

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
    r"""Write a share, rounded down so that the order of accuracies is kept and 100 % means all.

    >>> percent(0.9996), percent(0.29)
    ('99.9\xa0%', '29.0\xa0%')
    """
    return f"{math.floor(share * 1000 + _SLACK) / 10:.1f}{NO_BREAK}%"


def radius(value: float) -> str:
    """Write a certified radius, rounded down to thousandths.

    >>> radius(0.12399), radius(math.inf)
    ('0.123', '∞')
    """
    if value >= 1e6:
        return "∞" if math.isinf(value) else f"{value:.3g}"
    return f"{math.floor(value * 1000 + _SLACK) / 1000:.3f}"


def number(value: float | None) -> str:
    """Write seven digits, as many as float32 has, or a dash for what is not known.

    >>> number(1.23456789), number(None), number(math.inf)
    ('1.234568', '–', '∞')
    """
    if value is None:
        return "–"
    return "∞" if math.isinf(value) else f"{value:.7g}"


def bound(value: float) -> str:
    """Write a certified upper bound, rounded up to millionths.

    >>> bound(1.0), bound(1.0000002), bound(2.5)
    ('1', '1.000001', '2.5')
    """
    if math.isinf(value):
        return "∞"
    # Of large numbers, doubles do not have millionths.
    return f"{math.ceil(value * 1e6) / 1e6:.6f}".rstrip("0").rstrip(".") if value < 1e6 else f"{value * (1 + 1e-6):.6e}"


def scientific(value: float) -> str:
    r"""Write two digits and a power of ten, rounded up.

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
    """Write a whole number with commas.

    >>> count(2300000)
    '2,300,000'
    """
    return f"{value:,}"


def duration(seconds: float) -> str:
    """Write a time in seconds, minutes or hours, whichever are few.

    >>> from trysquare.lab.report.markup import duration
    >>> duration(12.4), duration(1800), duration(9000)
    ('12 s', '30 min', '2.5 h')
    """
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
