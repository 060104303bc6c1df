"""A Sphinx extension. Owns the sidebar, and where links to folders lead.

The start page, docs/index.md, lists all pages under headings. That list is the navigation, so no
page of Markdown needs a directive that GitHub would show as code.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sphinx.application import Sphinx

FOLDERS = {
    "../benchmarks/results/cpu": "benchmarks.md#results",
    "../deploy": "install.md#containers",
    "../examples": "language.md",  # which lists them
}
"""What stands for a folder, which a website cannot show."""

_SECTION = re.compile(r"^## (?P<title>.+)\n(?P<text>(?:(?!^## ).*\n)*)", re.MULTILINE)
_PAGE = re.compile(r"^- \[(?P<title>.+?)\]\((?P<page>[^)#:]+)\.md\)", re.MULTILINE)


def sections_of(start_page: str) -> Iterator[tuple[str, list[str]]]:
    """The headings that list pages, and their pages, in Sphinx's words: `title <path>`."""
    for section in _SECTION.finditer(start_page):
        pages = [f"{one['title']} <{one['page']}>" for one in _PAGE.finditer(section["text"])]
        if pages:
            yield section["title"], pages


def toctrees_of(start_page: str) -> str:
    """The same as Sphinx's directives, which are not shown on the page."""
    return "".join(
        "\n".join(["", "```{toctree}", ":hidden:", f":caption: {title}", "", *pages, "```", ""])
        for title, pages in sections_of(start_page)
    )


def _on_read(app: Sphinx, docname: str, source: list[str]) -> None:
    for folder, target in FOLDERS.items():
        source[0] = source[0].replace(f"]({folder})", f"]({target})")
    if docname == app.config.root_doc:
        source[0] += toctrees_of(source[0])


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("source-read", _on_read)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
