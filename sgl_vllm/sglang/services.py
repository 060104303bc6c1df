"""SGLang's backends for services: OpenAI's, Anthropic's, Google's, and what LiteLLM reaches.

Owns the forms in which SGLang sends prompts to services that accept only chats or only text.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any  # Any: JSON, and options of the official clients

from sgl_vllm.lang.backends import anthropic_service, openai_service
from sgl_vllm.lang.backends.base import Json, without_none
from sgl_vllm.lang.backends.requests import ChoiceAnswer, GenAnswer, Generated, GenRequest, Watch
from sgl_vllm.lang.backends.scoreless import ScorelessBackend
from sgl_vllm.lang.constraints import dtype_constraint
from sgl_vllm.lang.errors import BackendError
from sgl_vllm.lang.keywords import suggests
from sgl_vllm.lang.prompts import ChatPrompt, Message, Prompt, TextPrompt
from sgl_vllm.lang.usage import Usage
from sgl_vllm.sglang.backends import BaseBackend, ChatTemplate

if TYPE_CHECKING:
    from openai import AsyncOpenAI


class _TakesText(ScorelessBackend):
    """A chat service to which a prompt without roles is sent as one user turn."""

    def prompt_body(self, prompt: Prompt) -> Json:
        if isinstance(prompt, TextPrompt):
            prompt = ChatPrompt((Message("user", prompt.text),), "generate")
        return super().prompt_body(prompt)


class _Anthropic(_TakesText, anthropic_service.Anthropic):
    pass


class _LiteLLM(_TakesText, openai_service.LiteLLM):
    pass


class Anthropic(BaseBackend):
    """A model of Anthropic's. A prompt without roles is sent as one user turn. `options` are
    `api_key`, `base_url` and `max_retries`."""

    def __init__(self, model_name: str, *, timeout: float = 600.0, **options: Any) -> None:
        super().__init__(_Anthropic(model_name, timeout_s=timeout, **options), model_name)


class LiteLLM(BaseBackend):
    """A chat model under LiteLLM's name for it. A prompt without roles is sent as one user turn.

    `options` (api_key, base_url, organization, …) go to LiteLLM. `chat_template` has no effect.
    """

    def __init__(
        self,
        model_name: str,
        chat_template: ChatTemplate | None = None,
        *,
        timeout: float = 600.0,
        default_headers: dict[str, str] | None = None,
        **options: Any,
    ) -> None:
        given = without_none(extra_headers=default_headers, **options)
        super().__init__(
            _LiteLLM(model_name, timeout_s=timeout, **given), model_name, chat_template
        )


class VertexAI(BaseBackend):
    """A Gemini model, called through LiteLLM: at Vertex AI if GCP_PROJECT_ID (and GCP_LOCATION) is
    set, with `safety_settings`, and else with GEMINI_API_KEY. A prompt without roles is sent as one
    user turn."""

    @suggests
    def __init__(self, model_name: str, safety_settings: Any = None) -> None:
        if project := os.environ.get("GCP_PROJECT_ID"):
            place = without_none(
                vertex_project=project,
                vertex_location=os.environ.get("GCP_LOCATION"),
                safety_settings=safety_settings,
            )
            backend = _LiteLLM(f"vertex_ai/{model_name}", **place)
        elif "GEMINI_API_KEY" in os.environ:  # which LiteLLM reads
            backend = _LiteLLM(f"gemini/{model_name}")
        else:
            raise ValueError("VertexAI needs GCP_PROJECT_ID or GEMINI_API_KEY to be set")
        super().__init__(backend, model_name)


# --- OpenAI --------------------------------------------------------------------------------------

_LITERALS = {
    dtype_constraint("int")[0]: (r"\s*([-+]?[0-9]+)", (" ", "\n")),
    dtype_constraint("str")[0]: (r'\s*("[^"]*")', ("\n",)),
}
"""What a text begins with, and the stops that end it."""


@dataclass
class TokenUsage:
    """What a backend's calls have cost since the last `reset`."""

    prompt_tokens: int = 0
    completion_tokens: int = 0

    def reset(self) -> None:
        """Begin to count again."""
        self.prompt_tokens = self.completion_tokens = 0


class _OpenAI(openai_service.OpenAI):
    """A service called through a client with options of the program's own. Counts tokens.

    A completion model gets a prompt with roles as text. It has no constraints: for `dtype` int or
    str, the text is ended by a stop and cut to the literal it begins with. SGLang does the same.
    """

    def __init__(
        self, model: str, client: Callable[..., AsyncOpenAI], key: str | None, **options: Any
    ) -> None:
        super().__init__(model, api_key=key, **options)
        self.continues_turns = not self.is_chat_model
        self._client = client
        self.token_usage = TokenUsage()

    def new_client(self) -> AsyncOpenAI:
        return self._client(base_url=self.base_url, api_key=self._api_key or "EMPTY")

    async def texts(self, body: Json, watch: Watch | None) -> tuple[list[Generated], Usage]:
        texts, usage = await super().texts(body, watch)
        self.token_usage.prompt_tokens += usage.prompt_tokens
        self.token_usage.completion_tokens += usage.completion_tokens
        return texts, usage

    def _accepted(self, prompt: Prompt) -> Prompt:
        """`prompt` in the form that the model accepts: for a completion model, text with a line for
        each turn, such as ``USER:Hello.``, which is SGLang's default chat template. A prompt with
        media stays as it is."""
        if self.is_chat_model or isinstance(prompt, TextPrompt) or prompt.media:
            return prompt
        text = "".join(f"{message.role.upper()}:{message.text}\n" for message in prompt.messages)
        if prompt.ending == "generate":
            text += "ASSISTANT:"
        return TextPrompt(text.removesuffix("\n") if prompt.ending == "continue" else text)

    async def score(
        self, prompt: Prompt, choices: tuple[str, ...], *, unconditional: bool, warm: bool
    ) -> ChoiceAnswer:
        return await super().score(
            self._accepted(prompt), choices, unconditional=unconditional, warm=warm
        )

    async def generate(self, request: GenRequest) -> GenAnswer:
        request = replace(request, prompt=self._accepted(request.prompt))
        if self.is_chat_model or request.constraint not in _LITERALS:
            return await super().generate(request)
        pattern, stop = _LITERALS[request.constraint]
        sampling = replace(request.sampling, stop=stop)
        asked = replace(request, sampling=sampling, constraint=None, watch=None)
        answer = await super().generate(asked)
        texts = tuple(replace(one, text=self._literal(one.text, pattern)) for one in answer.texts)
        if request.watch is not None:
            request.watch(texts[0].text, None)
        return replace(answer, texts=texts)

    def _literal(self, text: str, pattern: str) -> str:
        found = re.match(pattern, text)
        if found is None:
            raise BackendError(
                f"{self.name} answered {text!r}, which does not begin with a literal of the dtype: "
                f"use a chat model and json_schema"
            )
        return found.group(1)


class OpenAI(BaseBackend):
    """A model of OpenAI's, of Azure's (`is_azure`), or of a server with the same API (`base_url`).

    `token_usage` counts the tokens of all calls. `options` are those of the official client: for
    example `organization`, `max_retries`, `default_headers`, and for Azure `api_version`.
    `chat_template` has no effect.
    """

    def __init__(
        self,
        model_name: str,
        is_chat_model: bool | None = None,
        chat_template: ChatTemplate | None = None,
        is_azure: bool = False,
        *,
        api_key: str | None = None,
        base_url: str | None = None,
        timeout: float = 600.0,
        azure_endpoint: str | None = None,
        azure_deployment: str | None = None,
        **options: Any,
    ) -> None:
        if is_azure:
            endpoint = azure_endpoint or os.environ.get("AZURE_OPENAI_ENDPOINT")
            if base_url is None and endpoint is None:
                raise ValueError(
                    "Azure needs azure_endpoint=..., or AZURE_OPENAI_ENDPOINT to be set"
                )
            base_url = base_url or (
                f"{str(endpoint).rstrip('/')}/openai/deployments/{azure_deployment or model_name}"
            )
            api_key = api_key or os.environ.get("AZURE_OPENAI_API_KEY")

        def client(**address: Any) -> AsyncOpenAI:
            import openai

            kind = openai.AsyncAzureOpenAI if is_azure else openai.AsyncOpenAI
            return suggests(kind)(**address, timeout=timeout, **options)

        self._openai = _OpenAI(
            model_name,
            client,
            api_key,
            base_url=base_url,
            is_chat_model=is_chat_model,
            timeout_s=timeout,
        )
        super().__init__(self._openai, model_name, chat_template)

    @property
    def is_chat_model(self) -> bool:
        """Whether the model is for chats. Otherwise it completes text."""
        return self._openai.is_chat_model

    @property
    def token_usage(self) -> TokenUsage:
        """The tokens of all calls of this backend since `token_usage.reset()`."""
        return self._openai.token_usage
