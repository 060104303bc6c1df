"""CONTRIBUTING.md lists every package, and names only files that exist."""

from __future__ import annotations

import re

from tools import source_tree

PAGE = source_tree.SECTION.page.read_text()


def test_the_map_is_up_to_date() -> None:
    assert source_tree.SECTION.written_into(PAGE) == PAGE, "run `make map`"


def test_every_package_says_what_it_is() -> None:
    silent = [package for package in source_tree.packages() if not source_tree.summary_of(package)]
    assert silent == []


def test_the_files_named_in_recipes_exist() -> None:
    named = re.findall(r"`([\w./]+/[\w./]*\.\w+)`", PAGE)
    missing = [name for name in named if not (source_tree.ROOT / name).exists()]
    assert len(named) > 10 and missing == []
