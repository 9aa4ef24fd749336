"""HTML and SVG from nested calls. Text is escaped unless it was made here, so nothing can be forgotten."""

from __future__ import annotations

import html
import re

_VOID = {"br", "hr", "img", "meta", "wbr"}
# Not allowed in HTML, or (lone surrogates, which JSON may hold) not in UTF-8.
_FORBIDDEN = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]")


class Markup(str):
    """Text that is HTML already."""

    __slots__ = ()


def escape(value: object) -> Markup:
    """Any value as text of a page.

    >>> escape("<b> & 'c'")
    '&lt;b&gt; &amp; &#x27;c&#x27;'
    """
    if isinstance(value, Markup):
        return value
    return Markup(html.escape(_FORBIDDEN.sub("\N{REPLACEMENT CHARACTER}", str(value))))


def join(*parts: object) -> Markup:
    """Parts one after another; lists and generators of parts too, and ``None`` is nothing."""
    return Markup("".join(_flat(part) for part in parts))


def _flat(part: object) -> str:
    if part is None:
        return ""
    return escape(part) if isinstance(part, str) or not hasattr(part, "__iter__") else join(*part)


def tag(name: str, /, *children: object, **attributes: object) -> Markup:
    """An element.

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
