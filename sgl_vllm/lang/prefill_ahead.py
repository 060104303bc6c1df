"""When to send a prompt ahead while a tool runs, so that it is cached when the tool returns.

Owns these times, and how long tools take. Sending is in `execution.py`.
"""

from __future__ import annotations

from collections import OrderedDict, deque

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


def times_to_send(transcript: Transcript, tool_s: float | None) -> list[float]:
    """When a prompt is sent, in seconds since a tool began: at once, and again shortly before the
    tool is expected to return. Meanwhile the server may have evicted it, or moved it to host
    memory. The second request costs next to nothing if the server still has all of it.

    `tool_s` is how long the tool will take at least, if that is known.
    """
    times = [AFTER_S] if transcript.is_worth_warming else []
    is_long = len(transcript.text) >= AGAIN_MIN_CHARS and not transcript.reusable
    if is_long and tool_s is not None and tool_s >= LONG_TOOL_S:
        times.append(AGAIN_AFTER * tool_s)
    return times
