"""The workloads of `benchmarks.ab`: what is asked, of what size, and what is right."""

from __future__ import annotations

import gzip
import json
import math
import re
from collections import Counter
from pathlib import Path
from re import _parser
from typing import Any

import pytest

pytest.importorskip("tokenizers")

from tokenizers import Tokenizer

import sgl_vllm as sgl
from benchmarks.ab.workloads import (
    WORKLOADS,
    agent_sessions,
    api_speculation,
    gsm8k,
    hellaswag,
    json_fields,
    json_regex,
    mmlu,
    questions,
    react,
    tool_calls,
    tree_of_thought,
)
from benchmarks.ab.workloads.base import MAX_MODEL_LEN, Item, Texts, Vocabulary
from benchmarks.models import DEMO_MODEL
from benchmarks.schemas import FILE as SCHEMAS_FILE
from benchmarks.schemas import is_plain
from sgl_vllm.lang.backends.requests import GenAnswer, Generated, GenRequest
from sgl_vllm.lang.usage import Usage
from tests.unit.lang.scripted import ScriptedBackend, text_of

ROOT = Path(__file__).parents[3]
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


# -- texts


def test_a_text_of_n_words_has_n_tokens_alone_and_joined(vocabulary: Vocabulary) -> None:
    tokenizer = Tokenizer.from_file(str(DEMO_MODEL / "tokenizer.json"))
    texts = Texts(vocabulary, seed=0)
    for num_tokens in (1, 7, 300):
        text, more = texts.text(num_tokens), texts.text(5)
        assert len(tokenizer.encode(text, add_special_tokens=False).ids) == num_tokens
        assert len(tokenizer.encode(text + more, add_special_tokens=False).ids) == num_tokens + 5


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


@pytest.mark.parametrize(
    ("name", "file", "content", "said"),
    [
        ("react", react.PROMPTS_FILE, '{"other": "text"}', react.PROMPTS_FILE),
        ("tree_of_thought", tree_of_thought.PUZZLES_FILE, "Rank,Numbers\n1,1\n", "no column"),
        ("skeleton_of_thought", questions.MTBENCH_FILE, "no JSON\n", questions.MTBENCH_FILE),
        ("chat_short", questions.MTBENCH_FILE, '{"turns": [1]}\n', questions.MTBENCH_FILE),
        ("mmlu", mmlu.FILE, json.dumps(MMLU | {"answer": 4}), "entry 1 of mmlu.jsonl"),
        ("mmlu", mmlu.FILE, json.dumps(MMLU), "more than 5 questions"),
        ("hellaswag", hellaswag.FILE, json.dumps(HELLASWAG | {"label": "7"}), "0 to 3"),
        ("multi_chain", gsm8k.FILE, '{"question": "?", "answer": "7"}', "entry 1.*####"),
        ("rag", questions.HOTPOT_FILE, "{}", "no list of questions"),
        ("rag", "another.json", "{}", "cannot read"),
    ],
)
def test_data_that_cannot_be_used_is_refused_with_its_place(
    name: str, file: str, content: str, said: str, vocabulary: Vocabulary, tmp_path: Path
) -> None:
    if name == "react":
        (tmp_path / questions.HOTPOT_FILE).write_text('[{"question": "?"}]')
    (tmp_path / file).write_text(content)
    with pytest.raises(ValueError, match=f"--data: .*{said}"):
        WORKLOADS[name].items(Texts(vocabulary, 0, tmp_path), 4)


# -- each of them


CHARACTER = """\
{"name": "Albus", "house": "Gryffindor", "blood status": "Half-blood", "occupation": "teacher", \
"wand": {"wood": "elm", "core": "phoenix feather", "length": 13.5}, "alive": false, \
"patronus": "otter", "age": 99, "pet": "bird"}"""


def test_json_regex_is_json_of_nine_keys_that_ends_whatever_is_decided() -> None:
    assert re.fullmatch(json_regex.CHARACTER, CHARACTER)
    assert len(json.loads(CHARACTER)) == 9
    most_characters = _parser.parse(json_regex.CHARACTER).getwidth()[1]
    assert most_characters < json_regex.MAX_TOKENS == 256


def test_json_fields_writes_json_of_five_values_that_end_within_their_tokens() -> None:
    values = ("Bern", "Suisse", "46.95", "134000", 'German", "Italian')
    text = ""
    for (before, _, max_tokens, form), value in zip(json_fields.FIELDS, values, strict=True):
        assert re.fullmatch(form, value)
        assert _parser.parse(form).getwidth()[1] < max_tokens
        text += before + value
    assert json.loads(text + json_fields.END)["languages"] == ["German", "Italian"]


def test_tool_calls_are_strict_by_name_and_by_choice_one_and_several(
    vocabulary: Vocabulary,
) -> None:
    fields = [tool_calls.request_fields(one) for one in tool_calls.items(Texts(vocabulary, 0), 30)]
    kinds = Counter(
        (one["tool_choice"] == "required", one["parallel_tool_calls"]) for one in fields
    )
    assert kinds == {(True, True): 10, (True, False): 10, (False, False): 10}
    for tool in tool_calls.TOOLS:
        schema = tool["function"]["parameters"]
        assert tool["function"]["strict"] and schema["required"] == [*schema["properties"]]
        assert is_plain(schema)


def test_the_tree_of_thought_has_39_thoughts_each_behind_its_parent(
    vocabulary: Vocabulary,
) -> None:
    item = tree_of_thought.items(Texts(vocabulary, 0), 1)[0]
    backend = Writer(vocabulary)
    run("tree_of_thought", item, backend)
    assert Counter(backend.lengths) == Counter(item["lengths"])
    assert len(item["lengths"]) == len({*backend.prompts}) == 39

    def level(prompt: str) -> int:
        return sum(prompt.count(words) for words in tree_of_thought.LEAD_INS)

    assert Counter(map(level, backend.prompts)) == {1: 3, 2: 9, 3: 27}


def test_steps_of_sessions_wait_for_the_answers_that_they_build_on(vocabulary: Vocabulary) -> None:
    step = agent_sessions.Step
    first = (step(0, (), 0.0, " ask", 1), step(1, (0,), 0.0, " tool", 2))
    contexts = ((*first, step(3, (1, 2), 0.0, " found", 1)), (step(2, (0,), 0.05, " task", 3),))
    backend = Writer(vocabulary)
    run("agent_sessions", {"contexts": contexts}, backend)
    word = str(vocabulary.words[0])
    assert backend.prompts[:3] == [" ask", f" ask{word} tool", " task"]
    assert backend.prompts[3] == f" ask{word} tool{word * 2} found"


def test_one_call_answers_three_fields_where_the_model_goes_on_in_the_form(
    vocabulary: Vocabulary,
) -> None:
    form = '{"name": "Ada", "age": 36, "job": "writer"}\n\nHere is another person: none'
    (item,) = api_speculation.items(Texts(vocabulary, 0), 1)
    backend = ScriptedBackend(lambda prompt: form[len(prompt) - prompt.rindex('{"name": "') :])
    ahead = api_speculation.speculating.run(**item, temperature=0, backend=backend)
    assert (ahead["name"], ahead["age"], ahead["job"]) == ("Ada", " 36", "writer")
    assert len(backend.asked) == 1 and ahead.usage.saved_calls == 2


# -- answers
