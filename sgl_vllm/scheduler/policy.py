"""In which order waiting requests are admitted: by what the cache holds, without starvation.

Owns the waiting queue and its bound on overtaking. Does not own the orders themselves
(`orders.py`), nor how prefixes are matched. Pure.

Idea: cache-aware scheduling (arXiv 2312.07104, section 3). The bound is ours.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np
from numpy.typing import NDArray

from sgl_vllm.radix.node import Node
from sgl_vllm.scheduler.orders import CACHE_AWARE, ORDERS, least_attained_service
from sgl_vllm.scheduler.rows import Ints, Item, Rows, WaitingRows

OVERHEAD_TOKENS = 64
"""Fixed cost of a request beside its prompt, in prefill tokens."""


@dataclass(frozen=True, slots=True)
class Bound:
    """How far later requests may overtake a waiting one.

    A request that reaches one of these limits is overdue. Overdue requests go first, in order of
    arrival, among the requests of their priority whose tenants all have credit, or all have none;
    only preempted requests go before them. Delays are in tokens to compute: the prompt tokens that
    are not cached, and `OVERHEAD_TOKENS` per request. The length of replies is unknown, so it does
    not count.

    Attributes:
        max_overtakes: overdue once this many later requests were admitted before it.
        max_delay: overdue once those had to compute this share of the largest backlog that the
            request has seen.
        min_delay_tokens: a delay below this never makes a request overdue.
        max_wait_s: overdue after waiting this many seconds.
    """

    max_overtakes: int
    max_delay: float
    min_delay_tokens: int = 512
    max_wait_s: float = float("inf")


class WaitingQueue(WaitingRows[Item]):
    """The waiting requests, and the order in which they are admitted.

    A step takes items out with `pop`. Each is then put back, or counts as admitted with the next
    `settle`.

    The bound holds among requests of one priority and tenant. At most `max_overtakes` - 1 + s later
    requests are admitted before a request, where s is the largest number admitted between two calls
    of `settle`; and what they compute stays below the limit of `Bound`, except for the last s. The
    reason is that a request is overdue as soon as it reaches a limit, and then only earlier ones go
    before it. While agents take turns (`hold_s`), the limit on what they compute does not apply.

    Cost: `order` and `settle` are array operations over all n waiting requests and a sort of at
    most `window`: less than a millisecond for n = 1,000. `settle` takes its array operations once
    for each priority and tenant that was admitted. `order` is O(1) if nothing has changed, unless
    `max_wait_s` is finite or agents take turns.

    Args:
        order: a key of `ORDERS`.
        window: how many requests are reordered, oldest first. The rest follow in order of arrival.
            Requests whose tenant goes last do not use up the window while others wait.
    """

    def __init__(self, order: str, bound: Bound, window: int) -> None:
        super().__init__()
        self._keys = ORDERS[order]
        self._is_cache_aware = order in CACHE_AWARE
        self._is_timeless = bound.max_wait_s == float("inf")
        self._bound = bound
        self._window = window
        self._num_tokens = 0
        """Of all that waited when the order was last decided."""
        self._last_order: list[Item] = []
        self._last_asked: tuple[bool, bool, frozenset[Hashable]] | None = None

    # -- the order --------------------------------------------------------------------------------

    def order(
        self,
        now_s: float = 0.0,
        *,
        room_tokens: int = 0,
        last_tenants: Collection[Hashable] = (),
        hold_s: float = 0.0,
    ) -> list[Item]:
        """All waiting items, the first to be admitted in front.

        Args:
            now_s: on the clock of `add`.
            room_tokens: size of the cache's free and evictable blocks. If all waiting requests fit
                there together, a cache-aware order gains nothing, and they go in order of arrival.
            last_tenants: their requests go after those of others with the same priority.
            hold_s: unless 0, agents take turns (`programs/admission.py`): the order is that of
                `least_attained_service`, and requests that have waited this many seconds are
                overdue, whatever the others had to compute.

        Returns:
            The same list as before if nothing has changed. Not to be modified.
        """
        if self._is_changed:
            self._num_tokens = int(self._columns["tokens"].sum(where=self._columns["waits"]))
        is_roomy = not hold_s and self._is_cache_aware and self._num_tokens <= room_tokens
        asked = (is_roomy, hold_s > 0, frozenset(last_tenants))
        is_timeless = self._is_timeless and not hold_s
        if self._is_changed or asked != self._last_asked or not is_timeless:
            slots = self._ordered_slots(now_s, is_roomy, last_tenants, hold_s)
            self._last_order = self._items_of(slots)
            self._last_asked = asked
            self._is_changed = False
        return self._last_order

    def by_arrival(self) -> list[Item]:
        """All waiting items in order of arrival within priorities, readmissions in front."""
        slots = np.flatnonzero(self._columns["waits"])
        rows = Rows(self._columns, slots)
        return self._items_of(slots[np.lexsort((rows["arrival"], rows["priority"]))])

    def is_overdue(self, item: Item) -> bool:
        """Whether a waiting item was overdue when the order was last decided."""
        return bool(self._columns["overdue"][self._slots[item]])

    def _ordered_slots(
        self, now_s: float, is_roomy: bool, last_tenants: Collection[Hashable], hold_s: float
    ) -> Ints:
        slots = np.flatnonzero(self._columns["waits"])
        rows = Rows(self._columns, slots)
        beyond_window = slots[:0]
        is_last = self._is_of(last_tenants, rows)
        if len(slots) > self._window:
            by_arrival = _sorted_by(rows["priority"], is_last, rows["arrival"])
            slots, beyond_window = np.split(slots[by_arrival], [self._window])
            rows, is_last = Rows(self._columns, slots), is_last[by_arrival[: self._window]]
        is_overdue = self._update_overdue(rows, now_s, hold_s)
        goes_first = rows["arrival"] < 0
        by_policy = ~(is_overdue | goes_first)
        order = least_attained_service if hold_s else self._keys
        keys = [] if is_roomy else order(rows, self._nodes_of(slots))
        keys = [np.where(by_policy, key, 0) for key in keys]
        tier = np.where(goes_first, 0, 1 + 2 * is_last + by_policy)
        in_order = slots[_sorted_by(rows["priority"], tier, *keys, rows["arrival"])]
        return np.concatenate([in_order, beyond_window])

    def _is_of(self, tenants: Collection[Hashable], rows: Rows) -> NDArray[np.bool_]:
        """Which rows belong to these tenants. Readmissions do not count."""
        if not tenants:
            return np.zeros(len(rows), dtype=bool)
        numbers = [self._tenants.number_of(tenant) for tenant in tenants]
        return np.isin(rows["tenant"], numbers) & (rows["arrival"] >= 0)

    def _update_overdue(self, rows: Rows, now_s: float, hold_s: float) -> NDArray[np.bool_]:
        bound = self._bound
        backlog = np.maximum(rows["backlog"], _cost(rows["tokens"], rows["matched"]).sum())
        self._columns["backlog"][rows.slots] = backlog
        is_overdue = rows["overtakes"] >= bound.max_overtakes
        max_wait_s = min(hold_s or bound.max_wait_s, bound.max_wait_s)
        is_overdue |= now_s - rows["arrival_s"] >= max_wait_s
        if not hold_s:
            max_delay = np.maximum(bound.max_delay * backlog, bound.min_delay_tokens)
            is_overdue |= rows["delay"] >= max_delay
        self._columns["overdue"][rows.slots] = is_overdue
        return is_overdue

    def _items_of(self, slots: Ints) -> list[Item]:
        # The row of a waiting item is never free.
        return cast(list[Item], self._items.take(slots).tolist())

    def _nodes_of(self, slots: Ints) -> Callable[[], list[Node | None]]:
        return lambda: cast(list[Node | None], self._nodes.take(slots).tolist())

    def discard(self, item: Item) -> None:
        super().discard(item)
        self._forget_order()

    def release_popped(self) -> None:
        super().release_popped()
        self._forget_order()

    def _forget_order(self) -> None:
        """Do not keep the requests of the last order alive once none of them waits."""
        if not self._slots and not self._popped:
            self._last_order = []

    # -- the bound --------------------------------------------------------------------------------

    def settle(self, num_cached: Sequence[int]) -> int:
        """Count all popped items as admitted, and release them, even if counting fails.

        Args:
            num_cached: how many cached tokens each of `popped` got.

        Returns:
            How many times one of them went before an earlier request of its priority and tenant.
        """
        if not self._popped:
            return 0
        self._is_changed = True
        try:
            return self._count_overtakes(num_cached) if self._slots else 0
        finally:
            self.release_popped()

    def _count_overtakes(self, num_cached: Sequence[int]) -> int:
        admitted = Rows(self._columns, np.array(list(self._popped.values()), dtype=np.int64))
        priorities, tenants = admitted["priority"], admitted["tenant"]
        arrivals, costs = admitted["arrival"], _cost(admitted["tokens"], np.array(num_cached))
        num_overtakes = 0
        for priority, tenant in set(zip(priorities.tolist(), tenants.tolist(), strict=True)):
            alike = (priorities == priority) & (tenants == tenant)
            num_overtakes += self._overtake(priority, tenant, arrivals[alike], costs[alike])
        return num_overtakes

    def _overtake(self, priority: int, tenant: int, arrivals: Ints, costs: Ints) -> int:
        """Requests of one kind with these arrivals and costs are admitted."""
        columns = self._columns
        by_arrival = np.argsort(arrivals)
        costs_from = np.append(np.cumsum(costs[by_arrival][::-1])[::-1], 0)
        others = columns["waits"] & (columns["priority"] == priority)
        others = np.flatnonzero(others & (columns["tenant"] == tenant))
        num_earlier = np.searchsorted(arrivals[by_arrival], columns["arrival"].take(others))
        overtakes = len(arrivals) - num_earlier
        columns["overtakes"][others] += overtakes
        columns["delay"][others] += costs_from[num_earlier]
        return int(overtakes.sum())


def _sorted_by(*keys: NDArray[np.generic]) -> Ints:
    """The indices that sort by these keys, the most significant first, all of one length. Most of
    them are constant in most steps, and cost next to nothing then."""
    varying = [key for key in keys[:-1] if len(key) and (key != key[0]).any()]
    if not varying:
        return np.argsort(keys[-1], kind="stable")
    return np.lexsort((keys[-1], *reversed(varying)))


def _cost(num_tokens: Ints, num_cached: Ints) -> Ints:
    """What serving each request costs, in tokens to compute."""
    return num_tokens - num_cached + OVERHEAD_TOKENS
