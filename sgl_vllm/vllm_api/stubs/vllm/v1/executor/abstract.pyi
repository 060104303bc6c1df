# [radix_slot_copy]
from collections.abc import Callable
from typing import Any, TypeVar

_Result = TypeVar("_Result")

class Executor:
    def collective_rpc(
        self,
        method: str | Callable[..., _Result],
        timeout: float | None = ...,
        args: tuple[Any, ...] = ...,
    ) -> list[_Result]: ...
