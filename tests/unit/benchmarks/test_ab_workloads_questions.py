"""The workloads of `benchmarks.ab` that ask questions: sizes, what prompts share, data, scores."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("tokenizers")

import sgl_vllm as sgl
from benchmarks.ab.workloads import (
    WORKLOADS,
    few_shot_gsm8k,
    gsm8k,
    hellaswag,
    mmlu,
    mmlu_best,
    multi_chain,
    questions,
    rag,
)
from benchmarks.ab.workloads.base import MAX_MODEL_LEN, Item, Texts, Vocabulary
from sgl_vllm.lang.backends.base import (
    Backend,
    GenAnswer,
    Generated,
    GenRequest,
    Prompt,
    ScoreAnswer,
    TextPrompt,
    Usage,
)
from sgl_vllm.protocol.scoring import ChoiceTokens

NAMES = ("mmlu", "mmlu_best", "hellaswag", "few_shot_gsm8k", "multi_chain", "rag")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with small files in the formats of the real ones."""
    folder = tmp_path_factory.mktemp("data")
    write_lines(
        folder / mmlu.FILE,
        [
            {
                "subject": subject,
                "question": f"In {subject}, what comes after {number}?",
                "choices": ["nothing", str(number + 1), "a hare", "the sea"],
                "answer": 1,
            }
            for number in range(9)
            for subject in ("astronomy", "law")
        ],
    )
    write_lines(
        folder / hellaswag.FILE,
        [
            {
                "ctx": f"A man puts {number} pans on a table. He",
                "endings": ["cooks.", "sings.", "leaves.", f"takes {number} more."],
                "label": str(number % 4),
            }
            for number in range(30)
        ],
    )
    for name, number in ((gsm8k.EXAMPLES_FILE, 8), (gsm8k.FILE, 12)):
        write_lines(
            folder / name,
            [
                {
                    "question": f"Ann has {pens * 1000} pens and buys as many again. How many now?",
                    "answer": f"She has 2 * {pens * 1000} pens.\n#### {pens * 2},000",
                }
                for pens in range(1, number + 1)
            ],
        )
    hotpot = [
        {"question": f"Who wrote book {number}?", "answer": "Ann " * number, "type": "bridge"}
        for number in range(1, 80)
    ]
    (folder / questions.HOTPOT_FILE).write_text(json.dumps(hotpot))
    return folder


def write_lines(file: Path, entries: Sequence[Mapping[str, Any]]) -> None:
    file.write_text("".join(json.dumps(entry) + "\n" for entry in entries))


class Noting(Backend):
    """Answers at once, and notes the prompts and what may be generated after them.

    A generation is its first allowed letter; of choices the last one is the likeliest.
    """

    name = "a backend for tests"

    def __init__(self) -> None:
        self.asked: list[tuple[str, int]] = []

    async def generate(self, request: GenRequest) -> GenAnswer:
        assert isinstance(request.prompt, TextPrompt)
        assert request.sampling.max_new_tokens is not None
        self.asked.append((request.prompt.text, request.sampling.max_new_tokens))
        text = " 17" if request.regex is None else request.regex.strip("[]")[-1]
        return GenAnswer((Generated(text, "length"),), Usage())

    async def score(
        self, prompt: Prompt, choices: tuple[str, ...], *, unconditional: bool, warm: bool
    ) -> ScoreAnswer:
        assert isinstance(prompt, TextPrompt)
        self.asked += [(prompt.text + choice, 1) for choice in choices]
        scored = [ChoiceTokens((number,), (float(number),)) for number in range(len(choices))]
        return ScoreAnswer(tuple(scored), Usage())


def run(program: sgl.Program, item: Item) -> tuple[sgl.ProgramState, list[tuple[str, int]]]:
    backend = Noting()
    state = program.run(**item, backend=backend, temperature=0)
    state.sync()
    return state, backend.asked


def items_of(name: str, vocabulary: Vocabulary, number: int, data: Path | None) -> list[Item]:
    return WORKLOADS[name].items(Texts(vocabulary, 0, data), number)


def state_with(name: str, value: str) -> sgl.ProgramState:
    @sgl.function
    def program(s: sgl.ProgramState) -> None:
        s.set_var(name, value)

    return program.run(backend=Noting())


# -- sizes


@pytest.mark.parametrize("with_data", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_every_prompt_with_its_answer_fits_the_model(
    name: str, with_data: bool, vocabulary: Vocabulary, data: Path
) -> None:
    workload = WORKLOADS[name]
    for item in items_of(name, vocabulary, 12, data if with_data else None):
        for program in filter(None, (workload.program, workload.stock_program)):
            _, asked = run(program, item)
            assert asked
            for prompt, num_tokens in asked:
                assert vocabulary.num_tokens(prompt) + num_tokens < MAX_MODEL_LEN


@pytest.mark.parametrize("name", NAMES)
def test_the_longest_that_can_be_asked_fits_the_model(name: str) -> None:
    markup = 64
    longest = {
        "mmlu": mmlu.MAX_PREFIX_TOKENS + mmlu.MAX_QUESTION_TOKENS,
        "mmlu_best": mmlu.MAX_PREFIX_TOKENS + mmlu.MAX_QUESTION_TOKENS,
        "hellaswag": hellaswag.MAX_PREFIX_TOKENS + hellaswag.MAX_QUESTION_TOKENS,
        "few_shot_gsm8k": few_shot_gsm8k.MAX_PREFIX_TOKENS
        + gsm8k.MAX_QUESTION_TOKENS
        + gsm8k.MAX_ANSWER_TOKENS,
        "multi_chain": gsm8k.MAX_QUESTION_TOKENS
        + len(multi_chain.LEADS) * (gsm8k.MAX_ANSWER_TOKENS + markup)
        + multi_chain.ANSWER_TOKENS,
        "rag": rag.DOCUMENTS_PER_PROMPT * (rag.DOCUMENT_TOKENS[1] + markup)
        + rag.MAX_QUESTION_TOKENS
        + rag.MAX_ANSWER_TOKENS,
    }
    assert longest[name] + markup <= MAX_MODEL_LEN


def test_made_up_prefixes_of_mmlu_are_of_several_sizes_up_to_1536_tokens(
    vocabulary: Vocabulary,
) -> None:
    made = items_of("mmlu", vocabulary, 40, None)
    sizes = [vocabulary.num_tokens(one) for one in {item["examples"] for item in made}]
    assert len(sizes) == len(mmlu.SUBJECTS_TOKENS)
    assert 256 < min(sizes) < 640 and 1000 < max(sizes) <= mmlu.MAX_PREFIX_TOKENS == 1536
    for item in made:
        assert item["examples"].count("Answer:") == mmlu.NUM_EXAMPLES


def test_hellaswag_shows_twenty_examples_of_its_real_size(vocabulary: Vocabulary) -> None:
    made = items_of("hellaswag", vocabulary, 30, None)
    (examples,) = {item["examples"] for item in made}
    assert examples.count("\n\n") == 20
    assert 20 * 55 <= vocabulary.num_tokens(examples) <= 20 * 95
    for item in made:
        assert 40 <= vocabulary.num_tokens(item["context"]) <= 60
        for ending in item["endings"]:
            assert 15 <= vocabulary.num_tokens(ending) <= 30


@pytest.mark.parametrize("with_data", [False, True])
def test_answers_are_as_long_as_the_references_up_to_256_tokens(
    with_data: bool, vocabulary: Vocabulary, data: Path
) -> None:
    folder = data if with_data else None
    made = items_of("few_shot_gsm8k", vocabulary, 40, folder)
    problems = gsm8k.problems(Texts(vocabulary, 0, folder), 40)
    sizes = {item["num_tokens"] for item in made}
    assert len(sizes) > 1 and max(sizes) <= 256
    if with_data:
        by_question = {one.asked(): vocabulary.num_tokens(" " + one.answer) for one in problems}
        assert all(by_question[item["question"]] == item["num_tokens"] for item in made)
    long = gsm8k.Problem("?", "word " * 500 + "#### 1")
    assert long.num_answer_tokens(vocabulary) == 256


def test_chains_of_one_problem_differ_in_length_and_are_at_most_256_tokens(
    vocabulary: Vocabulary,
) -> None:
    for item in items_of("multi_chain", vocabulary, 30, None):
        assert len(item["chains_tokens"]) == 5
        assert len({*item["chains_tokens"]}) > 1
        assert 1 <= min(item["chains_tokens"]) <= max(item["chains_tokens"]) <= 256


def test_answers_of_rag_are_at_most_64_tokens_and_with_data_as_long_as_the_references(
    vocabulary: Vocabulary, data: Path
) -> None:
    made = [item["num_tokens"] for item in items_of("rag", vocabulary, 60, None)]
    assert len(set(made)) > 10 and max(made) <= 64
    real = items_of("rag", vocabulary, 79, data)
    size = {item["question"]: item["num_tokens"] for item in real}
    assert size["Who wrote book 1?"] == vocabulary.num_tokens(" Ann ")
    assert size["Who wrote book 79?"] == 64


# -- what prompts share


@pytest.mark.parametrize("with_data", [False, True])
def test_questions_of_an_mmlu_subject_share_its_examples_and_no_others(
    with_data: bool, vocabulary: Vocabulary, data: Path
) -> None:
    made = items_of("mmlu", vocabulary, 8, data if with_data else None)
    num_subjects = 2 if with_data else len(mmlu.SUBJECTS_TOKENS)
    uses = Counter(item["examples"] for item in made)
    assert [*uses.values()] == [8 // num_subjects] * num_subjects
    assert all(one["examples"] != other["examples"] for one, other in pairwise(made))
    assert len({item["question"] for item in made}) == 8
    assert not any(item["question"] in item["examples"] for item in made)


def test_mmlu_leaves_out_examples_that_do_not_fit(vocabulary: Vocabulary, tmp_path: Path) -> None:
    entry = {"subject": "law", "question": "word " * 600, "choices": [*"wxyz"], "answer": 0}
    write_lines(tmp_path / mmlu.FILE, [entry] * 6)
    (item,) = items_of("mmlu", vocabulary, 1, tmp_path)
    assert item["examples"].count("Answer:") == 2
    assert vocabulary.num_tokens(item["examples"]) <= mmlu.MAX_PREFIX_TOKENS


@pytest.mark.parametrize("name", ["hellaswag", "few_shot_gsm8k"])
@pytest.mark.parametrize("with_data", [False, True])
def test_all_questions_come_after_the_same_examples(
    name: str, with_data: bool, vocabulary: Vocabulary, data: Path
) -> None:
    made = items_of(name, vocabulary, 10, data if with_data else None)
    (examples,) = {item["examples"] for item in made}
    key = "context" if name == "hellaswag" else "question"
    assert len({item[key] for item in made}) == 10
    for item in made:
        _, asked = run(WORKLOADS[name].program, item)
        assert all(prompt.startswith(examples + item[key]) for prompt, _ in asked)


def test_few_shot_gsm8k_shows_five_worked_answers(vocabulary: Vocabulary, data: Path) -> None:
    for folder in (None, data):
        (item,) = items_of("few_shot_gsm8k", vocabulary, 1, folder)
        assert item["examples"].count("####") == 5


def test_five_chains_go_their_own_ways_from_one_question_and_are_all_read(
    vocabulary: Vocabulary,
) -> None:
    (item,) = items_of("multi_chain", vocabulary, 1, None)
    state, asked = run(multi_chain.answer, item)
    *chains, (last, num_tokens) = asked
    assert sorted(prompt for prompt, _ in chains) == sorted(
        item["question"] + lead for lead in multi_chain.LEADS
    )
    assert sorted(size for _, size in chains) == sorted(item["chains_tokens"])
    assert len(set(multi_chain.LEADS)) == 5
    assert num_tokens == 16
    assert last.startswith(f"{item['question']}{multi_chain.LEADS[0]} 17")
    assert last.count(" 17") >= 5 and all(lead in last for lead in multi_chain.LEADS)
    assert state["answer"] == " 17"


@pytest.mark.parametrize("with_data", [False, True])
def test_documents_come_out_of_one_corpus_in_one_order_and_some_much_more_often(
    with_data: bool, vocabulary: Vocabulary, data: Path
) -> None:
    made = items_of("rag", vocabulary, 200, data if with_data else None)
    uses = Counter(document for item in made for document in item["documents"])
    assert len(uses) <= rag.NUM_DOCUMENTS
    assert uses.most_common(1)[0][1] > 5 * min(uses.values())
    after: dict[str, set[str]] = {}
    for item in made:
        first, second, third = item["documents"]
        after.setdefault(first, set()).update((second, third))
        after.setdefault(second, set()).add(third)
    assert not any(one in after.get(other, ()) for one in after for other in after[one])
    assert all(200 <= vocabulary.num_tokens(document) <= 400 for document in uses)
    beginnings = Counter(item["documents"][0] for item in made)
    assert beginnings.most_common(1)[0][1] > 60


# -- answers


def test_both_ways_to_ask_mmlu_end_in_the_same_text(vocabulary: Vocabulary) -> None:
    workload = mmlu_best.WORKLOAD
    assert workload.stock_program is not None
    (item,) = workload.items(Texts(vocabulary, 0), 1)
    by_select, four = run(workload.program, item)
    by_one_token, one = run(workload.stock_program, item)
    assert by_select.text() == by_one_token.text() == item["examples"] + item["question"] + "D"
    assert (len(four), len(one)) == (4, 1)
    assert one[0][1] == 1


def test_a_label_of_mmlu_is_one_token_and_no_part_of_another(vocabulary: Vocabulary) -> None:
    for item in items_of("mmlu", vocabulary, 4, None):
        prompt = item["examples"] + item["question"]
        for label in mmlu.LABELS:
            assert vocabulary.num_tokens(prompt + label) == vocabulary.num_tokens(prompt) + 1


@pytest.mark.parametrize("name", ["mmlu", "mmlu_best"])
def test_the_score_of_mmlu_is_whether_the_label_is_right(name: str, vocabulary: Vocabulary) -> None:
    score = WORKLOADS[name].score
    assert score is not None
    made = items_of(name, vocabulary, 40, None)
    assert {item["right"] for item in made} == {*"ABCD"}
    for label in mmlu.LABELS:
        state = state_with("label", label)
        assert [score(item, state) for item in made] == [item["right"] == label for item in made]


def test_the_score_of_hellaswag_is_whether_the_ending_is_right(vocabulary: Vocabulary) -> None:
    for item in items_of("hellaswag", vocabulary, 12, None):
        state, _ = run(hellaswag.ending, item)
        assert state["ending"] == item["endings"][-1]
        assert hellaswag.score(item, state) == (item["right"] == item["endings"][-1])
        assert item["right"] in item["endings"]


@pytest.mark.parametrize("name", ["few_shot_gsm8k", "multi_chain"])
def test_the_score_of_a_problem_is_whether_the_last_number_is_right(name: str) -> None:
    score = WORKLOADS[name].score
    assert score is not None
    item = {"number": 1400.0}
    for answer, value in (
        (" 7 * 200 = 1,400", 1),
        ("\n#### 1400", 1),
        (" 1400.00 euros.", 1),
        (" 1400, or 1399", 0),
        (" many", 0),
    ):
        assert score(item, state_with("answer", answer)) == value


def test_the_number_of_a_problem_is_what_stands_after_the_marks() -> None:
    assert gsm8k.Problem("?", "7 or 8\n#### -1,234.5").number == -1234.5
    with pytest.raises(ValueError, match="####"):
        _ = gsm8k.Problem("?", "It is 7.").number
    assert gsm8k.last_number("3, 4 and 5.") == 5
    assert gsm8k.last_number("none") is None


# -- data


def test_real_questions_are_asked_in_their_own_words(vocabulary: Vocabulary, data: Path) -> None:
    (item,) = items_of("mmlu", vocabulary, 1, data)
    assert "In astronomy, what comes after" in item["question"]
    assert "\nB. 6\n" in item["question"] or "\nC. a hare\n" in item["question"]
    assert item["right"] == "B"
    (item,) = items_of("hellaswag", vocabulary, 1, data)
    assert item["endings"][0] == " cooks." and item["context"].endswith("He")
    (item,) = items_of("few_shot_gsm8k", vocabulary, 1, data)
    assert item["examples"].startswith("Question: Ann has 1000 pens")
    assert item["number"] in range(2000, 26000, 2000)


@pytest.mark.parametrize("name", ["mmlu", "mmlu_best", "hellaswag"])
def test_a_folder_without_a_file_that_it_need_not_have_is_as_none(
    name: str, vocabulary: Vocabulary, tmp_path: Path
) -> None:
    assert items_of(name, vocabulary, 8, tmp_path) == items_of(name, vocabulary, 8, None)


@pytest.mark.parametrize("name", ["few_shot_gsm8k", "multi_chain", "rag"])
def test_a_folder_without_a_file_that_it_needs_is_refused(
    name: str, vocabulary: Vocabulary, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match="--data: cannot read"):
        items_of(name, vocabulary, 8, tmp_path)


MMLU = {"subject": "law", "question": "?", "choices": [*"wxyz"], "answer": 0}
HELLASWAG = {"ctx": "He", "endings": [*"wxyz"], "label": 0}


@pytest.mark.parametrize(
    ("name", "file", "content", "said"),
    [
        ("mmlu", mmlu.FILE, json.dumps(MMLU | {"answer": 4}), "entry 1 of mmlu.jsonl"),
        ("mmlu", mmlu.FILE, json.dumps(MMLU | {"choices": ["w"]}), "four choices"),
        ("mmlu", mmlu.FILE, json.dumps(MMLU) + "\n{}", "entry 2 of mmlu.jsonl.*choices"),
        ("mmlu", mmlu.FILE, json.dumps(MMLU), "more than 5 questions"),
        ("mmlu", mmlu.FILE, "{", "entry 1 of mmlu.jsonl"),
        ("mmlu", mmlu.FILE, "", "no list of questions"),
        ("hellaswag", hellaswag.FILE, json.dumps(HELLASWAG | {"label": "7"}), "0 to 3"),
        (
            "hellaswag",
            hellaswag.FILE,
            json.dumps(HELLASWAG | {"endings": [*"wwyz"]}),
            "four different endings",
        ),
        ("hellaswag", hellaswag.FILE, json.dumps(HELLASWAG), "no question after its 20 examples"),
        ("multi_chain", gsm8k.FILE, '{"question": "?", "answer": "7"}', "entry 1.*####"),
        ("few_shot_gsm8k", gsm8k.EXAMPLES_FILE, '{"question": "?"}', "entry 1.*answer"),
        ("rag", questions.HOTPOT_FILE, "{}", "no list of questions"),
        (
            "rag",
            questions.HOTPOT_FILE,
            '[{"question": "?"}]',
            "entry 1 of hotpot_dev_200.json.*answer",
        ),
        ("rag", questions.HOTPOT_FILE, "[", "cannot read hotpot_dev_200.json"),
    ],
)
def test_data_that_cannot_be_used_is_refused_with_its_place(
    name: str, file: str, content: str, said: str, vocabulary: Vocabulary, tmp_path: Path
) -> None:
    (tmp_path / file).write_text(content)
    with pytest.raises(ValueError, match=f"--data: .*{said}"):
        items_of(name, vocabulary, 4, tmp_path)


def test_examples_are_taken_from_the_first_on_while_they_fit(vocabulary: Vocabulary) -> None:
    examples = [" one two", " three", " four"]
    sizes = [vocabulary.num_tokens("".join(examples[:number])) for number in range(4)]
    for number, size in enumerate(sizes):
        assert questions.examples_that_fit(vocabulary, examples, size) == "".join(examples[:number])
