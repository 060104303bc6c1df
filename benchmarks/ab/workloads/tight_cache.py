"""Many groups of requests, each with its own prefix, and a cache that holds a fifth of them.

Requests rotate through the groups, so in order of arrival a prefix returns only after most others,
when such a cache has long evicted it. As many requests run as fit into the cache, and many more
wait, so a scheduler can serve those of one group together. The gain grows with the number of
waiting requests per group, here about three; the concurrency, which is stated with the result, says
how many.
"""

from __future__ import annotations

import sgl_vllm as sgl
from benchmarks.ab.workloads.base import Item, Texts, Workload

NUM_GROUPS = 48
PREFIX_TOKENS = 1024
QUESTION_TOKENS = (8, 32)
OUTPUT_TOKENS = (4, 16)
CACHE_SHARE = 0.2
MAX_MODEL_LEN = 1152


@sgl.function
def answer(s: sgl.ProgramState, prefix: str, question: str, num_tokens: int) -> None:
    s += prefix + question
    s += sgl.gen("answer", max_tokens=num_tokens, ignore_eos=True)


def items(texts: Texts, num_requests: int) -> list[Item]:
    """Every group once in a random order, then all again in another, and so on."""
    prefixes = [texts.text(PREFIX_TOKENS) for _ in range(NUM_GROUPS)]
    return [
        {
            "prefix": prefixes[group],
            "question": texts.text(texts.number(*QUESTION_TOKENS)),
            "num_tokens": texts.number(*OUTPUT_TOKENS),
        }
        for group in texts.order(num_requests, NUM_GROUPS)
    ]


def server_args(block_size_tokens: int) -> tuple[str, ...]:
    num_blocks = round(CACHE_SHARE * NUM_GROUPS * PREFIX_TOKENS / block_size_tokens)
    return (
        *("--num-gpu-blocks-override", str(num_blocks)),
        *("--max-model-len", str(MAX_MODEL_LEN)),
    )


WORKLOAD = Workload.of("tight_cache", answer, items, server_args=server_args)
