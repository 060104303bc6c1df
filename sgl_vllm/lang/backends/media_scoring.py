"""`select` after images, videos and audio.

Owns how the choices are scored there. The tokens of such a prompt do not say what its media show,
so it cannot be sent as tokens: each choice is sent as a chat that ends with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from sgl_vllm.lang.prompts import ChatPrompt
from sgl_vllm.lang.usage import Usage

if TYPE_CHECKING:
    from sgl_vllm.lang.backends.on_vllm import OnVLLM


class MediaScoring:
    """The model as `sgl_vllm.protocol.scoring` asks it, for one prompt and its choices.

    Args:
        backend: runs the model.
        prompt: what comes before the choices.
        continued: the prompt with each choice.
        prefix_ids: tokens of the prompt. An image may be one token of them, or as many as the model
            reads.
        full_ids: tokens of `continued`, in the same form.
    """

    def __init__(
        self,
        backend: OnVLLM,
        prompt: ChatPrompt,
        continued: Sequence[ChatPrompt],
        prefix_ids: Sequence[int],
        full_ids: Sequence[list[int]],
    ) -> None:
        self._backend = backend
        self._prompt = prompt
        self._continued = continued
        self._num_prefix = len(prefix_ids)
        self._full_ids = list(full_ids)
        self._num_read: int | None = None

    async def begin_ids(self) -> list[int]:
        return await self._backend.begin_ids()

    async def warm_ids(self, ids: list[int]) -> Usage:
        """Compute and cache the whole prompt, of which `ids` is a prefix."""
        cost = await self._backend.warm_chat(self._prompt)
        self._num_read = cost.prompt_tokens
        return cost

    async def next_token_logprobs(self, ids: list[int], tokens: list[int]) -> None:
        """Not asked one by one: each would be a chat as well."""

    async def prompt_logprobs(
        self, sequences: list[list[int]], start: int
    ) -> tuple[list[tuple[float, ...]], Usage]:
        if sequences != self._full_ids:  # the choices alone, which have no media
            return await self._backend.prompt_logprobs(sequences, start)
        # Where scoring starts in the tokens that the model reads, if it is known how many they are.
        read_start = None
        if self._num_read is not None:
            read_start = self._num_read - (self._num_prefix - start)
        endings = [ids[start:] for ids in sequences]
        return await self._backend.chat_logprobs(self._continued, endings, read_start)
