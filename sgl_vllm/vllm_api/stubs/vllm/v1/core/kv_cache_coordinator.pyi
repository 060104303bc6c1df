from vllm.v1.core.kv_cache_utils import BlockHash, KVCacheBlock
from vllm.v1.core.single_type_kv_cache_manager import SingleTypeKVCacheManager

class KVCacheCoordinator:
    single_type_managers: tuple[SingleTypeKVCacheManager, ...]  # [radix, schedule]

    def find_longest_cache_hit(  # [radix, schedule]
        self, block_hashes: list[BlockHash], max_cache_hit_length: int
    ) -> tuple[tuple[list[KVCacheBlock], ...], int, int]: ...
