"""SGLang's `Anthropic`: a model of Anthropic's."""

from __future__ import annotations

from sgl_vllm.lang.backends import anthropic_service as core
from sgl_vllm.lang.backends.base import Json, Prompt
from sgl_vllm.lang.keywords import suggests
from sgl_vllm.sglang.lang.backend.base_backend import BaseBackend
from sgl_vllm.sglang.lang.backend.prompt_forms import as_user_turn


class _Anthropic(core.Anthropic):
    def _prompt_body(self, prompt: Prompt) -> Json:
        return super()._prompt_body(as_user_turn(prompt))


class Anthropic(BaseBackend):
    """A model of Anthropic's. A prompt without roles is sent as one user turn."""

    @suggests
    def __init__(
        self,
        model_name: str,
        *,
        api_key: str | None = None,
        base_url: str | None = None,
        timeout: float = 600.0,
        max_retries: int = 2,
    ) -> None:
        backend = _Anthropic(
            model_name,
            api_key=api_key,
            base_url=base_url,
            timeout_s=timeout,
            max_retries=max_retries,
        )
        super().__init__(backend, model_name)
