# [routes]
from collections.abc import Callable
from typing import TypeVar

from fastapi import Request

_Handler = TypeVar("_Handler", bound=Callable[..., object])

async def validate_json_request(raw_request: Request) -> None: ...
def with_cancellation(handler_func: _Handler) -> _Handler: ...
