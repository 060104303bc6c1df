"""The order in which the leaves of a tree are evicted.

Owns the queues of leaves that may be evicted. Does not own the policies
(`eviction_policies.py`), nor the eviction itself: the tree asks for the next leaf and cuts it.
Pure: no vLLM, no torch.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection, Iterable
from typing import TYPE_CHECKING, Any  # Any: a policy's key, of its own type

from sgl_vllm.radix.blocks import BlockTable
from sgl_vllm.radix.eviction_policies import EvictionPolicy, lru
from sgl_vllm.radix.node import Node

if TYPE_CHECKING:
    from sgl_vllm.radix.kept import KeptPrefixes


class LeafQueue:
    """Candidates for eviction, smallest key first.

    A binary heap with lazy deletion: an entry may be out of date. A node that has become more
    valuable is put back when it comes up; one that is no longer a candidate is skipped, and so is
    an entry that `forget` has replaced. Push and pop cost O(log n).
    """

    def __init__(self, key: EvictionPolicy, is_candidate: Callable[[Node], bool]) -> None:
        self._key = key
        self._is_candidate = is_candidate
        self._heap: list[tuple[Any, int, Node]] = []  # Any: a policy's key, of its own type
        self._members: dict[Node, int] = {}
        """Of each node, the number of its entry. A node's other entries have been replaced."""
        self._num_pushed = 0  # numbers entries, so that nodes are never compared
        self._limit = 64

    def push(self, node: Node) -> None:
        """Add `node`, which has just become a candidate."""
        if node in self._members:
            return
        self._put(self._key(node), node)
        if len(self._heap) > self._limit:
            self._remove_stale()

    def pop(self) -> Node | None:
        """Take the candidate with the smallest key; None if there is none."""
        while self._heap:
            key, number, node = heapq.heappop(self._heap)
            if self._members.get(node) != number:
                continue
            del self._members[node]
            if not self._is_candidate(node):
                continue
            if (current := self._key(node)) == key:
                return node
            self._put(current, node)
        return None

    def forget(self, node: Node) -> None:
        """Let `node` be pushed again, with the smaller key that it has now."""
        self._members.pop(node, None)

    def __contains__(self, node: Node) -> bool:
        return node in self._members

    def clear(self) -> None:
        self._heap.clear()
        self._members.clear()

    def _put(self, key: Any, node: Node) -> None:
        self._num_pushed += 1
        self._members[node] = self._num_pushed
        heapq.heappush(self._heap, (key, self._num_pushed, node))

    def _remove_stale(self) -> None:
        """Remove nodes that are no candidates, and entries that were replaced. The limit doubles
        with what is left, so this costs O(1) per push."""
        self._heap = [
            entry
            for entry in self._heap
            if self._members.get(entry[2]) == entry[1] and self._is_candidate(entry[2])
        ]
        heapq.heapify(self._heap)
        self._members = {node: number for _, number, node in self._heap}
        self._limit = 2 * len(self._heap) + 64


class EvictionOrder:
    """The evictable leaves of one tree.

    Leaves with a *tail*, a last block that is worth less, come first, least recently used first.
    With recurrent groups that is a block in which no hit can end. Else it is a partial one: a cache
    of whole blocks would not hold it, so none is kept at the expense of a full one. Then all leaves
    come, in the policy's order. Wanted leaves are set aside, and unmarked leaves go in place of
    marked ones.

    Args:
        has_tail: whether a node is an evictable leaf with a tail.

    Invariant: every evictable leaf of the tree is queued or set aside.
    """

    def __init__(
        self,
        policy: EvictionPolicy,
        blocks: BlockTable,
        has_tail: Callable[[Node], bool],
        kept: KeptPrefixes,
    ) -> None:
        self._has_tail = has_tail
        self._tails = LeafQueue(lru, self._has_tail)
        self._leaves = LeafQueue(policy, blocks.is_evictable)
        self._oldest = LeafQueue(lru, blocks.is_evictable)
        self._kept = kept
        self.may_expire = False
        """Whether `expire_from` has been called."""
        self._set_aside: list[tuple[LeafQueue, Node]] = []
        self._set_aside_for: Collection[Node] = ()

    def add(self, leaf: Node) -> None:
        """Add `leaf`, which has just become evictable."""
        self._leaves.push(leaf)
        self._kept.add(leaf)
        if self._has_tail(leaf):
            self._tails.push(leaf)
        if self.may_expire:
            self._oldest.push(leaf)

    def forget(self, node: Node) -> None:
        """`node` has become less valuable. Add it again if it is evictable."""
        for queue in (self._tails, self._leaves, self._oldest):
            queue.forget(node)

    def pop(self, wanted: Collection[Node], only_tails: bool = False) -> Node | None:
        """Take the next leaf, or the next with a tail, that is not in `wanted`; None if there is
        none.

        Wanted leaves that come up are set aside until this is called with another collection.
        """
        if wanted is not self._set_aside_for:
            self._put_back()
            self._set_aside_for = wanted
        for queue in (self._tails,) if only_tails else (self._tails, self._leaves):
            while (leaf := queue.pop()) is not None:
                if leaf in wanted:
                    self._set_aside.append((queue, leaf))
                    continue
                if queue is self._leaves and (other := self._kept.instead_of(leaf, wanted)):
                    queue.push(leaf)
                    return other
                return leaf
        return None

    def _put_back(self) -> None:
        for queue, leaf in self._set_aside:
            queue.push(leaf)
        self._set_aside.clear()

    def expire_from(self, nodes: Iterable[Node]) -> None:
        """Track the age of leaves from now on, beginning with the evictable leaves in `nodes`."""
        self.may_expire = True
        for node in nodes:
            self._oldest.push(node)

    def pop_unused_since(self, time: float) -> Node | None:
        """Take the least recently used leaf if it was not used since `time`; else None."""
        leaf = self._oldest.pop()
        if leaf is not None and leaf.last_used >= time:
            self._oldest.push(leaf)
            return None
        return leaf

    def clear(self) -> None:
        self._tails.clear()
        self._leaves.clear()
        self._oldest.clear()
        self._set_aside.clear()

    def holds(self, leaf: Node) -> bool:
        """Whether an evictable leaf can still be evicted, and expire: for tests."""
        is_set_aside = any(leaf is other for _, other in self._set_aside)
        may_expire = not self.may_expire or leaf in self._oldest
        return may_expire and (leaf in self._leaves or is_set_aside)
