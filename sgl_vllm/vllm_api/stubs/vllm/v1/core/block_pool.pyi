# [radix]
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from vllm.v1.core.kv_cache_utils import BlockHashWithGroupId, FreeKVCacheBlockQueue, KVCacheBlock
from vllm.v1.request import Request

class BlockPool:
    blocks: list[KVCacheBlock]
    null_block: KVCacheBlock
    free_block_queue: FreeKVCacheBlockQueue
    num_gpu_blocks: int
    hash_block_size: int
    enable_kv_cache_events: bool
    kv_event_queue: list[Any]  # events of several kinds
    metrics_collector: object | None
    cached_block_hash_to_block: BlockHashToBlockMap

    def get_num_free_blocks(self) -> int: ...  # [radix, schedule]
    def cache_full_blocks(
        self,
        request: Request,
        blocks: list[KVCacheBlock],
        num_cached_blocks: int,
        num_full_blocks: int,
        block_size: int,
        kv_cache_group_id: int,
        block_mask: list[bool] | None = ...,
    ) -> None: ...
    def emit_cached_block_events(
        self, request: Request, num_cached_blocks: int, block_size: int, kv_cache_group_id: int
    ) -> None: ...
    def cache_partial_block(
        self,
        request: Request,
        block: KVCacheBlock,
        num_tokens: int,
        kv_cache_group_id: int,
        block_size: int,
        *args: Any,
        **kwargs: Any,
    ) -> BlockHashWithGroupId | None: ...
    def get_new_blocks(self, num_blocks: int) -> list[KVCacheBlock]: ...
    def touch(self, blocks: Sequence[KVCacheBlock]) -> None: ...
    def free_blocks(self, ordered_blocks: Iterable[KVCacheBlock]) -> None: ...
    def unpin_blocks(
        self, blocks: Iterable[KVCacheBlock], on_reuse: Callable[[KVCacheBlock], None]
    ) -> None: ...
    def reset_prefix_cache(self) -> bool: ...
    def _maybe_evict_cached_block(self, block: KVCacheBlock) -> bool: ...
    def _emit_block_removed_events(self, block_hashes: list[BlockHashWithGroupId]) -> None: ...
    def _remove_cached_block_hashes(self, block: KVCacheBlock) -> list[BlockHashWithGroupId]: ...

class BlockHashToBlockMap:
    def get_one_block(self, key: BlockHashWithGroupId) -> KVCacheBlock | None: ...
