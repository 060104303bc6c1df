"""A question that is asked at most once, whoever needs the answer first."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Generic, TypeVar  # Any: what a coroutine sends is not used

T = TypeVar("T")


class Once(Generic[T]):
    """An answer that is requested when it is first needed, on one event loop.

    Callers that come while it is being requested share the answer, or the failure. After a
    failure, the next caller asks again.
    """

    def __init__(self, ask: Callable[[], Coroutine[Any, Any, T]]) -> None:
        self._ask = ask
        self._task: asyncio.Task[T] | None = None

    async def answer(self) -> T:
        if self._task is None or (self._task.done() and not _succeeded(self._task)):
            self._task = asyncio.create_task(self._ask())
            self._task.add_done_callback(_succeeded)  # marks a failure as seen for asyncio
        return await asyncio.shield(self._task)

    @property
    def was_asked(self) -> bool:
        """Whether there is an answer, or one may still arrive."""
        return self._task is not None


def _succeeded(task: asyncio.Task[Any]) -> bool:
    return not task.cancelled() and task.exception() is None
