from typing import NewType

from vllm.config import VllmConfig
from vllm.v1.kv_cache_interface import KVCacheConfig

BlockHash = NewType("BlockHash", bytes)
BlockHashWithGroupId = NewType("BlockHashWithGroupId", bytes)

def resolve_kv_cache_block_sizes(  # [preview]
    kv_cache_config: KVCacheConfig, vllm_config: VllmConfig
) -> tuple[int, int]: ...

class KVCacheBlock:
    block_id: int
    ref_cnt: int
    is_null: bool
    next_free_block: KVCacheBlock | None  # [radix]
    _block_hash: BlockHashWithGroupId | None  # [radix]
    _block_hash_num_tokens: int | None  # [radix]

    @property
    def block_hash(self) -> BlockHashWithGroupId | None: ...  # [radix]
    @property
    def block_hash_num_tokens(self) -> int | None: ...  # [radix]
    def set_block_hash(  # [radix]
        self, block_hash: BlockHashWithGroupId, num_tokens: int | None = ...
    ) -> None: ...
    def reset_hash(self) -> None: ...  # [radix]

class KVCacheBlockCopy(tuple[int, int]): ...  # [radix]

class FreeKVCacheBlockQueue:  # [radix]
    fake_free_list_head: KVCacheBlock
    fake_free_list_tail: KVCacheBlock

    def remove(self, block: KVCacheBlock) -> None: ...
    def prepend_n(self, blocks: list[KVCacheBlock]) -> None: ...
