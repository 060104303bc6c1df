# [routes]
from typing import Any

from vllm.entrypoints.serve.engine.protocol import OpenAIBaseModel

class TokenizeCompletionRequest(OpenAIBaseModel):
    model: str | None = ...
    prompt: str

class TokenizeChatRequest(OpenAIBaseModel):
    model: str | None = ...
    messages: list[dict[str, Any]]
    add_generation_prompt: bool = ...

class TokenizeResponse(OpenAIBaseModel):
    tokens: list[int]
