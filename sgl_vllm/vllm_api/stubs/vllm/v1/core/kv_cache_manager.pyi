from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_coordinator import KVCacheCoordinator
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.request import Request

@dataclass
class KVCacheBlocks:
    blocks: tuple[Sequence[KVCacheBlock], ...]

class KVCacheManager:
    block_pool: BlockPool
    coordinator: KVCacheCoordinator
    empty_kv_cache_blocks: KVCacheBlocks  # [radix]
    enable_caching: bool  # [radix]
    enable_kv_cache_events: bool  # [radix]
    max_model_len: int  # [radix]
    watermark_blocks: int  # [radix]

    def create_kv_cache_blocks(  # [radix]
        self, blocks: tuple[list[KVCacheBlock], ...]
    ) -> KVCacheBlocks: ...
    def get_blocks(self, request_id: str) -> KVCacheBlocks: ...  # [radix, jump_forward]
    def prefix_cache_lookup_enabled(self, request: Request) -> bool: ...  # [radix]
    def new_step_starts(self) -> None: ...  # [radix]
    def get_computed_blocks(  # [radix]
        self,
        request: Request,
        max_cache_hit_length: int | None = ...,  # since 0.33
    ) -> tuple[KVCacheBlocks, int, int]: ...
    def allocate_slots(  # [radix]
        self,
        request: Request,
        num_new_tokens: int,
        num_new_computed_tokens: int = ...,
        *args: Any,
        num_lookahead_tokens: int = ...,
        num_external_computed_tokens: int = ...,
        delay_cache_blocks: bool = ...,
        **kwargs: Any,
    ) -> KVCacheBlocks | None: ...
    def cache_blocks(self, request: Request, num_computed_tokens: int) -> None: ...  # [radix]
    def record_prefix_cache_stats(self, request: Request, num_hits: int) -> None: ...  # [radix]
    def estimate_cached_tokens(self, request: Request) -> int: ...  # [radix]
    def free(self, request: Request) -> None: ...  # [radix]
    def pop_blocks_for_free(self, request: Request) -> list[KVCacheBlock]: ...  # [radix]
    def take_events(self) -> object: ...  # [self_check]
    def reset_prefix_cache(self) -> bool: ...  # [radix]
