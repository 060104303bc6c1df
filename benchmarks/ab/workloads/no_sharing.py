"""Random prompts with nothing in common: here the plugin can only cost."""

from __future__ import annotations

import sgl_vllm as sgl
from benchmarks.ab.workloads.base import Item, Texts, Workload

PROMPT_TOKENS = (64, 512)
OUTPUT_TOKENS = (16, 64)


@sgl.function
def continuation(s: sgl.ProgramState, prompt: str, num_tokens: int) -> None:
    s += prompt
    s += sgl.gen("text", max_tokens=num_tokens, ignore_eos=True)


def items(texts: Texts, num_requests: int) -> list[Item]:
    return [
        {
            "prompt": texts.text(texts.number(*PROMPT_TOKENS)),
            "num_tokens": texts.number(*OUTPUT_TOKENS),
        }
        for _ in range(num_requests)
    ]


WORKLOAD = Workload.of("no_sharing", continuation, items)
