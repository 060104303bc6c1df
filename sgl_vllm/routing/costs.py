"""What it costs to send a request to a worker, and the result of a choice.

Owns the cost model and the values that pass between a router and its adapters. Pure.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

Worker = Hashable
"""The caller's name for a worker: a replica's id, an address, a rank."""


@dataclass(frozen=True, slots=True)
class Load:
    """What a worker has to do already.

    Attributes:
        num_queued_tokens: prompt tokens that were sent to it, are not cached there, and are not
            computed yet.
        num_running: its unfinished requests.
    """

    num_queued_tokens: int = 0
    num_running: int = 0


@dataclass(frozen=True, slots=True)
class CostModel:
    """The cost of a choice, in units of the time to compute one uncached prompt token.

        cost = uncached tokens + queued tokens + output tokens that running requests still produce

    The first term is compute, the others are waiting. While little waits, a request goes to the
    worker with its prefix. When so much waits there that computing the prefix elsewhere is faster,
    it goes elsewhere, and that worker then has the prefix too. So a hot prefix spreads, and a
    request with no cached prefix on any worker goes to the one with the least waiting.

    Attributes:
        output_tokens: the assumed output of a running request, unless its own limit is lower.
        group_patience_tokens: a request of a group leaves its group's worker if another worker is
            cheaper by more than this.
    """

    output_tokens: int = 500
    group_patience_tokens: float = 8192.0


@dataclass(frozen=True, slots=True, eq=False)
class Route:
    """One choice.

    Attributes:
        worker: where the request goes.
        num_tokens: its prompt tokens; estimated for text.
        num_cached_tokens: of these, how many the router expects to be cached there.
        num_output_tokens: its assumed output.
        cost: see `CostModel`.
    """

    worker: Worker
    num_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    cost: float

    @property
    def num_uncached_tokens(self) -> int:
        return self.num_tokens - self.num_cached_tokens
