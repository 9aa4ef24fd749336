import pytest

from tests.lab.report.documents import Document
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
