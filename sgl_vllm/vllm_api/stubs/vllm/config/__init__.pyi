from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from vllm.config.compilation import CUDAGraphMode

def set_current_vllm_config(
    vllm_config: VllmConfig,
) -> AbstractContextManager[None]: ...  # [preview]

class VllmConfig:
    additional_config: Mapping[str, Any]  # any mapping of the user's; ours has a key of its own
    cache_config: CacheConfig
    compilation_config: CompilationConfig  # [jump_graph_tokens]
    device_config: DeviceConfig
    model_config: ModelConfig
    parallel_config: ParallelConfig
    scheduler_config: SchedulerConfig
    speculative_config: SpeculativeConfig | None
    structured_outputs_config: StructuredOutputsConfig
    kv_events_config: KVEventsConfig | None  # [radix, rank_routing, self_check]
    kv_transfer_config: KVTransferConfig | None
    quant_config: object | None  # [preview]

    @property
    def use_v2_model_runner(self) -> bool: ...  # [jump_forward, preview]
    @property
    def num_prefill_lookahead_tokens(self) -> int: ...

class CompilationConfig:  # [jump_graph_tokens, preview]
    static_forward_context: dict[str, Any]  # [preview]
    cudagraph_mode: CUDAGraphMode | None
    cudagraph_capture_sizes: list[int] | None

class CacheConfig:
    enable_prefix_caching: bool
    mamba_cache_mode: str  # [jump_forward]
    prefix_match_unit: int | None  # [radix]
    cache_dtype: str  # [self_check, approximate_reuse]
    block_size: int  # [routes, rank_routing]
    num_gpu_blocks: int | None  # [rank_routing]
    kv_offloading_size: float | None  # [preview]

class DeviceConfig:
    device_type: str

class ModelConfig:
    model: str  # [self_check]
    dtype: torch.dtype  # [self_check, preview]
    quantization: str | None  # [self_check]
    enforce_eager: bool  # [self_check]
    runner_type: str  # [self_check]
    skip_tokenizer_init: bool  # [fsm, jump_forward]
    logits_processors: list[str | type] | None  # [jump_forward]
    return_sampling_mask: bool  # [jump_forward]
    logprobs_mode: str  # [jump_forward, routes]
    max_model_len: int  # [radix, routes, self_check, approximate_reuse]

    @property
    def is_encoder_decoder(self) -> bool: ...  # [self_check, jump_forward]
    @property
    def is_hybrid(self) -> bool: ...  # [radix, jump_forward, select]
    @property
    def is_attention_free(self) -> bool: ...  # [radix, jump_forward, select]
    @property
    def is_diffusion(self) -> bool: ...  # [self_check]
    @property
    def uses_mrope(self) -> bool: ...  # [approximate_reuse]
    @property
    def is_moe(self) -> bool: ...  # [preview]
    def get_vocab_size(self) -> int: ...  # [fsm, jump_forward, self_check]

class ParallelConfig:
    tensor_parallel_size: int  # [self_check]
    pipeline_parallel_size: int  # [jump_forward, self_check]
    data_parallel_index: int  # [self_check]
    data_parallel_size: int
    decode_context_parallel_size: int  # [radix, jump_graph_tokens]
    prefill_context_parallel_size: int  # [radix, jump_graph_tokens]
    data_parallel_size_local: int  # [rank_routing]
    world_size: int  # [preview, approximate_reuse]
    worker_cls: str  # [preview]
    enable_expert_parallel: bool  # [preview]
    distributed_executor_backend: str | type[object] | None

    @property
    def use_ubatching(self) -> bool: ...  # [approximate_reuse, jump_graph_tokens]
    def reconfigure_for_independent_dp_rank(self) -> None: ...  # [preview]

class SchedulerConfig:
    scheduler_cls: str | type[object] | None
    max_num_seqs: int  # [jump_graph_tokens]
    async_scheduling: bool | None
    enable_chunked_prefill: bool  # [self_check, approximate_reuse]
    policy: str  # [preview]

class SpeculativeConfig:
    method: str | None
    model: str | None  # [self_check]
    num_speculative_tokens: int | None
    disable_eagle_block_drop: bool  # [radix]
    draft_model_config: ModelConfig  # [preview]
    draft_parallel_config: ParallelConfig  # [preview]

    def use_eagle(self) -> bool: ...  # [preview]
    def uses_draft_model(self) -> bool: ...  # [preview]
    def use_ngram_gpu(self) -> bool: ...  # [jump_forward]

class KVTransferConfig:  # [preview]
    kv_connector_extra_config: dict[str, Any]  # a connector's own

    def __init__(self, **options: Any) -> None: ...  # those of --kv-transfer-config

class StructuredOutputsConfig:
    backend: str
    disable_any_whitespace: bool  # [fsm, jump_forward]
    disable_additional_properties: bool  # [fsm, jump_forward]

class KVEventsConfig:  # [rank_routing]
    enable_kv_cache_events: bool  # [radix, rank_routing]
    publisher: str
    endpoint: str
    replay_endpoint: str | None
