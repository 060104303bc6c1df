# [approximate_reuse]
from typing import Any

from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest

class OnlineRenderer:  # [routes, approximate_reuse]
    async def render_chat(self, request: ChatCompletionRequest, **kwargs: Any) -> object: ...
    async def render_completion(  # [routes]
        self, request: CompletionRequest, **kwargs: Any
    ) -> object: ...
