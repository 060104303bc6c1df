# [jump_graph_tokens, preview]
from typing import Any

from vllm.v1.attention.backend import AttentionBackend
from vllm.v1.kv_cache_interface import KVCacheSpec

class AttentionGroup:
    def __init__(  # [preview]
        self,
        backend: type[AttentionBackend],
        layer_names: list[str],
        kv_cache_spec: KVCacheSpec,
        kv_cache_group_id: int,
        *,
        metadata_builders: list[Any],  # builders, or their classes
    ) -> None: ...
