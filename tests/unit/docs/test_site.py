"""The documentation site's navigation and versions; tests/browser/test_site.py builds it."""

from __future__ import annotations

import re

from tools.site import __main__ as site
from tools.site import conf, navigation

START_PAGE = site.ROOT / "docs" / "index.md"


def test_the_start_page_lists_every_page_once() -> None:
    listed = re.findall(r"^- \[.+?\]\((.+?\.md)\)", START_PAGE.read_text(), re.MULTILINE)
    found = [(START_PAGE.parent / name).resolve() for name in listed]
    pages = {page for pattern in conf.include_patterns for page in site.ROOT.glob(pattern)}
    assert sorted(found) == sorted(pages - {START_PAGE})


def test_tutorials_guides_explanations_and_reference_are_apart() -> None:
    titles = [title for title, _ in navigation.sections_of(START_PAGE.read_text())]
    assert titles == ["Tutorial", "How-to guides", "Explanation", "Reference", "Project"]
