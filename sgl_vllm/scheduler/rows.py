"""A table of waiting requests, one row each, so that ordering them is an array operation.

Owns which rows are in use and the small integers that stand for tenants and fork groups. Does not
own what the columns are for: `policy.py` counts overtakes in them, `orders.py` sorts by them. Pure.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping
from typing import Any, Generic, TypeVar  # Any: an array of objects, and of any type

import numpy as np
from numpy.typing import NDArray

from sgl_vllm.radix.node import Match, Node

Item = TypeVar("Item", bound=Hashable)
Ints = NDArray[np.int64]
Columns = Mapping[str, NDArray[Any]]

NO_GROUP = -1
"""No fork group, or no key of next tokens."""
MAX_PRIORITY = 2**62
"""Priorities beyond this count as this."""
_MIN_ROWS = 64
_SHRINK_ABOVE_ROWS = 256

# One array per column: NumPy is many times slower on the fields of a structured array.
_COLUMNS: Mapping[str, type[np.generic]] = {
    "arrival": np.int64,  # a serial number; negative for a readmission
    "arrival_s": np.float64,
    "priority": np.int64,
    "tenant": np.int64,
    "fork_group": np.int64,
    "since": np.int64,  # the earliest arrival of its fork group; its own without a group
    "tokens": np.int64,
    "served": np.int64,  # tokens that were computed for its context so far
    "is_agent": np.bool_,
    "matched": np.int64,
    "next_tokens_key": np.int64,  # equal if the next tokens after the match are the same
    "overtakes": np.int64,
    "delay": np.int64,  # tokens
    "backlog": np.int64,  # tokens: the largest that the request has seen
    "overdue": np.bool_,  # when the order was last decided
    "waits": np.bool_,  # False if the row is free, or its request popped
}


class Rows:
    """Some rows of the table, as they are when a column is read.

    Args:
        columns: of the whole table.
        slots: which rows.
    """

    def __init__(self, columns: Columns, slots: Ints) -> None:
        self._columns = columns
        self.slots = slots

    def __len__(self) -> int:
        return len(self.slots)

    def __getitem__(self, name: str) -> NDArray[Any]:
        """A copy of one column, of shape (number of rows,)."""
        return self._columns[name].take(self.slots)

    @property
    def is_cold(self) -> NDArray[np.bool_]:
        """Whether less than half of each request is cached."""
        return 2 * self["matched"] < self["tokens"]


class WaitingRows(Generic[Item]):
    """The rows of waiting and of popped requests.

    Every item has one row, at `_slots[item]` while it waits and at `_popped[item]` once popped. A
    popped item is put back or released. `add`, `pop` and `put_back` cost O(1), growing amortized.
    """

    def __init__(self) -> None:
        self._columns = {name: np.zeros(0, type_) for name, type_ in _COLUMNS.items()}
        self._items: NDArray[Any] = np.zeros(0, dtype=object)
        self._nodes: NDArray[Any] = np.zeros(0, dtype=object)
        self._free: list[int] = []
        self._slots: dict[Item, int] = {}
        self._popped: dict[Item, int] = {}
        self._num_added = self._num_readmissions = 0
        self._tenants = _Interned()
        self._fork_groups = _Interned()
        self._group_since: dict[int, int] = {}
        self._is_changed = True
        """Whether a row that waits has changed since the order was last decided."""

    def __len__(self) -> int:
        return len(self._slots)

    def __contains__(self, item: Item) -> bool:
        return item in self._slots

    def __iter__(self) -> Iterator[Item]:
        """In no particular order."""
        return iter(self._slots)

    @property
    def tenants(self) -> Collection[Hashable]:
        """The tenants of all items, popped ones included."""
        return self._tenants.names

    @property
    def popped(self) -> list[Item]:
        """The items that were popped, and neither put back nor released."""
        return list(self._popped)

    # -- add and remove ---------------------------------------------------------------------------

    def add(
        self,
        item: Item,
        num_tokens: int,
        *,
        arrival_s: float = 0.0,
        priority: int = 0,
        tenant: Hashable = None,
        fork_group: Hashable = None,
        num_served: int = 0,
        is_agent: bool = False,
        is_readmission: bool = False,
    ) -> None:
        """Add `item` at the end. An item that waits already loses its place.

        Args:
            num_tokens: length of its prompt, and of its output so far if it was preempted.
            priority: smaller goes first.
            tenant: its tenant; None if tenants are not distinguished.
            fork_group: items of one group stay together as long as one of them waits.
            num_served: tokens that were computed for its context so far.
            is_agent: whether it is an agent's, and may be held back.
            is_readmission: the request was admitted before, and then preempted or its KV load
                failed. It goes before all others of its priority, whatever its fork group.
        """
        if item in self._slots:
            self.discard(item)
        if not self._free:
            self._resize(max(_MIN_ROWS, 2 * len(self._items)))
        slot = self._free.pop()
        self._is_changed = True
        if is_readmission:
            self._num_readmissions += 1
            arrival = -self._num_readmissions
        else:
            self._num_added += 1
            arrival = self._num_added
        group, since = NO_GROUP, arrival
        if fork_group is not None and not is_readmission:
            group = self._fork_groups.acquire(fork_group)
            since = self._group_since.setdefault(group, arrival)
        known: dict[str, float] = {
            "arrival": arrival,
            "arrival_s": arrival_s,
            "priority": max(-MAX_PRIORITY, min(priority, MAX_PRIORITY)),
            "tenant": self._tenants.acquire(tenant),
            "fork_group": group,
            "since": since,
            "tokens": num_tokens,
            "served": num_served,
            "is_agent": is_agent,
            "next_tokens_key": NO_GROUP,
            "waits": True,
        }
        for name, column in self._columns.items():
            column[slot] = known.get(name, 0)
        self._items[slot] = item
        self._nodes[slot] = None
        self._slots[item] = slot

    def pop(self, item: Item) -> None:
        """Take out `item` to be admitted, or to be put back."""
        slot = self._popped[item] = self._slots.pop(item)
        self._is_changed = True
        self._columns["waits"][slot] = False

    def put_back(self, item: Item) -> bool:
        """Return a popped item to its old place. False if it was not popped."""
        slot = self._popped.pop(item, None)
        if slot is None:
            return False
        self._slots[item] = slot
        self._is_changed = True
        self._columns["waits"][slot] = True
        return True

    def discard(self, item: Item) -> None:
        """Remove a waiting item for good."""
        self._is_changed = True
        self._release(self._slots.pop(item))

    def release_popped(self) -> None:
        """Remove all popped items for good."""
        for slot in self._popped.values():
            self._release(slot)
        self._popped.clear()
        if len(self._items) > _SHRINK_ABOVE_ROWS and 4 * len(self._slots) < len(self._items):
            self._resize(2 * len(self._slots))

    # -- what is known of an item -----------------------------------------------------------------

    def score(self, item: Item, match: Match, next_tokens_key: int | None = None) -> None:
        """Record the cached prefix of a waiting item.

        Args:
            next_tokens_key: equal, and not negative, for items with the same match and the same
                next tokens after it.
        """
        slot = self._slots[item]
        self._is_changed = True
        self._columns["matched"][slot] = match.num_tokens
        key = NO_GROUP if next_tokens_key is None else next_tokens_key
        self._columns["next_tokens_key"][slot] = key
        self._nodes[slot] = match.node

    def nodes_of(self, items: Iterable[Item]) -> set[Node]:
        """The nodes that the waiting requests of `items` match."""
        slots = [self._slots[item] for item in items if item in self._slots]
        return {node for node in self._nodes[slots].tolist() if node is not None}

    def match_of(self, item: Item) -> Match:
        """The cached prefix of a waiting item."""
        slot = self._slots[item]
        return Match(int(self._columns["matched"][slot]), self._nodes[slot])

    def is_agent(self, item: Item) -> bool:
        """Whether a waiting or popped item belongs to an agent, and may be held back."""
        return bool(self._columns["is_agent"][self._slot_of(item)])

    def arrival_s_of(self, item: Item) -> float:
        """When a waiting or popped item arrived."""
        return float(self._columns["arrival_s"][self._slot_of(item)])

    def _slot_of(self, item: Item) -> int:
        return self._slots[item] if item in self._slots else self._popped[item]

    def cold_agents(self, items: Iterable[Item], arrived_after_s: float) -> set[Item]:
        """Waiting agents' requests of `items` with less than half of the prompt cached that arrived
        after this time, except readmissions."""
        slots = np.array([self._slots[one] for one in items if one in self._slots], dtype=np.int64)
        rows = Rows(self._columns, slots)
        is_chosen = rows["is_agent"] & rows.is_cold
        is_chosen &= (rows["arrival_s"] > arrived_after_s) & (rows["arrival"] >= 0)
        return set(self._items[slots[is_chosen]].tolist())

    def next_tokens_key_of(self, item: Item) -> int:
        """Stands for the next tokens of a waiting item; `NO_GROUP` if they are unknown."""
        return int(self._columns["next_tokens_key"][self._slots[item]])

    def num_with_same_next_tokens(self, item: Item) -> int:
        """How many waiting items have the next tokens of `item`; at least 1."""
        key = self.next_tokens_key_of(item)
        if key == NO_GROUP:
            return 1
        keys = self._columns["next_tokens_key"][self._columns["waits"]]
        return int(np.count_nonzero(keys == key))

    def siblings_of(self, item: Item, num: int) -> list[Item]:
        """Other waiting items with the next tokens of `item`, `num` of them at most. O(rows)."""
        key = self.next_tokens_key_of(item)
        if key == NO_GROUP:
            return []
        slots = np.flatnonzero((self._columns["next_tokens_key"] == key) & self._columns["waits"])
        others = (self._items[slot] for slot in slots[: num + 1])
        return [other for other in others if other is not item][:num]

    # -- rows -------------------------------------------------------------------------------------

    def _resize(self, num_rows: int) -> None:
        """Move the rows in use to the front of `num_rows` rows, or of as many as are in use."""
        used = np.array([*self._slots.values(), *self._popped.values()], dtype=np.int64)
        num_rows = max(num_rows, len(used))
        num_free = num_rows - len(used)
        self._columns = {
            name: np.concatenate([column[used], np.zeros(num_free, column.dtype)])
            for name, column in self._columns.items()
        }
        self._items = np.concatenate([self._items[used], np.full(num_free, None)])
        self._nodes = np.concatenate([self._nodes[used], np.full(num_free, None)])
        places = iter(range(num_rows))
        self._slots = dict(zip(self._slots, places, strict=False))
        self._popped = dict(zip(self._popped, places, strict=False))
        self._free = list(range(num_rows - 1, len(used) - 1, -1))

    def _release(self, slot: int) -> None:
        self._tenants.release(int(self._columns["tenant"][slot]))
        group = int(self._columns["fork_group"][slot])
        if group != NO_GROUP and self._fork_groups.release(group):
            self._group_since.pop(group, None)
        self._columns["waits"][slot] = False
        self._items[slot] = self._nodes[slot] = None
        self._free.append(slot)


class _Interned:
    """Small integers for names, each as long as it has users. Integers are not used twice."""

    def __init__(self) -> None:
        self._numbers: dict[Hashable, int] = {}
        self._names: dict[int, Hashable] = {}
        self._num_users: Counter[int] = Counter()
        self._next_number = 0

    @property
    def names(self) -> Collection[Hashable]:
        return self._numbers.keys()

    def acquire(self, name: Hashable) -> int:
        number = self._numbers.get(name)
        if number is None:
            number = self._numbers[name] = self._next_number
            self._names[number] = name
            self._next_number += 1
        self._num_users[number] += 1
        return number

    def number_of(self, name: Hashable) -> int:
        """-1 for a name without users."""
        return self._numbers.get(name, -1)

    def release(self, number: int) -> bool:
        """Whether that was the last user."""
        self._num_users[number] -= 1
        if self._num_users[number]:
            return False
        del self._num_users[number]
        del self._numbers[self._names.pop(number)]
        return True
