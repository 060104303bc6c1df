# [routes]
from typing import Any

from fastapi import Request

class OpenAIServingChat:
    async def create_chat_completion(
        self, request: Any, raw_request: Request | None = None
    ) -> Any: ...
