"""What is in a page, by Python's own parser of HTML."""

from html.parser import HTMLParser

VOID = {"br", "hr", "img", "meta", "wbr"}


class Document(HTMLParser):
    """Elements, ids, addresses and text; raises if elements are not properly nested."""

    def __init__(self, text):
        super().__init__(convert_charrefs=True)
        self.open, self.elements, self.attributes, self.text, self.texts = [], [], [], [], {}
        self.feed(text)
        self.close()
        assert not self.open, self.open

    def handle_starttag(self, tag, attrs):
        self.elements.append(tag)
        self.attributes.append(dict(attrs))
        if tag not in VOID:
            self.open.append((tag, dict(attrs).get("id")))

    def handle_endtag(self, tag):
        assert self.open.pop()[0] == tag

    def handle_data(self, data):
        if self.open and self.open[-1][0] not in ("style", "script"):
            self.text.append(data)
            for _, key in self.open:
                self.texts.setdefault(key, []).append(data)

    def of(self, tag):
        """Attributes of all elements of a kind."""
        return [given for name, given in zip(self.elements, self.attributes, strict=True) if name == tag]

    def inside(self, key):
        """Text inside of the element with an id."""
        return " ".join(self.texts[key])
