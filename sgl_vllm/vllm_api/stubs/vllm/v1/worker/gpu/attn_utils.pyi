# [preview]
from vllm.config import VllmConfig
from vllm.v1.kv_cache_interface import KVCacheSpec

def get_kv_cache_spec(vllm_config: VllmConfig) -> dict[str, KVCacheSpec]: ...
