# [preview]
from collections.abc import Iterable

from vllm.v1.attention.backend import AttentionBackend

class KVCacheLayout:
    name: str

def get_supported_kv_cache_layouts(
    backends: Iterable[type[AttentionBackend]],
) -> list[KVCacheLayout]: ...
