# [radix]
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.kv_cache_interface import KVCacheSpec

class SingleTypeKVCacheManager:
    block_size: int
    kv_cache_spec: KVCacheSpec
    max_admission_blocks_per_request: int | None
    req_to_blocks: dict[str, list[KVCacheBlock]]
    num_cached_block: dict[str, int]

    _partial_hit_reqs: dict[str, tuple[int, KVCacheBlock]]
    _pending_cow_copies: list[tuple[KVCacheBlock, KVCacheBlock]]

    def get_num_skipped_tokens(self, num_computed_tokens: int) -> int: ...
