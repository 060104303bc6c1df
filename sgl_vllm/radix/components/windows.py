"""KV-cache groups whose layers read only a part of what precedes a token: window groups.

Owns which block of each window group holds which tokens of a node, where a hit may end, and which
of these blocks can be evicted by themselves. Does not own tokens, nodes and the blocks of full
attention (`prefix_tree.py`), nor ownership and locks (`blocks.py`). Pure: no vLLM, no torch.

A hit of L tokens needs of a window group only the blocks that hold tokens `[num_skipped(L), L)`:

    tokens              0                                            L
    full attention      |---------|---------|---------|---------|-----
    window group                            num_skipped(L) [..........
                        |  HOLE   |  HOLE   |---------|---------|-----   all that a hit of L needs

So a node has for each group a list of blocks and holes. A block may be evicted alone, which makes a
hole and shortens some hits, but cuts nothing off. A request that computes these tokens again fills
the hole. With a block of full attention, the other groups' blocks of the same and all later tokens
are evicted.

A group may have smaller blocks than full attention, several to one of it. The rule is the same for
each size: a leaf owns the blocks up to its end, an internal node only those that it fills.

    token               0       2       4       6       8       10
    full attention      |------ 0 ------|------ 1 ------|-- 2 --        blocks of 4 tokens
    window group        |-- 0 --|-- 1 --|-- 2 --|-- 3 --|-- 4 --|       blocks of 2
     └─ A               [0 ...................... 7)                    owns 0; in the group 0, 1, 2
         └─ B                                       [7 ...... 10)       owns 1, 2; in the group 3, 4

**Spare** blocks go before anything else: those outside the window that ends where their node ends,
or one token before. Only a request that diverges inside the node could use them. What ends at the
node's end, and so all that continues it, needs the others.

If every layer has a window, a node has a `HOLE` in place of each block of full attention. Then the
blocks of the first group, which has the longest window, decide whether a leaf can be evicted.

All that distinguishes a sliding window from chunks is `num_skipped`. A further group of full
attention is a window group that skips nothing.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from sgl_vllm.radix.blocks import BlockTable
from sgl_vllm.radix.components.component import Component, Given
from sgl_vllm.radix.node import HOLE, Match, Node, path_to, without_holes
from sgl_vllm.radix.watchers import Watchers

NumSkipped = Callable[[int], int]
"""How many of the first n tokens the group's layers do not read to compute what follows these n. At
most n, and never less for a larger n."""


class WindowGroup(NamedTuple):
    """One window group.

    Attributes:
        block_size: tokens per block. Those of full attention are a multiple of it.
        num_skipped: what the group's layers skip.
    """

    block_size: int
    num_skipped: NumSkipped

    def first_block(self, num_tokens: int) -> int:
        """Number of the first block that a hit of `num_tokens` needs."""
        return self.num_skipped(num_tokens) // self.block_size

    def num_blocks(self, num_tokens: int) -> int:
        """How many blocks `num_tokens` take; the last may be partial."""
        return -(-num_tokens // self.block_size)


class Windows(Component):
    """The window groups of one tree.

    Args:
        groups: each of them.
        blocks: the table of the tree's blocks.
        watchers: of the tree, notified when a match becomes readable as a whole, or stops being so.

    Invariant: `check` below.
    """

    def __init__(
        self, groups: Sequence[WindowGroup], blocks: BlockTable, watchers: Watchers
    ) -> None:
        for group in groups:
            if blocks.block_size % group.block_size:
                raise ValueError(
                    f"blocks of {blocks.block_size} tokens are not whole ones of {group.block_size}"
                )
        self.groups = tuple(groups)
        self._blocks = blocks
        self._watchers = watchers
        self._locations: dict[int, tuple[int, int]] = {}
        """The index of the group, and the block number, of each block."""
        self._spare: OrderedDict[int, None] = OrderedDict()
        """Every spare block that is not locked, in the order in which they became so. Some others
        too, which are no longer spare."""

    def __contains__(self, block_id: int) -> bool:
        return block_id in self._locations

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
            num_tokens = first_hole
        return num_tokens

    def block_ids(self, match: Match, num_tokens: int) -> list[list[int]]:
        """For each group its blocks of a hit of `num_tokens`, as `longest_hit` gave it: from number
        0 on, beginning with `HOLE` for those that it does not need."""
        lists = self._lists(match.node, num_tokens)
        for group, ids in zip(self.groups, lists, strict=True):
            del ids[group.num_blocks(num_tokens) :]
            first = group.first_block(num_tokens)
            ids[:first] = [HOLE] * first
        return lists

    def _lists(self, node: Node | None, num_tokens: int) -> list[list[int]]:
        """For each group the blocks from number 0 to the end of `node`. If `num_tokens` end inside
        a block that children of the node own, that of any of them."""
        path = path_to(node)
        lists = []
        for index, group in enumerate(self.groups):
            ids: list[int] = []
            for holder in path:
                ids += holder.windows[index]
            if len(ids) * group.block_size < num_tokens:
                ids.append(shared_block(path[-1], index))
            lists.append(ids)
        return lists

    def _first_hole(self, lists: list[list[int]], num_tokens: int) -> int | None:
        """Where the first block begins that a group needs for a hit and does not have."""
        holes = []
        for group, ids in zip(self.groups, lists, strict=True):
            first = group.first_block(num_tokens)
            needed = ids[first : group.num_blocks(num_tokens)]
            if HOLE in needed:
                holes.append((first + needed.index(HOLE)) * group.block_size)
        return min(holes, default=None)

    # -- insert -------------------------------------------------------------------------------

    def add_node(self, node: Node) -> None:
        node.windows = tuple([] for _ in self.groups)

    def fill_holes(self, node: Node, num_matched: int, given: Given) -> list[int]:
        """Fill holes of `node` and of its parents up to, excluding, `given.own_leaf` with blocks
        that the caller has for the same tokens. Of a block that is not full it must have all tokens
        that the node has."""
        taken: list[int] = []
        current: Node | None = node
        while current is not None and current is not given.own_leaf and current.parent is not None:
            filled = []
            for index, ids in enumerate(current.windows):
                size = self.groups[index].block_size
                first = current.start // size
                end = len(ids) if num_matched >= current.end else num_matched // size - first
                if HOLE not in ids[:end]:
                    continue
                offset = first - given.num_known // size
                for place, block_id in enumerate(given.windows[index][offset : offset + end]):
                    if ids[place] == HOLE and block_id != HOLE:
                        ids[place] = block_id
                        number = first + place
                        taken += self._add(index, number, [block_id], current)
                        filled.append((number * size, (number + 1) * size))
            if filled:
                self._notify(current, min(filled)[0], max(end for _, end in filled))
            current = current.parent
        return taken

    def after_growth(
        self, node: Node, old_end: int, given: Given, continued: Node | None
    ) -> tuple[list[int], list[int]]:
        taken: list[int] = []
        replaced: list[int] = []
        for index, group in enumerate(self.groups):
            size = group.block_size
            number, num_known_blocks = old_end // size, given.num_known // size
            end = group.num_blocks(node.end)
            new = given.windows[index][number - num_known_blocks : end - num_known_blocks]
            if old_end % size:
                if continued is not None:
                    tail = self._remove([continued.windows[index].pop()])
                    replaced += [block_id for block_id in tail if block_id != new[0]]
                self._notify(node, number * size, (number + 1) * size)
            node.windows[index].extend(new)
            taken += self._add(index, number, new, node)
        self._note_left_behind(node, old_end)
        return taken, replaced

    def _note_left_behind(self, node: Node, old_end: int) -> None:
        """`node` ended at `old_end`, and its window has moved on with its end. What it has got
        since is locked."""
        for group, ids in zip(self.groups, node.windows, strict=True):
            first = node.start // group.block_size
            begin = self._end_of_spare(group, old_end)
            end = min(self._end_of_spare(group, node.end), old_end // group.block_size)
            for block_id in ids[max(0, begin - first) : max(0, end - first)]:
                if block_id != HOLE and self._is_evictable_spare(block_id):
                    self._note_spare(block_id)

    def split(self, node: Node, upper: Node) -> None:
        self.add_node(upper)
        for group, ids, of_upper in zip(self.groups, node.windows, upper.windows, strict=True):
            num_blocks = upper.end // group.block_size - upper.start // group.block_size
            of_upper += ids[:num_blocks]
            del ids[:num_blocks]
            self._blocks.assign(of_upper, upper)

    def move_first(self, node: Node, parent: Node) -> list[int]:
        moved = []
        for group, ids, of_parent in zip(self.groups, node.windows, parent.windows, strict=True):
            if parent.end % group.block_size:
                block_id = ids.pop(0)
                of_parent.append(block_id)
                self._blocks.assign([block_id], parent)
                moved.append(block_id)
        return without_holes(moved)

    # -- evict --------------------------------------------------------------------------------

    def cut(self, node: Node, end: int) -> list[int]:
        removed = []
        for group, ids in zip(self.groups, node.windows, strict=True):
            num_kept = end // group.block_size - node.start // group.block_size
            removed += ids[num_kept:]
            del ids[num_kept:]
        return self._remove(removed)

    def begin_of(self, block_id: int) -> int:
        """The first token of a block."""
        index, number = self._locations[block_id]
        return number * self.groups[index].block_size

    def drop(self, block_id: int) -> list[int]:
        """Remove one block and nothing else, which makes a hole."""
        index, number = self._locations[block_id]
        size = self.groups[index].block_size
        node = self._leave_hole(block_id)
        self._blocks.remove([block_id])
        self._notify(node, number * size, (number + 1) * size)
        return [block_id]

    def evict_spare(self, num_blocks: int) -> list[int]:
        """Remove up to `num_blocks` spare blocks, the oldest first. Returns them. O(1) for each."""
        evicted: list[int] = []
        nodes: dict[Node, None] = {}
        while self._spare and len(evicted) < num_blocks:
            block_id, _ = self._spare.popitem(last=False)
            if self._is_evictable_spare(block_id):
                nodes[self._leave_hole(block_id)] = None
                evicted.append(block_id)
        self._blocks.remove(evicted)
        for node in nodes:
            self._watchers.notify(node)  # what continues the node needs no spare block
        return evicted

    def unlocked(self, block_ids: Iterable[int]) -> None:
        node, index, spare_numbers = None, -1, range(0)
        for block_id in block_ids:
            if (location := self._locations.get(block_id)) is None:
                continue
            if location[0] != index or self._blocks.owners[block_id] is not node:
                node, index = self._blocks.owners[block_id], location[0]
                spare_numbers = self._spare_numbers(node, index)
            if location[1] in spare_numbers:
                self._note_spare(block_id)

    def clear(self) -> None:
        self._locations.clear()
        self._spare.clear()

    def _note_spare(self, block_id: int) -> None:
        """Note a block that is spare, if it is not locked."""
        if block_id not in self._blocks.locked:
            self._spare[block_id] = None
            self._spare.move_to_end(block_id)

    def _is_evictable_spare(self, block_id: int) -> bool:
        """Whether it is not locked, and outside the windows that end close to its node's end."""
        index, number = self._locations[block_id]
        node = self._blocks.owners[block_id]
        return block_id not in self._blocks.locked and number in self._spare_numbers(node, index)

    def _spare_numbers(self, node: Node, index: int) -> range:
        """The numbers of the spare blocks of `node` in a group."""
        group = self.groups[index]
        # A first block that begins before `node.start` also serves the parent's end.
        begin = -(-node.start // group.block_size)
        return range(begin, self._end_of_spare(group, node.end))

    def _end_of_spare(self, group: WindowGroup, end: int) -> int:
        """Number of the first block that is kept in a node up to `end`. The window stays whole if
        the node loses its partial last block of full attention, and for a hit one token shorter:
        the last token of a prompt always runs, and a drafter may have read one token ahead."""
        return group.first_block(max(0, end - end % self._blocks.block_size - 1))

    def leaving(self, node: Node) -> None:
        """`node` may have held the part of a block that its parents share with it."""
        self._notify_above(node, node.start - node.start % self._blocks.block_size)

    def _notify_above(self, node: Node, begin: int) -> None:
        """Notify the watchers of matches that end in parents of `node`, but after `begin`."""
        while node.start > begin and node.parent is not None:
            node = node.parent
            self._watchers.notify(node)

    # -- inside -------------------------------------------------------------------------------

    def _add(self, index: int, number: int, ids: Sequence[int], node: Node) -> list[int]:
        """`node` owns the blocks in `ids`, whose first has this number. Returns them."""
        if not self._blocks.owners.keys().isdisjoint(ids):
            raise ValueError(f"one of the blocks {ids} is already in the tree, at another place")
        self._locations.update(
            (block_id, (index, block_number))
            for block_number, block_id in enumerate(ids, number)
            if block_id != HOLE
        )
        return self._blocks.add(ids, node)

    def _leave_hole(self, block_id: int) -> Node:
        """Forget a block, but for `BlockTable`. Returns the node where it was."""
        index, number = self._locations.pop(block_id)
        self._spare.pop(block_id, None)
        node = self._blocks.owners[block_id]
        node.windows[index][number - node.start // self.groups[index].block_size] = HOLE
        return node

    def _remove(self, block_ids: Sequence[int]) -> list[int]:
        removed = self._blocks.remove(block_ids)
        for block_id in removed:
            del self._locations[block_id]
            self._spare.pop(block_id, None)
        return removed

    def _notify(self, node: Node, begin: int, end: int) -> None:
        """Blocks of `node` in `[begin, end)` have appeared or disappeared. Notifies the watchers of
        matches that may have become readable as a whole, or stopped being so: those that end inside
        the node or close after it, and those that end in its parents, but after `begin`.

        A hit that was and stays shorter than its match may change its length unnoticed.
        """
        self._notify_above(node, begin)
        stack = [node]
        while stack:
            node = stack.pop()
            self._watchers.notify(node)
            next_end = node.end + 1
            if any(group.first_block(next_end) * group.block_size < end for group in self.groups):
                stack += node.children.values()

    def check(self, nodes: Iterable[Node]) -> None:
        locations: dict[int, tuple[int, int]] = {}
        for node in nodes:
            for index, (group, ids) in enumerate(zip(self.groups, node.windows, strict=True)):
                size = group.block_size
                last = node.end // size if node.children else group.num_blocks(node.end)
                assert len(ids) == last - node.start // size
                for number, block_id in enumerate(ids, node.start // size):
                    if block_id != HOLE:
                        assert block_id not in locations, f"block {block_id} is in two places"
                        locations[block_id] = index, number
                        assert self._blocks.owners[block_id] is node
        assert locations == self._locations
        assert {i for i in locations if self._is_evictable_spare(i)} <= self._spare.keys()
        assert self._spare.keys() <= locations.keys()


def shared_block(node: Node, index: int) -> int:
    """A block of a group that holds the part of internal `node` after its last full block; `HOLE`
    if none of its children has one."""
    stack = [*reversed(node.children.values())]
    while stack:
        child = stack.pop()
        ids = child.windows[index]
        if not ids:
            stack += reversed(child.children.values())
        elif ids[0] != HOLE:
            return ids[0]
    return HOLE
