"""Prefixes that clients ask to keep for a time: what is evicted in their place.

Owns the marks of each tenant, and how many of its blocks they can hold. Does not own the order of
eviction, which asks (`eviction_order.py`). Pure: no vLLM, no torch.

A marked leaf that is next to be evicted stays, and the next unmarked one *of the same tenant* goes.
When the tenant has lost as many blocks as the marked leaf has, that takes the other's place in the
order. So marks decide which blocks a tenant loses, and not how many: other tenants lose the same
blocks as without them. A tenant without unmarked leaves loses marked ones.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

from sgl_vllm.radix.blocks import BlockTable
from sgl_vllm.radix.eviction_order import LeafQueue
from sgl_vllm.radix.eviction_policies import EvictionPolicy
from sgl_vllm.radix.node import Node, subtree


@dataclass(slots=True, eq=False)
class _Tenant:
    """`leaves`: those that can be evicted, the unmarked first. `marked`: the blocks of each marked
    node, the one marked last at the end. `num_blocks`: their sum."""

    leaves: LeafQueue
    marked: OrderedDict[Node, int] = field(default_factory=OrderedDict)
    num_blocks: int = 0

    def count(self, node: Node) -> None:
        self.forget(node)
        self.marked[node] = len(node.block_ids)
        self.num_blocks += len(node.block_ids)

    def forget(self, node: Node) -> None:
        self.num_blocks -= self.marked.pop(node, 0)


class KeptPrefixes:
    """The marks of one tree.

    A mark costs O(nodes on the path), and the first mark of a tenant O(its nodes). Memory: an entry
    per marked node and per leaf of their tenants.

    Attributes:
        max_blocks: the blocks that the marks of one tenant can hold. Beyond it, its oldest marks
            are removed.
    """

    def __init__(
        self, policy: EvictionPolicy, blocks: BlockTable, clock: Callable[[], float]
    ) -> None:
        self.max_blocks = 0
        self._key: EvictionPolicy = lambda node: (node.kept_until > clock(), policy(node))
        self._is_candidate = blocks.is_evictable
        self._clock = clock
        self.clear()

    def clear(self) -> None:
        self._tenants: dict[Node, _Tenant] = {}  # by root, those with marks
        self._spared: Node | None = None  # by the last eviction
        self._num_paid = 0  # the blocks that this has cost so far
        self._evicted: tuple[Node, int] | None = None  # instead, and its blocks before

    def mark(self, path: Sequence[Node], until_s: float) -> None:
        """Keep the nodes from the root's child down to a node until then, on the tree's clock."""
        root = _root_of(path[0])
        tenant = self._tenants.get(root)
        if tenant is None:
            tenant = self._tenants[root] = _Tenant(LeafQueue(self._key, self._is_candidate))
            for leaf in filter(self._is_candidate, subtree(root)):
                tenant.leaves.push(leaf)
        for node in reversed(path):
            node.kept_until = max(node.kept_until, until_s)
            tenant.count(node)
        while tenant.num_blocks > self.max_blocks:
            self.unmark(next(iter(tenant.marked)))

    def unmark(self, node: Node) -> None:
        """A marked node is kept no longer, or is about to leave the tree."""
        node.kept_until = 0.0
        root = _root_of(node)
        self._tenants[root].forget(node)
        if not self._tenants[root].marked:
            del self._tenants[root]

    def split(self, lower: Node, upper: Node) -> None:
        """`upper` has got the first tokens of a marked node."""
        upper.kept_until = lower.kept_until
        tenant = self._tenants[_root_of(upper)]
        tenant.count(lower)
        tenant.count(upper)

    def add(self, leaf: Node) -> None:
        """`leaf` has become evictable."""
        if self._tenants and (tenant := self._tenants.get(_root_of(leaf))) is not None:
            tenant.leaves.push(leaf)

    def instead_of(self, leaf: Node, wanted: Collection[Node]) -> Node | None:
        """The leaf to evict in place of `leaf`, which is next; None if that is to be evicted
        itself. Call `settle` afterwards."""
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
        self._evicted = other, len(other.block_ids)
        return other

    def settle(self) -> None:
        """What `instead_of` returned has been evicted, wholly or in part."""
        if self._evicted is None or self._spared is None:
            return
        (other, num_before), self._evicted = self._evicted, None
        self._num_paid += num_before - (len(other.block_ids) if other.parent is not None else 0)
        if self._num_paid >= len(self._spared.block_ids):
            self._spared.last_used = max(self._spared.last_used, other.last_used)
            self._spared = None


def _root_of(node: Node) -> Node:
    while node.parent is not None:
        node = node.parent
    return node
