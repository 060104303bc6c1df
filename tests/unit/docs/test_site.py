"""The documentation site: its navigation, and that it is built without a warning."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from sgl_vllm.version import __version__
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


@pytest.mark.slow
def test_it_is_built_and_its_links_lead_somewhere(tmp_path: Path) -> None:
    """Sphinx checks links, and its warnings are errors."""
    pytest.importorskip("sphinx", reason="sphinx is not installed")
    command = [sys.executable, "-m", "tools.site", "--output", str(tmp_path)]
    built = subprocess.run(command, cwd=site.ROOT, capture_output=True, text=True)
    assert (built.returncode, built.stderr) == (0, "")
    for page in ("docs/index.html", "docs/support.html", "docs/language.html", "search.html"):
        assert (tmp_path / __version__ / page).is_file(), page
