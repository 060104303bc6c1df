"""Fair shares between tenants: deficit counters over computed tokens. Pure.

Idea: deficit longest prefix match, DLPM (arXiv 2501.14312). Each tenant has credit, and each token
that is computed for it costs one. While some waiting tenant has credit left, those without credit
go last. Cached tokens are free, so requests are ordered by cached prefix as far as fairness allows.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Hashable

MAX_DEBT_QUANTA = 10
"""The largest debt. Without it, debts would grow while tenants with credit wait for something other
than compute, such as a grammar."""

MAX_ABSENT = 10_000
"""At most this many tenants without waiting requests are remembered. Beyond it, the half with the
largest debts is."""


class DeficitCounters:
    """The credit of every tenant, in tokens.

    Whenever no waiting tenant has credit, all tenants get `quantum` more, as often as needed. So a
    tenant's credit lies between `quantum` and -f, where f is what its admitted requests still
    compute once its credit is spent. Of two tenants that always wait and whose requests could be
    admitted, one gets at most 2 * (`quantum` + f) computed tokens more than the other, for f up to
    `MAX_DEBT_QUANTA` quanta.

    A new tenant starts with `quantum`. All tenants also get more once those with credit have spent
    twice what all waiting tenants can have, so an endless series of new tenants cannot starve an
    old one. A tenant without requests keeps its debt until others have paid off as much, but no
    credit.

    Args:
        quantum: tokens, at least 1. Smaller is fairer; larger leaves more room for cache hits.
    """

    def __init__(self, quantum: int) -> None:
        if quantum < 1:
            raise ValueError(f"quantum must be at least 1 token, not {quantum}")
        self._quantum = quantum
        self._credit: dict[Hashable, int] = {}
        self._num_spent = 0  # credit, since the last refill

    def charge(self, tenant: Hashable, num_tokens: int) -> None:
        """Record that `num_tokens` were computed for `tenant`."""
        credit = self._credit.get(tenant, self._quantum)
        self._num_spent += max(0, min(credit, num_tokens))
        self._credit[tenant] = max(credit - num_tokens, -MAX_DEBT_QUANTA * self._quantum)

    def without_credit(self, waiting: Collection[Hashable]) -> set[Hashable]:
        """The waiting tenants that go last. Never all of them after `refill_if_due`. Changes
        nothing. Cost: O(waiting tenants)."""
        return {tenant for tenant in waiting if self._credit.get(tenant, self._quantum) <= 0}

    def refill_if_due(self, waiting: Collection[Hashable]) -> None:
        """Give all tenants credit if no waiting tenant has any, or those with credit have spent
        enough. Calling it again changes nothing. Cost: O(tenants)."""
        credit = self._credit
        best = max((credit.get(tenant, self._quantum) for tenant in waiting), default=1)
        if best <= 0:
            self._refill(waiting, (-best // self._quantum + 1) * self._quantum)
        elif self._num_spent > 2 * self._quantum * (len(waiting) + 1):
            self._refill(waiting, self._quantum)
        if len(credit) > MAX_ABSENT + len(waiting):
            absent = (tenant for tenant in credit if tenant not in waiting)
            kept = heapq.nsmallest(MAX_ABSENT // 2, absent, key=credit.__getitem__)
            kept += [tenant for tenant in waiting if tenant in credit]
            self._credit = {tenant: credit[tenant] for tenant in kept}

    def _refill(self, waiting: Collection[Hashable], num_tokens: int) -> None:
        """Give every tenant `num_tokens` more, up to the quantum."""
        self._num_spent = 0
        for tenant in [*self._credit]:
            credit = self._credit[tenant] + num_tokens
            if tenant not in waiting and credit >= 0:
                del self._credit[tenant]
            else:
                self._credit[tenant] = min(credit, self._quantum)
