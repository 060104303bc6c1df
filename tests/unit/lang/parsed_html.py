"""HTML as a reader meets it: elements, their attributes, and the text inside them."""

from __future__ import annotations

from html.parser import HTMLParser

VOID = {"img", "meta", "link"}


class Element:
    """A tag with its attributes, and all text inside it."""

    def __init__(self, tag: str, attributes: dict[str, str | None], inside: list[Element]) -> None:
        self.tag = tag
        self.inside = inside
        self.attributes = attributes
        self.classes = (attributes.get("class") or "").split()
        self.text = ""


class Parsed(HTMLParser):
    """All elements of a fragment. Fails if a tag is not closed properly."""

    def __init__(self, fragment: str) -> None:
        super().__init__()
        self.all: list[Element] = []
        self._open: list[Element] = []
        self.feed(fragment)
        self.close()
        assert not self._open, f"left open: {[e.tag for e in self._open]}"

    def handle_starttag(self, tag, attrs):
        element = Element(tag, dict(attrs), list(self._open))
        self.all.append(element)
        if tag not in VOID:
            self._open.append(element)

    def handle_startendtag(self, tag, attrs):
        self.all.append(Element(tag, dict(attrs), list(self._open)))

    def handle_endtag(self, tag):
        assert self._open.pop().tag == tag

    def handle_data(self, data):
        for element in self._open:
            element.text += data

    def of_class(self, *classes: str) -> list[Element]:
        return [element for element in self.all if set(classes) <= set(element.classes)]

    def texts(self, *classes: str) -> list[str]:
        return [" ".join(element.text.split()) for element in self.of_class(*classes)]


def slices(fragment: str, *classes: str) -> list[str]:
    """The texts of the prompt with these classes, without those of the legend."""
    return [
        element.text
        for element in Parsed(fragment).of_class("sgl-slice", *classes)
        if any("sgl-piece" in outer.classes for outer in element.inside)
    ]
