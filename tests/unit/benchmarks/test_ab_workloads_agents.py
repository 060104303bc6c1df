"""Workloads of agents, thoughts, judges, chats and API speculation: calls, lengths, sharing."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path

import pytest

pytest.importorskip("tokenizers")

import sgl_vllm as sgl
from benchmarks.ab.workloads import (
    WORKLOADS,
    Workload,
    api_speculation,
    chat,
    generative_agents,
    llm_judge,
    react,
    skeleton_of_thought,
    tree_of_thought,
)
from benchmarks.ab.workloads.base import MAX_MODEL_LEN, Item, Texts, Vocabulary
from benchmarks.ab.workloads.mtbench import FILE as QUESTIONS_FILE
from benchmarks.ab.workloads.questions import HOTPOT_FILE
from sgl_vllm.lang.backends.base import ChatPrompt, GenAnswer, Generated, GenRequest, Usage
from tests.unit.lang.scripted import ScriptedBackend, text_of

NAMES = (
    "react",
    "generative_agents",
    "tree_of_thought",
    "skeleton_of_thought",
    "llm_judge",
    "chat_short",
    "chat_long",
    "api_speculation",
)
WITH_DATA = ("react", "tree_of_thought", "skeleton_of_thought", "chat_short", "chat_long")
# What a random model wrote is up to a fifth more tokens when it is read.
GROWTH = 1.3
TOKENS_OF_A_TURN = 12  # of the chat template


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """A folder of files in the real ones' formats, with texts too long for any prompt."""
    examples = "\n".join(
        f"Question: Who was it {number}?\nThought 1: I need to search {'it ' * 60}\n"
        f"Action 1: Search[it]\nObservation 1: It was number {number}.{' It was' * 200}\n"
        f"Thought 2: So it was.\nAction 2: Finish[it]"
        for number in range(6)
    )
    prompts = {"webthink_simple6": "\n" + examples + "\n", "another": "text"}
    (tmp_path / react.PROMPTS_FILE).write_text(json.dumps(prompts))
    questions = [{"question": f"Who is {name}?", "answer": "yes"} for name in ("A", "B", "C" * 900)]
    (tmp_path / HOTPOT_FILE).write_text(json.dumps(questions))
    (tmp_path / tree_of_thought.PUZZLES_FILE).write_text(
        "Rank,Puzzles,AMT (s)\n1,1 1 4 6,4.4\n2,1 1 11 11,4.41\n3,12 12 13 13,4.5\n"
    )
    turns = [["Write a post.", "Rewrite it."], ["Tell me all of it. " * 400, "Again?"]]
    (tmp_path / QUESTIONS_FILE).write_text(
        "\n".join(json.dumps({"question_id": 81, "turns": one}) for one in turns) + "\n"
    )
    return tmp_path


class LongestTexts(Texts):
    """Every number that is drawn is the highest."""

    def number(self, low: int, high: int) -> int:
        return high


class Writer(ScriptedBackend):
    """Writes random words, as many as are asked for and `growth` times more of them."""

    def __init__(self, vocabulary: Vocabulary, growth: float = 1.0) -> None:
        super().__init__()
        self._texts = Texts(vocabulary, seed=7)
        self._growth = growth

    async def generate(self, request: GenRequest) -> GenAnswer:
        self.asked.append(request)
        num_tokens = request.sampling.max_new_tokens or 0
        text = self._texts.text(math.ceil(num_tokens * self._growth))
        return GenAnswer((Generated(text, "length"),), Usage(calls=1))

    @property
    def lengths(self) -> list[int]:
        return [one.sampling.max_new_tokens or 0 for one in self.requests]


def run(program: sgl.Program, item: Item, backend: Writer) -> str:
    return program.run(**item, temperature=0, backend=backend).text()


def longest_tokens(backend: Writer, vocabulary: Vocabulary) -> int:
    """Of all requests, prompt and output."""
    return max(
        vocabulary.num_tokens(text_of(one.prompt))
        + (TOKENS_OF_A_TURN * len(one.prompt.messages) if isinstance(one.prompt, ChatPrompt) else 0)
        + (one.sampling.max_new_tokens or 0)
        for one in backend.requests
    )


# -- all of them


@pytest.mark.parametrize("name", [name for name in NAMES if not name.startswith("chat")])
@pytest.mark.parametrize("with_data", [False, True])
def test_the_longest_program_that_can_be_drawn_fits(
    name: str, with_data: bool, vocabulary: Vocabulary, data: Path
) -> None:
    workload = WORKLOADS[name]
    (item,) = workload.items(LongestTexts(vocabulary, 0, data if with_data else None), 1)
    backend = Writer(vocabulary, GROWTH)
    run(workload.program, item, backend)
    assert longest_tokens(backend, vocabulary) <= MAX_MODEL_LEN


@pytest.mark.parametrize("name", ["chat_short", "chat_long"])
@pytest.mark.parametrize("with_data", [False, True])
def test_conversations_fit(name: str, with_data: bool, vocabulary: Vocabulary, data: Path) -> None:
    workload = WORKLOADS[name]
    items = workload.items(Texts(vocabulary, 0, data if with_data else None), 20)
    for item in items:
        backend = Writer(vocabulary, GROWTH)
        run(workload.program, item, backend)
        assert longest_tokens(backend, vocabulary) <= MAX_MODEL_LEN


@pytest.mark.parametrize("name", NAMES)
def test_all_share_the_servers_of_usual_flags(name: str) -> None:
    assert WORKLOADS[name].server_args(16) == WORKLOADS["no_sharing"].server_args(16)


@pytest.mark.parametrize("name", [name for name in NAMES if name != "api_speculation"])
def test_a_generation_has_one_length_whatever_the_model_is(
    name: str, vocabulary: Vocabulary
) -> None:
    workload = WORKLOADS[name]
    backend = Writer(vocabulary)
    run(workload.program, workload.items(Texts(vocabulary, 0), 1)[0], backend)
    for request in backend.requests:
        assert request.sampling.min_new_tokens == request.sampling.max_new_tokens
        assert not request.sampling.stop


@pytest.mark.parametrize("name", WITH_DATA)
def test_the_data_are_what_is_asked(name: str, vocabulary: Vocabulary, data: Path) -> None:
    items = WORKLOADS[name].items
    real, made_up = items(Texts(vocabulary, 0, data), 3), items(Texts(vocabulary, 0), 3)
    words = {
        "react": "Who is A?",
        "tree_of_thought": "1 1 11 11",
        "skeleton_of_thought": "Write a post.",
        "chat_short": "Write a post.",
        "chat_long": "Write a post.",
    }[name]
    assert words in str(real)
    assert words not in str(made_up)


BROKEN: tuple[tuple[str, str, str], ...] = (
    ("react", react.PROMPTS_FILE, "{"),
    ("react", react.PROMPTS_FILE, '{"other": "text"}'),
    ("react", react.PROMPTS_FILE, '{"webthink_simple6": "no observation"}'),
    ("react", HOTPOT_FILE, '[{"answer": "yes"}]'),
    ("react", HOTPOT_FILE, "[]"),
    ("tree_of_thought", tree_of_thought.PUZZLES_FILE, "Rank,Numbers\n1,1 1 4 6\n"),
    ("tree_of_thought", tree_of_thought.PUZZLES_FILE, "Rank,Puzzles\n"),
    ("skeleton_of_thought", QUESTIONS_FILE, "no JSON\n"),
    ("chat_short", QUESTIONS_FILE, '{"turns": "one text"}\n'),
    ("chat_short", QUESTIONS_FILE, '{"turns": [1]}\n'),
    ("chat_long", QUESTIONS_FILE, ""),
)


@pytest.mark.parametrize(("name", "file", "content"), BROKEN)
def test_a_file_of_another_format_is_refused_by_its_name(
    name: str, file: str, content: str, vocabulary: Vocabulary, data: Path
) -> None:
    (data / file).write_text(content)
    with pytest.raises(ValueError, match=rf"--data: .*{file}"):
        WORKLOADS[name].items(Texts(vocabulary, 0, data), 2)


@pytest.mark.parametrize("name", WITH_DATA)
def test_a_file_that_is_not_there_is_named(
    name: str, vocabulary: Vocabulary, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match="--data: cannot read"):
        WORKLOADS[name].items(Texts(vocabulary, 0, tmp_path), 2)


# -- each of them


def check_each_continues_the_last(prompts: Sequence[str]) -> None:
    for before, after in pairwise(prompts):
        assert after.startswith(before) and len(after) > len(before)


def test_agents_of_react_take_several_steps_each_after_the_last(vocabulary: Vocabulary) -> None:
    items = react.items(Texts(vocabulary, 0), 24)
    assert {len(item["steps"]) for item in items} == {3, 4, 5, 6, 7}
    prefixes = {item["examples"] for item in items}
    assert len(prefixes) == 1
    assert 1024 < vocabulary.num_tokens(prefixes.pop()) <= react.MAX_PREFIX_TOKENS
    for item in items[:4]:
        backend = Writer(vocabulary)
        text = run(react.agent, item, backend)
        assert backend.lengths == [step.num_tokens for step in item["steps"]]
        assert max(backend.lengths) <= 200
        check_each_continues_the_last(backend.prompts)
        assert all(step.observation in text for step in item["steps"])


def test_the_examples_of_react_are_six_of_the_authors(vocabulary: Vocabulary, data: Path) -> None:
    item = react.items(Texts(vocabulary, 0, data), 1)[0]
    assert vocabulary.num_tokens(item["examples"]) <= react.MAX_PREFIX_TOKENS
    assert item["examples"].startswith("Question: Who was it 0?")
    assert item["steps"][0].observation.startswith(" It was number")
    made_up = react.items(Texts(vocabulary, 0), 1)[0]["examples"]
    assert made_up.count("Question:") == react.NUM_EXAMPLES


def test_generative_agents_ask_five_kinds_behind_shared_prefixes(vocabulary: Vocabulary) -> None:
    num_agents, num_kinds = generative_agents.NUM_AGENTS, len(generative_agents.KINDS)
    num_events = 3
    items = generative_agents.items(Texts(vocabulary, 0), num_events * num_agents * num_kinds)
    assert [item["num_tokens"] for item in items[:5]] == [2, 20, 6, 10, 5]
    assert len({item["event"] for item in items}) == num_events
    uses = Counter(item["shared"] for item in items)
    num_about_persona = sum(kind.begins_with_persona for kind in generative_agents.KINDS)
    assert sorted(uses.values()) == sorted(
        [num_events * num_about_persona] * num_agents
        + [num_events * num_agents] * (num_kinds - num_about_persona)
    )
    backend = Writer(vocabulary)
    run(generative_agents.call, items[1], backend)
    assert backend.lengths == [20]
    assert backend.prompts[0].startswith(items[1]["shared"])


def test_the_tree_of_thought_has_39_thoughts_each_behind_its_parent(
    vocabulary: Vocabulary,
) -> None:
    item = tree_of_thought.items(Texts(vocabulary, 0), 1)[0]
    backend = Writer(vocabulary)
    text = run(tree_of_thought.search, item, backend)
    assert Counter(backend.lengths) == Counter(item["lengths"])
    assert len(item["lengths"]) == 39 and 24 <= min(item["lengths"]) < max(item["lengths"]) <= 256

    def level(prompt: str) -> int:
        return sum(prompt.count(words) for words in tree_of_thought.LEAD_INS)

    by_level: dict[int, list[str]] = {1: [], 2: [], 3: []}
    for prompt in backend.prompts:
        by_level[level(prompt)].append(prompt)
    assert [len(by_level[number]) for number in (1, 2, 3)] == [3, 9, 27]
    for number in (2, 3):
        for prompt in by_level[number]:
            assert sum(prompt.startswith(parent) for parent in by_level[number - 1]) == 1
    assert len(set(backend.prompts)) == 39
    assert level(text) == 39  # all thoughts are joined


def test_puzzles_are_four_numbers(vocabulary: Vocabulary, data: Path) -> None:
    made_up = tree_of_thought.items(Texts(vocabulary, 0), 30)
    for item in made_up + tree_of_thought.items(Texts(vocabulary, 0, data), 3):
        numbers = [int(number) for number in item["puzzle"].split()]
        assert len(numbers) == 4 and 1 <= min(numbers) <= max(numbers) <= 13


def test_a_skeleton_is_five_tips_in_a_row_then_five_expansions_of_all(
    vocabulary: Vocabulary,
) -> None:
    item = skeleton_of_thought.items(Texts(vocabulary, 0), 1)[0]
    backend = Writer(vocabulary)
    text = run(skeleton_of_thought.answer, item, backend)
    assert tuple(backend.lengths[:5]) == item["tip_lengths"] and max(backend.lengths[:5]) <= 24
    assert sorted(backend.lengths[5:]) == sorted(item["expansion_lengths"])
    assert len(backend.lengths) == 10 and max(backend.lengths) <= 128
    check_each_continues_the_last(backend.prompts[:5])
    for prompt in backend.prompts[5:]:
        assert prompt.startswith(backend.prompts[4])
    assert all(f"\nTip {number} in detail:" in text for number in range(1, 6))


def test_a_judge_judges_six_criteria_of_one_essay_and_scores_after_all(
    vocabulary: Vocabulary,
) -> None:
    item = llm_judge.items(Texts(vocabulary, 0), 1)[0]
    backend = Writer(vocabulary)
    run(llm_judge.judge, item, backend)
    *judgements, score = backend.prompts
    assert sorted(backend.lengths[:-1]) == sorted(item["lengths"])
    assert len(judgements) == len(llm_judge.CRITERIA) == 6
    assert max(item["lengths"]) <= 256
    assert backend.lengths[-1] == 2
    shared = llm_judge.TASK + item["essay"]
    asked = [f"\nJudgement of its {criterion}:" for criterion in llm_judge.CRITERIA]
    assert sorted(judgements) == sorted(shared + words for words in asked)
    assert all(words in score for words in asked)


@pytest.mark.parametrize(
    ("workload", "replies", "num_requests"),
    [(chat.SHORT, (4, 8), 20), (chat.LONG, (256, 512), 20)],
    ids=lambda value: getattr(value, "name", None),
)
@pytest.mark.parametrize("with_data", [False, True])
def test_conversations_have_four_turns_of_the_lengths_stated(
    workload: Workload,
    replies: tuple[int, int],
    num_requests: int,
    with_data: bool,
    vocabulary: Vocabulary,
    data: Path,
) -> None:
    items = workload.items(Texts(vocabulary, 0, data if with_data else None), num_requests)
    assert len({str(item) for item in items}) == num_requests
    for item in items:
        turns = item["turns"]
        assert len(turns) == 4
        for turn in turns:
            # A text that is cut can have a token less, and one that is joined a token more.
            assert 255 <= vocabulary.num_tokens(turn.text) <= 513
            assert replies[0] <= turn.num_reply_tokens <= replies[1]
    backend = Writer(vocabulary)
    run(workload.program, items[0], backend)
    assert backend.lengths == [turn.num_reply_tokens for turn in items[0]["turns"]]
    roles = [
        [message.role for message in request.prompt.messages]
        for request in backend.requests
        if isinstance(request.prompt, ChatPrompt)
    ]
    assert roles[0] == ["user"]
    assert roles[3] == ["user", "assistant"] * 3 + ["user"]


def test_chat_short_is_the_whole_table_of_20_conversations() -> None:
    assert chat.SHORT.num_requests * chat.NUM_TURNS == 80


# -- API speculation


def card(fields: str) -> Callable[[str], str]:
    """A model that writes a card of these fields, from wherever it is in it."""
    beginning = fields[: fields.index("Ada")]
    return lambda prompt: fields[len(prompt) - prompt.rindex(beginning) :]


def test_one_call_answers_three_fields_where_the_model_goes_on_in_the_form(
    vocabulary: Vocabulary,
) -> None:
    form = '{"name": "Ada", "age": 36, "job": "writer"}\n\nHere is another person: none'
    (item,) = api_speculation.items(Texts(vocabulary, 0), 1)
    backend = ScriptedBackend(card(form))
    ahead = api_speculation.WORKLOAD.program.run(**item, temperature=0, backend=backend)
    assert (ahead["name"], ahead["age"], ahead["job"]) == ("Ada", " 36", "writer")
    assert len(backend.asked) == 1 and ahead.usage.saved_calls == 2
    assert ahead.text().endswith('{"name": "Ada", "age": 36, "job": "writer"}\n')


def test_a_model_of_another_form_is_asked_for_each_field(vocabulary: Vocabulary) -> None:
    (item,) = api_speculation.items(Texts(vocabulary, 0), 1)
    backend = Writer(vocabulary)
    stock_program = api_speculation.WORKLOAD.stock_program
    assert stock_program is not None
    assert len({*stock_program.arg_names}) == 1
    run(stock_program, item, backend)
    assert len(backend.requests) == 3
    assert [one.sampling.stop for one in backend.requests] == ['"', ",", '"']


def test_notes_differ_and_examples_are_the_same(vocabulary: Vocabulary) -> None:
    items = api_speculation.items(Texts(vocabulary, 0), 50)
    assert len({item["note"] for item in items}) == 50
    examples = api_speculation.EXAMPLES.strip().split("\n\n")
    for example in examples:
        assert json.loads(example.removeprefix(api_speculation.LEAD_IN)).keys() == {
            "name",
            "age",
            "job",
        }


def test_what_the_program_writes_ends_where_a_token_does(vocabulary: Vocabulary) -> None:
    """Or what is ahead could not answer: the prompt of a field would be other tokens."""
    (item,) = api_speculation.items(Texts(vocabulary, 0), 1)
    backend = ScriptedBackend(card('{"name": "Ada", "age": 36, "job": "writer"}\n\n'))
    text = api_speculation.speculating.run(**item, temperature=0, backend=backend).text()
    whole = vocabulary.num_tokens(text)
    for value in ("Ada", " 36", "writer"):
        at = text.rindex(value)
        assert vocabulary.num_tokens(text[:at]) + vocabulary.num_tokens(text[at:]) == whole
