"""Prompts of a head, marked segments and a question, for tests of approximate reuse."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from vllm.outputs import RequestOutput

from sgl_vllm.protocol.cache_namespace import CacheNamespace
from sgl_vllm.protocol.request_keys import REUSE, SEGMENTS
from sgl_vllm.radix.tokens import pack
from tests.engine.engine import Engine, greedy

NAMESPACE = CacheNamespace(None, None)
HEAD, QUESTION = "Read what follows.\n", "Which of them is slow?"


def document(number: int, num_sentences: int = 12) -> str:
    """A text that ends with a line break, so that it is tokenized alike between any others."""
    rng = random.Random(number)
    words = [
        rng.choice(["hare", "owl", "fox", "hen", "toad", "newt"]) for _ in range(num_sentences)
    ]
    return " ".join(f"The {word} has {rng.randrange(90)} of {number}." for word in words) + "\n"


@dataclass(frozen=True)
class Prompt:
    """A head, segments that are marked, and a question."""

    segments: tuple[str, ...]
    head: str = HEAD
    question: str = QUESTION
    salt: str | None = None

    @property
    def marks(self) -> list[int]:
        marks, position = [], len(self.head)
        for segment in self.segments:
            marks += [position, position + len(segment)]
            position += len(segment)
        return marks

    def pieces(self, engine: Engine) -> list[list[int]]:
        """The tokens of each of its texts."""
        return [engine.encode(text) for text in (self.head, *self.segments, self.question)]

    def tokens(self, engine: Engine) -> list[int]:
        return [token for piece in self.pieces(engine) for token in piece]

    def as_prompt(self, engine: Engine) -> dict[str, Any]:
        salt = {"cache_salt": self.salt} if self.salt else {}
        return {"prompt_token_ids": self.tokens(engine), **salt}

    def extra_args(self, reuse: bool) -> dict[str, Any]:
        return {SEGMENTS: self.marks, **({REUSE: "approximate"} if reuse else {})}


def ask(
    engine: Engine, prompts: Sequence[Prompt], reuse: bool, max_tokens: int = 4, **params: Any
) -> list[RequestOutput]:
    """All at once, and their answers."""
    return engine.llm.generate(
        [prompt.as_prompt(engine) for prompt in prompts],
        [greedy(max_tokens, extra_args=prompt.extra_args(reuse), **params) for prompt in prompts],
        use_tqdm=False,
    )


def has_flag(output: RequestOutput) -> bool:
    """Whether an answer says anything of reuse."""
    return REUSE in (output.kv_transfer_params or {})


def reused(output: RequestOutput) -> tuple[int, int]:
    """What an answer with the flag says: tokens and segments reused."""
    assert output.kv_transfer_params is not None
    report = output.kv_transfer_params[REUSE]
    return report["reused_tokens"], report["reused_segments"]


def kv_of(engine: Engine, prompt: Prompt, reuse: bool) -> list[torch.Tensor]:
    """What the cache holds of its whole blocks once it is computed, by layer."""
    params = greedy(3, extra_args=prompt.extra_args(reuse))
    return engine.kv_of(prompt.as_prompt(engine), params)


def num_computed(engine: Engine, prompt: Prompt, share: float, num_hit: int) -> int:
    """All tokens past a hit but those of each segment after its first `share`."""
    head, *segments, question = map(len, prompt.pieces(engine))
    computed, position = head + question, head
    for length in segments:
        first = max(position + math.ceil(share * length), num_hit + 1)
        computed += min(first - position, length)
        position += length
    return computed - num_hit


def play(engine: Engine, prompts, max_tokens: int) -> list:
    """Prompts and whether each may reuse, all at once."""
    return engine.llm.generate(
        [prompt.as_prompt(engine) for prompt, _ in prompts],
        [greedy(max_tokens, extra_args=prompt.extra_args(reuses)) for prompt, reuses in prompts],
        use_tqdm=False,
    )


def logprobs(output) -> list[dict[int, float]]:
    return [
        {token: one.logprob for token, one in row.items()} for row in output.outputs[0].logprobs
    ]


def places(engine: Engine, prompt: Prompt) -> list[int]:
    """Where the index would copy a prompt's segments from: the position of each one's first token
    there."""
    index = engine.scheduler.parts.approximate.index
    found = [index.find(NAMESPACE, pack(piece)) for piece in prompt.pieces(engine)[1:-1]]
    return [-1 if donor is None else donor.start for donor in found]
