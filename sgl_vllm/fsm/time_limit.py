"""A limit on the time of work that others may keep from the processor."""

from __future__ import annotations

import time
from collections.abc import Callable

PATIENCE = 6
"""Work that gets too little of the processors may take so many times its limit."""


class TimeLimit:
    """Time that work may take, from now on: `limit_s` seconds of processor time, but not less than
    `limit_s` and not more than `PATIENCE` times as many seconds of the clock. Beside an engine that
    keeps all cores busy, 2 s of work take 20 s; a limit on the clock alone would refuse it for what
    others do.

    Args:
        limit_s: seconds.
        cpu_s: the seconds of processor time that the work has had so far, in all its threads.
    """

    def __init__(self, limit_s: float, cpu_s: Callable[[], float]) -> None:
        self._limit_s = limit_s
        self._cpu_s = cpu_s
        self._started = time.monotonic()
        self._cpu_at_start_s = cpu_s()

    def left_s(self) -> float:
        """After how many seconds to ask again; 0 if the time is used up."""
        passed = time.monotonic() - self._started
        if passed < self._limit_s:
            return self._limit_s - passed
        left = self._limit_s - (self._cpu_s() - self._cpu_at_start_s)
        return max(0.0, min(left, PATIENCE * self._limit_s - passed))
