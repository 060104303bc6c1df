# [prefix_attention, approximate_reuse]
from enum import Enum

import numpy as np
import torch
from numpy.typing import NDArray

class AttentionBackend:  # [jump_graph_tokens, preview]
    @staticmethod
    def get_builder_cls() -> type: ...  # [preview]

class AttentionImplBase: ...  # [approximate_reuse]

class AttentionCGSupport(Enum):  # [prefix_attention]
    NEVER = ...

class AttentionType(Enum):  # [prefix_attention]
    DECODER = ...

class CommonAttentionMetadata:  # [prefix_attention]
    max_query_len: int
    causal: bool | torch.Tensor
    query_start_loc_cpu: torch.Tensor
    block_table_tensor: torch.Tensor
    seq_lens_cpu_upper_bound: torch.Tensor | None
    rswa_prefix_lens: torch.Tensor | None
    req_idx: NDArray[np.int32] | None
