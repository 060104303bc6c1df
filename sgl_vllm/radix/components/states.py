"""KV-cache groups of recurrent layers, which keep one state per request: Mamba, linear attention.

Owns which blocks hold the state after which prefix, where a hit may end because of that, and which
states can be evicted. Does not own tokens, nodes and the blocks of full attention
(`prefix_tree.py`), ownership and locks (`blocks.py`), nor the order in which states are
evicted (`state_order.py`). Pure: no vLLM, no torch.

A state is what a recurrent layer has made of *all* tokens so far. It cannot be cut, and the next
token overwrites it. So a hit can only end where a state was kept:

    tokens              0                                            n
    full attention      |---------|---------|---------|---------|-----   a hit may end anywhere
    recurrent groups              S                 S               S   a hit may end at an S

A node keeps its states by their position, the number of tokens before them: a block of each
recurrent group, all of one position. If one of these blocks goes, the others are of no use.

A state is evicted alone, unless it is the only one in the last block of a leaf: then the tokens
after the state before it go too, as no hit could reach them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence

from sgl_vllm.radix.blocks import BlockTable
from sgl_vllm.radix.components.component import Component, Given, States
from sgl_vllm.radix.components.state_order import Kind, StateOrder
from sgl_vllm.radix.node import Match, Node, holder_of
from sgl_vllm.radix.watchers import Watchers


class RecurrentStates(Component):
    """The recurrent groups of one tree.

    Args:
        num_groups: how many there are.
        blocks: the table of the tree's blocks.
        watchers: of the tree, notified when a hit becomes longer or shorter.
        clock: seconds, monotonic.

    Invariant: `check` below.
    """

    def __init__(
        self,
        num_groups: int,
        blocks: BlockTable,
        watchers: Watchers,
        clock: Callable[[], float],
    ) -> None:
        self._num_groups = num_groups
        self._blocks = blocks
        self._watchers = watchers
        self._positions: dict[int, int] = {}
        """Of every block, the position of its state."""
        self._order = StateOrder(clock)
        """The states, each by its first block. Some of those in a queue may be locked."""
        self._set_aside: list[int] = []
        self._set_aside_for: Collection[Node] = ()

    def __contains__(self, block_id: int) -> bool:
        return block_id in self._positions

    def __len__(self) -> int:
        """How many states there are."""
        return len(self._positions) // self._num_groups

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

    def add_node(self, node: Node) -> None:
        node.states = {}

    def after_insert(self, node: Node, given: Given) -> list[int]:
        return self._add(node, given.states) if given.states else []

    def _add(self, node: Node, states: States) -> list[int]:
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
            self._order.add(block_ids[0])
            self._blocks.add(block_ids, holder)
            self._notify(holder, position)
            taken += block_ids
        return taken

    def split(self, node: Node, upper: Node) -> None:
        upper.states = {i: ids for i, ids in node.states.items() if i <= upper.end}
        for position, block_ids in upper.states.items():
            del node.states[position]
            self._blocks.assign(block_ids, upper)

    def mark(self, block_id: int, kind: Kind) -> None:
        """The state that a block is part of was left in a place of this kind. Does nothing if the
        tree has another state at its position."""
        if (position := self._positions.get(block_id)) is not None:
            self._order.mark(self._blocks.owners[block_id].states[position][0], kind)

    def used(self, node: Node, position: int) -> None:
        """A request goes on from the state at a position of `node`, if there still is one."""
        if (block_ids := node.states.get(position)) is not None:
            self._order.used(block_ids[0])
            self.unlocked(block_ids[:1])  # may be evicted at once if no request holds it

    def count_as_never_used(self, node: Node) -> None:
        for block_ids in node.states.values():
            self._order.count_as_never_used(block_ids[0])

    def is_worth_a_state(self, kind: Kind) -> bool:
        """Whether a new state in a place of this kind is worth evicting others."""
        return self._order.is_worth_a_state(kind)

    # -- evict --------------------------------------------------------------------------------

    def num_blocks_to_last_kept_state(self, node: Node) -> int:
        """How many blocks of full attention of leaf `node` to keep when its last block is evicted:
        those up to the last state that ends before that block; 0 if there is none."""
        size = self._blocks.block_size
        start = node.start // size
        ends = (-(-position // size) - start for position in node.states)
        return max((end for end in ends if end < len(node.block_ids)), default=0)

    def cut(self, node: Node, end: int) -> list[int]:
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

    def take_first(self, wanted: Collection[Node]) -> int | None:
        """A block of the state to evict next, which is then evicted; None if there is none.

        Those of nodes in `wanted` are set aside until this is called with another collection.
        """
        if wanted is not self._set_aside_for:
            self._order.put_back(self._set_aside)
            self._set_aside.clear()
            self._set_aside_for = wanted
        while (block_id := self._order.take_first()) is not None:
            node, position = self._blocks.owners[block_id], self._positions[block_id]
            if not self._blocks.locked.isdisjoint(node.states[position]):
                continue  # put back when it is unlocked
            if node not in wanted:
                return block_id
            self._set_aside.append(block_id)
        return None

    def is_last(self, block_id: int) -> bool:
        """Whether a state is the only one in the last block of a leaf that may be evicted."""
        node, position = self._blocks.owners[block_id], self._positions[block_id]
        last = self._start_of_last_block(node)
        return (
            position > last
            and self._blocks.is_evictable(node)
            and not any(last < i != position for i in node.states)
        )

    def has_tail(self, node: Node) -> bool:
        """Whether `node` is a leaf whose last block may be evicted, and is a tail: no hit can end
        in it."""
        last = self._start_of_last_block(node)
        return self._blocks.is_evictable(node) and not any(i > last for i in node.states)

    def unlocked(self, block_ids: Iterable[int]) -> None:
        for block_id in block_ids:
            if (position := self._positions.get(block_id)) is not None:
                node = self._blocks.owners[block_id]
                of_state = node.states[position]
                if self._blocks.locked.isdisjoint(of_state):
                    self._order.put(of_state[0])
                    if node.ended:
                        self._order.count_as_never_used(of_state[0])

    def clear(self) -> None:
        self._positions.clear()
        self._order.clear()
        self._set_aside.clear()

    def _start_of_last_block(self, node: Node) -> int:
        size = self._blocks.block_size
        return (node.start // size + len(node.block_ids) - 1) * size

    # -- inside -------------------------------------------------------------------------------

    def _remove(self, block_ids: Sequence[int]) -> None:
        for block_id in block_ids:
            del self._positions[block_id]
            if block_id in self._order:
                self._order.remove(block_id)
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
        positions: dict[int, int] = {}
        for node in nodes:
            for position, block_ids in node.states.items():
                assert node.start < position <= node.end
                assert len(block_ids) == self._num_groups
                for block_id in block_ids:
                    assert block_id not in positions, f"block {block_id} is in two states"
                    positions[block_id] = position
                    assert self._blocks.owners[block_id] is node
                if self._blocks.locked.isdisjoint(block_ids):
                    is_queued = self._order.may_be_evicted(block_ids[0])
                    assert is_queued or block_ids[0] in self._set_aside, "it cannot be evicted"
        assert positions == self._positions
        assert len(self._order) == len(self)
