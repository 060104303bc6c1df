# [routes]
from collections.abc import Callable
from typing import TypeVar

_Handler = TypeVar("_Handler", bound=Callable[..., object])

def with_cancellation(handler_func: _Handler) -> _Handler: ...
