# [routes]
from typing import Any

from vllm.config import ModelConfig
from vllm.entrypoints.serve.engine.protocol import OpenAIBaseModel
from vllm.renderers import TokenizeParams

class TokenizeCompletionRequest(OpenAIBaseModel):
    model: str | None = ...
    prompt: str
    add_special_tokens: bool = ...

    def build_tok_params(self, model_config: ModelConfig) -> TokenizeParams: ...

class TokenizeChatRequest(OpenAIBaseModel):
    model: str | None = ...
    messages: list[dict[str, Any]]
    add_generation_prompt: bool = ...
    add_special_tokens: bool = ...

    def build_tok_params(self, model_config: ModelConfig) -> TokenizeParams: ...

class TokenizeResponse(OpenAIBaseModel):
    tokens: list[int]
