"""Orders of segments that let prompts share their beginnings. Pure: no I/O, no clock, no server.

Owns the search. A *segment* is a hashable value with a weight, such as a text with its length. A
*set* has the segments of one prompt, in the order in which they were given. Prompts share what they
begin with, so the smaller the trie of all orders, the better they are:

    given    [a b c]  [c a d]  [b a c]      9 segments, none shared
    planned  [a c b]  [a c d]  [a c b]      a, c, b, d: 4 in the trie, 5 shared

`SharedOrders` does the same for sets that come one after the other, from the orders before.
"""

from __future__ import annotations

import heapq
import random
from collections import Counter, OrderedDict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeAlias, TypeVar

Segment = TypeVar("Segment", bound=Hashable)

SegmentId: TypeAlias = tuple[bytes, int]
"""A segment as `any_order` has it: a digest of its text, and how often the same text is before it
in the same set."""

MAX_WORK = 5_000_000
"""`plan` looks at a segment of a set at most about this often: under two seconds. Sets that are
left then get the most frequent segments first."""

MAX_REPLACED = 150_000
"""The local search puts a segment of a set into the trie about this often: half a second."""

NUM_ROUNDS = 4
"""Of the local search, over all segments."""

NEIGHBORHOOD = 12
"""Sets that the local search takes out of the trie at a time."""

JITTER = 0.9
"""How far a random factor of the local search is from 1, at most."""


MAX_NODES_VISITED = 500
"""In a search for one set."""


@dataclass(slots=True)
class _Node(Generic[Segment]):
    """A beginning: the segments from the root to here. `num_orders` begin with it."""

    children: dict[Segment, _Node[Segment]] = field(default_factory=dict)
    num_orders: int = 0


class OrderTrie(Generic[Segment]):
    """Orders of segments that all follow the same prompt. `weights` are those of segments."""

    def __init__(self, orders: Iterable[Sequence[Segment]] = ()) -> None:
        self._root: _Node[Segment] = _Node()
        for order in orders:
            self.add(order)

    def add(self, order: Sequence[Segment]) -> int:
        """Returns how many segments, from the last one back, were not there yet."""
        node, num_new = self._root, 0
        for segment in order:
            child = node.children.get(segment)
            if child is None:
                child = node.children[segment] = _Node()
                num_new += 1
            child.num_orders += 1
            node = child
        return num_new

    def remove(self, order: Sequence[Segment]) -> None:
        """Take out an order that was added."""
        node = self._root
        for segment in order:
            child = node.children[segment]
            child.num_orders -= 1
            if not child.num_orders:
                del node.children[segment]
                return
            node = child

    def shared_weight(self, order: Iterable[Segment], weights: Mapping[Segment, int]) -> int:
        """How much of `order` others begin with, by weight."""
        node, shared = self._root, 0
        for segment in order:
            child = node.children.get(segment)
            if child is None:
                break
            node, shared = child, shared + weights[segment]
        return shared

    def heaviest(
        self, segments: Sequence[Segment], weights: Mapping[Segment, int]
    ) -> tuple[tuple[Segment, ...], int]:
        """The heaviest beginning that has only segments of this set, and its weight. Looks at
        `MAX_NODES_VISITED` nodes at most."""
        best: tuple[tuple[Segment, ...], int] = ((), 0)
        stack: list[tuple[_Node[Segment], tuple[Segment, ...], int]] = [(self._root, (), 0)]
        num_visited, wanted = 0, frozenset(segments)
        while stack and num_visited < MAX_NODES_VISITED:
            node, path, weight = stack.pop()
            num_visited += 1
            if weight > best[1]:
                best = path, weight
            children = node.children
            if len(children) < len(segments):
                found = [segment for segment in children if segment in wanted]
            else:
                found = [segment for segment in segments if segment in children]
            for segment in reversed(found):  # never one of the path: no order has one twice
                child = children[segment]
                stack.append((child, (*path, segment), weight + weights[segment]))
        return best


def shared_weight(orders: Iterable[Sequence[Segment]], weights: Mapping[Segment, int]) -> int:
    """The weight of all segments that repeat the beginning of an earlier order.

    That is the weight of all orders, less that of the trie of them.
    """
    trie: OrderTrie[Segment] = OrderTrie()
    shared = 0
    for order in orders:
        shared += trie.shared_weight(order, weights)
        trie.add(order)
    return shared


def plan(sets: Sequence[Sequence[Segment]], weights: Mapping[Segment, int]) -> list[list[Segment]]:
    """An order for each of `sets`, so that they share as much of their beginnings as is found.

    Each order is a permutation of its set. Together they never share less than the sets as given
    (`shared_weight`). The search is greedy: at each node of the trie, it takes the segment whose
    weight is shared most often among the sets there, gives it to all of them that have it, and goes
    on with each side. A local search follows (`_improved`). Of a few small sets, no orders share
    more than 1% more.

    Deterministic; ties go to what was given first. Cost: O(segments in all sets * depth of the
    trie) at worst, bounded by `MAX_WORK` and `MAX_REPLACED`. 1,000 sets of 10 take
    0.1 to 0.3 s, 2,000 sets of 30 about 0.7 s.

    Raises:
        ValueError: a set has a segment twice.
    """
    for one in sets:
        if len(set(one)) < len(one):
            raise ValueError("a set has a segment twice")
    plans = [_greedy(sets, weights), by_frequency(sets, weights), [list(one) for one in sets]]
    return _improved(max(plans, key=lambda orders: shared_weight(orders, weights)), weights)


def by_frequency(
    sets: Sequence[Sequence[Segment]], weights: Mapping[Segment, int]
) -> list[list[Segment]]:
    """Each set with its most frequent segments first, weighted by what sharing them saves."""
    counts = Counter(segment for one in sets for segment in one)
    ranks = {segment: rank for rank, segment in enumerate(counts)}

    def key(segment: Segment) -> tuple[int, int]:
        return -(counts[segment] - 1) * weights[segment], ranks[segment]

    return [sorted(one, key=key) for one in sets]


# -- many sets: greedy


def _greedy(
    sets: Sequence[Sequence[Segment]], weights: Mapping[Segment, int]
) -> list[list[Segment]]:
    """The trie from its root: what is shared most often goes first."""
    orders: list[list[Segment]] = [[] for _ in sets]
    frequent = by_frequency(sets, weights)
    stack = [dict(enumerate(frequent))]  # sets that have the same beginning: what is left of each
    work = 0
    while stack and work < MAX_WORK:
        group = stack.pop()
        having: dict[Segment, list[int]] = {}
        for index, left in group.items():
            work += len(left)
            for segment in left:
                having.setdefault(segment, []).append(index)
        pairs = enumerate(having.items())
        heap = [((1 - len(n)) * weights[one], rank, one) for rank, (one, n) in pairs if len(n) > 1]
        heapq.heapify(heap)
        while heap:
            gain, rank, segment = heapq.heappop(heap)
            having[segment] = now = [index for index in having[segment] if index in group]
            work += len(now)
            if gain != (gain_now := (1 - len(now)) * weights[segment]):
                if len(now) > 1:  # others of its sets have got another segment
                    heapq.heappush(heap, (gain_now, rank, segment))
                continue
            for index in now:
                orders[index].append(segment)
            stack.append({index: [s for s in group.pop(index) if s != segment] for index in now})
    kept = [set(order) for order in orders]
    return [
        [*order, *(segment for segment in one if segment not in there)]
        for order, one, there in zip(orders, frequent, kept, strict=True)
    ]


# -- many sets: local search


def _improved(
    orders: Sequence[Sequence[Segment]], weights: Mapping[Segment, int]
) -> list[list[Segment]]:
    """Orders that share as much or more.

    For each segment, the orders that have it are taken out of the trie, and put back one by one in
    random order: each continues the heaviest beginning that is there, and then has its segments by
    what they could share within the group, times a random factor. The new orders stay unless the
    old ones shared more.
    """
    rng = random.Random(0)
    now = [list(order) for order in orders]
    trie = OrderTrie(now)
    having: dict[Segment, list[int]] = {}
    for index, order in enumerate(now):
        for segment in order:
            having.setdefault(segment, []).append(index)
    groups = [indices for indices in having.values() if len(indices) > 1]
    num_replaced = 0
    for indices in groups * NUM_ROUNDS:
        if num_replaced > MAX_REPLACED:
            break
        group = rng.sample(indices, min(len(indices), NEIGHBORHOOD))
        old = [now[index] for index in group]
        shared_before = 0
        for order in reversed(old):
            trie.remove(order)
            shared_before += trie.shared_weight(order, weights)
            num_replaced += len(order)
        counts = Counter(segment for order in old for segment in order)
        ranks = {
            segment: (1 - count) * weights[segment] * rng.uniform(1 - JITTER, 1 + JITTER)
            for segment, count in counts.items()
        }
        new = []
        shared = 0
        for order in old:
            by_rank = sorted(order, key=ranks.__getitem__)
            path, weight = trie.heaviest(by_rank, weights)
            new.append([*path, *(segment for segment in by_rank if segment not in path)])
            trie.add(new[-1])
            shared += weight
        if shared < shared_before:
            for order in new:
                trie.remove(order)
            for order in old:
                trie.add(order)
        else:
            for index, order in zip(group, new, strict=True):
                now[index] = order
    return now


# -- sets that come one after the other


@dataclass(frozen=True)
class Chosen(Generic[Segment]):
    """An order, and how much of it earlier orders began with: by weight, from its first segment."""

    order: tuple[Segment, ...]
    shared_weight: int


class SharedOrders(Generic[Segment]):
    """Orders of sets that follow the same beginning, each chosen from those before it.

    The longest beginning that was sent before goes first, then the segments that were asked for
    most often. A set that has been ordered once keeps its order.
    """

    def __init__(self) -> None:
        self._trie: OrderTrie[Segment] = OrderTrie()
        self.num_kept = 0
        """Segments of the trie, and of the sets that have an order."""
        self._counts: Counter[Segment] = Counter()
        self._decided: dict[frozenset[Segment], tuple[Segment, ...]] = {}

    def decided(self, segments: Iterable[Segment]) -> tuple[Segment, ...] | None:
        """The order of this set, if it has one."""
        return self._decided.get(frozenset(segments))

    def suggest(
        self, segments: Sequence[Segment], weights: Mapping[Segment, int]
    ) -> Chosen[Segment]:
        """An order for a set, without remembering it. O(segments log segments), and at most 500
        nodes of the trie."""
        path, shared = self._trie.heaviest(segments, weights)
        rest = [segment for segment in segments if segment not in path]
        rest.sort(key=lambda segment: -self._counts[segment] * weights[segment])  # stable
        return Chosen((*path, *rest), shared)

    def shared_weight(self, order: Sequence[Segment], weights: Mapping[Segment, int]) -> int:
        """How much of an order earlier ones began with, by weight."""
        return self._trie.shared_weight(order, weights)

    def add(self, order: Sequence[Segment]) -> None:
        """Remember that `order` has been sent."""
        self.num_kept += self._trie.add(order)
        self._counts.update(order)
        key = frozenset(order)
        if key not in self._decided:
            self._decided[key] = tuple(order)
            self.num_kept += len(order)

    def forget_older_half(self) -> None:
        """Forget half of the sets, those that came first, and what only they have sent."""
        orders = list(self._decided.values())
        self._trie, self.num_kept = OrderTrie(), 0
        self._counts.clear()
        self._decided.clear()
        for order in orders[(len(orders) + 1) // 2 :]:
            self.add(order)


class OrderMemory(Generic[Segment]):
    """`SharedOrders` for each beginning, the most recently used ones only.

    Args:
        max_segments: of all orders together. When there are more, the beginning that was used least
            recently is forgotten, or the older half of what followed the only one. A segment takes
            about 0.3 kB.
    """

    def __init__(self, max_segments: int = 30_000) -> None:
        self._max_segments = max_segments
        self._num_segments = 0
        self._by_beginning: OrderedDict[Hashable, SharedOrders[Segment]] = OrderedDict()

    def after(self, beginning: Hashable) -> SharedOrders[Segment]:
        """The orders that have followed `beginning`."""
        return self._by_beginning.get(beginning) or SharedOrders()

    def add(self, beginning: Hashable, order: Sequence[Segment]) -> None:
        """`order` has been sent after `beginning`."""
        orders = self._by_beginning.setdefault(beginning, SharedOrders())
        self._by_beginning.move_to_end(beginning)
        num_before = orders.num_kept
        orders.add(order)
        self._num_segments += orders.num_kept - num_before
        while self._num_segments > self._max_segments:
            if len(self._by_beginning) > 1:
                _, forgotten = self._by_beginning.popitem(last=False)
                self._num_segments -= forgotten.num_kept
            else:
                orders.forget_older_half()
                self._num_segments = orders.num_kept
