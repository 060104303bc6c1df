# [prefix_attention]
from typing import Any

import torch
from vllm.v1.worker.gpu.buffer_utils import UvaBackedTensor

class BlockTables:
    input_block_tables: list[torch.Tensor]
    num_blocks: UvaBackedTensor
    redirect_writes_to_null_block: bool  # since 0.32

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
    def append_block_ids(
        self, req_index: int, new_block_ids: tuple[list[int], ...], overwrite: bool
    ) -> None: ...
