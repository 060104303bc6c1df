"""What workers have cached, as their engines' KV events report it.

Owns the index from prefix hashes to workers (`KvEventIndex`), and each worker's blocks, from which
the index is kept, with what vLLM's events mean for these (`KvEventCache`). Pure: no clock, no
network. Events are read by the names of their classes and fields.
"""

from __future__ import annotations

import logging
from collections.abc import Hashable, Iterable
from typing import Any  # Any: events

import numpy as np

from sgl_vllm.protocol.cache_namespace import CacheNamespace
from sgl_vllm.routing.approx_index import Hashes, PrefixMatches
from sgl_vllm.routing.costs import Worker
from sgl_vllm.routing.prefix_hashes import PrefixHasher, is_hashed, seed_of

logger = logging.getLogger(__name__)

MEDIUM_GPU = "GPU"
"""How KV events name the memory from which attention reads."""

FULL_ATTENTION = ("full_attention", "mla_attention")
"""How KV events name groups of layers that read all tokens."""

ExtraKeys = tuple[object, ...] | None
"""What vLLM adds to a block's hash: adapter and salt as strings, images as tuples."""

BlockHash = Hashable
"""vLLM's name for a block: bytes or an integer."""


class KvEventIndex:
    """Which workers have which hashed prefixes. A set of workers is an integer with a bit for each.

    Prefix-closed, because an engine evicts a block after all blocks that continue it.
    """

    def __init__(self) -> None:
        self._workers: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._workers)

    def add(self, prefix_hash: int, bit: int) -> None:
        self._workers[prefix_hash] = self._workers.get(prefix_hash, 0) | bit

    def discard(self, prefix_hash: int, bit: int) -> None:
        if left := self._workers.get(prefix_hash, 0) & ~bit:
            self._workers[prefix_hash] = left
        else:
            self._workers.pop(prefix_hash, None)

    def match_prefix(self, hashes: Hashes) -> PrefixMatches:
        """Cost: O(s log n) look-ups for n hashes and s different sets of workers.

        The set of workers only shrinks along `hashes`, so stretches with one set are skipped.
        """
        matches = []
        begin, num_hashes = 0, len(hashes)
        while begin < num_hashes and (workers := self._workers.get(int(hashes[begin]))):
            low, high, step = begin, num_hashes, 1  # hashes[low] has this set, hashes[high] has not
            while high - low > 1:
                middle = min(low + step, (low + high) // 2)
                if self._workers.get(int(hashes[middle])) == workers:
                    low, step = middle, 2 * step
                else:
                    high = middle
            begin = low + 1
            matches.append((begin, workers))
        return matches


class KvEventCache:
    """The blocks that one worker's engine holds, as its KV events report them.

    Of several KV-cache groups it follows one, the first that reports full attention, or number 0
    until one does: whatever else a request can read, it needs these blocks.

    After a gap in the batch numbers it is cleared and filled again from the events that follow. A
    batch that was applied before is skipped. Batch 0 means that the worker has restarted.

    Memory: about 280 bytes per block, with the index and vLLM's hash. Cost: 5 us per stored block.
    """

    def __init__(self, index: KvEventIndex, worker: Worker, bit: int, hasher: PrefixHasher) -> None:
        self._index = index
        self._worker = worker
        self._bit = bit
        self._hasher = hasher
        self._blocks: dict[BlockHash, tuple[int, int]] = {}
        """The length in blocks, and the hash, of the prefix that ends with the block."""
        self._group = 0
        self._is_full = False  # the group that is followed
        self._expected: int | None = None  # the next batch's number
        self._has_gap = False  # just before the last batch
        self.num_gaps = 0

    def __len__(self) -> int:
        """Held blocks."""
        return len(self._blocks)

    def clear(self) -> None:
        self._remove(list(self._blocks))

    def apply(self, events: Iterable[object], number: int | None) -> bool:
        """See `PrefixRouter.apply_events`."""
        is_complete = True
        if number is not None:
            if self._expected is not None and number != self._expected:
                is_old = number < self._expected
                if is_old and number > 0 and not self._has_gap:
                    return True
                self.clear()
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
            self.clear()
            return
        if event.medium not in (None, MEDIUM_GPU):
            return
        if kind == "BlockStored" and not self._is_full:
            self._follow_full_attention(event)
        if (event.group_idx or 0) != self._group:
            return
        if kind == "BlockRemoved":
            self._remove(event.block_hashes)
        elif kind == "BlockStored":
            self._store(event)

    def _follow_full_attention(self, event: Any) -> None:
        self._is_full = getattr(event, "kv_cache_spec_kind", None) in FULL_ATTENTION
        group = event.group_idx or 0
        if self._is_full and group != self._group:
            self._group = group
            self.clear()

    def _store(self, event: Any) -> None:
        block_size = self._hasher.block_size
        if event.block_size > block_size:
            raise ValueError(
                f"the engine's blocks have {event.block_size} tokens and this router's "
                f"{block_size}: create the router with block_size={event.block_size}"
            )
        if event.block_size < block_size:
            return  # the partial block at the end of a prompt
        block_hashes, parent = event.block_hashes, event.parent_block_hash
        extra_keys = event.extra_keys or [None] * len(block_hashes)
        num_blocks = next(
            (i for i, keys in enumerate(extra_keys) if not _is_text(keys)), len(extra_keys)
        )
        if not num_blocks or (parent is not None and parent not in self._blocks):
            return
        if parent is None:
            length, before = 0, seed_of(_namespace(event.lora_name, extra_keys[0]), "tokens")
        else:
            length, before = self._blocks[parent]
        words = np.array(event.token_ids[: num_blocks * block_size], np.int32).view(np.uint32)
        hashes = self._hasher.hashes(words, before, length).tolist()
        for block_hash, prefix_hash in zip(block_hashes[:num_blocks], hashes, strict=True):
            length += 1
            self._blocks[block_hash] = length, prefix_hash
            if is_hashed(length):
                self._index.add(prefix_hash, self._bit)

    def _remove(self, block_hashes: Iterable[BlockHash]) -> None:
        """Unknown blocks are ignored."""
        for block_hash in block_hashes:
            length, prefix_hash = self._blocks.pop(block_hash, (0, 0))
            if is_hashed(length):
                self._index.discard(prefix_hash, self._bit)


def _is_text(keys: ExtraKeys) -> bool:
    """Whether a block holds tokens only: no image, no embeddings."""
    return all(isinstance(key, str) for key in keys or ())


def _namespace(lora: str | None, keys: ExtraKeys) -> CacheNamespace:
    """From the extra keys of a prompt's first block: the adapter's name and the tenant's salt."""
    names = [key for key in keys or () if isinstance(key, str)]
    if lora is not None and lora in names:
        names.remove(lora)
    return CacheNamespace(lora, names[0] if names else None)
