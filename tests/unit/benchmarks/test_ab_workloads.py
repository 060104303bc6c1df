"""The workloads of `benchmarks.ab`: what is asked, of what size, and what is right."""

from __future__ import annotations

import gzip
import json
import math
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("tokenizers")


import sgl_vllm as sgl
from benchmarks.ab.workloads import (
    WORKLOADS,
    agent_sessions,
    gsm8k,
    hellaswag,
    mmlu,
    questions,
    react,
    tree_of_thought,
)
from benchmarks.ab.workloads.base import MAX_MODEL_LEN, Item, Texts, Vocabulary
from benchmarks.schemas import FILE as SCHEMAS_FILE
from sgl_vllm.lang.backends.requests import GenAnswer, Generated, GenRequest
from sgl_vllm.lang.usage import Usage
from tests.unit.lang.scripted import ScriptedBackend, text_of

MMLU = {"subject": "law", "question": "?", "choices": [*"wxyz"], "answer": 0}
HELLASWAG = {"ctx": "He", "endings": [*"wxyz"], "label": 0}
WITH_OTHER_WAYS = ("image_qa", "video_qa", "tool_calls", "json_schema")
"""Of other kinds of requests, or with texts of their own."""


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


class Longest(Texts):
    """Every number that is drawn is the highest."""

    def number(self, low: int, high: int) -> int:
        return high


class Writer(ScriptedBackend):
    """Writes as many words as it is asked for, and some more, as a random model's text is more
    tokens when it is read."""

    def __init__(self, vocabulary: Vocabulary, growth: float = 1.0) -> None:
        super().__init__()
        self._word, self._growth = str(vocabulary.words[0]), growth

    async def generate(self, request: GenRequest) -> GenAnswer:
        self.asked.append(request)
        num_words = math.ceil((request.sampling.max_new_tokens or 0) * self._growth)
        return GenAnswer((Generated(self._word * num_words, "length"),), Usage(calls=1))

    @property
    def lengths(self) -> list[int]:
        return [one.sampling.max_new_tokens or 0 for one in self.requests]


def run(name: str, item: Item, backend: Writer) -> sgl.ProgramState:
    return WORKLOADS[name].program.run(**item, temperature=0, backend=backend)


# -- all of them


@pytest.mark.parametrize("name", WORKLOADS)
def test_a_workload_has_as_many_items_as_asked_for_and_the_same_from_the_same_seed(
    name: str, vocabulary: Vocabulary
) -> None:
    workload = WORKLOADS[name]
    made = workload.items(Texts(vocabulary, 0), 20)
    assert len(made) == 20
    assert (
        made == workload.items(Texts(vocabulary, 0), 20) != workload.items(Texts(vocabulary, 1), 20)
    )
    assert workload.name == name and workload.quick_requests < workload.num_requests
    assert {*workload.program.arg_names} == {*made[0]}


@pytest.mark.parametrize("name", [name for name in WORKLOADS if name not in WITH_OTHER_WAYS])
@pytest.mark.parametrize("with_data", [False, True])
def test_the_longest_program_that_can_be_drawn_fits(
    name: str, with_data: bool, vocabulary: Vocabulary, data: Path
) -> None:
    workload = WORKLOADS[name]
    drawn = Texts if name.startswith("chat") or name == "agent_sessions" else Longest
    for item in workload.items(drawn(vocabulary, 0, data if with_data else None), 4):
        if name == "agent_sessions":
            item = {"contexts": without_pauses(item["contexts"])}
        backend = Writer(vocabulary, growth=1.3)
        run(name, item, backend)
        scored = [one[0] for one in backend.asked if isinstance(one, tuple)]
        of_turns = 12 * 8  # of the chat template
        for prompt, num_tokens in [
            *((one.prompt, one.sampling.max_new_tokens or 0) for one in backend.requests),
            *((prompt, 32) for prompt in scored),
        ]:
            text = text_of(prompt)
            assert vocabulary.num_tokens(text) + num_tokens <= MAX_MODEL_LEN - of_turns


def without_pauses(contexts: Any) -> Any:
    return tuple(
        tuple(agent_sessions.Step(s.number, s.after, 0.0, s.text, s.num_tokens) for s in context)
        for context in contexts
    )


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
