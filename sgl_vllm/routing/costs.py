"""What it costs to send a request to a worker, the result of a choice, and the requests in flight.

Owns the cost model, which routes are open, and what each worker still has to do for them. Pure.
Workers are *slots* in a `LoadBook`: small numbers that are reused when a worker is removed.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

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


Floats = NDArray[np.float64]


class LoadBook:
    """Loads of all workers, as arrays indexed by slot.

    Invariant: `queued`, `running` and `writing` are the sums over a slot's open routes. A route
    that is unknown, or reported twice, changes nothing.
    """

    def __init__(self) -> None:
        self.queued: Floats = np.zeros(0)  # prompt tokens to compute
        self.running: Floats = np.zeros(0)  # requests
        self.writing: Floats = np.zeros(0)  # output tokens to come
        self.sent: Floats = np.zeros(0)  # uncached prompt tokens ever sent
        self._closed: Floats = np.zeros(0)  # infinite where a slot has no worker
        self._in_prefill: dict[Route, int] = {}
        self._open: dict[Route, int] = {}

    def __len__(self) -> int:
        """Open routes."""
        return len(self._open)

    def open_slot(self, slot: int) -> None:
        """A worker takes an unused slot, the next new one at most."""
        if slot == len(self._closed):
            for name in ("queued", "running", "writing", "sent", "_closed"):
                setattr(self, name, np.append(getattr(self, name), 0.0))
        self._closed[slot] = np.inf
        # Starts at the others' share, so that it does not get every request without a prefix.
        others = self.sent[np.isfinite(self._closed)]
        self.sent[slot] = others.min() if len(others) else 0.0
        self.queued[slot] = self.running[slot] = self.writing[slot] = self._closed[slot] = 0.0

    def close_slot(self, slot: int) -> None:
        """Its worker is removed; its routes count as finished."""
        self._closed[slot] = np.inf
        for book in (self._in_prefill, self._open):
            for route in [route for route, one in book.items() if one == slot]:
                del book[route]

    def start(self, route: Route, slot: int) -> None:
        self._in_prefill[route] = self._open[route] = slot
        self.queued[slot] += route.num_uncached_tokens
        self.sent[slot] += route.num_uncached_tokens
        self.running[slot] += 1
        self.writing[slot] += route.num_output_tokens

    def first_token(self, route: Route) -> None:
        slot = self._in_prefill.pop(route, None)
        if slot is not None:
            self.queued[slot] -= route.num_uncached_tokens

    def finish(self, route: Route) -> None:
        self.first_token(route)
        slot = self._open.pop(route, None)
        if slot is not None:
            self.running[slot] -= 1
            self.writing[slot] -= route.num_output_tokens

    def load(self, slot: int) -> Load:
        return Load(int(self.queued[slot]), int(self.running[slot]))

    def waiting(self, known: Mapping[int, Load], output_tokens: int) -> Floats:
        """The tokens that a new request would wait for at each slot; infinite without a worker.

        Args:
            known: loads that replace the book's own.
            output_tokens: what one of their requests writes, where the book has no mean.
        """
        waiting: Floats = self.queued + self.writing + self._closed
        for slot, load in known.items():
            own = self.running[slot]
            of_each = self.writing[slot] / own if own else output_tokens
            waiting[slot] = load.num_queued_tokens + load.num_running * of_each
        return waiting
