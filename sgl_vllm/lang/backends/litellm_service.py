"""The backend for the services that LiteLLM reaches.

Owns how LiteLLM is called. It takes OpenAI's words and translates them for each service, so what
can be said is that of `openai_service.py`, for chat models.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from types import ModuleType
from typing import Any

from sgl_vllm.lang.backends.base import Watch
from sgl_vllm.lang.backends.openai_api import AssembledAnswer
from sgl_vllm.lang.backends.openai_service import OpenAIWords, without_defaults
from sgl_vllm.lang.errors import BackendError


class LiteLLM(OpenAIWords):
    """A chat model by LiteLLM's name for it, such as ``"mistral/mistral-small-latest"``.

    `options` (api_key, base_url, a service's own) go to every `litellm.acompletion` as they are;
    keys are otherwise found where LiteLLM looks for them. A failed call is tried `max_retries`
    more times by LiteLLM's rule. Options at OpenAI's defaults are not sent, as many services know
    only some of them; what a service lacks LiteLLM refuses.
    """

    is_chat_model = True

    def __init__(
        self, model: str, *, timeout_s: float = 600.0, max_retries: int = 2, **options: Any
    ) -> None:
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

    async def ask(self, body: dict[str, Any], watch: Watch | None) -> dict[str, Any]:
        call = {
            "model": self.model,
            **without_defaults(body),
            "timeout": self.timeout_s,
            "num_retries": self.max_retries,
            **self._options,
        }
        if watch is not None:
            call |= {"stream": True, "stream_options": {"include_usage": True}}
            assembled = AssembledAnswer(chat=True)
            await self.drive(self._chunks(call), assembled, watch)
            return assembled.answer()
        try:
            async with asyncio.timeout(self.timeout_s):
                answer = await (await _litellm()).acompletion(**call)
        except Exception as error:
            self.raise_as_backend_error(error)
        with self.reading():
            return dict(answer.model_dump())

    async def _chunks(self, call: dict[str, Any]) -> AsyncGenerator[Any]:
        stream = await (await _litellm()).acompletion(**call)
        try:
            async for chunk in stream:
                yield chunk.model_dump()
        finally:
            await stream.aclose()


async def _litellm() -> Any:
    """The package. Its first import takes seconds and may ask the network for prices: in a thread,
    as programs of other backends share the loop."""

    def load() -> Any:
        try:
            import litellm
        except ImportError as error:
            raise BackendError(
                "LiteLLM needs the package litellm: pip install 'sgl-vllm[litellm]'"
            ) from error
        return litellm

    return await asyncio.to_thread(load)
