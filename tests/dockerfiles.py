"""Reads Dockerfiles, as far as those in `deploy/` go: one instruction a line, `\\` continues it."""

from __future__ import annotations

import re
from pathlib import Path


def instructions_of(file: Path) -> list[tuple[str, str]]:
    """Each instruction and its words, in their order."""
    lines = [line for line in file.read_text().splitlines() if not line.startswith("#")]
    joined = re.sub(r"\\\n\s*", "", "\n".join(lines))
    instructions = [line.partition(" ") for line in joined.splitlines() if line]
    return [(kind, words) for kind, _, words in instructions]


def arguments_of(file: Path) -> dict[str, str]:
    """The build arguments and their defaults."""
    given = [words.partition("=") for kind, words in instructions_of(file) if kind == "ARG"]
    return {name: default for name, _, default in given}


def script_of(file: Path) -> str:
    """All RUN instructions as one shell script."""
    return "\n".join(words for kind, words in instructions_of(file) if kind == "RUN")
