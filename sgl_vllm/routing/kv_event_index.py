"""What workers have cached, exactly, as their engines' KV events report it.

Owns the index from prefix hashes to workers (`KvEventIndex`), each worker's blocks, from which the
index is kept (`KvEventCache`), what vLLM's events mean for these, and what happens after a gap in
their numbers (`KvEventStream`). Pure: no clock, no network. Events are read by the names of their
classes and fields.
"""

from __future__ import annotations

import logging
from array import array
from collections.abc import Hashable, Iterable, Sequence
from typing import Any  # Any: events

import numpy as np
from numpy.typing import NDArray

from sgl_vllm.protocol.cache_namespace import CacheNamespace
from sgl_vllm.routing.approx_index import Hashes, PrefixMatches
from sgl_vllm.routing.costs import Worker
from sgl_vllm.routing.prefix_hashes import PrefixHasher, seed_of

logger = logging.getLogger(__name__)

MEDIUM_GPU = "GPU"
"""How KV events name the memory from which attention reads."""

FULL_ATTENTION = ("full_attention", "mla_attention")
"""How KV events name groups of layers that read all tokens."""

ExtraKeys = tuple[object, ...] | None
"""What vLLM adds to a block's hash: adapter and salt as strings, images as tuples."""

NONE = -1

BlockHash = Hashable
"""vLLM's name for a block: bytes or an integer."""


class KvEventIndex:
    """Which workers have which hashed prefixes. A set of workers is an integer with a bit for each.

    Invariant: prefix-closed. A worker that has a prefix has all shorter ones.
    """

    NUM_PARTS = 64  # a growing dictionary is copied, which is quick for a small one

    def __init__(self) -> None:
        self._parts: list[dict[int, int]] = [{} for _ in range(self.NUM_PARTS)]

    def __len__(self) -> int:
        return sum(map(len, self._parts))

    def workers_with(self, prefix_hash: int) -> int:
        return self._parts[prefix_hash % self.NUM_PARTS].get(prefix_hash, 0)

    def add(self, prefix_hash: int, bit: int) -> None:
        part = self._parts[prefix_hash % self.NUM_PARTS]
        part[prefix_hash] = part.get(prefix_hash, 0) | bit

    def discard(self, prefix_hash: int, bit: int) -> None:
        part = self._parts[prefix_hash % self.NUM_PARTS]
        if left := part.get(prefix_hash, 0) & ~bit:
            part[prefix_hash] = left
        else:
            part.pop(prefix_hash, None)

    def match_prefix(self, hashes: Hashes) -> PrefixMatches:
        """Cost: O(s log n) look-ups for n hashes and s different sets of workers.

        The set of workers only shrinks along `hashes`, so stretches with one set are skipped.
        """
        matches = []
        begin, num_hashes = 0, len(hashes)
        while begin < num_hashes and (workers := self.workers_with(int(hashes[begin]))):
            low, high, step = begin, num_hashes, 1  # hashes[low] has this set, hashes[high] has not
            while high - low > 1:
                middle = min(low + step, (low + high) // 2)
                if self.workers_with(int(hashes[middle])) == workers:
                    low, step = middle, 2 * step
                else:
                    high = middle
            begin = low + 1
            matches.append((begin, workers))
        return matches


class KvEventCache:
    """The blocks that one worker's engine holds, as its KV events report them.

    A block is a row of arrays, and rows form a tree by their parents. A block is *held* from the
    time it is stored until it is removed. It is *reachable* if all blocks from the first one to it
    are held: only reachable blocks can be hit, and only their prefixes are in the index. A block
    that is removed while longer ones are held keeps its row, not held, until it is stored again or
    the last of those is removed.

    Memory: about 160 bytes per block of 16 tokens, with the index. Cost: 3 us per stored block.
    """

    def __init__(self, index: KvEventIndex, bit: int, hasher: PrefixHasher) -> None:
        self._index = index
        self._bit = bit
        self._hasher = hasher
        self.num_unknown_parents = 0  # blocks ignored because their parent is unknown
        self._set_up()

    def _set_up(self) -> None:
        self._rows: dict[BlockHash, int] = {}
        self._block_hashes: list[BlockHash] = []  # by row
        self._states = array("Q")  # hash state of the prefix that ends with the block
        self._prefix_hashes = array("q")  # of that prefix; NONE if its length is not hashed
        self._lengths = array("i")  # of that prefix, in blocks
        self._parents = array("i")
        self._first_children = array("i")
        self._next_siblings = array("i")
        self._previous_siblings = array("i")
        self._is_held = bytearray()
        self._is_reachable = bytearray()
        self._free_rows: list[int] = []

    def __len__(self) -> int:
        """Held blocks."""
        return sum(self._is_held)

    def store(
        self,
        block_hashes: Sequence[BlockHash],
        parent_hash: BlockHash | None,
        tokens: NDArray[np.integer],
        namespace: CacheNamespace,
    ) -> None:
        """The engine stored blocks that follow each other.

        Args:
            parent_hash: the block before the first one; None at the start of a prompt.
            tokens: of all blocks, shape (blocks * block size,).
            namespace: used only without a parent; other blocks have their parent's.
        """
        if parent_hash is None:
            parent, state, length = NONE, seed_of(namespace, "tokens"), 0
        elif (parent := self._rows.get(parent_hash, NONE)) == NONE:
            self.num_unknown_parents += len(block_hashes)
            return
        else:
            state, length = self._states[parent], self._lengths[parent]
        states = self._hasher.states(self._hasher.blocks(tokens), state)
        lengths, hashes = self._hasher.hashes_of(states, length)
        all_hashes = np.full(len(states), NONE, dtype=np.int64)
        all_hashes[lengths - length - 1] = hashes
        rows = zip(block_hashes, states.tolist(), all_hashes.tolist(), strict=True)
        for block_hash, state, prefix_hash in rows:
            length += 1
            row = self._rows.get(block_hash)
            if row is None:
                row = self._new_row(block_hash, parent, state, prefix_hash, length)
            if not self._is_held[row]:
                self._is_held[row] = True
                self._reach(row)
            parent = row

    def remove(self, block_hashes: Iterable[BlockHash]) -> None:
        """The engine removed blocks. Unknown ones are ignored."""
        for block_hash in block_hashes:
            row = self._rows.get(block_hash)
            if row is None or not self._is_held[row]:
                continue
            self._is_held[row] = False
            self._unreach(row)
            self._free(row)

    def clear(self) -> None:
        for row in self._rows.values():
            if self._is_reachable[row] and self._prefix_hashes[row] != NONE:
                self._index.discard(self._prefix_hashes[row], self._bit)
        self._set_up()

    def _reach(self, row: int) -> None:
        """`row` is held now. If it is reachable, so are the held blocks that continue it."""
        parent = self._parents[row]
        if parent != NONE and not self._is_reachable[parent]:
            return
        rows = [row]
        while rows:
            row = rows.pop()
            self._is_reachable[row] = True
            if self._prefix_hashes[row] != NONE:
                self._index.add(self._prefix_hashes[row], self._bit)
            rows += [child for child in self._children(row) if self._is_held[child]]

    def _unreach(self, row: int) -> None:
        """`row` is no longer held: neither it nor any block after it is reachable."""
        rows = [row] if self._is_reachable[row] else []
        while rows:
            row = rows.pop()
            self._is_reachable[row] = False
            if self._prefix_hashes[row] != NONE:
                self._index.discard(self._prefix_hashes[row], self._bit)
            rows += [child for child in self._children(row) if self._is_reachable[child]]

    def _children(self, row: int) -> Iterable[int]:
        child = self._first_children[row]
        while child != NONE:
            yield child
            child = self._next_siblings[child]

    def _new_row(
        self, block_hash: BlockHash, parent: int, state: int, prefix_hash: int, length: int
    ) -> int:
        """A row that is not held yet, first among its siblings."""
        sibling = self._first_children[parent] if parent != NONE else NONE
        if self._free_rows:
            row = self._free_rows.pop()
            self._block_hashes[row] = block_hash
            self._states[row], self._prefix_hashes[row] = state, prefix_hash
            self._lengths[row] = length
            self._parents[row], self._first_children[row] = parent, NONE
            self._next_siblings[row], self._previous_siblings[row] = sibling, NONE
        else:
            row = len(self._block_hashes)
            self._block_hashes.append(block_hash)
            self._states.append(state)
            self._prefix_hashes.append(prefix_hash)
            self._lengths.append(length)
            self._parents.append(parent)
            self._first_children.append(NONE)
            self._next_siblings.append(sibling)
            self._previous_siblings.append(NONE)
            self._is_held.append(False)
            self._is_reachable.append(False)
        if parent != NONE:
            self._first_children[parent] = row
        if sibling != NONE:
            self._previous_siblings[sibling] = row
        self._rows[block_hash] = row
        return row

    def _free(self, row: int) -> None:
        """Frees `row` and its ancestors, as far as they are neither held nor have children."""
        while row != NONE and not self._is_held[row] and self._first_children[row] == NONE:
            parent, before = self._parents[row], self._previous_siblings[row]
            after = self._next_siblings[row]
            if before != NONE:
                self._next_siblings[before] = after
            elif parent != NONE:
                self._first_children[parent] = after
            if after != NONE:
                self._previous_siblings[after] = before
            del self._rows[self._block_hashes[row]]
            self._block_hashes[row] = None
            self._free_rows.append(row)
            row = parent


class KvEventStream:
    """Applies one worker's batches of KV events to its `KvEventCache`.

    Of several KV-cache groups it follows one, the first that reports full attention, or number 0
    until one does: whatever else a request can read, it needs these blocks.

    After a gap in the batch numbers the cache is cleared and filled again from the events that
    follow. A batch that was applied before is skipped. Batch 0 means that the worker has restarted.
    """

    def __init__(self, worker: Worker, cache: KvEventCache, block_size: int) -> None:
        self._worker = worker
        self.cache = cache
        self._block_size = block_size
        self._group = 0
        self._is_full = False  # the group that is followed
        self._expected: int | None = None  # the next batch's number
        self._has_gap = False  # just before the last batch
        self.num_gaps = 0

    def apply(self, events: Iterable[object], number: int | None) -> bool:
        """See `PrefixRouter.apply_events`."""
        is_complete = True
        if number is not None:
            if self._expected is not None and number != self._expected:
                is_old = number < self._expected
                if is_old and number > 0 and not self._has_gap:
                    return True
                self.cache.clear()
                if not is_old:
                    is_complete = False
                    self.num_gaps += 1
                    logger.warning(
                        "sgl-vllm: KV events %d to %d of worker %r are missing. The router starts "
                        "again with an empty view of its cache.",
                        self._expected,
                        number - 1,
                        self._worker,
                    )
            self._expected = number + 1
            self._has_gap = not is_complete
        for event in events:
            self._apply(event)
        return is_complete

    def _apply(self, event: Any) -> None:
        kind = type(event).__name__
        if kind == "AllBlocksCleared":
            self.cache.clear()
            return
        if event.medium not in (None, MEDIUM_GPU):
            return
        if kind == "BlockStored" and not self._is_full:
            self._follow_full_attention(event)
        if (event.group_idx or 0) != self._group:
            return
        if kind == "BlockRemoved":
            self.cache.remove(event.block_hashes)
        elif kind == "BlockStored":
            self._store(event)

    def _follow_full_attention(self, event: Any) -> None:
        self._is_full = getattr(event, "kv_cache_spec_kind", None) in FULL_ATTENTION
        group = event.group_idx or 0
        if self._is_full and group != self._group:
            self._group = group
            self.cache.clear()

    def _store(self, event: Any) -> None:
        if event.block_size > self._block_size:
            raise ValueError(
                f"the engine's blocks have {event.block_size} tokens and this router's "
                f"{self._block_size}: create the router with block_size={event.block_size}"
            )
        if event.block_size < self._block_size:
            return  # the partial block at the end of a prompt
        extra_keys = event.extra_keys or [None] * len(event.block_hashes)
        num_blocks = next(
            (i for i, keys in enumerate(extra_keys) if not _is_text(keys)), len(extra_keys)
        )
        if not num_blocks:
            return
        self.cache.store(
            event.block_hashes[:num_blocks],
            event.parent_block_hash,
            np.array(event.token_ids[: num_blocks * self._block_size], dtype=np.int32),
            _namespace(event.lora_name, extra_keys[0]),
        )


def _is_text(keys: ExtraKeys) -> bool:
    """Whether a block holds tokens only: no image, no embeddings."""
    return all(isinstance(key, str) for key in keys or ())


def _namespace(lora: str | None, keys: ExtraKeys) -> CacheNamespace:
    """From the extra keys of a prompt's first block: the adapter's name and the tenant's salt."""
    names = [key for key in keys or () if isinstance(key, str)]
    if lora is not None and lora in names:
        names.remove(lora)
    return CacheNamespace(lora, names[0] if names else None)
