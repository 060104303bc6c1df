# [routes]
from typing import Any

from fastapi import Request

class OpenAIServingResponses:
    async def create_responses(self, request: Any, raw_request: Request | None = None) -> Any: ...
