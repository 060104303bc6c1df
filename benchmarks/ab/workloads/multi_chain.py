"""Five chains of thought about one problem, side by side, and an answer that reads them all.

Problems as in GSM8K: real ones with `--data`, else made-up ones (`gsm8k`). As everything here is
greedy, each chain begins with words of its own, so that they differ. A chain is from half to one
and a half times as long as the reference's answer, at most 256 tokens, and does not end by itself:
models that were never trained for it would not end at all.
"""

from __future__ import annotations

import sgl_vllm as sgl
from benchmarks.ab.workloads import gsm8k
from benchmarks.ab.workloads.base import Item, Texts, Workload

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
def answer(
    s: sgl.ProgramState, question: str, chains_tokens: tuple[int, ...], number: float
) -> None:
    """`number` is for the score alone."""
    s += question
    chains = s.fork(len(LEADS))
    for chain, lead, num_tokens in zip(chains, LEADS, chains_tokens, strict=True):
        chain += lead
        chain += sgl.gen("chain", max_tokens=num_tokens, ignore_eos=True)
    for chain, lead in zip(chains, LEADS, strict=True):
        s += lead + chain["chain"]
    s += "\nAll in all, the answer is"
    s += sgl.gen("answer", max_tokens=ANSWER_TOKENS, ignore_eos=True)


def items(texts: Texts, num_requests: int) -> list[Item]:
    """Raises ValueError if the data is not what `gsm8k` says."""
    return [
        {
            "question": one.asked(),
            "chains_tokens": tuple(
                _varied(texts, one.num_answer_tokens(texts.vocabulary)) for _ in LEADS
            ),
            "number": one.number,
        }
        for one in gsm8k.problems(texts, num_requests)
    ]


def _varied(texts: Texts, num_tokens: int) -> int:
    varied = num_tokens * texts.number(*CHAIN_PERCENT) // 100
    return max(1, min(varied, gsm8k.MAX_ANSWER_TOKENS))


WORKLOAD = Workload(
    name="multi_chain",
    summary="five chains of up to 256 tokens side by side, then an answer that reads them all",
    gain=(
        "Little is possible: nearly all of the time goes into the chains, which nothing shortens. "
        "Chains take their question from the cache, and the answer takes question and first chain "
        "from it, to the token, where stock's hits end with a whole block."
    ),
    program=answer,
    items=items,
    num_requests=8,
    quick_requests=3,
    score=gsm8k.score,
)
