"""Numbers as people read them. What is certified is never rounded up."""

from __future__ import annotations

import math

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

    >>> from trysquare.lab.report.formats import duration
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
