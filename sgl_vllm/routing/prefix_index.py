"""What the workers have cached, as far as a router knows: one index for all of them.

Owns the two ways to know it: what was sent to a worker (`ApproxPrefixIndex`, one for all, and each
worker's `SentCache`), and what its engine tells by KV events (`KvEventIndex`, one for all,
and each worker's `ToldCache`). Both are *prefix-closed*: a worker that has a prefix has all shorter
ones. Pure: no clock, no network.

Workers are bits of an integer, as sets of them are integers.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sgl_vllm.routing.prefix_hashes import Namespace, PrefixHasher, ladder_length, seed_of

NONE = -1

Keys = NDArray[np.int64]
"""The numbered beginnings of a request, `Prefixes.keys`."""

Found = list[tuple[int, int]]
"""Who has how many of a request's beginnings: (number, workers), the number ascending; each set of
workers is a part of the one before."""


# -- what was sent --------------------------------------------------------------------------------


class _Node:
    """Beginnings of the ladder's steps `[start, start + len(keys))` that the same workers have, and
    that continue those of `parent`."""

    __slots__ = ("children", "keys", "parent", "start", "workers")

    def __init__(self, parent: _Node | None, start: int, keys: Keys, workers: int) -> None:
        self.parent = parent
        self.start = start
        self.keys = keys
        self.workers = workers
        self.children: dict[int, _Node] = {}  # by their first key

    @property
    def end(self) -> int:
        return self.start + len(self.keys)

    @property
    def num_grains(self) -> int:
        return ladder_length(self.end) - ladder_length(self.start)

    def num_common(self, keys: Keys) -> int:
        """How many of its own are those of a request, which has the first of them."""
        own, other = self.keys, keys[self.start : self.end]
        if own[len(other) - 1] == other[-1]:
            return len(other)
        return int((own[: len(other)] == other).argmin())


class ApproxPrefixIndex:
    """A radix tree over what was sent to all workers; a node says to which.

    Some 600 bytes a node, of which a request adds one or two, and 8 for each of its beginnings.
    """

    def __init__(self) -> None:
        self._root = _Node(None, 0, np.empty(0, dtype=np.int64), 0)
        self._caches: dict[int, SentCache] = {}  # by their bit

    def matches(self, keys: Keys) -> Found:
        """A few microseconds for each node on the path."""
        return [(node.start + num_common, node.workers) for node, num_common in self._walk(keys)]

    def nodes(self) -> Iterator[_Node]:
        stack = [*self._root.children.values()]
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

    def _walk(self, keys: Keys) -> Iterator[tuple[_Node, int]]:
        """The nodes along a request, each with how many of its beginnings are the request's."""
        node = self._root
        while node.end < len(keys):
            child = node.children.get(int(keys[node.end]))
            if child is None:
                return
            num_common = child.num_common(keys)
            yield child, num_common
            if num_common < len(child.keys):
                return
            node = child

    def _path(self, keys: Keys) -> list[_Node]:
        """Nodes that spell the request exactly, split and made where needed; the last one made may
        belong to nobody yet."""
        path = [
            node if n == len(node.keys) else self._split(node, n)
            for node, n in list(self._walk(keys))
        ]
        last = path[-1] if path else self._root
        if last.end < len(keys):
            # A copy: what is longer is not to be kept for this part's sake.
            path.append(_Node(last, last.end, keys[last.end :].copy(), 0))
            last.children[int(path[-1].keys[0])] = path[-1]
        return path

    def _split(self, node: _Node, num_keys: int) -> _Node:
        """Its first keys become a node of their own, its parent from now on."""
        assert node.parent is not None
        head = _Node(node.parent, node.start, node.keys[:num_keys].copy(), node.workers)
        node.parent.children[int(head.keys[0])] = head
        node.parent, node.start, node.keys = head, head.end, node.keys[num_keys:].copy()
        head.children[int(node.keys[0])] = node
        workers = node.workers
        while workers:
            bit = workers & -workers
            self._caches[bit]._add_head(head, node)
            workers ^= bit
        return head


class SentCache:
    """What was sent to one worker: by guess, what it has cached.

    Nodes of the tree in the order in which they were last sent, a longer beginning before the
    shorter ones that it continues, as engines have it. The first go when there is more than
    `capacity_grains`.
    """

    def __init__(self, tree: ApproxPrefixIndex, bit: int, capacity_grains: int) -> None:
        self._tree = tree
        self._bit = bit
        self._sent_s: OrderedDict[_Node, float] = OrderedDict()
        self.capacity_grains = capacity_grains
        self.num_grains = 0
        tree._caches[bit] = self

    def send(self, keys: Keys, now_s: float) -> None:
        """A request with these beginnings was sent there."""
        for node in reversed(self._tree._path(keys)):
            if node in self._sent_s:
                self._sent_s.move_to_end(node)
            else:
                node.workers |= self._bit
                self.num_grains += node.num_grains
            self._sent_s[node] = now_s
        while self.num_grains > self.capacity_grains:
            self._forget_oldest()

    def expire(self, before_s: float) -> None:
        """Forgets what was last sent before then."""
        while self._sent_s and next(iter(self._sent_s.values())) < before_s:
            self._forget_oldest()

    def clear(self) -> None:
        while self._sent_s:
            self._forget_oldest()

    def _add_head(self, head: _Node, node: _Node) -> None:
        """`node` has been split. The head comes last: it has to outlast the node."""
        self._sent_s[head] = self._sent_s[node]

    def _forget_oldest(self) -> None:
        node, _ = self._sent_s.popitem(last=False)
        self.num_grains -= node.num_grains
        node.workers &= ~self._bit
        if not node.workers:  # then nobody has what continues it
            assert node.parent is not None
            del node.parent.children[int(node.keys[0])]


# -- what is told ---------------------------------------------------------------------------------


class KvEventIndex:
    """Which workers have which beginnings."""

    NUM_PARTS = 64  # a dictionary that grows is copied: 64 small ones take little time each

    def __init__(self) -> None:
        self._parts: list[dict[int, int]] = [{} for _ in range(self.NUM_PARTS)]

    def __len__(self) -> int:
        return sum(map(len, self._parts))

    def who(self, key: int) -> int:
        return self._parts[key % self.NUM_PARTS].get(key, 0)

    def add(self, key: int, bit: int) -> None:
        part = self._parts[key % self.NUM_PARTS]
        part[key] = part.get(key, 0) | bit

    def discard(self, key: int, bit: int) -> None:
        part = self._parts[key % self.NUM_PARTS]
        if left := part.get(key, 0) & ~bit:
            part[key] = left
        else:
            part.pop(key, None)

    def matches(self, keys: Keys) -> Found:
        """As the set of workers shrinks along `keys`, stretches with one set are leapt over:
        O(s log n) look-ups for s different sets, not n."""
        found = []
        begin, num_keys = 0, len(keys)
        while begin < num_keys and (workers := self.who(int(keys[begin]))):
            low, high, step = begin, num_keys, 1  # keys[low] has this set, keys[high] has not
            while high - low > 1:
                middle = min(low + step, (low + high) // 2)
                if self.who(int(keys[middle])) == workers:
                    low, step = middle, 2 * step
                else:
                    high = middle
            begin = low + 1
            found.append((begin, workers))
        return found


class ToldCache:
    """What one worker's engine holds, as its KV events tell.

    A block is a row of arrays; rows form the tree of parents. A block is *held* from being stored
    until it is removed, and *rooted* if all from the first block to it are held: only such can be
    met, and only their beginnings are in the index. A block that is removed while longer ones are
    held stays as a row without being held, until it is stored again or the last of them is gone.

    Some 160 bytes a block of 16 tokens, with what the index takes; 3 us for each that is stored.
    """

    def __init__(self, index: KvEventIndex, bit: int, hasher: PrefixHasher) -> None:
        self._index = index
        self._bit = bit
        self._hasher = hasher
        self.num_unknown_parents = 0  # blocks left out because what they continue is not known
        self._set_up()

    def _set_up(self) -> None:
        self._rows: dict[Any, int] = {}  # block hash -> row
        self._names: list[Any] = []  # row -> block hash
        self._states = array("Q")  # of the beginning that ends with the block
        self._keys = array("q")  # its number; NONE if the ladder has none of that length
        self._lengths = array("i")  # in grains, which are blocks
        self._parents = array("i")
        self._first_children = array("i")
        self._next_siblings = array("i")
        self._previous_siblings = array("i")
        self._is_held = bytearray()
        self._is_rooted = bytearray()
        self._free_rows: list[int] = []

    def __len__(self) -> int:
        """Blocks that are held."""
        return sum(self._is_held)

    def store(
        self,
        block_hashes: Sequence[Any],
        parent_hash: Any,
        tokens: NDArray[np.integer],
        namespace: Namespace,
    ) -> None:
        """Blocks that follow each other, with their tokens, shape (blocks * tokens per block,).

        `namespace` counts for those without a parent; the others have their parent's.
        """
        if parent_hash is None:
            parent, state, length = NONE, seed_of(namespace, "tokens"), 0
        elif (parent := self._rows.get(parent_hash, NONE)) == NONE:
            self.num_unknown_parents += len(block_hashes)
            return
        else:
            state, length = self._states[parent], self._lengths[parent]
        states = self._hasher.states(self._hasher.grains(tokens), state)
        ladder_lengths, ladder_keys = self._hasher.ladder_keys(states, length)
        keys = np.full(len(states), NONE, dtype=np.int64)
        keys[ladder_lengths - length - 1] = ladder_keys
        for name, state, key in zip(block_hashes, states.tolist(), keys.tolist(), strict=True):
            length += 1
            row = self._rows.get(name)
            if row is None:
                row = self._new_row(name, parent, state, key, length)
            if not self._is_held[row]:
                self._is_held[row] = True
                self._root(row)
            parent = row

    def remove(self, block_hashes: Iterable[Any]) -> None:
        """Unknown ones do no harm."""
        for name in block_hashes:
            row = self._rows.get(name)
            if row is None or not self._is_held[row]:
                continue
            self._is_held[row] = False
            self._uproot(row)
            self._free(row)

    def clear(self) -> None:
        for row in self._rows.values():
            if self._is_rooted[row] and self._keys[row] != NONE:
                self._index.discard(self._keys[row], self._bit)
        self._set_up()

    def _root(self, row: int) -> None:
        """`row` has come to be held: what is held from here on can be met, if it can itself."""
        parent = self._parents[row]
        if parent != NONE and not self._is_rooted[parent]:
            return
        rows = [row]
        while rows:
            row = rows.pop()
            self._is_rooted[row] = True
            if self._keys[row] != NONE:
                self._index.add(self._keys[row], self._bit)
            rows += [child for child in self._children(row) if self._is_held[child]]

    def _uproot(self, row: int) -> None:
        """`row` is not held any more: nothing from here on can be met."""
        rows = [row] if self._is_rooted[row] else []
        while rows:
            row = rows.pop()
            self._is_rooted[row] = False
            if self._keys[row] != NONE:
                self._index.discard(self._keys[row], self._bit)
            rows += [child for child in self._children(row) if self._is_rooted[child]]

    def _children(self, row: int) -> Iterable[int]:
        child = self._first_children[row]
        while child != NONE:
            yield child
            child = self._next_siblings[child]

    def _new_row(self, name: Any, parent: int, state: int, key: int, length: int) -> int:
        """Not held yet, first among its siblings."""
        sibling = self._first_children[parent] if parent != NONE else NONE
        if self._free_rows:
            row = self._free_rows.pop()
            self._names[row] = name
            self._states[row], self._keys[row], self._lengths[row] = state, key, length
            self._parents[row], self._first_children[row] = parent, NONE
            self._next_siblings[row], self._previous_siblings[row] = sibling, NONE
        else:
            row = len(self._names)
            self._names.append(name)
            self._states.append(state)
            self._keys.append(key)
            self._lengths.append(length)
            self._parents.append(parent)
            self._first_children.append(NONE)
            self._next_siblings.append(sibling)
            self._previous_siblings.append(NONE)
            self._is_held.append(False)
            self._is_rooted.append(False)
        if parent != NONE:
            self._first_children[parent] = row
        if sibling != NONE:
            self._previous_siblings[sibling] = row
        self._rows[name] = row
        return row

    def _free(self, row: int) -> None:
        """Gives up `row` and its ancestors, as far as they are neither held nor needed."""
        while row != NONE and not self._is_held[row] and self._first_children[row] == NONE:
            parent, before = self._parents[row], self._previous_siblings[row]
            after = self._next_siblings[row]
            if before != NONE:
                self._next_siblings[before] = after
            elif parent != NONE:
                self._first_children[parent] = after
            if after != NONE:
                self._previous_siblings[after] = before
            del self._rows[self._names[row]]
            self._names[row] = None
            self._free_rows.append(row)
            row = parent
