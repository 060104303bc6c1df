# [routes]
from typing import Any

from fastapi import Request

class OpenAIServingCompletion:
    async def create_completion(self, request: Any, raw_request: Request | None = None) -> Any: ...
