"""Marks on prefixes that clients ask to keep for a time, and which leaves are evicted instead.

Owns the marks of each tenant, and the limit on their blocks. Does not own the order of eviction,
which consults this module (`eviction_order.py`). Pure: no vLLM, no torch.

When a marked leaf is next, the next unmarked leaf *of the same tenant* is evicted instead. Once the
tenant has lost as many blocks as the marked leaf has, the marked leaf moves to the evicted leaf's
place in the order. So marks decide which blocks a tenant loses, not how many, and other tenants
lose the same blocks as without marks. A tenant without unmarked leaves loses marked ones.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

from sgl_vllm.radix.blocks import BlockTable
from sgl_vllm.radix.eviction_order import LeafQueue
from sgl_vllm.radix.eviction_policies import EvictionPolicy
from sgl_vllm.radix.node import Node, subtree


@dataclass(slots=True, eq=False)
class _Tenant:
    """`leaves`: the evictable leaves, unmarked ones first. `marked`: the number of blocks of each
    marked node, most recently marked last. `num_blocks`: the sum over `marked`."""

    leaves: LeafQueue
    marked: OrderedDict[Node, int] = field(default_factory=OrderedDict)
    num_blocks: int = 0

    def count(self, node: Node, num_blocks: int) -> None:
        self.forget(node)
        self.marked[node] = num_blocks
        self.num_blocks += num_blocks

    def forget(self, node: Node) -> None:
        self.num_blocks -= self.marked.pop(node, 0)


class KeptPrefixes:
    """The marks of one tree.

    A mark costs O(nodes on the path), and the first mark of a tenant O(its nodes). Memory: an entry
    per marked node, and per leaf of tenants with marks.

    Attributes:
        max_blocks: the most blocks that one tenant's marks can cover. Beyond that, its oldest
            marks are removed.
    """

    def __init__(
        self, policy: EvictionPolicy, blocks: BlockTable, clock: Callable[[], float]
    ) -> None:
        self.max_blocks = 0
        self._key: EvictionPolicy = lambda node: (node.kept_until > clock(), policy(node))
        self._is_candidate = blocks.is_evictable
        self._num_blocks = blocks.num_locking
        self._clock = clock
        self.clear()

    def clear(self) -> None:
        self._tenants: dict[Node, _Tenant] = {}  # by root; only tenants with marks
        self._spared: Node | None = None  # the marked leaf that stays
        self._num_paid = 0  # blocks evicted in its place so far
        self._evicted: tuple[Node, int] | None = None  # leaf evicted last, and its blocks before

    def mark(self, path: Sequence[Node], until_s: float) -> None:
        """Mark the nodes in the first `max_blocks` blocks of `path`, which starts below the root,
        until `until_s` on the tree's clock."""
        root = _root_of(path[0])
        ends = itertools.accumulate(map(self._num_blocks, path))
        path = [node for node, end in zip(path, ends, strict=True) if end <= self.max_blocks]
        if not path:
            return
        tenant = self._tenants.get(root)
        if tenant is None:
            tenant = self._tenants[root] = _Tenant(LeafQueue(self._key, self._is_candidate))
            for leaf in filter(self._is_candidate, subtree(root)):
                tenant.leaves.push(leaf)
        for node in reversed(path):
            node.kept_until = max(node.kept_until, until_s)
            tenant.count(node, self._num_blocks(node))
        while tenant.num_blocks > self.max_blocks:
            self.unmark(next(iter(tenant.marked)))

    def unmark(self, node: Node) -> None:
        """Remove the mark of `node`. Call this also before `node` leaves the tree."""
        node.kept_until = 0.0
        root = _root_of(node)
        self._tenants[root].forget(node)
        if not self._tenants[root].marked:
            del self._tenants[root]

    def split(self, lower: Node, upper: Node) -> None:
        """`upper` now has the first tokens of the marked node `lower`."""
        upper.kept_until = lower.kept_until
        tenant = self._tenants[_root_of(upper)]
        tenant.count(lower, self._num_blocks(lower))
        tenant.count(upper, self._num_blocks(upper))

    def add(self, leaf: Node) -> None:
        """`leaf` has become evictable."""
        if self._tenants and (tenant := self._tenants.get(_root_of(leaf))) is not None:
            tenant.leaves.push(leaf)

    def instead_of(self, leaf: Node, wanted: Collection[Node]) -> Node | None:
        """The leaf to evict in place of `leaf`, which is next in the order; None to evict `leaf`.
        Call `settle` after the eviction."""
        if not leaf.kept_until or leaf.kept_until <= (now_s := self._clock()):
            return None
        leaves = self._tenants[_root_of(leaf)].leaves
        if (other := leaves.pop()) is None:
            return None
        if other.kept_until > now_s or other in wanted:
            leaves.push(other)
            return None
        if self._spared is not leaf:
            self._spared, self._num_paid = leaf, 0
        self._evicted = other, self._num_blocks(other)
        return other

    def settle(self) -> None:
        """Count the blocks that the leaf from `instead_of` has lost to eviction."""
        if self._evicted is None or self._spared is None:
            return
        (other, num_before), self._evicted = self._evicted, None
        self._num_paid += num_before - (self._num_blocks(other) if other.parent is not None else 0)
        if self._num_paid >= self._num_blocks(self._spared):
            self._spared.last_used = max(self._spared.last_used, other.last_used)
            self._spared = None


def _root_of(node: Node) -> Node:
    while node.parent is not None:
        node = node.parent
    return node
