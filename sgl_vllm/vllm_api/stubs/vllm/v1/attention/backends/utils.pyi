# [preview]
from collections.abc import Iterable
from enum import Enum

from vllm.v1.attention.backend import AttentionBackend

class KVCacheLayout(Enum):
    LBNHC = ...

def get_supported_kv_cache_layouts(
    backends: Iterable[type[AttentionBackend]],
) -> list[KVCacheLayout]: ...
