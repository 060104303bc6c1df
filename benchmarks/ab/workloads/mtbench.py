"""What people ask an assistant: MT-bench's questions with `--data`.

Owns the file's format. Two turns a question, the second about the answer to the first.
"""

from __future__ import annotations

from typing import Any

from benchmarks.ab.workloads.base import Texts
from benchmarks.ab.workloads.questions import read_questions

FILE = "mtbench_question.jsonl"


def questions(texts: Texts) -> list[list[str]] | None:
    """The turns of each question; None without data. Raises ValueError for another format."""
    return None if texts.data is None else read_questions(texts, FILE, _turns)


def _turns(entry: dict[str, Any]) -> list[str]:
    turns = entry["turns"]
    if not isinstance(turns, list) or not turns or not all(isinstance(one, str) for one in turns):
        raise ValueError("it is to have a list of turns")
    return turns
