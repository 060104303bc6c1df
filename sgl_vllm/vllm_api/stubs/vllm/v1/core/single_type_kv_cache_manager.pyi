# [radix]
from vllm.v1.core.kv_cache_utils import KVCacheBlock

class SingleTypeKVCacheManager:
    block_size: int
    req_to_blocks: dict[str, list[KVCacheBlock]]
    num_cached_block: dict[str, int]
