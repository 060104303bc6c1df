"""Multiple choice as in MMLU: five examples of a subject, a question, one of four labels.

The label is chosen by `select`: the likeliest of the four after the prompt. Stock vLLM is asked as
evaluation harnesses ask it, for the log-probabilities of a whole prompt per label, and computes the
prompt four times, as it caches none of which it is to tell those.

In `mmlu_best`, stock is asked as well as it can be: one request of one token, held to the four
labels by a regular expression. Both then choose the likeliest label, and so the same one, unless
two are so nearly equally likely that the order of summing decides.

With `--data` the questions are those of ``mmlu.jsonl``, if the folder has that file, a line each:
``{"subject": str, "question": str, "choices": [str] * 4, "answer": 0 to 3}``; the first five of
each subject are its examples, of which as many are taken as fit into `MAX_PREFIX_TOKENS`. Otherwise
they are made up in the data set's lengths: a line in one subject, half a page in another.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import sgl_vllm as sgl
from benchmarks.ab.workloads.base import Item, Texts, Workload
from benchmarks.ab.workloads.questions import examples_that_fit, has_file, read_questions

FILE = "mmlu.jsonl"
NUM_EXAMPLES = 5
MAX_PREFIX_TOKENS = 1536
MAX_QUESTION_TOKENS = 1024

LABELS = ("A", "B", "C", "D")
# The most tokens of a question, without its options, in each of the made-up subjects.
SUBJECTS_TOKENS = (48, 96, 144, 216)
CHOICE_TOKENS = (2, 16)


@dataclass(frozen=True)
class MultipleChoice:
    """A question, its four options, and the index of the right one."""

    subject: str
    question: str
    choices: tuple[str, ...]
    right: int

    def asked(self) -> str:
        """Up to where the label stands: a line of its own, so that it is one token and no part of
        another, whatever the tokenizer."""
        options = "".join(
            f"{label}. {choice.strip()}\n"
            for label, choice in zip(LABELS, self.choices, strict=True)
        )
        return f"{self.question.strip()}\n{options}Answer:\n"

    def with_answer(self) -> str:
        return f"{self.asked()}{LABELS[self.right]}\n\n"


@sgl.function
def choice(s: sgl.ProgramState, examples: str, question: str, right: str) -> None:
    """`right` is for the score alone."""
    s += examples
    s += question
    s += sgl.select("label", list(LABELS))


@sgl.function
def choice_by_one_token(s: sgl.ProgramState, examples: str, question: str, right: str) -> None:
    """`right` is for the score alone."""
    s += examples
    s += question
    s += sgl.gen("label", max_tokens=1, regex=f"[{''.join(LABELS)}]")


def items(texts: Texts, num_requests: int) -> list[Item]:
    """Subjects in rotation, in each all questions in a random order before any again.

    Raises ValueError if the data has no subject with examples and a question, or is not as above.
    """
    subjects = [
        (examples, questions)
        for one in (_read(texts) if has_file(texts, FILE) else _made_up(texts, num_requests))
        for examples, questions in [_split(texts, one)]
        if questions
    ]
    if not subjects:
        raise ValueError(f"--data: no subject of {FILE} has more than {NUM_EXAMPLES} questions")
    per_subject = -(-num_requests // len(subjects))
    orders = [texts.order(per_subject, len(questions)) for _, questions in subjects]
    by_turns: list[Item] = [
        {
            "examples": examples,
            "question": questions[order[turn]].asked(),
            "right": LABELS[questions[order[turn]].right],
        }
        for turn in range(per_subject)
        for (examples, questions), order in zip(subjects, orders, strict=True)
    ]
    return by_turns[:num_requests]


def score(item: Item, state: sgl.ProgramState) -> float:
    """Whether the label is the right one."""
    return float(state["label"] == item["right"])


def _split(texts: Texts, subject: list[MultipleChoice]) -> tuple[str, list[MultipleChoice]]:
    """The text before each question of the subject, and the questions that fit into a prompt."""
    heading = f"Questions about {subject[0].subject.strip()}, each with one right answer.\n\n"
    shown = [heading, *(one.with_answer() for one in subject[:NUM_EXAMPLES])]
    asked = [
        one
        for one in subject[NUM_EXAMPLES:]
        if texts.vocabulary.num_tokens(one.asked()) <= MAX_QUESTION_TOKENS
    ]
    return examples_that_fit(texts.vocabulary, shown, MAX_PREFIX_TOKENS), asked


def _read(texts: Texts) -> list[list[MultipleChoice]]:
    by_subject: dict[str, list[MultipleChoice]] = {}
    for one in read_questions(texts, FILE, _question):
        by_subject.setdefault(one.subject, []).append(one)
    return list(by_subject.values())


def _question(entry: dict[str, Any]) -> MultipleChoice:
    choices, right = tuple(str(choice) for choice in entry["choices"]), entry["answer"]
    if len(choices) != len(LABELS) or right not in range(len(LABELS)):
        raise ValueError("it is to have four choices and an answer from 0 to 3")
    return MultipleChoice(str(entry["subject"]), str(entry["question"]), choices, right)


def _made_up(texts: Texts, num_requests: int) -> list[list[MultipleChoice]]:
    per_subject = -(-num_requests // len(SUBJECTS_TOKENS))
    return [
        [
            MultipleChoice(
                subject,
                texts.text(texts.number(most_tokens // 2, most_tokens)) + "?",
                tuple(texts.text(texts.number(*CHOICE_TOKENS)) for _ in LABELS),
                texts.number(0, len(LABELS) - 1),
            )
            for _ in range(NUM_EXAMPLES + per_subject)
        ]
        for most_tokens in SUBJECTS_TOKENS
        for subject in [texts.text(2)]
    ]


WORKLOAD = Workload.of("mmlu", choice, items, score=score)
BEST = Workload.of("mmlu_best", choice, items, stock_program=choice_by_one_token, score=score)
