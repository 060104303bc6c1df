# [approximate_reuse]
import torch

class Attention:
    kv_cache: torch.Tensor
    num_kv_heads: int
    head_size: int
    impl: object
