"""Has the server compute a prompt while a tool runs, so that its result finds it cached.

Owns when the prompt is sent, when that is canceled, and how long tools take. Does not own the
tool's call (`execution.py`). Runs on the background loop.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

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

_MAX_TOOLS = 512


class ToolTimes:
    """The last 16 durations of each of the 512 tools used last, by name."""

    def __init__(self) -> None:
        self._last: OrderedDict[str, deque[float]] = OrderedDict()

    def took(self, tool: str, seconds: float) -> None:
        """A call of `tool` has returned."""
        self._last.setdefault(tool, deque(maxlen=16)).append(seconds)
        self._last.move_to_end(tool)
        if len(self._last) > _MAX_TOOLS:
            self._last.popitem(last=False)

    def soonest_s(self, tool: str) -> float | None:
        """How soon a call that begins now may return: three in four of the last calls took at least
        as long. None if fewer than four are known."""
        known = sorted(self._last.get(tool, ()))
        return known[len(known) // 4] if len(known) >= 4 else None


tool_times = ToolTimes()
"""Those of this process."""


@dataclass(eq=False)
class PrefillAhead:
    """Sends one prompt while a tool runs: at once, and again shortly before the tool is expected
    to return. Meanwhile the server may have evicted it, or moved it to host memory. The second
    request costs next to nothing if the server still has all of it.

    Args:
        send: has the server compute a prompt, and says whether it did. It raises nothing.
        is_needed: whether the prompt goes on with text of the model, as far as is known.
        is_computed: whether the server has computed it.
    """

    transcript: Transcript
    send: Callable[[Transcript], Awaitable[bool]]
    is_needed: Callable[[], bool]
    is_computed: bool = False
    _request: asyncio.Task[None] | None = None

    @contextmanager
    def during(self, tool_s: float | None) -> Iterator[None]:
        """While the tool runs. `tool_s` is how long it will take at least, if that is known."""
        if not global_config.enable_prefill_during_tools:
            yield
            return
        call_later, transcript = asyncio.get_running_loop().call_later, self.transcript
        timers = []
        if transcript.is_worth_warming:
            timers.append(call_later(AFTER_S, self._start))
        is_long = len(transcript.text) >= AGAIN_MIN_CHARS and not transcript.reusable
        if is_long and tool_s is not None and tool_s >= LONG_TOOL_S:
            timers.append(call_later(AGAIN_AFTER * tool_s, self._start))
        try:
            yield
        finally:
            for timer in timers:
                timer.cancel()
            if self._request is not None:  # if it still waits, what follows is sent anyway
                self._request.cancel()

    def _start(self) -> None:
        is_waiting = self._request is not None and not self._request.done()
        if self.is_needed() and not is_waiting:
            self._request = asyncio.create_task(self._compute())

    async def _compute(self) -> None:
        if await self.send(self.transcript):
            self.is_computed = True
