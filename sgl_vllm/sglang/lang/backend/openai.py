"""SGLang's `OpenAI`: OpenAI's service, Azure's, and any with the same API."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any  # Any: options of the official client

from sgl_vllm.lang.backends import openai_service as core
from sgl_vllm.lang.backends.base import ChoiceAnswer, GenAnswer, GenRequest, Json, Prompt, Watch
from sgl_vllm.lang.backends.openai_api import read_usage
from sgl_vllm.lang.constraints import dtype_constraint
from sgl_vllm.lang.errors import BackendError
from sgl_vllm.lang.keywords import suggests
from sgl_vllm.sglang.deprecation import deprecated
from sgl_vllm.sglang.lang.backend.base_backend import BaseBackend
from sgl_vllm.sglang.lang.backend.prompt_forms import as_text
from sgl_vllm.sglang.lang.chat_template import ChatTemplate

if TYPE_CHECKING:
    from openai import AsyncOpenAI

_INT = dtype_constraint("int")[0]
_STR = dtype_constraint("str")[0]


@dataclass
class TokenUsage:
    """What a backend's calls have cost since the last `reset`."""

    prompt_tokens: int = 0
    completion_tokens: int = 0

    def reset(self) -> None:
        """Begin to count again."""
        self.prompt_tokens = self.completion_tokens = 0


class _OpenAI(core.OpenAI):
    """A service called through a client with options of the program's own. Counts tokens.

    A completion model gets a prompt with roles as text. It has no constraints: for `dtype` int or
    str, the text is ended by a stop and cut to the literal it begins with. SGLang does the same.
    """

    def __init__(
        self,
        model: str,
        make_client: Callable[[_OpenAI], AsyncOpenAI],
        **options: Any,
    ) -> None:
        super().__init__(model, **options)
        self.continues_turns = not self.is_chat_model
        self._make_client = make_client
        self.token_usage = TokenUsage()

    @property
    def api_key(self) -> str:
        """The key to send."""
        return self._api_key or "EMPTY"

    def new_client(self) -> AsyncOpenAI:
        return self._make_client(self)

    async def ask(self, body: Json, watch: Watch | None) -> Json:
        answer = await super().ask(body, watch)
        with self.reading():
            usage = read_usage(answer)
        self.token_usage.prompt_tokens += usage.prompt_tokens
        self.token_usage.completion_tokens += usage.completion_tokens
        return answer

    def _accepted(self, prompt: Prompt) -> Prompt:
        """`prompt` in the form that the model accepts, where there is one."""
        return prompt if self.is_chat_model else as_text(prompt)

    async def score(
        self, prompt: Prompt, choices: tuple[str, ...], *, unconditional: bool, warm: bool
    ) -> ChoiceAnswer:
        return await super().score(
            self._accepted(prompt), choices, unconditional=unconditional, warm=warm
        )

    async def generate(self, request: GenRequest) -> GenAnswer:
        request = replace(request, prompt=self._accepted(request.prompt))
        if self.is_chat_model or request.constraint not in (_INT, _STR):
            return await super().generate(request)
        is_int = request.constraint == _INT
        stop = (" ", "\n") if is_int else ("\n",)
        sampling = replace(request.sampling, stop=stop)
        answer = await super().generate(
            replace(request, sampling=sampling, constraint=None, watch=None)
        )
        texts = tuple(
            replace(text, text=self._literal(text.text, r"[-+]?[0-9]+" if is_int else r'"[^"]*"'))
            for text in answer.texts
        )
        if request.watch is not None:
            request.watch(texts[0].text, None)
        return replace(answer, texts=texts)

    def _literal(self, text: str, pattern: str) -> str:
        found = re.match(rf"\s*({pattern})", text)
        if found is None:
            raise BackendError(
                f"{self.name} answered {text!r}, which does not begin with a literal of the dtype: "
                f"use a chat model and json_schema"
            )
        return found.group(1)


class OpenAI(BaseBackend):
    """A model of OpenAI's, of Azure's (`is_azure`), or of a server with the same API (`base_url`).

    `token_usage` counts the tokens of all calls. Of the options of the official client, `api_key`,
    `base_url`, `organization`, `project`, `timeout`, `max_retries`, `default_headers`,
    `default_query` and `http_client` are accepted, for Azure also `azure_endpoint`,
    `azure_deployment`, `api_version` and `azure_ad_token`. `chat_template` has no effect.
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
        max_retries: int = 2,
        azure_endpoint: str | None = None,
        azure_deployment: str | None = None,
        api_version: str | None = None,
        azure_ad_token: str | None = None,
        **client_options: Any,
    ) -> None:
        if chat_template is not None:
            deprecated("chat_template", "leave it out: the service has its own template")
        azure: dict[str, str | None] = {}
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
            azure = {"api_version": api_version, "azure_ad_token": azure_ad_token}
        options = {"timeout": timeout, "max_retries": max_retries, **client_options}
        self._openai = _OpenAI(
            model_name,
            lambda backend: _client(backend, options, azure if is_azure else None),
            base_url=base_url,
            api_key=api_key,
            is_chat_model=is_chat_model,
            timeout_s=timeout,
            max_retries=max_retries,
        )
        super().__init__(self._openai, model_name)

    @property
    def is_chat_model(self) -> bool:
        """Whether the model is for chats. Otherwise it completes text."""
        return self._openai.is_chat_model

    @property
    def token_usage(self) -> TokenUsage:
        """The tokens of all calls of this backend since `token_usage.reset()`."""
        return self._openai.token_usage


def _client(
    backend: _OpenAI, options: Mapping[str, Any], azure: Mapping[str, Any] | None
) -> AsyncOpenAI:
    import openai

    address: dict[str, Any] = {"base_url": backend.base_url, "api_key": backend.api_key, **options}
    if azure is None:
        return suggests(openai.AsyncOpenAI)(**address)
    return suggests(openai.AsyncAzureOpenAI)(**address, **azure)
