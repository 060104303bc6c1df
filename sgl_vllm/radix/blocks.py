"""The table of cached blocks: which node owns each, and which are locked.

Owns ownership and locks. Does not own what a block holds (`prefix_tree.py`) nor which block is
evicted first (`eviction_order.py`). Pure: no vLLM, no torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from sgl_vllm.radix.node import Node, without_holes


@dataclass(slots=True, eq=False)
class BlockTable:
    """The blocks of one tree. Every `HOLE` among the ids that a caller gives is ignored.

    Invariant: each block has one owner, and every locked block has an owner.

    Attributes:
        block_size: tokens per block.
        has_full_attention: whether nodes have blocks of full attention. If not, the blocks of the
            first window group keep a leaf from being evicted.
        owners: the node that owns each block.
        locked: ids of blocks that running requests or pins read.
    """

    block_size: int
    has_full_attention: bool = True
    owners: dict[int, Node] = field(default_factory=dict)
    locked: set[int] = field(default_factory=set)

    @property
    def num_evictable(self) -> int:
        return len(self.owners) - len(self.locked)

    def add(self, block_ids: Sequence[int], node: Node) -> list[int]:
        """New blocks. The caller of the tree uses them, so they are locked. Returns them."""
        added = without_holes(block_ids)
        self.owners.update(dict.fromkeys(added, node))
        self.locked.update(added)
        return added

    def assign(self, block_ids: Sequence[int], node: Node) -> None:
        """Blocks of the table move to another node."""
        self.owners.update(dict.fromkeys(without_holes(block_ids), node))

    def remove(self, block_ids: Sequence[int]) -> list[int]:
        """Blocks leave the table. Returns them."""
        removed = without_holes(block_ids)
        for block_id in removed:
            del self.owners[block_id]
        self.locked.difference_update(removed)
        return removed

    def lock(self, block_ids: Iterable[int]) -> None:
        """Ids that are not in the table are ignored."""
        self.locked.update(filter(self.owners.__contains__, block_ids))

    def unlock(self, block_ids: Sequence[int]) -> list[Node]:
        """Ids that are not in the table are ignored. Returns the leaves that are evictable now."""
        self.locked.difference_update(block_ids)
        nodes = set(map(self.owners.get, block_ids))
        return [node for node in nodes if node is not None and self.is_evictable(node)]

    def clear(self) -> None:
        self.owners.clear()
        self.locked.clear()

    def is_evictable(self, node: Node) -> bool:
        """Whether `node` is a leaf of the tree whose last block is not locked."""
        return (
            node.parent is not None
            and not node.children
            and self.locking(node)[-1] not in self.locked
        )

    def locking(self, node: Node) -> list[int]:
        """The blocks that keep the tokens of a leaf in the tree while they are locked."""
        return node.block_ids if self.has_full_attention else node.windows[0]

    def num_locking(self, node: Node) -> int:
        """How many blocks `locking` has, holes left out."""
        if self.has_full_attention:
            return len(node.block_ids)
        return len(without_holes(node.windows[0]))

    def has_tail(self, node: Node) -> bool:
        """Whether it also ends inside its last block, so that this block is a tail
        (`eviction_order.py`)."""
        return node.end % self.block_size != 0 and self.is_evictable(node)
