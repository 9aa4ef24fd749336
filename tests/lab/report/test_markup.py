import itertools
import math
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.lab.report.documents import Document
from trysquare.lab.report import markup
from trysquare.lab.report.charts import LARGEST, Canvas, Chart, Rows, Scale, apart, shortened, ticks
from trysquare.lab.report.markup import Markup, escape, join, tag


@pytest.mark.parametrize("hostile", ["<script>x</script>", '"><img src=x onerror=y>', "' & </style>", "&lt;"])
def test_text_and_attributes_come_back_as_they_were(hostile):
    page = Document(tag("p", hostile, title=hostile))
    assert page.elements == ["p"]
    assert page.attributes == [{"title": hostile}]
    assert "".join(page.text) == hostile


def test_what_html_and_utf8_do_not_have_is_replaced():
    text = escape("a\x00b\ud800c\x1b\n\t")
    assert text == "a\N{REPLACEMENT CHARACTER}b\N{REPLACEMENT CHARACTER}c\N{REPLACEMENT CHARACTER}\n\t"
    text.encode()


def test_nested_parts_are_joined_and_markup_is_kept():
    assert join("a<", None, [Markup("<br>"), ("b", 3)]) == "a&lt;<br>b3"
    assert tag("a", href=None, class_="x", stroke_width=2) == '<a class="x" stroke-width="2"></a>'


NUMBERS = st.floats(-1e6, 1e6)


@given(NUMBERS, st.floats(1e-6, 1e6), st.integers(2, 12))
def test_ticks_are_few_round_and_inside(low, span, most):
    found = ticks(low, low + span, most)
    slack = 1e-8 * max(abs(low), span)
    assert len(found) <= most
    assert all(low - slack <= value <= low + span + slack for value in found)
    steps = [b - a for a, b in itertools.pairwise(found)]
    assert not steps or max(steps) - min(steps) <= 4 * math.ulp(max(map(abs, found)))


def test_ticks_of_nothing():
    assert ticks(2.0, 2.0, 5) == [2.0]


@given(st.lists(st.floats(allow_nan=False), max_size=5))
def test_an_axis_holds_all_values_whatever_they_are(values):
    axis = Scale.around(values, "x")
    finite = [value for value in values if abs(value) <= LARGEST]
    assert axis.low < axis.high
    assert all(axis.low <= value <= axis.high for value in finite)
    assert len(ticks(axis.low, axis.high, 6)) <= 6


def chart():
    return Chart("key", "title <", "description", Canvas(400, 200), Scale(0, 10, "x"), Scale(0, 1, "y"))


def test_a_chart_says_what_it_is():
    drawn = chart()
    drawn.draw_x()
    drawn.draw_y()
    page = Document(drawn.rendered())
    (svg,) = page.of("svg")
    assert svg["role"] == "img"
    assert [page.inside(key) for key in svg["aria-labelledby"].split()] == ["title <", "description"]
    assert {"0", "5", "10", "x", "y"} <= set(page.text)


def test_a_line_goes_from_corner_to_corner_and_does_not_leave():
    drawn = chart()
    drawn.line([(0, 0), (10, 1), (20, -3)], "c")
    path = Document(drawn.rendered()).of("path")[0]["d"]
    canvas = drawn.canvas
    left, right, top, bottom = canvas.left, canvas.width - canvas.right, canvas.top, canvas.height - canvas.bottom
    assert [float(n) for n in re.findall(r"[\d.]+", path)] == [left, bottom, right, top, right, bottom]


def test_rows_are_named_and_long_names_shortened_with_the_whole_as_a_hint():
    rows = Rows("key", "t", "d", 400, Scale(0, 1, "x"), ["short", "a" * 30], pitch=20, letters=10, remarks=["1", "2"])
    rows.bar(1, 0.2, 0.4, "box", 4)
    page = Document(rows.rendered())
    assert rows.down(0.5) < rows.down(1.5)
    assert {"short", "…aaaaaaaaa", "a" * 30, "1", "2"} <= set(page.text)
    (box,) = page.of("rect")
    assert float(box["y"]) == pytest.approx(rows.down(1.5) - 2, abs=0.1)


@given(st.lists(st.floats(0, 100), min_size=1, max_size=6))
def test_labels_do_not_overlap(places):
    moved = sorted(apart(places, 14, 0, 100))
    assert all(b - a >= 14 - 1e-9 for a, b in itertools.pairwise(moved))
    assert moved[-1] <= 100


SHARES = st.floats(0, 1)


@given(SHARES, SHARES)
def test_percentages_keep_the_order_and_are_not_rounded_up(a, b):
    low, high = sorted((a, b))
    shown = [float(markup.percent(share).split("\xa0")[0]) for share in (low, high)]
    assert shown[0] <= shown[1] <= 100 * high + 1e-6


@given(st.floats(0, 1e6))
def test_radii_are_rounded_down_and_bounds_up(value):
    assert float(markup.radius(value)) <= value + 1e-9
    assert float(markup.bound(value)) >= value


@pytest.mark.parametrize(
    ("shown", "text"),
    [
        (markup.bound(math.inf), "∞"),
        (markup.bound(3e8), "3.000003e+08"),
        (markup.radius(2e9), "2e+09"),
        (markup.scientific(9.99e-7), "1.0\xa0×\xa010⁻⁶"),
        (shortened("short", 9), "short"),
    ],
)
def test_corners(shown, text):
    assert shown == text
