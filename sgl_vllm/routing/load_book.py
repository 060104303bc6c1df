"""The requests in flight at each worker, as sums that a choice can read at once.

Owns which routes are open, and what each worker still has to do for them. Pure. Workers are
*slots*: small numbers that are reused when a worker is removed.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from sgl_vllm.routing.costs import Load, Route

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
