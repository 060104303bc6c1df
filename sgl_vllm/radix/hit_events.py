"""KV events of a hit, for requests that ask for them with `kv_cache_report_mode="full"`.

Owns which blocks of a hit are announced again. Does not own the events of blocks that enter or
leave the tree (`pool.py`), nor what an event says, which is vLLM's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_utils import KVCacheBlock
    from vllm.v1.request import Request

    from sgl_vllm.radix.pool import RadixBlockPool


def announce_hit(
    pool: RadixBlockPool,
    request: Request,
    blocks: Sequence[Sequence[KVCacheBlock]],
    num_tokens: int,
) -> None:
    """Announce the whole blocks of a hit again: of each group those that the request reads.

    Args:
        blocks: the hit, a list for each group in vLLM's order. It begins with null blocks where the
            request does not read the first ones.
        num_tokens: length of the hit.
    """
    for number, (of_group, group) in enumerate(zip(blocks, pool.groups.managers, strict=True)):
        size = group.block_size
        whole = of_group[: num_tokens // size]
        num_skipped = sum(block.is_null for block in whole)
        if num_skipped == len(whole):
            continue
        pool.emit_cached_block_events(request, len(whole), size, number)
        if num_skipped:  # vLLM announces them too
            event = pool.kv_event_queue[-1]
            event.parent_block_hash = event.block_hashes[num_skipped - 1]
            event.block_hashes = event.block_hashes[num_skipped:]
            event.token_ids = event.token_ids[num_skipped * size :]
            if event.extra_keys is not None:
                event.extra_keys = event.extra_keys[num_skipped:]
