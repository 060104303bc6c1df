"""One worker's KV events, in the order of their batch numbers.

Owns what vLLM's events mean for what a worker has cached, and what happens after a gap in their
numbers. Pure: events are read by the names of their classes and fields.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any  # Any: events, by the names of their fields

import numpy as np

from sgl_vllm.protocol.cache_namespace import CacheNamespace
from sgl_vllm.routing.costs import Worker
from sgl_vllm.routing.kv_event_index import KvEventCache

logger = logging.getLogger(__name__)

MEDIUM_GPU = "GPU"
"""How KV events name the memory from which attention reads."""

FULL_ATTENTION = ("full_attention", "mla_attention")
"""How KV events name groups of layers that read all tokens."""

ExtraKeys = tuple[object, ...] | None
"""What vLLM adds to a block's hash: adapter and salt as strings, images as tuples."""


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
