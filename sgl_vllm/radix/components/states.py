"""KV-cache groups of recurrent layers, which keep one state per request: Mamba, linear attention.

Owns which blocks hold the state after which prefix, where a hit may end because of that, and which
states can be evicted by themselves. Does not own tokens, nodes and the blocks of full attention
(`tree.py`), nor ownership and locks (`blocks.py`). Pure: no vLLM, no torch.

A state is what a recurrent layer has made of *all* tokens so far. It cannot be cut, and the next
token overwrites it. So a hit can only end where a state was kept:

    tokens              0                                            n
    full attention      |---------|---------|---------|---------|-----   a hit may end anywhere
    recurrent groups              S                 S               S   a hit may end at an S

A node keeps its states by their position, the number of tokens before them: a block of each
recurrent group, all of one position. If one of these blocks goes, the others are of no use.

**Spare** states go before anything else: those inside a node. Only a request that diverges exactly
there could use them, and none is expected to. At the end of a node, either something diverges or a
sequence ends.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence

from sgl_vllm.radix.blocks import BlockTable
from sgl_vllm.radix.node import Match, Node, holder_of
from sgl_vllm.radix.watchers import Watchers

States = Mapping[int, Sequence[int]]
"""By position, a block of each recurrent group."""


class RecurrentStates:
    """The recurrent groups of one tree.

    Args:
        num_groups: how many there are.
        blocks: the table of the tree's blocks.
        watchers: of the tree, notified when a hit becomes longer or shorter.

    Invariant: `check` below.
    """

    def __init__(self, num_groups: int, blocks: BlockTable, watchers: Watchers) -> None:
        self._num_groups = num_groups
        self._blocks = blocks
        self._watchers = watchers
        self._positions: dict[int, int] = {}
        """Of every block, the position of its state."""
        self._spare: OrderedDict[int, None] = OrderedDict()
        """A block of every spare state that is not locked, in the order in which they became so.
        Some others too, which are no longer spare."""
        self._expected: set[int] = set()
        """A block of every state that `expect` was called for."""

    def __contains__(self, block_id: int) -> bool:
        return block_id in self._positions

    def __len__(self) -> int:
        """How many states there are."""
        return len(self._positions) // self._num_groups

    @property
    def num_spare_blocks(self) -> int:
        """How many blocks of spare states there are at most."""
        return len(self._spare) * self._num_groups

    # -- match --------------------------------------------------------------------------------

    def longest_hit(self, match: Match, num_tokens: int) -> int:
        """The last position in the first `num_tokens` of a match that has a state; 0 if none has.
        Costs O(nodes and states on the path)."""
        node = match.node
        while node is not None:
            if node.states:
                position = max((i for i in node.states if i <= num_tokens), default=0)
                if position:
                    return position
            node = node.parent
        return 0

    def block_ids(self, match: Match, num_tokens: int) -> list[int]:
        """A block of each group that holds the state after `num_tokens`, as `longest_hit` gave
        them."""
        node = holder_of(match, num_tokens).node
        return list(node.states[num_tokens]) if node is not None else []

    # -- insert -------------------------------------------------------------------------------

    def add(self, node: Node, states: States) -> list[int]:
        """Keep states of the sequence that ends in `node`. Where there is one already, the caller's
        is not taken.

        Returns:
            The blocks taken. They are in use by the caller, so they are locked.

        Raises:
            ValueError: a block is in the tree already, at another place.
        """
        taken: list[int] = []
        for position, block_ids in states.items():
            holder = node
            while holder.parent is not None and position <= holder.start:
                holder = holder.parent
            if holder.parent is None or position in holder.states:
                continue
            if not self._blocks.owners.keys().isdisjoint(block_ids):
                raise ValueError(f"one of the blocks {block_ids} is already in the tree")
            holder.states[position] = tuple(block_ids)
            self._positions.update(dict.fromkeys(block_ids, position))
            self._blocks.add(block_ids, holder)
            self._notify(holder, position)
            taken += block_ids
        return taken

    def grew(self, node: Node, old_end: int) -> None:
        """`node` ended at `old_end`, so a state there has become spare."""
        if (state := node.states.get(old_end)) is not None:
            self._note_spare(state[0])

    def split(self, node: Node, upper: Node) -> None:
        """`upper` has got the first tokens of `node`."""
        upper.states = {i: ids for i, ids in node.states.items() if i <= upper.end}
        for position, block_ids in upper.states.items():
            del node.states[position]
            self._blocks.assign(block_ids, upper)

    def expect(self, block_id: int) -> None:
        """The state that a block is part of is not spare: requests are expected to go on from
        there. Does nothing if the tree has another state at its position."""
        if (position := self._positions.get(block_id)) is not None:
            self._expected.add(self._blocks.owners[block_id].states[position][0])

    # -- evict --------------------------------------------------------------------------------

    def num_blocks_to_last_kept_state(self, node: Node) -> int:
        """How many blocks of full attention of leaf `node` to keep when its last block is evicted:
        those up to the last state that ends before that block; 0 if there is none."""
        size = self._blocks.block_size
        start = node.start // size
        ends = (-(-position // size) - start for position in node.states)
        return max((end for end in ends if end < len(node.block_ids)), default=0)

    def cut(self, node: Node, end: int) -> list[int]:
        """Remove the states of `node` after `end`. Returns their blocks."""
        removed: list[int] = []
        for position in [i for i in node.states if i > end]:
            removed += node.states.pop(position)
        self._remove(removed)
        return removed

    def drop(self, block_id: int) -> list[int]:
        """Remove the state that a block is part of. Returns all its blocks."""
        node, position = self._blocks.owners[block_id], self._positions[block_id]
        block_ids = list(node.states.pop(position))
        self._remove(block_ids)
        self._notify(node, position)
        return block_ids

    def evict_spare(self, num_blocks: int) -> list[int]:
        """Remove spare states of up to about `num_blocks`, the oldest first. Returns their blocks.
        O(1) for each."""
        evicted: list[int] = []
        while self._spare and len(evicted) < num_blocks:
            block_id, _ = self._spare.popitem(last=False)
            if self._is_evictable_spare(block_id):
                evicted += self.drop(block_id)
        return evicted

    def unlocked(self, block_ids: Iterable[int]) -> None:
        """These blocks are in use no longer. Some may be of no recurrent group."""
        for block_id in block_ids:
            if block_id in self._positions:
                self._note_spare(block_id)

    def clear(self) -> None:
        self._positions.clear()
        self._spare.clear()
        self._expected.clear()

    def _note_spare(self, block_id: int) -> None:
        if self._is_evictable_spare(block_id):
            first = self._blocks.owners[block_id].states[self._positions[block_id]][0]
            self._spare[first] = None
            self._spare.move_to_end(first)

    def _is_evictable_spare(self, block_id: int) -> bool:
        """Whether its state is inside its node and not expected, and no block of it is locked."""
        node, position = self._blocks.owners[block_id], self._positions[block_id]
        block_ids = node.states[position]
        return (
            position < node.end
            and block_ids[0] not in self._expected
            and self._blocks.locked.isdisjoint(block_ids)
        )

    # -- inside -------------------------------------------------------------------------------

    def _remove(self, block_ids: Sequence[int]) -> None:
        for block_id in block_ids:
            del self._positions[block_id]
            self._spare.pop(block_id, None)
            self._expected.discard(block_id)
        self._blocks.remove(block_ids)

    def _notify(self, node: Node, position: int) -> None:
        """A state of `node` has come or gone. Notifies the watchers of matches that end inside the
        node, and below it where no later state is nearer."""
        stack = [node]
        while stack:
            node = stack.pop()
            self._watchers.notify(node)
            if not any(i > position for i in node.states):
                stack += node.children.values()

    def check(self, nodes: Iterable[Node]) -> None:
        """Raise AssertionError if this contradicts the nodes of the tree: for tests."""
        positions: dict[int, int] = {}
        for node in nodes:
            for position, block_ids in node.states.items():
                assert node.start < position <= node.end
                assert len(block_ids) == self._num_groups
                for block_id in block_ids:
                    assert block_id not in positions, f"block {block_id} is in two states"
                    positions[block_id] = position
                    assert self._blocks.owners[block_id] is node
                if self._is_evictable_spare(block_ids[0]):
                    assert block_ids[0] in self._spare, "a spare state cannot be evicted"
        assert positions == self._positions
        assert self._spare.keys() <= positions.keys()
        assert self._expected <= positions.keys()
