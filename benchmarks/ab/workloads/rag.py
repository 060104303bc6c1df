"""Documents, then a question: each prompt holds three documents out of one corpus.

Some documents are asked for much more often than others: the one of rank r with a weight of 1 / r.
Whatever finds them, they stand in a prompt in one fixed order, that of their ranks, so that prompts
have beginnings in common: the first document, the first two, or all three.

With `--data` questions, and the lengths of answers, are those of HotPotQA (``hotpot_dev_200.json``,
a list of ``{"question": str, "answer": str}``), else made up. Documents are made up in either case.
An answer does not end by itself. There is no score: no document says what is asked.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

import sgl_vllm as sgl
from benchmarks.ab.workloads.base import Item, Texts, Workload
from benchmarks.ab.workloads.questions import HOTPOT_FILE, read_questions

NUM_DOCUMENTS = 24
DOCUMENTS_PER_PROMPT = 3
DOCUMENT_TOKENS = (200, 400)
MAX_QUESTION_TOKENS = 256
MAX_ANSWER_TOKENS = 64

QUESTION_TOKENS = (12, 32)
ANSWER_TOKENS = (8, MAX_ANSWER_TOKENS)


@dataclass(frozen=True)
class Question:
    """A question, and how long its answer is to be."""

    text: str
    num_answer_tokens: int


@sgl.function
def answer(s: sgl.ProgramState, documents: tuple[str, ...], question: str, num_tokens: int) -> None:
    for document in documents:
        s += "Document:" + document + "\n\n"
    s += "Question: " + question + "\nAnswer:"
    s += sgl.gen("answer", max_tokens=num_tokens, ignore_eos=True)


def items(texts: Texts, num_requests: int) -> list[Item]:
    """Raises ValueError if the data is not as above."""
    corpus = [texts.text(texts.number(*DOCUMENT_TOKENS)) for _ in range(NUM_DOCUMENTS)]
    return [
        {
            "documents": _retrieved(texts, corpus),
            "question": one.text,
            "num_tokens": one.num_answer_tokens,
        }
        for one in _questions(texts, num_requests)
    ]


def _retrieved(texts: Texts, corpus: Sequence[str]) -> tuple[str, ...]:
    weights = 1 / np.arange(1, len(corpus) + 1)
    found = texts.rng.choice(
        len(corpus), DOCUMENTS_PER_PROMPT, replace=False, p=weights / weights.sum()
    )
    return tuple(corpus[index] for index in sorted(found))


def _questions(texts: Texts, number: int) -> list[Question]:
    if texts.data is None:
        return [
            Question(
                texts.text(texts.number(*QUESTION_TOKENS)).strip() + "?",
                texts.number(*ANSWER_TOKENS),
            )
            for _ in range(number)
        ]

    def question(entry: dict[str, Any]) -> Question:
        num_tokens = texts.vocabulary.num_tokens(f" {entry['answer']}")
        return Question(
            texts.vocabulary.beginning(entry["question"], MAX_QUESTION_TOKENS),
            min(num_tokens, MAX_ANSWER_TOKENS),
        )

    read = read_questions(texts, HOTPOT_FILE, question)
    return [read[index] for index in texts.order(number, len(read))]


WORKLOAD = Workload.of("rag", answer, items)
