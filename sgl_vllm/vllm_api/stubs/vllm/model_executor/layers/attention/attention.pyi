# [approximate_reuse]
import torch
from vllm.v1.attention.backend import AttentionImplBase

class Attention(torch.nn.Module):  # type: ignore[misc]
    kv_cache: torch.Tensor
    num_kv_heads: int
    head_size: int
    impl: AttentionImplBase
