"""What workers have cached, guessed from the requests that were sent to them.

Owns one radix tree over all of these requests (`ApproxPrefixIndex`), and the order in which a
worker's guessed cache evicts (`ApproxCache`). Pure: no clock, no network.

The guess is prefix-closed: a worker that has a prefix has all shorter ones. A set of workers is an
integer with a bit for each.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from sgl_vllm.routing.prefix_hashes import prefix_length

Hashes = NDArray[np.int64]
"""A prompt's `PrefixHashes.hashes`."""

PrefixMatches = list[tuple[int, int]]
"""Which workers have how many of a prompt's hashed prefixes: (number, workers), number ascending.
Each set of workers is a subset of the one before."""


class _Node:
    """The hashed prefixes `[start, start + len(hashes))` of some prompts.

    They continue those of `parent`, and the same `workers` have all of them.
    """

    __slots__ = ("children", "hashes", "parent", "start", "workers")

    def __init__(self, parent: _Node | None, start: int, hashes: Hashes, workers: int) -> None:
        self.parent = parent
        self.start = start
        self.hashes = hashes
        self.workers = workers
        self.children: dict[int, _Node] = {}  # by their first hash

    @property
    def end(self) -> int:
        return self.start + len(self.hashes)

    @property
    def num_blocks(self) -> int:
        return prefix_length(self.end) - prefix_length(self.start)

    def num_common(self, hashes: Hashes) -> int:
        """How many of its hashes a prompt shares, which shares the first."""
        own, other = self.hashes, hashes[self.start : self.end]
        if own[len(other) - 1] == other[-1]:
            return len(other)
        return int((own[: len(other)] == other).argmin())


class ApproxPrefixIndex:
    """A radix tree over the prompts sent to all workers. Each node knows to which.

    Memory: about 600 bytes per node, of which a request adds one or two, and 8 bytes per hash.
    """

    def __init__(self) -> None:
        self._root = _Node(None, 0, np.empty(0, dtype=np.int64), 0)
        self._caches: dict[int, ApproxCache] = {}  # by their bit

    def match_prefix(self, hashes: Hashes) -> PrefixMatches:
        """Cost: a few microseconds per node on the path."""
        return [(node.start + num_common, node.workers) for node, num_common in self._walk(hashes)]

    def nodes(self) -> Iterator[_Node]:
        stack = [*self._root.children.values()]
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

    def _walk(self, hashes: Hashes) -> Iterator[tuple[_Node, int]]:
        """The nodes along a prompt, each with how many of its hashes the prompt shares."""
        node = self._root
        while node.end < len(hashes):
            child = node.children.get(int(hashes[node.end]))
            if child is None:
                return
            num_common = child.num_common(hashes)
            yield child, num_common
            if num_common < len(child.hashes):
                return
            node = child

    def _path(self, hashes: Hashes) -> list[_Node]:
        """The nodes that spell exactly this prompt, split and created where needed.

        The last one, if new, has no workers yet.
        """
        path = [
            node if n == len(node.hashes) else self._split(node, n)
            for node, n in list(self._walk(hashes))
        ]
        last = path[-1] if path else self._root
        if last.end < len(hashes):
            # A copy, so that the node does not keep the whole prompt's array alive.
            path.append(_Node(last, last.end, hashes[last.end :].copy(), 0))
            last.children[int(path[-1].hashes[0])] = path[-1]
        return path

    def _split(self, node: _Node, num_hashes: int) -> _Node:
        """Moves a node's first hashes into a new parent, which is returned."""
        assert node.parent is not None
        head = _Node(node.parent, node.start, node.hashes[:num_hashes].copy(), node.workers)
        node.parent.children[int(head.hashes[0])] = head
        node.parent, node.start, node.hashes = head, head.end, node.hashes[num_hashes:].copy()
        head.children[int(node.hashes[0])] = node
        workers = node.workers
        while workers:
            bit = workers & -workers
            self._caches[bit]._add_head(head, node)
            workers ^= bit
        return head


class ApproxCache:
    """What one worker has cached, by guess: the prompts that were sent to it most recently.

    Nodes stand in the order in which they were last sent, a longer prefix before the shorter ones
    that it continues, as engines evict them. The first are evicted while there are more than
    `capacity_blocks`.
    """

    def __init__(self, index: ApproxPrefixIndex, bit: int, capacity_blocks: int) -> None:
        self._index = index
        self._bit = bit
        self._sent_s: OrderedDict[_Node, float] = OrderedDict()
        self.capacity_blocks = capacity_blocks
        self.num_blocks = 0
        index._caches[bit] = self

    def insert(self, hashes: Hashes, now_s: float) -> None:
        """A prompt with these hashes was sent to the worker."""
        for node in reversed(self._index._path(hashes)):
            if node in self._sent_s:
                self._sent_s.move_to_end(node)
            else:
                node.workers |= self._bit
                self.num_blocks += node.num_blocks
            self._sent_s[node] = now_s
        while self.num_blocks > self.capacity_blocks:
            self._evict_oldest()

    def expire(self, before_s: float) -> None:
        """Removes what was last sent before then."""
        while self._sent_s and next(iter(self._sent_s.values())) < before_s:
            self._evict_oldest()

    def clear(self) -> None:
        while self._sent_s:
            self._evict_oldest()

    def _add_head(self, head: _Node, node: _Node) -> None:
        """`node` was split. Its head goes to the end, because it must outlast the node."""
        self._sent_s[head] = self._sent_s[node]

    def _evict_oldest(self) -> None:
        node, _ = self._sent_s.popitem(last=False)
        self.num_blocks -= node.num_blocks
        node.workers &= ~self._bit
        if not node.workers:  # then no worker has its children either
            assert node.parent is not None
            del node.parent.children[int(node.hashes[0])]
