import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trysquare.lab.report import formats

SHARES = st.floats(0, 1)


@given(SHARES, SHARES)
def test_percentages_keep_the_order_and_are_not_rounded_up(a, b):
    low, high = sorted((a, b))
    shown = [float(formats.percent(share).split("\xa0")[0]) for share in (low, high)]
    assert shown[0] <= shown[1] <= 100 * high + 1e-6


@given(st.floats(0, 1e6))
def test_radii_are_rounded_down_and_bounds_up(value):
    assert float(formats.radius(value)) <= value + 1e-9
    assert float(formats.bound(value)) >= value


@pytest.mark.parametrize(
    ("shown", "text"),
    [
        (formats.bound(math.inf), "∞"),
        (formats.bound(3e8), "3.000003e+08"),
        (formats.radius(2e9), "2e+09"),
        (formats.scientific(9.99e-7), "1.0\xa0×\xa010⁻⁶"),
        (formats.shortened("short", 9), "short"),
    ],
)
def test_corners(shown, text):
    assert shown == text
