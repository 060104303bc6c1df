"""What the cache gives up first: policies, and the queue of leaves that may go.

Owns the order of eviction. Does not know blocks, locks or vLLM. Pure.

A policy is a function from a node to its *eviction key*; the leaf with the smallest key goes first.
Keys may only grow while a node lives (use makes a node more valuable, never less), which is what
lets the queue look at a node again only when its turn comes.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sgl_vllm.radix.tree import Node

EvictionPolicy = Callable[["Node"], Any]
"""From a node to its eviction key: anything that compares, the smallest goes first."""


def lru(node: Node) -> float:
    """Least recently used."""
    return node.last_used


def lfu(node: Node) -> tuple[int, float]:
    """Least often hit; among equals the least recently used."""
    return (node.num_hits, node.last_used)


def slru(node: Node) -> tuple[bool, float]:
    """Segmented LRU: prefixes that were never hit first, then the rest; each least recently used.

    A flood of prompts that are never repeated does not evict those that are.
    """
    return (node.num_hits > 0, node.last_used)


def priority(node: Node) -> tuple[int, float]:
    """Prefixes used only by low-priority requests (vLLM's `priority`); among equals LRU."""
    return (-node.priority, node.last_used)


POLICIES: dict[str, EvictionPolicy] = {"lru": lru, "lfu": lfu, "slru": slru, "priority": priority}


class LeafQueue:
    """Nodes in the order of their keys.

    A binary heap whose entries may be out of date: a node that has become more valuable is put
    back when it comes up, one that is no candidate any more is passed over. Push and pop cost
    O(log n); a node is in it at most once.
    """

    def __init__(self, key: EvictionPolicy, is_candidate: Callable[[Node], bool]) -> None:
        self._key = key
        self._is_candidate = is_candidate
        self._heap: list[tuple[Any, int, Node]] = []
        self._members: set[Node] = set()
        self._num_pushed = 0  # breaks ties, so that nodes are never compared
        self._limit = 64

    def push(self, node: Node) -> None:
        """Add `node`, which has just become a candidate."""
        if node in self._members:
            return
        self._members.add(node)
        self._put(self._key(node), node)
        if len(self._heap) > self._limit:
            self._drop_stale()

    def pop(self) -> Node | None:
        """Take the candidate with the smallest key; None if there is none."""
        while self._heap:
            key, _, node = heapq.heappop(self._heap)
            if not self._is_candidate(node):
                self._members.discard(node)
            elif (current := self._key(node)) != key:
                self._put(current, node)
            else:
                self._members.discard(node)
                return node
        return None

    def __contains__(self, node: Node) -> bool:
        return node in self._members

    def clear(self) -> None:
        self._heap.clear()
        self._members.clear()

    def _put(self, key: Any, node: Node) -> None:
        self._num_pushed += 1
        heapq.heappush(self._heap, (key, self._num_pushed, node))

    def _drop_stale(self) -> None:
        """Forget who is no candidate. The limit doubles with what is left: O(1) a push."""
        self._heap = [entry for entry in self._heap if self._is_candidate(entry[2])]
        heapq.heapify(self._heap)
        self._members = {entry[2] for entry in self._heap}
        self._limit = 2 * len(self._heap) + 64
