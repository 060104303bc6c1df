"""Pages and pictures: HTML, SVG, style sheets and scripts, from the templates in this folder.

    page.html      what every page has around its body
    palette.css    the colors of all of them, light and dark
    page.css       the style of a page; view.css and tree.css add to it

Owns escaping. Every value that goes into a template passes `visible` and is escaped, so neither a
prompt nor a model can write a tag or an attribute. Templates load nothing from the network.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jinja2 import Environment

FOLDER = Path(__file__).parent

_CONTROLS = {code: 0x2400 + code for code in range(32) if chr(code) not in "\t\n"}
_BIDI_CONTROLS = (0x061C, 0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2066, 0x206A))
_CONTROLS |= {127: 0x2421} | dict.fromkeys(
    (*range(0x80, 0xA0), *_BIDI_CONTROLS, 0xFFFE, 0xFFFF), 0xFFFD
)


def visible(text: str) -> str:
    """`text` with symbols in place of characters that could control a terminal, change the
    direction of a line or fail to encode. The length stays the same."""
    if text.isascii() and text.isprintable():
        return text
    shown = text.translate(_CONTROLS)
    return "".join("\ufffd" if "\ud800" <= c <= "\udfff" else c for c in shown)


def rendered(template: str, **values: object) -> str:
    """The template with these values, all of them escaped."""
    return _environment().get_template(template).render(values)


@cache
def _environment() -> Environment:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined  # takes a tenth of a second
    from markupsafe import Markup

    def finalize(value: object) -> object:
        is_text = isinstance(value, str) and not isinstance(value, Markup)
        return visible(str(value)) if is_text else value

    environment = Environment(
        loader=FileSystemLoader(FOLDER),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=finalize,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["number"] = "{:,}".format
    return environment
