"""The documentation site's navigation and versions; tests/browser/test_site.py builds it."""

from __future__ import annotations

import re
from pathlib import Path

from tools.site import __main__ as site
from tools.site import conf, navigation

START_PAGE = site.ROOT / "docs" / "index.md"


def test_the_start_page_lists_every_page_once() -> None:
    listed = re.findall(r"^- \[.+?\]\((.+?\.md)\)", START_PAGE.read_text(), re.MULTILINE)
    found = [(START_PAGE.parent / name).resolve() for name in listed]
    pages = {page for pattern in conf.include_patterns for page in site.ROOT.glob(pattern)}
    assert sorted(found) == sorted(pages - {START_PAGE})


def test_the_sidebar_has_the_start_pages_headings_and_the_words_of_its_links() -> None:
    start_page = (
        "# A title\n\n[no list](x.md)\n\n## Tutorial\n\nText.\n\n- [Guide](guide.md): first.\n"
        "- [Elsewhere](https://example.org/x.md)\n\n## Empty\n\n## Project\n\n- [How](../HOW.md)\n"
    )
    assert list(navigation.sections_of(start_page)) == [
        ("Tutorial", ["Guide <guide>"]),
        ("Project", ["How <../HOW>"]),
    ]


def test_tutorials_guides_explanations_and_reference_are_apart() -> None:
    titles = [title for title, _ in navigation.sections_of(START_PAGE.read_text())]
    assert titles == ["Tutorial", "How-to guides", "Explanation", "Reference", "Project"]


def test_versions_are_listed_from_the_newest_and_other_folders_are_not(tmp_path: Path) -> None:
    for name in ("0.9.0", "0.10.0", "0.10.0rc1", "latest", "0.11.0"):
        (tmp_path / name / "docs").mkdir(parents=True)
        if name != "0.11.0":  # which has no start page
            (tmp_path / name / "docs" / "index.html").touch()
    assert site.versions_in(tmp_path) == ["0.10.0", "0.10.0rc1", "0.9.0"]
    links = re.findall(r'href="([^"]+html)"', site.versions_page(tmp_path))
    assert links[0] == "0.10.0/docs/index.html"
