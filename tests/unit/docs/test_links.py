"""Links between the project's pages lead somewhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import sgl_vllm
from tools.site import navigation

ROOT = Path(sgl_vllm.__file__).parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])
FOLDERS = "benchmarks|constraints|deploy|kernels|sgl_vllm|tests|tools"
_LINK = re.compile(r"\]\(([^)\s]+)\)")


def anchors_of(page: Path) -> set[str]:
    """The names that a page's headings get, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", h.lower()).strip().replace(" ", "-") for h in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files_and_headings_that_exist(page: Path) -> None:
    broken = []
    for link in _LINK.findall(page.read_text()):
        file, _, anchor = link.partition("#")
        if "://" in link:
            continue
        target = page.parent / file if file else page
        is_page = target.suffix == ".md" and target.is_file()
        if not target.exists() or (anchor and is_page and anchor not in anchors_of(target)):
            broken.append(link)
    assert broken == []


@pytest.mark.parametrize("page", sorted((ROOT / "docs").glob("*.md")), ids=lambda page: page.name)
def test_links_to_folders_have_a_page_of_the_site(page: Path) -> None:
    links = [link for link in _LINK.findall(page.read_text()) if "://" not in link]
    folders = {link for link in links if (page.parent / link).is_dir()}
    assert folders <= navigation.FOLDERS.keys()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_and_modules_named_on_a_page_exist(page: Path) -> None:
    text = page.read_text()
    files = set(re.findall(rf"`((?:{FOLDERS})/[\w./-]*\w)`", text))
    modules = set(re.findall(r"-m ((?:benchmarks|tools|tests|sgl_vllm)\.[a-z][\w.]*\w)", text))
    files |= {name.replace(".", "/") for name in modules}
    found = {name for name in files if (ROOT / name).exists() or (ROOT / f"{name}.py").is_file()}
    assert files - found - {"tests/v1/core"} == set()  # that one is vLLM's


def test_every_example_is_in_the_list_of_examples() -> None:
    page = (ROOT / "docs" / "language.md").read_text()
    examples = {path.name for path in (ROOT / "examples").iterdir() if path.is_file()}
    assert {name for name in examples if f"(../examples/{name})" not in page} == set()
