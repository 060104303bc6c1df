"""What the window groups of a tree keep of a node, and after which of its tokens a hit may end.

Owns the reading of one node for snapshots: it needs the node's own blocks and one number per group
from its parent, so a walk down the tree reads every block once. Does not own the rule itself, which
`Windows.longest_hit` applies to one match. Pure: no vLLM, no torch.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from sgl_vllm.radix.components.windows import HOLE, WindowGroup, shared_block
from sgl_vllm.radix.node import Node

Range = tuple[int, int]

_KEPT, _MISSING = b"\0", b"\1"


class KeptWindows:
    """The blocks and holes of one node.

    Args:
        groups: the window groups of the tree.
        node: holds tokens.
        holes_before: for each group the number of the last hole in the node's parents, as
            `last_holes` of its parent; -1 if there is none.

    Attributes:
        num_blocks: how many blocks of window groups the node owns.
        last_holes: for each group the number of the last hole in the node and its parents.
    """

    def __init__(
        self, groups: Sequence[WindowGroup], node: Node, holes_before: Sequence[int]
    ) -> None:
        self._groups = groups
        self._start, self._end = node.start, node.end
        self._holes_before = holes_before
        self._first = [node.start // group.block_size for group in groups]
        self._missing: list[bytes] = []
        """For each group, whether each block of the node's tokens is a hole."""
        self.num_blocks = 0
        self.last_holes: list[int] = []
        for index, (group, ids) in enumerate(zip(groups, node.windows, strict=True)):
            missing = bytes([block_id == HOLE for block_id in ids])
            self.num_blocks += missing.count(_KEPT)
            last = missing.rfind(_MISSING)
            self.last_holes.append(holes_before[index] if last < 0 else self._first[index] + last)
            if (self._first[index] + len(ids)) * group.block_size < node.end:
                missing += _MISSING if shared_block(node, index) == HOLE else _KEPT
            self._missing.append(missing)

    def ranges(self) -> list[Range]:
        """The ranges `[start, end)` of tokens that every group keeps, counted from the node's first
        token. O(blocks), at the speed of searching bytes."""
        ranges = []
        indexes = range(len(self._groups))
        position = self._start
        while position < self._end:
            hole = min(self._find(index, _MISSING, position) for index in indexes)
            if hole > position:
                ranges.append((position - self._start, hole - self._start))
            position = max(self._find(index, _KEPT, hole) for index in indexes)
        return ranges

    def hit_ends(self) -> list[Range]:
        """Where a hit may end: ranges of numbers of the node's tokens, first and last number
        included. A request that matches so many of them, and no more, can read all that it matches.

        Costs O(blocks), O(log n) per hole or run of holes, and a call of `num_skipped` per window
        that fits into the node.
        """
        ranges = []
        indexes = range(len(self._groups))
        empty = [self._empty_windows(group) for group in self._groups]
        length = self._start + 1
        while length <= self._end:
            first = max(self._next_end(index, length, empty[index]) for index in indexes)
            if first == length:
                last = min(self._last_end(index, length) for index in indexes)
                ranges.append((first - self._start, last - self._start))
                first = last + 1
            length = first
        return ranges

    def _find(self, index: int, what: bytes, position: int) -> int:
        """From `position` on, the first token that is in a hole of a group, or in a block; the
        node's end if there is none."""
        size, first = self._groups[index].block_size, self._first[index]
        found = self._missing[index].find(what, position // size - first)
        return self._end if found < 0 else min(max(position, (first + found) * size), self._end)

    def _next_end(self, index: int, length: int, empty: Sequence[int]) -> int:
        """The first hit of `length` or more tokens for which a group may have what it needs, and
        has it if that is `length`; more than the node's end if there is none.

        Args:
            empty: the lengths in the node that need no block of the group.
        """
        group, first, missing = self._groups[index], self._first[index], self._missing[index]
        found = missing.rfind(_MISSING, 0, group.num_blocks(length) - first)
        last = self._holes_before[index] if found < 0 else first + found
        if group.first_block(length) > last:
            return length
        if found >= 0:  # up to the last of a run of holes
            after = missing.find(_KEPT, found)
            last = first + (after if after >= 0 else len(missing)) - 1
        behind = bisect_left(range(self._end + 1), last + 1, lo=length, key=group.first_block)
        place = bisect_left(empty, length)
        return min(behind, empty[place]) if place < len(empty) else behind

    def _last_end(self, index: int, length: int) -> int:
        """The longest hit for which a group has what it needs, if it has it for all from `length`
        up to there."""
        size, first = self._groups[index].block_size, self._first[index]
        found = self._missing[index].find(_MISSING, -(-length // size) - first)
        return self._end if found < 0 else min((first + found) * size, self._end)

    def _empty_windows(self, group: WindowGroup) -> list[int]:
        """The hits that end in the node and need no block of a group, as at the end of a chunk.
        Ascending.

        These are lengths n with `num_skipped(n) == n`. As `num_skipped` never decreases, there is
        none between `num_skipped(n)` and n.
        """
        lengths = []
        length = self._end
        while length > self._start:
            num_skipped = group.num_skipped(length)
            if num_skipped == length:
                if length % group.block_size == 0:
                    lengths.append(length)
                num_skipped -= 1
            length = num_skipped
        lengths.reverse()
        return lengths
