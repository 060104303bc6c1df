"""Completion as in HellaSwag: twenty examples, then the beginning of a text and four endings.

The ending is chosen by `select`, by its mean log-probability per token. Stock vLLM is asked for the
log-probabilities of four whole prompts per question, as evaluation harnesses do, and caches none
of those. That makes a round long there: four times the prefix for every question.

In `hellaswag_best`, stock scores each token of each ending as the next token of a separate prompt.
Such prompts read the prefix cache, up to its last whole block.

With `--data` the texts are those of ``hellaswag.jsonl``, if the folder has that file, a line each,
with the data set's own keys: ``{"ctx": str, "endings": [str] * 4, "label": 0 to 3}``; the first
twenty are the examples, cut to those that fit into `MAX_PREFIX_TOKENS`. Otherwise the texts are
synthetic, with the data set's lengths.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import sgl_vllm as sgl
from benchmarks.ab.workloads.base import Item, Texts, Workload
from benchmarks.ab.workloads.questions import examples_that_fit, has_file, read_questions

FILE = "hellaswag.jsonl"
NUM_EXAMPLES = 20
NUM_ENDINGS = 4
MAX_PREFIX_TOKENS = 3072
MAX_QUESTION_TOKENS = 960

CONTEXT_TOKENS = (40, 60)
ENDING_TOKENS = (15, 30)


@dataclass(frozen=True)
class Beginning:
    """The beginning of a text, four different endings, and the index of the right one."""

    context: str
    endings: tuple[str, ...]
    right: int

    def with_ending(self) -> str:
        return f"{self.context}{self.endings[self.right]}\n\n"


@sgl.function
def ending(
    s: sgl.ProgramState, examples: str, context: str, endings: tuple[str, ...], right: str
) -> None:
    """`right` is for the score alone."""
    s += examples
    s += context
    s += sgl.select("ending", list(endings))


def items(texts: Texts, num_requests: int) -> list[Item]:
    """The same examples, and all beginnings in a random order before any again.

    Raises ValueError if the data has no more than the examples, or is not as above.
    """
    if has_file(texts, FILE):
        beginnings = read_questions(texts, FILE, _beginning)
    else:
        beginnings = [_made_up(texts) for _ in range(NUM_EXAMPLES + num_requests)]
    shown = [one.with_ending() for one in beginnings[:NUM_EXAMPLES]]
    examples = examples_that_fit(texts.vocabulary, shown, MAX_PREFIX_TOKENS)
    asked = [one for one in beginnings[NUM_EXAMPLES:] if _fits(texts, one)]
    if not asked:
        raise ValueError(f"--data: {FILE} has no question after its {NUM_EXAMPLES} examples")
    return [
        {
            "examples": examples,
            "context": one.context,
            "endings": one.endings,
            "right": one.endings[one.right],
        }
        for one in (asked[index] for index in texts.order(num_requests, len(asked)))
    ]


def score(item: Item, state: sgl.ProgramState) -> float:
    """Whether the ending is the right one."""
    return float(state["ending"] == item["right"])


def _fits(texts: Texts, one: Beginning) -> bool:
    longest = max(one.endings, key=len)
    return texts.vocabulary.num_tokens(one.context + longest) <= MAX_QUESTION_TOKENS


def _beginning(entry: dict[str, Any]) -> Beginning:
    endings = tuple(" " + str(one).strip() for one in entry["endings"])
    right = int(entry["label"])
    if len(set(endings)) != NUM_ENDINGS or len(endings) != NUM_ENDINGS:
        raise ValueError("it must have four different endings")
    if right not in range(NUM_ENDINGS):
        raise ValueError("its label must be 0 to 3")
    return Beginning(str(entry["ctx"]).rstrip(), endings, right)


def _made_up(texts: Texts) -> Beginning:
    return Beginning(
        texts.text(texts.number(*CONTEXT_TOKENS)),
        tuple(texts.text(texts.number(*ENDING_TOKENS)) for _ in range(NUM_ENDINGS)),
        texts.number(0, NUM_ENDINGS - 1),
    )


WORKLOAD = Workload.of("hellaswag", ending, items, score=score)
BEST = Workload.of("hellaswag_best", ending, items, stock_by_next_tokens=True, score=score)
