"""Questions with known answers: how a file of them is read, and how many examples a prompt takes.

No workload by itself; knows no server.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from benchmarks.ab.workloads.base import Texts, Vocabulary

Question = TypeVar("Question")

MTBENCH_FILE = "mtbench_question.jsonl"
HOTPOT_FILE = "hotpot_dev_200.json"
"""Two workloads read it."""


def has_file(texts: Texts, name: str) -> bool:
    """Whether there is a folder of real inputs with this file, for files that it may lack."""
    return texts.data is not None and (texts.data / name).is_file()


def read_questions(
    texts: Texts, name: str, read: Callable[[dict[str, Any]], Question]
) -> list[Question]:
    """What `read` makes of each entry: of a list if the file is ``.json``, of a line if ``.jsonl``.

    `read` raises KeyError, TypeError or ValueError for what it cannot use. Raises ValueError, which
    names the entry, if there is such a one, or if there are none. There has to be a `texts.data`.
    """
    content = texts.file(name) or ""
    try:
        entries = content.splitlines() if name.endswith(".jsonl") else json.loads(content)
        if not isinstance(entries, list) or not entries:
            raise ValueError("it is no list of questions")
    except ValueError as error:
        raise ValueError(f"--data: cannot read {name}: {error}") from error
    questions = []
    for number, entry in enumerate(entries, start=1):
        try:
            questions.append(read(json.loads(entry) if isinstance(entry, str) else entry))
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"--data: cannot use entry {number} of {name}: {error!r}") from error
    return questions


def examples_that_fit(vocabulary: Vocabulary, examples: Sequence[str], max_tokens: int) -> str:
    """The examples from the first on, as many as have at most so many tokens together."""
    joined = ""
    for example in examples:
        if vocabulary.num_tokens(joined + example) > max_tokens:
            break
        joined += example
    return joined


def mtbench(texts: Texts) -> list[list[str]] | None:
    """The turns of each of MT-bench's questions; None without data. Raises ValueError for another
    format."""
    return None if texts.data is None else read_questions(texts, MTBENCH_FILE, _turns)


def _turns(entry: dict[str, Any]) -> list[str]:
    turns = entry["turns"]
    if not isinstance(turns, list) or not turns or not all(isinstance(one, str) for one in turns):
        raise ValueError("it is to have a list of turns")
    return turns
