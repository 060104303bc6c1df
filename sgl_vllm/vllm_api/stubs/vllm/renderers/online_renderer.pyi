# [approximate_reuse]
from typing import Any

from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

class OnlineRenderer:
    async def render_chat(self, request: ChatCompletionRequest, **kwargs: Any) -> object: ...
