"""How long tools take, so that what follows one is ready when it returns.

Owns the durations of this process, by the tool's name. Does not own what is done with them
(`execution.py`).
"""

from __future__ import annotations

from collections import OrderedDict, deque

_MAX_TOOLS = 512
_NUM_LAST = 16
_MIN_KNOWN = 4


class ToolTimes:
    """The last durations of each tool. Used on the background loop only."""

    def __init__(self) -> None:
        self._last: OrderedDict[str, deque[float]] = OrderedDict()

    def took(self, tool: str, seconds: float) -> None:
        """A call of `tool` has returned. Of more than 512 tools the longest unused is forgotten."""
        self._last.setdefault(tool, deque(maxlen=_NUM_LAST)).append(seconds)
        self._last.move_to_end(tool)
        if len(self._last) > _MAX_TOOLS:
            self._last.popitem(last=False)

    def soonest_s(self, tool: str) -> float | None:
        """How soon a call that begins now may return: three in four of the last 16 calls took at
        least as long. None if fewer than four are known."""
        known = sorted(self._last.get(tool, ()))
        return known[len(known) // 4] if len(known) >= _MIN_KNOWN else None


tool_times = ToolTimes()
"""Those of this process."""
