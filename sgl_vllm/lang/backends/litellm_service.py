"""The backend for services that LiteLLM reaches.

Owns how LiteLLM is called. LiteLLM takes OpenAI's API and translates it for each service, so the
requests are those of `openai_service.py`, for chat models.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from types import ModuleType
from typing import Any  # Any: options of LiteLLM's

from sgl_vllm.lang.backends.base import Json
from sgl_vllm.lang.backends.openai_api import AssembledAnswer, streamed
from sgl_vllm.lang.backends.openai_service import OpenAIRequests, without_defaults
from sgl_vllm.lang.backends.requests import Watch
from sgl_vllm.lang.errors import BackendError
from sgl_vllm.lang.keywords import refuse_unknown
from sgl_vllm.lang.sampling import SamplingDefaults
from sgl_vllm.spelling import did_you_mean

_OPTIONS = (
    "api_key",
    "base_url",
    "max_retries",
    "timeout",
    "timeout_s",
    *SamplingDefaults.__annotations__,
)
"""Options that are known here. Services have others, which LiteLLM passes on."""


class LiteLLM(OpenAIRequests):
    """A chat model under LiteLLM's name for it, such as ``"mistral/mistral-small-latest"``.

    `options` (api_key, base_url, a service's own) are passed to every `litellm.acompletion`. Other
    keys are found where LiteLLM looks for them. A failed call is retried up to `max_retries` times
    by LiteLLM's rule. Options at OpenAI's defaults are not sent, because many services support
    only some of them. LiteLLM rejects what a service does not support.
    """

    is_chat_model = True

    def __init__(
        self, model: str, *, timeout_s: float = 600.0, max_retries: int = 2, **options: Any
    ) -> None:
        misspelled = [name for name in options if did_you_mean(name, _OPTIONS, cutoff=0.85)]
        refuse_unknown("LiteLLM", misspelled, _OPTIONS)
        super().__init__(options.get("api_key"), timeout_s)
        self.model = model
        self.max_retries = max_retries
        self._options = options

    @property
    def name(self) -> str:
        return f"{self.model} through LiteLLM"

    @property
    def advice_on_no_answer(self) -> str:
        return "is the service's address right, and can this machine reach it?"

    @property
    def advice_on_key(self) -> str:
        return "pass it as LiteLLM(..., api_key=...) or set the service's environment variable"

    def library(self) -> ModuleType:
        import openai  # LiteLLM's errors are subclasses of OpenAI's

        return openai

    async def ask(self, body: Json, watch: Watch | None) -> Json:
        call: Json = {
            "model": self.model,
            **without_defaults(body),
            "timeout": self.timeout_s,
            "num_retries": self.max_retries,
            **self._options,
        }
        if watch is not None:
            assembled = AssembledAnswer(chat=True)
            await self.drive(self._chunks(streamed(call)), assembled, watch)
            return assembled.answer()
        try:
            async with asyncio.timeout(self.timeout_s):
                answer = await (await _litellm()).acompletion(**call)
        except Exception as error:
            self.raise_as_backend_error(error)
        with self.reading():
            return dict(answer.model_dump())

    async def _chunks(self, call: Json) -> AsyncGenerator[Json]:
        stream = await (await _litellm()).acompletion(**call)
        try:
            async for chunk in stream:
                yield chunk.model_dump()
        finally:
            await stream.aclose()


async def _litellm() -> ModuleType:
    """The package. Its first import takes seconds and may fetch prices from the network, so it
    runs in a thread: programs of other backends share the event loop."""

    def load() -> ModuleType:
        try:
            import litellm
        except ImportError as error:
            raise BackendError(
                "LiteLLM needs the package litellm: pip install 'sgl-vllm[litellm]'"
            ) from error
        module: ModuleType = litellm
        return module

    return await asyncio.to_thread(load)
