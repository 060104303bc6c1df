# [routes]
from typing import Any

from fastapi import Request

class AnthropicServingMessages:
    async def create_messages(self, request: Any, raw_request: Request | None = None) -> Any: ...
