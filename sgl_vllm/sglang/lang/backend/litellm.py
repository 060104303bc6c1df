"""SGLang's `LiteLLM`: services that LiteLLM reaches."""

from __future__ import annotations

from typing import Any  # Any: options of LiteLLM's

from sgl_vllm.lang.backends import litellm_service as core
from sgl_vllm.lang.backends.base import Json, Prompt
from sgl_vllm.sglang.deprecation import deprecated
from sgl_vllm.sglang.lang.backend.base_backend import BaseBackend
from sgl_vllm.sglang.lang.backend.prompt_forms import as_user_turn
from sgl_vllm.sglang.lang.chat_template import ChatTemplate


class LiteLLMWithUserTurns(core.LiteLLM):
    """Sends a prompt without roles as one user turn."""

    def prompt_body(self, prompt: Prompt) -> Json:
        return super().prompt_body(as_user_turn(prompt))


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
        max_retries: int = 2,
        default_headers: dict[str, str] | None = None,
        **options: Any,
    ) -> None:
        if chat_template is not None:
            deprecated("chat_template", "leave it out: the service has its own template")
        if default_headers is not None:
            options["extra_headers"] = default_headers
        backend = LiteLLMWithUserTurns(
            model_name,
            timeout_s=timeout,
            max_retries=max_retries,
            **{name: value for name, value in options.items() if value is not None},
        )
        super().__init__(backend, model_name)
