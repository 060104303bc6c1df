"""A trie of orders: their beginnings, and which of them a set of segments can continue.

Owns the trie, and the search in it. Does not own how an order is chosen (`planning.py`). Pure.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

Segment = TypeVar("Segment", bound=Hashable)

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
