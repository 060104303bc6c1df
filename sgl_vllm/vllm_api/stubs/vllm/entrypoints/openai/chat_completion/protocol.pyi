# [routes]
from typing import Any

from vllm.entrypoints.serve.engine.protocol import OpenAIBaseModel

class ChatCompletionRequest(OpenAIBaseModel):
    messages: list[dict[str, Any]]
    vllm_xargs: dict[str, Any] | None
