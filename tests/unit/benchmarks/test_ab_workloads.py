"""The workloads of `benchmarks.ab`: what is asked, of what size, and what is right."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("tokenizers")


from benchmarks.ab.workloads import (
    WORKLOADS,
    gsm8k,
    hellaswag,
    mmlu,
    questions,
    react,
    tree_of_thought,
)
from benchmarks.ab.workloads.base import Texts, Vocabulary
from benchmarks.schemas import FILE as SCHEMAS_FILE

MMLU = {"subject": "law", "question": "?", "choices": [*"wxyz"], "answer": 0}
HELLASWAG = {"ctx": "He", "endings": [*"wxyz"], "label": 0}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of files in the real ones' formats, some with texts too long for any prompt."""
    folder = tmp_path_factory.mktemp("data")

    def lines(name: str, entries: list[dict[str, Any]]) -> None:
        (folder / name).write_text("".join(json.dumps(one) + "\n" for one in entries))

    steps = "\n".join(
        f"Question: Who was it {number}?\nThought 1: I search {'it ' * 60}\nAction 1: Search[it]\n"
        f"Observation 1: It was number {number}.{' It was' * 200}"
        for number in range(6)
    )
    (folder / react.PROMPTS_FILE).write_text(json.dumps({react.EXAMPLES_KEY: steps}))
    asked = [{"question": f"Who is {name}?", "answer": "Ann"} for name in ("A", "B", "C" * 900)]
    (folder / questions.HOTPOT_FILE).write_text(json.dumps(asked))
    (folder / tree_of_thought.PUZZLES_FILE).write_text("Rank,Puzzles\n1,1 1 4 6\n2,1 1 11 11\n")
    turns = [["Write a post.", "Rewrite it."], ["Tell me all of it. " * 400, "Again?"]]
    lines(questions.MTBENCH_FILE, [{"turns": one} for one in turns])
    lines(mmlu.FILE, [{**MMLU, "question": f"What comes after {n}?"} for n in range(9)])
    lines(hellaswag.FILE, [{**HELLASWAG, "ctx": f"A man puts {n} pans."} for n in range(30)])
    pens = [{"question": f"{n} pens?", "answer": f"{n} pens.\n#### {n}"} for n in range(1, 9)]
    lines(gsm8k.EXAMPLES_FILE, pens)
    lines(gsm8k.FILE, pens)
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    hard = ({"not": {"type": "string"}}, {"description": "long " * 400})
    with gzip.open(folder / SCHEMAS_FILE, "wt") as file:
        for one in (schema, *hard):
            file.write(json.dumps({"name": "one", "schema": one, "tests": []}) + "\n")
    return folder


@pytest.mark.parametrize("name", WORKLOADS)
def test_a_workload_has_as_many_items_as_asked_for_and_the_same_from_the_same_seed(
    name: str, vocabulary: Vocabulary
) -> None:
    workload = WORKLOADS[name]
    made = workload.items(Texts(vocabulary, 0), 6)
    assert len(made) == 6
    assert (
        made == workload.items(Texts(vocabulary, 0), 6) != workload.items(Texts(vocabulary, 1), 6)
    )
    assert workload.name == name and workload.quick_requests < workload.num_requests
    assert {*workload.program.arg_names} == {*made[0]}


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("react", "Who is A?"),
        ("rag", "Who is A?"),
        ("tree_of_thought", "1 1 11 11"),
        ("skeleton_of_thought", "Write a post."),
        ("chat_short", "Write a post."),
        ("mmlu", "What comes after"),
        ("hellaswag", "A man puts"),
        ("few_shot_gsm8k", "pens?"),
        ("json_schema", '"a": {"type": "integer"}'),
    ],
)
def test_the_data_are_what_is_asked(
    name: str, words: str, vocabulary: Vocabulary, data: Path
) -> None:
    items = WORKLOADS[name].items
    assert words in str(items(Texts(vocabulary, 0, data), 3))
    assert words not in str(items(Texts(vocabulary, 0), 3))
