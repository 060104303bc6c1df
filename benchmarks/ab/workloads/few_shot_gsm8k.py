"""Problems as in GSM8K after five examples, which all prompts share, and a worked answer.

Real problems with `--data`, else made-up ones (`gsm8k`). Each answer is as long as the reference's
in the model's tokens, at most 256, and does not end by itself: models that were never trained for
it would not end at all, and others would make the servers' work differ where their texts do.
"""

from __future__ import annotations

import sgl_vllm as sgl
from benchmarks.ab.workloads import gsm8k
from benchmarks.ab.workloads.base import Item, Texts, Workload

NUM_EXAMPLES = 5
MAX_PREFIX_TOKENS = 2560


@sgl.function
def answer(
    s: sgl.ProgramState, examples: str, question: str, num_tokens: int, number: float
) -> None:
    """`number` is for the score alone."""
    s += examples
    s += question
    s += sgl.gen("answer", max_tokens=num_tokens, ignore_eos=True)


def items(texts: Texts, num_requests: int) -> list[Item]:
    """Raises ValueError if the data is not what `gsm8k` says."""
    examples = gsm8k.examples(texts, NUM_EXAMPLES, MAX_PREFIX_TOKENS)
    return [
        {
            "examples": examples,
            "question": one.asked(),
            "num_tokens": one.num_answer_tokens(texts.vocabulary),
            "number": one.number,
        }
        for one in gsm8k.problems(texts, num_requests)
    ]


WORKLOAD = Workload(
    name="few_shot_gsm8k",
    summary="five examples that all share, a question, up to 256 tokens of an answer",
    gain=(
        "Little is possible: most of the time goes into the answers, which nothing shortens. The "
        "first requests wait a step for one of them to compute the examples, and a hit ends where "
        "the examples do, where stock's ends with a whole block."
    ),
    program=answer,
    items=items,
    num_requests=24,
    quick_requests=8,
    score=gsm8k.score,
)
