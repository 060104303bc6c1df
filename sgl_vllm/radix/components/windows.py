"""KV-cache groups whose layers read only a part of what precedes a token: window groups.

Owns which block of each window group holds which tokens of a node, where a hit may end, and which
of these blocks can be evicted by themselves. Does not own tokens, nodes and the blocks of full
attention (`tree.py`), nor ownership and locks (`blocks.py`). Pure: no vLLM, no torch.

A hit of L tokens needs of a window group only the blocks that hold tokens `[num_skipped(L), L)`:

    tokens              0                                            L
    full attention      |---------|---------|---------|---------|-----
    window group                            num_skipped(L) [..........
                        |  HOLE   |  HOLE   |---------|---------|-----   all that a hit of L needs

So a node has for each group a list of blocks and holes, as long as its list for full attention. A
block may be evicted alone, which makes a hole and shortens some hits, but cuts nothing off. A
request that computes these tokens again fills the hole. With a block of full attention, the other
groups' blocks of the same and all later tokens are evicted.

**Spare** blocks go before anything else: those outside the window that ends where their node ends.
Only a request that diverges inside the node could use them. What ends at the node's end, and so all
that continues it, needs the others.

All that distinguishes a sliding window from chunks is `num_skipped`. A further group of full
attention is a window group that skips nothing.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence

from sgl_vllm.radix.blocks import BlockTable
from sgl_vllm.radix.node import Match, Node, path_to
from sgl_vllm.radix.watchers import Watchers

HOLE = -1
"""Stands for a block that a window group does not have."""

NumSkipped = Callable[[int], int]
"""How many of the first n tokens the group's layers do not read to compute what follows these n. At
most n, and never less for a larger n."""


class Windows:
    """The window groups of one tree.

    Args:
        num_skipped: what each group skips.
        blocks: the table of the tree's blocks.
        watchers: of the tree, notified when a match becomes readable as a whole, or stops being so.

    Invariant: `check` below.
    """

    def __init__(
        self, num_skipped: Sequence[NumSkipped], blocks: BlockTable, watchers: Watchers
    ) -> None:
        self.num_groups = len(num_skipped)
        self._num_skipped = tuple(num_skipped)
        self._blocks = blocks
        self._block_size = blocks.block_size
        self._watchers = watchers
        self._locations: dict[int, tuple[int, int]] = {}
        """The group and the block number of each block."""
        self._spare: OrderedDict[int, None] = OrderedDict()
        """Every spare block that is not locked, in the order in which they became so. Some others
        too, which are no longer spare."""

    def __contains__(self, block_id: int) -> bool:
        return block_id in self._locations

    def first_block(self, group: int, num_tokens: int) -> int:
        """Number of the first block of a group that a hit of `num_tokens` needs."""
        return self._num_skipped[group](num_tokens) // self._block_size

    def no_blocks(self) -> tuple[list[int], ...]:
        """The lists of a node without blocks."""
        return tuple([] for _ in range(self.num_groups))

    # -- match --------------------------------------------------------------------------------

    def longest_hit(self, match: Match, num_tokens: int) -> int:
        """The longest prefix of a match, of at most `num_tokens`, of which every group has what it
        needs. Costs O(blocks of the match), at the speed of copying lists."""
        lists = self._lists(match.node, num_tokens)
        while num_tokens > 0:
            first_hole = self._first_hole(lists, num_tokens)
            if first_hole is None:
                break
            # Whatever ends inside this block or close after it needs it, too.
            num_tokens = first_hole * self._block_size
        return num_tokens

    def block_ids(self, match: Match, num_tokens: int) -> list[list[int]]:
        """For each group its blocks of a hit of `num_tokens`, as `longest_hit` gave it: as many as
        of full attention, beginning with `HOLE` for those that it does not need."""
        lists = self._lists(match.node, num_tokens)
        for group, ids in enumerate(lists):
            del ids[-(-num_tokens // self._block_size) :]
            first = self.first_block(group, num_tokens)
            ids[:first] = [HOLE] * first
        return lists

    def _lists(self, node: Node | None, num_tokens: int) -> list[list[int]]:
        """For each group the blocks from number 0 to the end of `node`. If `num_tokens` end inside
        a block that children of the node own, that of any of them."""
        path = path_to(node)
        lists = []
        for group in range(self.num_groups):
            ids: list[int] = []
            for holder in path:
                ids += holder.windows[group]
            if len(ids) * self._block_size < num_tokens:
                ids.append(_shared_block(path[-1], group))
            lists.append(ids)
        return lists

    def _first_hole(self, lists: list[list[int]], num_tokens: int) -> int | None:
        """Number of the first block that a group needs for a hit and does not have."""
        last = -(-num_tokens // self._block_size)
        holes = []
        for group, ids in enumerate(lists):
            first = self.first_block(group, num_tokens)
            needed = ids[first:last]
            if HOLE in needed:
                holes.append(first + needed.index(HOLE))
        return min(holes, default=None)

    # -- insert -------------------------------------------------------------------------------

    def fill(
        self,
        node: Node,
        num_matched: int,
        given: Sequence[Sequence[int]],
        first_block: int,
        stop: Node | None,
    ) -> list[int]:
        """Fill holes of `node` and of its parents up to, excluding, `stop` with blocks that a
        caller has for the same tokens. Of a block that is not full it must have all tokens that the
        node has.

        Args:
            num_matched: the tokens of the caller that the path to `node` holds.
            given: for each group its blocks from number `first_block` on.

        Returns:
            The blocks taken. They are in use by the caller, so they are locked.
        """
        size = self._block_size
        taken: list[int] = []
        current: Node | None = node
        while current is not None and current is not stop and current.parent is not None:
            first_number = current.start // size
            end = len(current.block_ids)
            if num_matched < current.end:
                end = num_matched // size - first_number
            begin = max(0, first_block - first_number)
            numbers = []
            for group, ids in enumerate(current.windows):
                if HOLE not in ids[begin:end]:
                    continue
                for index in range(begin, end):
                    number = first_number + index
                    block_id = given[group][number - first_block]
                    if ids[index] == HOLE and block_id != HOLE:
                        ids[index] = block_id
                        taken += self._add(group, number, [block_id], current)
                        numbers.append(number)
            if numbers:
                self._notify(current, min(numbers), max(numbers))
            current = current.parent
        return taken

    def append(
        self, node: Node, given: Sequence[Sequence[int]], tail_of: Node | None
    ) -> tuple[list[int], list[int]]:
        """Blocks of a caller that continue those of `node`, which gets as many for full attention.

        Args:
            given: for each group one list, all of the same length.
            tail_of: the leaf whose partial last block the first given one replaces, because it
                holds more tokens: `node`, or its parent, which then is no leaf any more.

        Returns:
            The blocks taken, which are locked, and those replaced.
        """
        taken: list[int] = []
        replaced: list[int] = []
        for group, ids in enumerate(node.windows):
            new = given[group]
            if tail_of is not None:
                tail = tail_of.windows[group].pop()
                if tail != HOLE:
                    self._remove([tail])
                    if tail != new[0]:
                        replaced.append(tail)
            number = node.start // self._block_size + len(ids)
            if number * self._block_size < node.start or tail_of is not None:
                self._notify(node, number, number)
            ids += new
            taken += self._add(group, number, new, node)
        return taken, replaced

    def grew(self, node: Node, old_end: int) -> None:
        """`node` ended at `old_end`, and its window has moved on with its end. What it has got
        since is locked."""
        first_number = node.start // self._block_size
        for group, ids in enumerate(node.windows):
            begin = self._end_of_spare(node, group, old_end)
            end = min(self._end_of_spare(node, group), old_end // self._block_size)
            for block_id in ids[max(0, begin - first_number) : max(0, end - first_number)]:
                self._note_spare(block_id)

    def split(self, node: Node, upper: Node) -> None:
        """`upper` has got the first blocks of full attention of `node`."""
        num_blocks = len(upper.block_ids)
        upper.windows = tuple(ids[:num_blocks] for ids in node.windows)
        for ids in node.windows:
            self._blocks.assign([i for i in ids[:num_blocks] if i != HOLE], upper)
            del ids[:num_blocks]

    def move_first(self, node: Node, parent: Node) -> None:
        """`parent` has got the first block of full attention of `node`."""
        for ids, of_parent in zip(node.windows, parent.windows, strict=True):
            block_id = ids.pop(0)
            of_parent.append(block_id)
            if block_id != HOLE:
                self._blocks.assign([block_id], parent)

    # -- evict --------------------------------------------------------------------------------

    def cut(self, node: Node, num_kept: int = 0) -> list[int]:
        """Keep `num_kept` blocks of `node` in each group. Returns those removed."""
        removed = []
        for ids in node.windows:
            removed += [block_id for block_id in ids[num_kept:] if block_id != HOLE]
            del ids[num_kept:]
        self._remove(removed)
        return removed

    def make_hole(self, block_id: int) -> None:
        """Remove one block and nothing else."""
        node, number = self._take_out(block_id)
        self._notify(node, number, number)

    def evict_spare(self, num_blocks: int) -> list[int]:
        """Remove up to `num_blocks` spare blocks, the oldest first. Returns them. O(1) for each."""
        evicted: list[int] = []
        while self._spare and len(evicted) < num_blocks:
            block_id, _ = self._spare.popitem(last=False)
            if self._is_evictable_spare(block_id):
                node, _ = self._take_out(block_id)
                self._watchers.notify(node)  # what continues the node needs no spare block
                evicted.append(block_id)
        return evicted

    def unlocked(self, block_ids: Iterable[int]) -> None:
        """These blocks are in use no longer. Some may be of no window group."""
        for block_id in block_ids:
            if block_id in self._locations:
                self._note_spare(block_id)

    def clear(self) -> None:
        self._locations.clear()
        self._spare.clear()

    def _note_spare(self, block_id: int) -> None:
        if block_id != HOLE and self._is_evictable_spare(block_id):
            self._spare[block_id] = None
            self._spare.move_to_end(block_id)

    def _is_evictable_spare(self, block_id: int) -> bool:
        """Whether it is not locked, and outside the window that ends where its node ends."""
        if block_id in self._blocks.locked:
            return False
        group, number = self._locations[block_id]
        node = self._blocks.owners[block_id]
        return (
            # A first block that begins before `node.start` also serves the parent's end.
            number * self._block_size >= node.start and number < self._end_of_spare(node, group)
        )

    def _end_of_spare(self, node: Node, group: int, end: int | None = None) -> int:
        """Number of the first block that is kept. The window stays whole if the node loses its
        partial last block."""
        end = node.end if end is None else end
        return self.first_block(group, end - end % self._block_size)

    # -- inside -------------------------------------------------------------------------------

    def _add(self, group: int, number: int, ids: Sequence[int], node: Node) -> list[int]:
        """`node` owns the blocks in `ids`, whose first has this number. Returns them."""
        block_ids = [block_id for block_id in ids if block_id != HOLE]
        if not self._blocks.owners.keys().isdisjoint(block_ids):
            raise ValueError(f"one of the blocks {ids} is already in the tree, at another place")
        self._blocks.add(block_ids, node)
        self._locations.update(
            (block_id, (group, block_number))
            for block_number, block_id in enumerate(ids, number)
            if block_id != HOLE
        )
        return block_ids

    def _take_out(self, block_id: int) -> tuple[Node, int]:
        """Leave a hole. Returns the node and the block number where it is."""
        group, number = self._locations[block_id]
        node = self._blocks.owners[block_id]
        node.windows[group][number - node.start // self._block_size] = HOLE
        self._remove([block_id])
        return node, number

    def _remove(self, block_ids: Sequence[int]) -> None:
        for block_id in block_ids:
            del self._locations[block_id]
            self._spare.pop(block_id, None)
        self._blocks.remove(block_ids)

    def _notify(self, node: Node, first: int, last: int) -> None:
        """Blocks `first` to `last` of `node` have appeared or disappeared. Notifies the watchers of
        matches that may have become readable as a whole, or stopped being so: those that end inside
        the node or close after it, and those that end in its parents, but inside block `first`.

        A hit that was and stays shorter than its match may change its length unnoticed.
        """
        above = node
        while above.start > first * self._block_size and above.parent is not None:
            above = above.parent
            self._watchers.notify(above)
        stack = [node]
        while stack:
            node = stack.pop()
            self._watchers.notify(node)
            if any(self.first_block(g, node.end + 1) <= last for g in range(self.num_groups)):
                stack += node.children.values()

    def check(self, nodes: Iterable[Node]) -> None:
        """Raise AssertionError if this contradicts the nodes of the tree: for tests."""
        locations: dict[int, tuple[int, int]] = {}
        for node in nodes:
            assert len(node.windows) == self.num_groups
            for group, ids in enumerate(node.windows):
                assert len(ids) == len(node.block_ids)
                for index, block_id in enumerate(ids):
                    if block_id != HOLE:
                        assert block_id not in locations, f"block {block_id} is in two places"
                        locations[block_id] = group, node.start // self._block_size + index
                        assert self._blocks.owners[block_id] is node
        assert locations == self._locations
        assert {i for i in locations if self._is_evictable_spare(i)} <= self._spare.keys()
        assert self._spare.keys() <= locations.keys()


def _shared_block(node: Node, group: int) -> int:
    """A block that holds the part of internal `node` after its last full block; `HOLE` if none of
    its children has one."""
    for child in node.children.values():
        block_id = child.windows[group][0] if child.block_ids else _shared_block(child, group)
        if block_id != HOLE:
            return block_id
    return HOLE
