"""Who has had more than a fair share of the machine: deficit counters over computed tokens. Pure.

Idea: DLPM, deficit longest prefix match (arXiv 2501.14312): clients have credit, every token that
is computed for one costs it one, and while some client that waits has credit left, those without go
last. Cached tokens are free, so an order by cached prefixes is kept as far as fairness allows.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable


class DeficitCounters:
    """The credit of every client, in tokens.

    All get `quantum` more as often as it takes whenever nobody who waits has any. So a client's
    credit lies between `quantum` and -f, where f is what its admitted requests still compute when
    the last of its credit is gone; and of two clients that both wait all the time, one is computed
    at most 2 * (`quantum` + f) tokens more than the other.

    A client that is not there any more keeps its debt until others have paid off as much, and no
    credit: nobody saves up.
    """

    def __init__(self, quantum: int) -> None:
        if quantum < 1:
            raise ValueError(f"a quantum is at least 1 token, not {quantum}")
        self._quantum = quantum
        self._credit: dict[Hashable, int] = {}

    def charge(self, client: Hashable, num_tokens: int) -> None:
        """`num_tokens` were computed for `client`."""
        self._credit[client] = self._credit.get(client, self._quantum) - num_tokens

    def without_credit(self, waiting: Collection[Hashable]) -> set[Hashable]:
        """Those of the `waiting` clients that go last. Never all of them."""
        credit = self._credit
        best = max((credit.get(client, self._quantum) for client in waiting), default=1)
        if best <= 0:
            self._refill(waiting, (-best // self._quantum + 1) * self._quantum)
        return {client for client in waiting if credit.get(client, self._quantum) <= 0}

    def _refill(self, waiting: Collection[Hashable], num_tokens: int) -> None:
        """The least multiple of the quantum after which one of the waiting has credit, to all."""
        for client in [*self._credit]:
            credit = self._credit[client] + num_tokens
            if client not in waiting and credit >= 0:
                del self._credit[client]
            else:
                self._credit[client] = min(credit, self._quantum)
