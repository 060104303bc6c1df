"""SGLang's `VertexAI`: a Gemini model, at Vertex AI or at Google's OpenAI-compatible endpoint."""

from __future__ import annotations

import os
from typing import Any  # Any: Google's safety settings

from sgl_vllm.lang.backends import openai_service
from sgl_vllm.lang.backends.base import Backend, Json, Prompt
from sgl_vllm.lang.keywords import suggests
from sgl_vllm.sglang.lang.backend.base_backend import BaseBackend
from sgl_vllm.sglang.lang.backend.litellm import LiteLLMWithUserTurns
from sgl_vllm.sglang.lang.backend.prompt_forms import as_user_turn

GEMINI_URL = "https://generativelanguage.googleapis.com/v1beta/openai"


class _Gemini(openai_service.OpenAI):
    def prompt_body(self, prompt: Prompt) -> Json:
        return super().prompt_body(as_user_turn(prompt))


class VertexAI(BaseBackend):
    """A Gemini model.

    With GCP_PROJECT_ID set (and GCP_LOCATION), it is called at Vertex AI, which needs the package
    litellm and Google's credentials. Otherwise GEMINI_API_KEY must be set, and the model is called
    at Google's OpenAI-compatible endpoint. `safety_settings` are sent to Vertex AI only. A prompt
    without roles is sent as one user turn.
    """

    @suggests
    def __init__(self, model_name: str, safety_settings: Any = None) -> None:
        super().__init__(_backend(model_name, safety_settings), model_name)


def _backend(model_name: str, safety_settings: Any) -> Backend:
    project, location = os.environ.get("GCP_PROJECT_ID"), os.environ.get("GCP_LOCATION")
    if project is not None:
        options = {
            "vertex_project": project,
            "vertex_location": location,
            "safety_settings": safety_settings,
        }
        given = {name: value for name, value in options.items() if value is not None}
        return LiteLLMWithUserTurns(f"vertex_ai/{model_name}", **given)
    key = os.environ.get("GEMINI_API_KEY")
    if key is None:
        raise ValueError("VertexAI needs GCP_PROJECT_ID or GEMINI_API_KEY to be set")
    return _Gemini(model_name, base_url=GEMINI_URL, api_key=key, is_chat_model=True)
