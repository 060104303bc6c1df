# [radix_slot_copy]
from collections.abc import Iterable, Sequence

import torch
from vllm.v1.core.kv_cache_utils import KVCacheBlockCopy

def copy_kv_cache_blocks_inplace(
    kv_caches: Iterable[torch.Tensor],
    num_blocks: int,
    kv_cache_block_copies: Sequence[KVCacheBlockCopy],
) -> None: ...
