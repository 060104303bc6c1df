"""Writes the map of packages in CONTRIBUTING.md from the packages' docstrings.

Owns the form of the map. ``make map`` runs it; a test fails while the page is out of date.

    python -m tools.source_tree [--check]
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

from tools.generated import ROOT, GeneratedSection

FOLDERS = ("sgl_vllm", "kernels", "benchmarks")


def packages() -> list[Path]:
    """The folders of the source tree with an ``__init__.py``, parents before children."""
    files = [file for folder in FOLDERS for file in (ROOT / folder).rglob("__init__.py")]
    return sorted(file.parent for file in files)


def summary_of(package: Path) -> str:
    """The first sentence of a package's docstring."""
    docstring = ast.get_docstring(ast.parse((package / "__init__.py").read_text())) or ""
    sentence, _, _ = " ".join(docstring.split()).partition(". ")
    return sentence.rstrip(".")


def table_lines() -> Iterator[str]:
    """The map in Markdown, a row for each package."""
    yield from ("", "| package | |", "| --- | --- |")
    for package in packages():
        yield f"| `{package.relative_to(ROOT)}/` | {summary_of(package)} |"


SECTION = GeneratedSection(
    ROOT / "CONTRIBUTING.md", "make map", "the packages' docstrings", table_lines
)

if __name__ == "__main__":
    sys.exit(SECTION.main())
