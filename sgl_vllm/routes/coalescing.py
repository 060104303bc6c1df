"""Calls that arrive while the same one runs share its next run.

Owns when a call is made. Does not own what it asks. A route that only reads needs no API key in
some servers, or is polled by many clients; the engine's work must not grow with their number.

    run 1   [---------------)
    calls      a    b    c       arrive during run 1, which may have read older numbers
    run 2                   [---------------)   answers a, b and c
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Hashable
from typing import Generic, TypeVar

Answer = TypeVar("Answer")


MAX_REST_S = 5.0


class Coalescer(Generic[Answer]):
    """Runs at most one call per key at a time. Every answer is from a run that began after the call
    arrived. For one event loop.

    Args:
        rest: if above 0, runs of all keys take turns, and after each the next waits for this many
            times as long as it took (at most `MAX_REST_S`), whoever asks how often. With 4, runs
            take a fifth of the time.
    """

    def __init__(self, rest: float = 0.0) -> None:
        self._rest = rest
        self._turn = asyncio.Lock()
        self._rests_until_s = 0.0
        self._running: dict[Hashable, asyncio.Task[Answer]] = {}
        self._next: dict[Hashable, asyncio.Task[Answer]] = {}

    async def call(self, key: Hashable, make: Callable[[], Awaitable[Answer]]) -> Answer:
        """The answer of `make()`, or of an equal call's.

        A caller that is cancelled does not cancel the run. All callers that share
        a run get its exception.

        Args:
            key: equal for calls whose answers are equal.
        """
        run = self._next.get(key)
        if run is None:
            run = self._next[key] = asyncio.create_task(self._run(key, make))
            # If all callers have left, nothing else reads an exception, and asyncio would log it.
            run.add_done_callback(lambda done: done.cancelled() or done.exception())
        return await asyncio.shield(run)

    async def _run(self, key: Hashable, make: Callable[[], Awaitable[Answer]]) -> Answer:
        if (before := self._running.get(key)) is not None:
            await asyncio.wait([before])
        run = self._running[key] = self._next.pop(key)
        try:
            return await (self._in_turn(make) if self._rest else make())
        finally:
            if self._running.get(key) is run:
                del self._running[key]

    async def _in_turn(self, make: Callable[[], Awaitable[Answer]]) -> Answer:
        now_s = asyncio.get_running_loop().time
        async with self._turn:
            await asyncio.sleep(max(0.0, self._rests_until_s - now_s()))
            begin_s = now_s()
            try:
                return await make()
            finally:
                rest_s = min(self._rest * (now_s() - begin_s), MAX_REST_S)
                self._rests_until_s = now_s() + rest_s
