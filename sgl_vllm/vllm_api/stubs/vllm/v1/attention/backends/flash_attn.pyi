# [prefix_attention]
from dataclasses import dataclass

import torch
from vllm.config import VllmConfig
from vllm.v1.attention.backend import AttentionCGSupport, AttentionType, CommonAttentionMetadata
from vllm.v1.kv_cache_interface import AttentionSpec

def is_quantized_kv_cache(kv_cache_dtype: str) -> bool: ...

class FlashAttentionBackend:
    @staticmethod
    def get_name() -> str: ...
    @staticmethod
    def get_impl_cls() -> type[FlashAttentionImpl]: ...
    @staticmethod
    def get_builder_cls() -> type[FlashAttentionMetadataBuilder]: ...

@dataclass
class FlashAttentionMetadata:
    block_table: torch.Tensor
    seq_lens: torch.Tensor

class FlashAttentionMetadataBuilder:
    supports_update_block_table: bool
    device: torch.device
    dcp_world_size: int
    num_heads_q: int
    num_heads_kv: int
    headdim: int
    kv_cache_dtype: torch.dtype
    block_size: int

    def __init__(
        self,
        kv_cache_spec: AttentionSpec,
        layer_names: list[str],
        vllm_config: VllmConfig,
        device: torch.device,
    ) -> None: ...
    @classmethod
    def get_cudagraph_support(
        cls, vllm_config: VllmConfig, kv_cache_spec: AttentionSpec
    ) -> AttentionCGSupport: ...
    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = ...,
    ) -> FlashAttentionMetadata: ...

class FlashAttentionImpl:
    num_heads: int
    num_kv_heads: int
    head_size: int
    scale: float
    attn_type: AttentionType
    alibi_slopes: torch.Tensor | None
    sliding_window: tuple[int, int]
    logits_soft_cap: float
    sinks: torch.Tensor | None
    kv_cache_dtype: str
    dcp_world_size: int

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int,
        alibi_slopes: list[float] | None,
        sliding_window: int | None,
        kv_cache_dtype: str,
        logits_soft_cap: float | None = ...,
        attn_type: AttentionType = ...,
        kv_sharing_target_layer_name: str | None = ...,
        sinks: torch.Tensor | None = ...,
    ) -> None: ...
    def forward(
        self,
        layer: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: FlashAttentionMetadata | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = ...,
        output_block_scale: torch.Tensor | None = ...,
    ) -> torch.Tensor: ...
