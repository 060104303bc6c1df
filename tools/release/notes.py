"""Release notes: the newest section of CHANGELOG.md."""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Notes:
    """A section of the changelog.

    Attributes:
        version: as in its heading.
        date: what the heading has in parentheses: a date, or `unreleased`.
        text: the Markdown below the heading, its relative links made absolute.
    """

    version: str
    date: str
    text: str


def newest_notes(changelog: str, link_base: str) -> Notes:
    """The first section below a heading like `## 0.1.0 (2026-11-30)`.

    Args:
        changelog: the text of CHANGELOG.md.
        link_base: what relative links are relative to, without a slash at the end.

    Raises:
        ValueError: there is no such heading, or nothing below it.
    """
    sections = re.split(r"^## (\S+) \(([^)]+)\)$", changelog, flags=re.MULTILINE)
    if len(sections) < 4 or not sections[3].strip():
        raise ValueError("CHANGELOG.md has no section `## VERSION (DATE)` with text")
    _, version, date, text, *_ = sections
    links = re.compile(r"\]\((?![a-z]+:|#)")
    return Notes(version, date, links.sub(f"]({link_base}/", text.strip()) + "\n")
