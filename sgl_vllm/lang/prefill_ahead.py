"""Has the server compute a prompt while a tool runs, so that its result finds it cached.

Owns when the prompt is sent, and when that is canceled. Does not own the tool's call
(`execution.py`), nor how long tools take (`tool_times.py`). Runs on the background loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager

from sgl_vllm.lang.settings import global_config
from sgl_vllm.lang.transcript import Transcript

AFTER_S = 0.02
"""How long a tool runs before the prompt up to it is computed meanwhile: one request more is not
worth it for a tool that is about to return."""

LONG_TOOL_S = 2.0
"""While a tool runs that usually takes longer, other requests may evict the prompt up to it."""

AGAIN_AFTER = 0.8
"""The prompt is sent again after this share of the time that a long tool usually takes."""

AGAIN_MIN_CHARS = 4096
"""A prompt of fewer characters is computed so fast that it is not sent a second time."""


class PrefillAhead:
    """Sends one prompt while a tool runs: at once, and again shortly before the tool is expected
    to return. Meanwhile the server may have evicted it, or moved it to host memory. The second
    request costs next to nothing if the server still has all of it.

    `is_computed` says whether the server has computed it.
    """

    def __init__(
        self,
        transcript: Transcript,
        send: Callable[[Transcript], Awaitable[bool]],
        is_needed: Callable[[], bool],
    ) -> None:
        """Args:
        send: has the server compute a prompt, and says whether it did. It raises nothing.
        is_needed: whether the prompt goes on with text of the model, as far as is known.
        """
        self._transcript = transcript
        self._send = send
        self._is_needed = is_needed
        self._request: asyncio.Task[None] | None = None
        self.is_computed = False

    @contextmanager
    def during(self, tool_s: float | None) -> Iterator[None]:
        """While the tool runs. `tool_s` is how long it will take at least, if that is known."""
        if not global_config.enable_prefill_during_tools:
            yield
            return
        loop = asyncio.get_running_loop()
        timers = [loop.call_later(AFTER_S, self._first)]
        if tool_s is not None and tool_s >= LONG_TOOL_S:
            timers.append(loop.call_later(AGAIN_AFTER * tool_s, self._again))
        try:
            yield
        finally:
            for timer in timers:
                timer.cancel()
            if self._request is not None:  # if it still waits, what follows is sent anyway
                self._request.cancel()

    def _first(self) -> None:
        if self._transcript.is_worth_a_hint:
            self._start()

    def _again(self) -> None:
        is_long = len(self._transcript.text) >= AGAIN_MIN_CHARS and not self._transcript.reusable
        if is_long and (self._request is None or self._request.done()):
            self._start()

    def _start(self) -> None:
        if self._is_needed():
            self._request = asyncio.create_task(self._compute())

    async def _compute(self) -> None:
        if await self._send(self._transcript):
            self.is_computed = True
