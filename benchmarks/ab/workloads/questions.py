"""What people ask an assistant: MT-bench's questions with `--data`.

Owns the file's format. Two turns a question, the second about the answer to the first.
"""

from __future__ import annotations

import json

from benchmarks.ab.workloads.base import Texts

FILE = "mtbench_question.jsonl"


def questions(texts: Texts) -> list[list[str]] | None:
    """The turns of each question; None without data. Raises ValueError for another format."""
    content = texts.file(FILE)
    if content is None:
        return None
    try:
        asked = [json.loads(line)["turns"] for line in content.splitlines() if line.strip()]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"--data: {FILE} is not MT-bench's: {error!r}") from error
    if not asked or not all(map(_are_turns, asked)):
        raise ValueError(f"--data: {FILE} is not MT-bench's: each line has a list of turns")
    return asked


def _are_turns(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(one, str) for one in value)
