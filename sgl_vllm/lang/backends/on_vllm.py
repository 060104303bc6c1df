"""What a vLLM server and a vLLM engine in this process have in common for the language.

Owns `select` by prompt log-probabilities, the plugin's keys in a request, and the reading of its
report. How tokens and log-probabilities are got is the backends': over HTTP in `vllm.py`, from the
engine itself in `engine.py`.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from sgl_vllm.lang.backends.base import (
    Backend,
    ChatPrompt,
    Generated,
    Prompt,
    ScoreAnswer,
    Usage,
)
from sgl_vllm.lang.errors import BackendError, UnsupportedError
from sgl_vllm.protocol import scoring
from sgl_vllm.protocol.request_keys import REPORT


class OnVLLM(Backend):
    """A model that vLLM runs. Its tokens can be told, and so the scores of choices are exact."""

    tells_tokens = True

    @abstractmethod
    async def has_plugin(self) -> bool:
        """Whether the plugin is switched on."""

    @abstractmethod
    async def tokenize(self, prompt: Prompt) -> list[int]:
        """The tokens of a prompt, as `generate` reads it."""

    @abstractmethod
    async def begin_ids(self) -> list[int]:
        """What the tokenizer puts before any text: one token, or nothing."""

    @abstractmethod
    async def warm_ids(self, ids: list[int]) -> Usage:
        """Compute and cache these tokens."""

    @abstractmethod
    async def prompt_logprobs(
        self, sequences: list[list[int]], start: int
    ) -> tuple[list[tuple[float, ...]], Usage]:
        """The log-probabilities of the tokens from `start` on in each sequence, as one call."""

    @abstractmethod
    async def next_token_logprobs(
        self, ids: list[int], tokens: list[int]
    ) -> tuple[list[float], list[Usage]] | None:
        """The log-probability of each of `tokens` right after `ids`, with what each has cost; None
        where the model's own, before what may be generated is chosen, are not to be had."""

    async def ids_of_empty_prompt(self) -> list[int]:
        """What stands for a prompt of no text, which vLLM refuses."""
        ids = await self.begin_ids()
        if not ids:
            raise BackendError(
                "the prompt is empty, and the model's tokenizer has no beginning-of-text "
                "token to start from: put some text before this"
            )
        return ids

    async def tokenized(self, prompts: Sequence[Prompt]) -> tuple[list[list[int]], list[Usage]]:
        """The tokens of each, and what it has cost to be told them."""
        return await scoring.all_answers([self.tokenize(prompt) for prompt in prompts]), []

    async def score(
        self, prompt: Prompt, choices: tuple[str, ...], *, unconditional: bool, warm: bool
    ) -> ScoreAnswer:
        prompts = [prompt, *(prompt.extended(choice) for choice in choices)]
        (prefix_ids, *full_ids), costs = await self.tokenized(prompts)
        try:
            scored = await scoring.score(
                self,
                prefix_ids,
                full_ids,
                unconditional=unconditional,
                warm=warm and await self.has_plugin(),
            )
        except scoring.NothingToScoreError as error:
            raise BackendError(str(error)) from None
        return ScoreAnswer(scored.choices, sum((*costs, *scored.costs), Usage()))

    def media_io_kwargs(self, prompt: ChatPrompt) -> dict[str, Any]:
        """How the media of a prompt are to be read, in vLLM's words; empty for its defaults."""
        num_frames = {m.num_frames for m in prompt.media if m.num_frames is not None}
        if len(num_frames) > 1:
            raise UnsupportedError(
                self.name,
                "videos with different num_frames in one prompt",
                "give all the same num_frames",
            )
        return {"video": {"num_frames": num_frames.pop()}} if num_frames else {}


def with_report(
    texts: list[Generated], usage: Usage, kv_transfer_params: dict[str, Any] | None
) -> Usage:
    """Put what the plugin reports of the first text into it; the usage with its forced tokens."""
    report = (kv_transfer_params or {}).get(REPORT)
    if not report:
        return usage
    texts[0] = _with_forced(texts[0], report["forced_bytes"])
    return replace(usage, forced_tokens=int(report["forced_tokens"]))


def _with_forced(generated: Generated, forced_bytes: list[list[int]]) -> Generated:
    """With the forced intervals, which come in bytes, in characters; a stop text may have cut
    them."""
    data = generated.text.encode()

    def num_chars(num_bytes: int) -> int:
        return len(data[:num_bytes].decode(errors="ignore"))

    intervals = ((num_chars(start), num_chars(end)) for start, end in forced_bytes)
    return replace(generated, forced=tuple((a, b) for a, b in intervals if a < b))
