# [radix, preview]
from collections.abc import Collection
from fractions import Fraction

class KVCacheSpec:
    block_size: int

    @property
    def prefix_cacheable(self) -> bool: ...
    @property
    def prefix_replay_tokens(self) -> int: ...

class AttentionSpec(KVCacheSpec):
    tokens_per_state: int | Fraction

class FullAttentionSpec(AttentionSpec):
    sliding_window: int | None  # [approximate_reuse]
    attention_chunk_size: int | None  # [approximate_reuse]

class MLAAttentionSpec(FullAttentionSpec): ...

class ChunkedLocalAttentionSpec(AttentionSpec):  # [radix]
    attention_chunk_size: int

class SlidingWindowSpec(AttentionSpec):  # [radix]
    sliding_window: int

class MambaSpec(KVCacheSpec):  # [radix]
    mamba_cache_mode: str
    num_prefill_checkpoint_blocks: int
    num_speculative_blocks: int

def iter_layer_specs(kv_cache_spec: KVCacheSpec) -> Collection[KVCacheSpec]: ...

class KVCacheGroupSpec:
    kv_cache_spec: KVCacheSpec
    layer_names: list[str]  # [preview]

class KVCacheTensor:
    size: int

class KVCacheConfig:
    num_blocks: int
    kv_cache_groups: list[KVCacheGroupSpec]
    kv_cache_tensors: list[KVCacheTensor]
