"""Parts that the sections are made of."""

from __future__ import annotations

from collections.abc import Sequence

from trysquare.lab.report.markup import Markup, tag


def section(key: str, title: str, *content: object) -> Markup:
    """A part with a heading that can be linked to."""
    heading = tag("h2", title, id=f"{key}-heading")
    return tag("section", heading, *content, id=key, aria_labelledby=f"{key}-heading")


def absent(what: str, command: str) -> Markup:
    """That something is not there, and the command that makes it."""
    return tag("p", what, " Make it with ", tag("code", command), " and write the report again.", class_="absent")


def table(caption: str, header: Sequence[str], rows: Sequence[Sequence[object]], class_: str = "") -> Markup:
    """A table that scrolls by itself where it is too wide; the first cell of a row is its header."""
    head = tag("tr", [tag("th", name, scope="col") for name in header])
    body = [tag("tr", tag("th", row[0], scope="row"), [tag("td", cell) for cell in row[1:]]) for row in rows]
    inner = tag("table", tag("caption", caption), tag("thead", head), tag("tbody", body), class_=class_ or None)
    return tag("div", inner, class_="scroll", tabindex="0", role="region", aria_label=caption)


def legend(entries: Sequence[tuple[str, str]]) -> Markup:
    """What the marks of a chart are: a class of the style sheet, and its meaning."""
    items = [tag("li", tag("span", class_=f"key {class_}", aria_hidden="true"), text) for class_, text in entries]
    return tag("ul", items, class_="legend")
