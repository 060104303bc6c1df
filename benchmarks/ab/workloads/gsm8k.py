"""Problems as in GSM8K: a question in words, a worked answer, a number. Two workloads ask them.

With `--data` they are the data set's own: ``gsm8k_train_head_20.jsonl``, of which the first are
shown as examples, and ``gsm8k_test_200.jsonl``, which is asked; a line each: ``{"question": str,
"answer": str}``, where the answer ends in ``#### NUMBER``. Otherwise they are made up in the data
set's lengths.

`few_shot_gsm8k` asks for a worked answer after five examples, which all prompts share. Each answer
is as long as the reference's in the model's tokens, at most 256, and does not end by itself: models
that were never trained for it would not end at all, and others would make the servers' work differ
where their texts do. `multi_chain` asks for five chains of thought side by side, each of which
begins with words of its own, as everything is greedy, and is from half to one and a half times as
long; then for an answer that reads them all.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import sgl_vllm as sgl
from benchmarks.ab.workloads.base import Item, Texts, Vocabulary, Workload
from benchmarks.ab.workloads.questions import examples_that_fit, read_questions

EXAMPLES_FILE = "gsm8k_train_head_20.jsonl"
FILE = "gsm8k_test_200.jsonl"
MAX_QUESTION_TOKENS = 512
MAX_ANSWER_TOKENS = 256

QUESTION_TOKENS = (30, 90)
WORK_TOKENS = (40, 200)
NUMBERS = (1, 999)

_NUMBER = re.compile(r"-?\d+(?:,\d{3})*(?:\.\d+)?")
_BEFORE_NUMBER = "####"


@dataclass(frozen=True)
class Problem:
    """A question and its worked answer, which ends in the number."""

    question: str
    answer: str

    @property
    def number(self) -> float:
        """ValueError if there is none."""
        _, found, number = self.answer.rpartition(_BEFORE_NUMBER)
        if not found or (value := last_number(number)) is None:
            raise ValueError(f"the answer does not end in {_BEFORE_NUMBER} and a number")
        return value

    def asked(self) -> str:
        return f"Question: {self.question.strip()}\nAnswer:"

    def with_answer(self) -> str:
        return f"{self.asked()} {self.answer.strip()}\n\n"

    def num_answer_tokens(self, vocabulary: Vocabulary) -> int:
        """Those of the worked answer in this vocabulary, but at most `MAX_ANSWER_TOKENS`."""
        return min(vocabulary.num_tokens(f" {self.answer.strip()}"), MAX_ANSWER_TOKENS)


def problems(texts: Texts, number: int) -> list[Problem]:
    """So many, all that there are in a random order before any again.

    Raises ValueError if the data is not as above.
    """
    if texts.data is None:
        return _made_up(texts, number)
    read = read_problems(texts, FILE)
    short = [
        one for one in read if texts.vocabulary.num_tokens(one.question) <= MAX_QUESTION_TOKENS
    ]
    if not short:
        raise ValueError(f"--data: {FILE} has no question of {MAX_QUESTION_TOKENS} tokens or less")
    return [short[index] for index in texts.order(number, len(short))]


def examples(texts: Texts, number: int, max_tokens: int) -> str:
    """So many problems with their answers, or as many as fit into the tokens: the text before each
    question. Raises ValueError if the data is not as above."""
    if texts.data is None:
        shown: Sequence[Problem] = _made_up(texts, number)
    else:
        shown = read_problems(texts, EXAMPLES_FILE)[:number]
    return examples_that_fit(texts.vocabulary, [one.with_answer() for one in shown], max_tokens)


def read_problems(texts: Texts, name: str) -> list[Problem]:
    """Those of a file. There has to be a `texts.data`; ValueError if it is not as above."""
    return read_questions(texts, name, _problem)


def last_number(text: str) -> float | None:
    """The last number in the text, written with thousands apart or not; None if it has none."""
    found = _NUMBER.findall(text)
    return float(found[-1].replace(",", "")) if found else None


def score(item: Item, state: sgl.ProgramState) -> float:
    """Whether the last number of the program's `answer` is the item's `number`."""
    return float(last_number(state["answer"]) == item["number"])


def _problem(entry: dict[str, Any]) -> Problem:
    problem = Problem(str(entry["question"]), str(entry["answer"]))
    _ = problem.number
    return problem


def _made_up(texts: Texts, number: int) -> list[Problem]:
    return [
        Problem(
            texts.text(texts.number(*QUESTION_TOKENS)) + "?",
            f"{texts.text(texts.number(*WORK_TOKENS))}\n{_BEFORE_NUMBER} {texts.number(*NUMBERS)}",
        )
        for _ in range(number)
    ]


# -- few_shot_gsm8k

NUM_EXAMPLES = 5
MAX_PREFIX_TOKENS = 2560


@sgl.function
def few_shot(
    s: sgl.ProgramState, examples: str, question: str, num_tokens: int, number: float
) -> None:
    """`number` is for the score alone."""
    s += examples
    s += question
    s += sgl.gen("answer", max_tokens=num_tokens, ignore_eos=True)


def few_shot_items(texts: Texts, num_requests: int) -> list[Item]:
    shown = examples(texts, NUM_EXAMPLES, MAX_PREFIX_TOKENS)
    return [
        {
            "examples": shown,
            "question": one.asked(),
            "num_tokens": one.num_answer_tokens(texts.vocabulary),
            "number": one.number,
        }
        for one in problems(texts, num_requests)
    ]


FEW_SHOT = Workload.of("few_shot_gsm8k", few_shot, few_shot_items, score=score)


# -- multi_chain

LEADS = (
    "\nStep by step:",
    "\nWith one equation:",
    "\nBackwards from what is asked:",
    "\nBy a rough estimate first:",
    "\nAs to a child:",
)
CHAIN_PERCENT = (50, 150)
ANSWER_TOKENS = 16


@sgl.function
def chains(
    s: sgl.ProgramState, question: str, chains_tokens: tuple[int, ...], number: float
) -> None:
    """`number` is for the score alone."""
    s += question
    branches = s.fork(len(LEADS))
    for chain, lead, num_tokens in zip(branches, LEADS, chains_tokens, strict=True):
        chain += lead
        chain += sgl.gen("chain", max_tokens=num_tokens, ignore_eos=True)
    for chain, lead in zip(branches, LEADS, strict=True):
        s += lead + chain["chain"]
    s += "\nAll in all, the answer is"
    s += sgl.gen("answer", max_tokens=ANSWER_TOKENS, ignore_eos=True)


def chain_items(texts: Texts, num_requests: int) -> list[Item]:
    return [
        {
            "question": one.asked(),
            "chains_tokens": tuple(
                _varied(texts, one.num_answer_tokens(texts.vocabulary)) for _ in LEADS
            ),
            "number": one.number,
        }
        for one in problems(texts, num_requests)
    ]


def _varied(texts: Texts, num_tokens: int) -> int:
    varied = num_tokens * texts.number(*CHAIN_PERCENT) // 100
    return max(1, min(varied, MAX_ANSWER_TOKENS))


MULTI_CHAIN = Workload.of("multi_chain", chains, chain_items, score=score)
