"""In which order waiting requests are admitted: by what the cache holds, without starvation.

Owns the line of waiting requests, the orders (`ORDERS`) and their bound. Does not know vLLM, nor
how a prefix is matched. Pure.

Ideas: cache-aware scheduling, longest prefix first and depth first (arXiv 2312.07104, section 3).
The bound, and keeping together what shares a prefix that is not cached yet, are ours.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from sgl_vllm.radix.node import Match, Node

Item = TypeVar("Item", bound=Hashable)
Ints = NDArray[np.int64]

NO_GROUP = -1
MAX_PRIORITY = 2**62  # more is as much

OVERHEAD_TOKENS = 64
"""To decode a reply takes about as long as to compute so many tokens of a prompt."""

_ROW = np.dtype(
    [
        ("arrival", np.int64),  # a number that grows; below zero for who goes first
        ("arrival_s", np.float64),
        ("priority", np.int64),
        ("client", np.int64),
        ("fork_group", np.int64),
        ("since", np.int64),  # the first arrival of its fork group; its own if it has none
        ("tokens", np.int64),
        ("matched", np.int64),
        ("branch", np.int64),  # equal for those that go on alike after what they match
        ("passes", np.int64),
        ("delay", np.int64),  # tokens
        ("backlog", np.int64),  # tokens: the largest it has seen
        ("chance", np.float64),
        ("overdue", np.bool_),  # when the line was last put in order
        ("waits", np.bool_),  # or the row is free, or its request popped
    ]
)
Rows = NDArray[np.void]


@dataclass(frozen=True, slots=True)
class Bound:
    """How far later requests may overtake a waiting one.

    A request that has reached one of these limits is overdue. Overdue requests go before all that
    are not, in order of arrival.

    Attributes:
        max_passes: so many later ones were admitted before it.
        max_delay: what these had to compute has come to this share of the largest backlog that it
            has seen. Both in tokens: those of a prompt that are not cached, and `OVERHEAD_TOKENS`
            for every request. Replies are not weighed by their length, which nobody knows.
        min_delay_tokens: but not before it has come to so many.
        max_wait_s: it has waited so long, in seconds.
    """

    max_passes: int
    max_delay: float
    min_delay_tokens: int = 512
    max_wait_s: float = float("inf")


class WaitingQueue(Generic[Item]):
    """Everyone who waits, and the order in which they are admitted.

    Each who is popped is then put back, or counts as admitted with the next `settle`.

    The bound holds among requests of one priority and client. At most `max_passes` - 1 + s others
    that came later are admitted before a request, where s is the most that are admitted between two
    calls of `settle`, and what they compute stays below what `Bound` allows, but for the last s.
    For as soon as a limit is reached the request is overdue, and only older ones go before it.

    Costs: `add`, `pop` and `score` O(1); `order` and `settle` array operations over all n in line
    and a sort of at most `window`: about 0.2 ms for 1,000.

    Args:
        order: a key of `ORDERS`.
        window: only so many, those that came first, are put in order; the others go after them, as
            they came. Whose client goes last does not stand in the way of others.
    """

    def __init__(self, order: str, bound: Bound, window: int) -> None:
        self._keys = ORDERS[order]
        self._is_timeless = bound.max_wait_s == float("inf")
        self._is_cache_aware = order in ("lpm", "dfs-weight")
        self._bound = bound
        self._window = window
        self._rows: Rows = np.zeros(0, dtype=_ROW)
        self._items: list[Item | None] = []
        self._nodes: list[Node | None] = []
        self._free: list[int] = []
        self._slots: dict[Item, int] = {}
        self._popped: dict[Item, int] = {}
        self._num_added = self._num_put_first = 0
        self._clients = _Numbers()
        self._fork_groups = _Numbers()
        self._group_since: dict[int, int] = {}
        self._rng = np.random.default_rng(0)
        self._known: tuple[Hashable, list[Item]] | None = None  # the order, while it holds

    def __len__(self) -> int:
        return len(self._slots)

    def __contains__(self, item: Item) -> bool:
        return item in self._slots

    def __iter__(self) -> Iterator[Item]:
        """In no particular order."""
        return iter(self._slots)

    # -- who is in line -----------------------------------------------------------------------

    def add(
        self,
        item: Item,
        num_tokens: int,
        *,
        arrival_s: float = 0.0,
        priority: int = 0,
        client: Hashable = None,
        fork_group: Hashable = None,
        first: bool = False,
    ) -> None:
        """Put `item` in line, at its end; also if it was there already.

        Args:
            num_tokens: of its prompt.
            arrival_s: on the clock of `order`.
            priority: smaller goes first.
            client: who sent it, where clients are told apart.
            fork_group: those of one group are kept together, as long as one of them waits.
            first: it was running already: before all others of its priority.
        """
        if item in self._slots:
            self.discard(item)
        if not self._free:
            self._resize(max(64, 2 * len(self._rows)))
        slot = self._free.pop()
        self._known = None
        if first:
            self._num_put_first += 1
            arrival = -self._num_put_first
        else:
            self._num_added += 1
            arrival = self._num_added
        group, since = NO_GROUP, arrival
        if fork_group is not None:
            group = self._fork_groups.take(fork_group)
            if not first:
                since = self._group_since.setdefault(group, arrival)
        priority = max(-MAX_PRIORITY, min(priority, MAX_PRIORITY))
        self._rows[slot] = (
            *(arrival, arrival_s, priority, self._clients.take(client), group, since),
            *(num_tokens, 0, -arrival, 0, 0, 0, self._rng.random(), False, True),
        )
        self._items[slot] = item
        self._nodes[slot] = None
        self._slots[item] = slot

    def score(self, item: Item, match: Match, branch: int | None = None) -> None:
        """Say what is cached of an item in line.

        Args:
            branch: equal, and not negative, for those that match alike and then go on alike.
        """
        slot = self._slots[item]
        self._known = None
        row = self._rows[slot]
        row["matched"] = match.num_tokens
        row["branch"] = -row["arrival"] if branch is None else branch
        self._nodes[slot] = match.node

    def node_of(self, item: Item) -> Node | None:
        return self._nodes[self._slots[item]]

    def is_overdue(self, item: Item) -> bool:
        """Whether it was when the line was last put in order."""
        return bool(self._rows["overdue"][self._slots[item]])

    def branch_of(self, item: Item) -> int:
        """What `score` said; a number of its own, below zero, if that was nothing."""
        return int(self._rows["branch"][self._slots[item]])

    def num_alike(self, item: Item) -> int:
        """How many in line match as it does and then go on alike; at least 1."""
        branches = self._rows["branch"][self._rows["waits"]]
        return int(np.count_nonzero(branches == self._rows["branch"][self._slots[item]]))

    @property
    def clients(self) -> Collection[Hashable]:
        """Of those in line, and those popped and not settled."""
        return self._clients.names

    def pop(self, item: Item) -> None:
        """Take `item` out, to be admitted or put back."""
        slot = self._popped[item] = self._slots.pop(item)
        self._known = None
        self._rows["waits"][slot] = False

    def put_back(self, item: Item) -> bool:
        """Let one who was popped wait on, at its old place. False if it was not."""
        slot = self._popped.pop(item, None)
        if slot is None:
            return False
        self._slots[item] = slot
        self._known = None
        self._rows["waits"][slot] = True
        return True

    def discard(self, item: Item) -> None:
        """Take `item` out for good."""
        self._known = None
        self._release(self._slots.pop(item))

    @property
    def popped(self) -> list[Item]:
        """Who was popped since the last `settle`, and not put back."""
        return list(self._popped)

    def passes_of(self, item: Item) -> int:
        """How many later ones were admitted before `item`, which is popped."""
        return int(self._rows["passes"][self._popped[item]])

    def settle(self, num_cached: Sequence[int]) -> int:
        """All of `popped` are admitted. Returns how many times one of them went before an earlier
        one of its priority and client.

        Args:
            num_cached: of how many tokens each of `popped` found the KV.
        """
        if not self._popped:
            return 0
        self._known = None
        try:
            num_passes = self._count_passes(num_cached) if self._slots else 0
        finally:
            for slot in self._popped.values():
                self._release(slot)
            self._popped.clear()
        if len(self._rows) > 256 and 4 * len(self._slots) < len(self._rows):
            self._resize(2 * len(self._slots))
        return num_passes

    def _count_passes(self, num_cached: Sequence[int]) -> int:
        admitted = self._rows[list(self._popped.values())]
        admitted["matched"] = num_cached
        kinds = set(zip(admitted["priority"].tolist(), admitted["client"].tolist(), strict=True))
        return sum(self._pass_over(*kind, admitted) for kind in kinds)

    def _pass_over(self, priority: int, client: int, admitted: Rows) -> int:
        rows = self._rows
        admitted = admitted[(admitted["priority"] == priority) & (admitted["client"] == client)]
        admitted = admitted[np.argsort(admitted["arrival"])]
        costs = np.append(np.cumsum(_cost(admitted)[::-1])[::-1], 0)
        others = rows["waits"] & (rows["priority"] == priority) & (rows["client"] == client)
        num_earlier = np.searchsorted(admitted["arrival"], rows["arrival"][others])
        passes = len(admitted) - num_earlier
        rows["passes"][others] += passes
        rows["delay"][others] += costs[num_earlier]
        return int(passes.sum())

    def _resize(self, num_rows: int) -> None:
        """So many rows, at least one for each who is here; those in use come first."""
        used = [*self._slots.values(), *self._popped.values()]
        num_rows = max(num_rows, len(used))
        num_free = num_rows - len(used)
        self._rows = np.concatenate([self._rows[used], np.zeros(num_free, dtype=_ROW)])
        self._items = [self._items[slot] for slot in used] + [None] * num_free
        self._nodes = [self._nodes[slot] for slot in used] + [None] * num_free
        places = iter(range(num_rows))
        self._slots = dict(zip(self._slots, places, strict=False))
        self._popped = dict(zip(self._popped, places, strict=False))
        self._free = list(range(num_rows - 1, len(used) - 1, -1))

    def _release(self, slot: int) -> None:
        row = self._rows[slot]
        self._clients.give_back(int(row["client"]))
        if row["fork_group"] != NO_GROUP:
            group = int(row["fork_group"])
            if self._fork_groups.give_back(group):
                self._group_since.pop(group, None)
        row["waits"] = False
        self._items[slot] = self._nodes[slot] = None
        self._free.append(slot)

    # -- the order ----------------------------------------------------------------------------

    def order(
        self,
        now_s: float = 0.0,
        *,
        room_tokens: int = 0,
        last_clients: Collection[Hashable] = (),
    ) -> list[Item]:
        """Everyone in line, who goes first at the front.

        Args:
            now_s: on the clock of `add`.
            room_tokens: what the cache holds and nobody uses, or is empty. If all who wait fit in
                there together, a cache-aware order has nothing to win, and they go as they came.
            last_clients: these clients' requests go after the others' of the same priority.

        The same list as before, not to be changed, if nothing has.
        """
        num_tokens = self._rows["tokens"] @ self._rows["waits"]
        is_roomy = self._is_cache_aware and num_tokens <= room_tokens
        known_by = (is_roomy, frozenset(last_clients))
        if self._known is not None and self._known[0] == known_by and self._is_timeless:
            return self._known[1]
        order = self._new_order(now_s, is_roomy, last_clients)
        self._known = known_by, [self._items[slot] for slot in order.tolist()]
        return self._known[1]

    def _new_order(self, now_s: float, is_roomy: bool, last_clients: Collection[Hashable]) -> Ints:
        """Slots."""
        slots = np.flatnonzero(self._rows["waits"])
        rows = self._rows[slots]
        later = slots[:0]
        is_last = self._is_of(last_clients, rows)
        if len(slots) > self._window:
            as_they_came = np.lexsort((rows["arrival"], is_last, rows["priority"]))
            slots, later = np.split(slots[as_they_came], [self._window])
            rows, is_last = self._rows[slots], is_last[as_they_came[: self._window]]
        is_overdue = self._see_who_is_overdue(slots, rows, now_s)
        goes_first = rows["arrival"] < 0
        by_policy = ~(is_overdue | goes_first)
        keys = [] if is_roomy else self._keys(rows, self._nodes_of(slots))
        keys = [np.where(by_policy, key, 0) for key in keys]
        tier = np.where(goes_first, 0, 1 + 2 * is_last + by_policy)
        in_order = slots[np.lexsort((rows["arrival"], *reversed(keys), tier, rows["priority"]))]
        return np.concatenate([in_order, later])

    def _is_of(self, clients: Collection[Hashable], rows: Rows) -> NDArray[np.bool_]:
        """Which of `rows` are of these clients, but for those that go first."""
        if not clients:
            return np.zeros(len(rows), dtype=bool)
        numbers = [self._clients.number_of(client) for client in clients]
        return np.isin(rows["client"], numbers) & (rows["arrival"] >= 0)

    def _see_who_is_overdue(self, slots: Ints, rows: Rows, now_s: float) -> NDArray[np.bool_]:
        bound = self._bound
        backlog = np.maximum(rows["backlog"], _cost(rows).sum())
        self._rows["backlog"][slots] = backlog
        is_overdue = rows["passes"] >= bound.max_passes
        is_overdue |= rows["delay"] >= np.maximum(bound.max_delay * backlog, bound.min_delay_tokens)
        is_overdue |= now_s - rows["arrival_s"] >= bound.max_wait_s
        self._rows["overdue"][slots] = is_overdue
        return is_overdue

    def by_arrival(self) -> list[Item]:
        """Everyone in line, as they came, but for priorities and who goes `first`."""
        slots = np.flatnonzero(self._rows["waits"])
        rows = self._rows[slots]
        in_order = slots[np.lexsort((rows["arrival"], rows["priority"]))]
        return [self._items[slot] for slot in in_order.tolist()]

    def _nodes_of(self, slots: Ints) -> Callable[[], list[Node | None]]:
        return lambda: [self._nodes[slot] for slot in slots.tolist()]


class _Numbers:
    """Small numbers for names, for as long as somebody has one."""

    def __init__(self) -> None:
        self._numbers: dict[Hashable, int] = {}
        self._names: dict[int, Hashable] = {}
        self._num_users: Counter[int] = Counter()
        self._num_given = 0

    def take(self, name: Hashable) -> int:
        number = self._numbers.get(name)
        if number is None:
            number = self._numbers[name] = self._num_given
            self._names[number] = name
            self._num_given += 1
        self._num_users[number] += 1
        return number

    @property
    def names(self) -> Collection[Hashable]:
        return self._numbers.keys()

    def number_of(self, name: Hashable) -> int:
        """-1 if nobody has one."""
        return self._numbers.get(name, -1)

    def give_back(self, number: int) -> bool:
        """Whether nobody has it any more."""
        self._num_users[number] -= 1
        if self._num_users[number]:
            return False
        del self._num_users[number]
        del self._numbers[self._names.pop(number)]
        return True


def _cost(rows: Rows) -> Ints:
    """What it takes to serve each, in tokens to compute."""
    return rows["tokens"] - rows["matched"] + OVERHEAD_TOKENS


# -- orders: keys to sort by, the most significant first; equal ones go in order of arrival --------

Nodes = Callable[[], list[Node | None]]


def _lpm(rows: Rows, nodes: Nodes) -> list[NDArray[np.generic]]:
    """Longest cached prefix first."""
    matched = _best_of_group(rows["fork_group"], rows["matched"], np.maximum)
    first = _best_of_group(rows["branch"], rows["arrival"], np.minimum)
    of_group = _best_of_group(rows["fork_group"], np.minimum(first, rows["since"]), np.minimum)
    return [-matched, of_group, first]


def _dfs_weight(rows: Rows, nodes: Nodes) -> list[NDArray[np.generic]]:
    """Depth first over the tree, into the branch with the most waiting requests."""
    places = _best_of_group(rows["fork_group"], depth_first_places(nodes()), np.minimum)
    return [places, *_lpm(rows, nodes)]


def _fcfs(rows: Rows, nodes: Nodes) -> list[NDArray[np.generic]]:
    """First come, first served."""
    return [_best_of_group(rows["fork_group"], rows["since"], np.minimum)]


def _random(rows: Rows, nodes: Nodes) -> list[NDArray[np.generic]]:
    """Random, as a baseline."""
    return [rows["chance"]]


ORDERS: dict[str, Callable[[Rows, Nodes], list[NDArray[np.generic]]]] = {
    "lpm": _lpm,
    "dfs-weight": _dfs_weight,
    "fcfs": _fcfs,
    "random": _random,
}
"""Longest matched prefix first; depth first over the tree, to where most wait; first come, first
served; and at random, to compare with. Where nothing is matched, those whose prompts begin alike
stand together."""


def _best_of_group(groups: Ints, values: Ints, best: np.ufunc) -> Ints:
    """For each the best value of its group; its own if the group is negative."""
    members = np.flatnonzero(groups >= 0)
    if len(members) < 2:
        return values
    _, which = np.unique(groups[members], return_inverse=True)
    of_group = values[members].copy()
    bests = of_group.copy()[: which.max() + 1]
    bests[which] = of_group  # some member's, to begin with
    best.at(bests, which, of_group)
    values = values.copy()
    values[members] = bests[which]
    return values


def depth_first_places(nodes: list[Node | None]) -> Ints:
    """The place of each node in a depth-first walk of their tree, shape (n,).

    Among siblings the one below which most of `nodes` are comes first; a node comes after all that
    is below it; None comes last. Costs a few microseconds for each of them and of those above.
    """
    weights: Counter[Node | None] = Counter(nodes)
    children: dict[Node | None, list[Node]] = {}
    above = list(weights)
    while above:
        node = above.pop()
        if node is not None:
            if node.parent not in weights:
                weights[node.parent] = 0
                above.append(node.parent)
            children.setdefault(node.parent, []).append(node)
    for node in sorted((n for n in weights if n is not None), key=lambda n: n.start, reverse=True):
        weights[node.parent] += weights[node]
    places: dict[Node | None, int] = {}
    stack: list[tuple[Node | None, bool]] = [(None, False)]
    while stack:
        node, is_left = stack.pop()
        if is_left:
            places[node] = len(places)
            continue
        stack.append((node, True))
        # The last pushed goes first.
        below = sorted(children.get(node, ()), key=lambda child: (weights[child], -child.serial))
        stack += [(child, False) for child in below]
    return np.array([places[node] for node in nodes], dtype=np.int64)
