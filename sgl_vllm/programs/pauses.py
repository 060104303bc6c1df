"""How long contexts pause until they are continued: counts by bucket, which decay. Pure."""

from __future__ import annotations

import itertools
from bisect import bisect_left, bisect_right

MIN_OUTCOMES = 16
"""With fewer outcomes than this nothing is expected, and a kind counts as any other. A tenant of
which nothing is known is believed so many times."""

MAX_OUTCOMES = 1000
"""Beyond this, all counts are halved, so that old pauses are forgotten."""

_BEGINS_S = [0.0, *(1e-3 * 2 ** (i / 2) for i in range(54))]
"""Where the buckets of pauses begin: two per octave, from a millisecond to a day."""


class Pauses:
    """How long contexts paused until they were continued: counts by bucket, which decay."""

    def __init__(self) -> None:
        self._counts = [0.0] * len(_BEGINS_S)
        self.num_outcomes = 0.0
        self.num_continued = 0.0  # of the outcomes

    def add(self, pause_s: float | None) -> None:
        """A context was continued after this pause; None if it was not."""
        if pause_s is not None:
            self._counts[bisect_right(_BEGINS_S, max(pause_s, 0.0)) - 1] += 1
            self.num_continued += 1
        self.num_outcomes += 1
        if self.num_outcomes > MAX_OUTCOMES:
            self._counts = [count / 2 for count in self._counts]
            self.num_outcomes /= 2
            self.num_continued /= 2

    def quantile_s(self, share: float) -> float:
        """This share of the contexts that were continued paused for no longer, to a factor of the
        square root of two; 0 with fewer than `MIN_OUTCOMES`."""
        if self.num_outcomes < MIN_OUTCOMES:
            return 0.0
        num_until = itertools.accumulate(self._counts)
        last = next(i for i, num in enumerate(num_until) if num >= share * self.num_continued)
        return _BEGINS_S[min(last + 1, len(_BEGINS_S) - 1)]

    def expected_for_s(self, horizon_s: float) -> float:
        """For how long after its end a context will more likely than not be continued within the
        next `horizon_s`. Cost: a few microseconds."""
        if self.num_outcomes < MIN_OUTCOMES:
            return 0.0
        num_before = list(itertools.accumulate(self._counts, initial=0.0))
        for bucket, elapsed_s in enumerate(_BEGINS_S):
            num_left = self.num_outcomes - num_before[bucket]
            end = bisect_left(_BEGINS_S, elapsed_s + horizon_s)
            if 2 * (num_before[end] - num_before[bucket]) <= num_left:
                return elapsed_s
        return _BEGINS_S[-1]
