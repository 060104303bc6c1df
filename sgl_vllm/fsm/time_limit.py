"""A time limit that a busy machine does not use up: it counts processor time."""

from __future__ import annotations

import time
from collections.abc import Callable

PATIENCE = 6
"""On a busy machine, work may take up to this many times its limit by the clock."""


class TimeLimit:
    """How long work may take from now on: `limit_s` seconds of processor time, and by the clock at
    least `limit_s` and at most `PATIENCE * limit_s` seconds. Beside an engine that keeps all cores
    busy, 2 s of work can take 20 s; a limit by the clock alone would refuse it.

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
