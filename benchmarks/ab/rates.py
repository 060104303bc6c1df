"""What the machine makes of tokens: so many of a prompt, and so many of output, in a second.

Measured on the stock server, so that a workload's limit can be told in seconds: its unique prompt
tokens and its undecided output tokens at these rates, with nothing lost in between. An estimate:
it takes a full batch throughout, a pass that decodes and reads prompts at no more than both apart,
and attention as long as in the probe. So an arm can come out a little better than the limit.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from typing import Any

import httpx

from benchmarks.ab.workloads.base import Texts

PROMPT_TOKENS = 512
SHORT_PROMPT_TOKENS = 8
OUTPUT_TOKENS = 24
MAX_SEQUENCES = 64
REPEATS = 3


@dataclass(frozen=True)
class Rates:
    """Prompt tokens and output tokens in a second, the latter of `sequences` at a time."""

    prefill_tokens_s: float
    decode_tokens_s: float
    sequences: int

    def seconds(self, prompt_tokens: int, output_tokens: int) -> float:
        return prompt_tokens / self.prefill_tokens_s + output_tokens / self.decode_tokens_s


def measure(url: str, texts: Texts, sequences: int) -> Rates:
    """The rates of an idle server, medians of three; some seconds on two cores.

    `sequences` are how many decode at a time; more than 64 are taken as 64.
    """
    sequences = min(sequences, MAX_SEQUENCES)
    with httpx.Client(base_url=url, timeout=600) as client:
        model = client.get("/v1/models").raise_for_status().json()["data"][0]["id"]

        def seconds(prompt_tokens: int, output_tokens: int, n: int) -> float:
            body: dict[str, Any] = {
                "model": model,
                "prompt": texts.text(prompt_tokens),
                "max_tokens": output_tokens,
                "ignore_eos": True,
                "n": n,
                "temperature": 1.0 if n > 1 else 0.0,
            }
            begun_s = time.perf_counter()
            client.post("/v1/completions", json=body).raise_for_status()
            return time.perf_counter() - begun_s

        def between(more: tuple[int, int, int], less: tuple[int, int, int]) -> float:
            """What the one takes longer than the other: the HTTP around them is no part of it."""
            taken = [seconds(*more) - seconds(*less) for _ in range(REPEATS)]
            return max(statistics.median(taken), 1e-6)

        short = (SHORT_PROMPT_TOKENS, 1, 1)
        prefill_s = between((PROMPT_TOKENS, 1, 1), short)
        decode_s = between(
            (SHORT_PROMPT_TOKENS, OUTPUT_TOKENS, sequences), (SHORT_PROMPT_TOKENS, 1, sequences)
        )
    return Rates(
        prefill_tokens_s=(PROMPT_TOKENS - SHORT_PROMPT_TOKENS) / prefill_s,
        decode_tokens_s=(OUTPUT_TOKENS - 1) * sequences / decode_s,
        sequences=sequences,
    )
