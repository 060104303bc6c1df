# [preview]
from vllm.config import VllmConfig
from vllm.v1.kv_cache_interface import KVCacheSpec
from vllm.v1.worker.utils import AttentionGroup

def get_varlen_cudagraph_unsupported_backend(  # [jump_graph_tokens]
    attn_groups: list[list[AttentionGroup]], vllm_config: VllmConfig, max_query_len: int
) -> tuple[str, int | None] | None: ...
def get_kv_cache_spec(vllm_config: VllmConfig) -> dict[str, KVCacheSpec]: ...
