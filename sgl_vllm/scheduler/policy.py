"""In which order waiting requests are admitted: longest cached prefix first, without starvation.

Owns the order and its bound. Does not know vLLM, nor how a prefix is matched. Pure.

Idea: cache-aware scheduling (arXiv 2312.07104, section 3), which alone starves cold requests; the
bound is our addition.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Candidate:
    """A waiting request, as far as its place in the queue goes.

    Attributes:
        matched_tokens: the length of its cached prefix.
        arrival_s: when it came, on the caller's clock.
        passes: how many requests that came later were admitted before it.
        goes_first: it was running already (preempted), and keeps its place at the head.
    """

    matched_tokens: int
    arrival_s: float
    passes: int = 0
    goes_first: bool = False


@dataclass(frozen=True, slots=True)
class LongestPrefixFirst:
    """Longest matched prefix first; ties in order of arrival.

    The bound: a request that `max_passes` later ones overtook, or that has waited `max_wait_s`,
    goes before every one that has not. Such requests go in order of arrival. So once a request is
    overdue, only older ones are admitted before it; and it is overtaken by at most
    `max_passes` - 1 + (the number admitted in one step) requests in all.
    """

    max_passes: int
    max_wait_s: float

    def order(self, candidates: Sequence[Candidate], now_s: float) -> list[int]:
        """The candidates' indices in the order of admission. O(n log n)."""

        def key(index: int) -> tuple[int, float, float]:
            candidate = candidates[index]
            if candidate.goes_first:
                return (0, 0.0, float(index))
            if (
                candidate.passes >= self.max_passes
                or now_s - candidate.arrival_s >= self.max_wait_s
            ):
                return (1, 0.0, candidate.arrival_s)
            return (2, -candidate.matched_tokens, candidate.arrival_s)

        return sorted(range(len(candidates)), key=key)
