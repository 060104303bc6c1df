"""Who has had more than a fair share of the machine: deficit counters over computed tokens. Pure.

Idea: DLPM, deficit longest prefix match (arXiv 2501.14312): clients have credit, every token that
is computed for one costs it one, and while some client that waits has credit left, those without go
last. Cached tokens are free, so an order by cached prefixes is kept as far as fairness allows.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable

MAX_DEBT_QUANTA = 10
"""Nobody owes more: debts grow where those with credit wait for something else than the machine."""

MAX_ABSENT = 10_000
"""So many clients that do not wait are remembered."""


class DeficitCounters:
    """The credit of every client, in tokens.

    All get `quantum` more, as often as it takes, whenever nobody who waits has any. So a client's
    credit lies between `quantum` and -f, where f is what its admitted requests still compute when
    the last of its credit is gone; and of two clients that both wait all the time, and whose
    requests could be admitted, one is computed at most 2 * (`quantum` + f) tokens more than the
    other, for f up to `MAX_DEBT_QUANTA` quanta.

    Who comes anew has `quantum`. So that an endless row of new ones cannot keep out an old one, all
    get more, too, when those with credit have spent twice what all who wait have together at most.

    A client that is not there any more keeps its debt until others have paid off as much, and no
    credit: nobody saves up.
    """

    def __init__(self, quantum: int) -> None:
        if quantum < 1:
            raise ValueError(f"a quantum is at least 1 token, not {quantum}")
        self._quantum = quantum
        self._credit: dict[Hashable, int] = {}
        self._num_spent = 0  # of credit, since all got more

    def charge(self, client: Hashable, num_tokens: int) -> None:
        """`num_tokens` were computed for `client`."""
        credit = self._credit.get(client, self._quantum)
        self._num_spent += max(0, min(credit, num_tokens))
        self._credit[client] = max(credit - num_tokens, -MAX_DEBT_QUANTA * self._quantum)

    def without_credit(self, waiting: Collection[Hashable]) -> set[Hashable]:
        """Those of the `waiting` clients that go last. Never all of them."""
        credit = self._credit
        best = max((credit.get(client, self._quantum) for client in waiting), default=1)
        if best <= 0:
            self._refill(waiting, (-best // self._quantum + 1) * self._quantum)
        elif self._num_spent > 2 * self._quantum * (len(waiting) + 1):
            self._refill(waiting, self._quantum)
        if len(credit) > MAX_ABSENT + len(waiting):
            self._credit = {client: credit[client] for client in waiting if client in credit}
        return {client for client in waiting if self._credit.get(client, self._quantum) <= 0}

    def _refill(self, waiting: Collection[Hashable], num_tokens: int) -> None:
        """`num_tokens` more to all; nobody gets to more than the quantum."""
        self._num_spent = 0
        for client in [*self._credit]:
            credit = self._credit[client] + num_tokens
            if client not in waiting and credit >= 0:
                del self._credit[client]
            else:
                self._credit[client] = min(credit, self._quantum)
