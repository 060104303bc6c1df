# [radix, preview]
class KVCacheSpec:
    block_size: int  # [preview]

class AttentionSpec(KVCacheSpec): ...
class FullAttentionSpec(AttentionSpec): ...

class KVCacheGroupSpec:
    kv_cache_spec: KVCacheSpec
    layer_names: list[str]  # [preview]

class KVCacheTensor:
    size: int

class KVCacheConfig:
    num_blocks: int  # [radix_slot_copy]
    kv_cache_groups: list[KVCacheGroupSpec]
    kv_cache_tensors: list[KVCacheTensor]
