from collections.abc import Mapping
from typing import Any

class VllmConfig:
    additional_config: Mapping[str, Any]  # any mapping of the user's; ours has a key of its own
    cache_config: CacheConfig
    device_config: DeviceConfig
    model_config: ModelConfig
    parallel_config: ParallelConfig
    scheduler_config: SchedulerConfig
    speculative_config: SpeculativeConfig | None
    kv_transfer_config: object | None  # [radix]
    structured_outputs_config: StructuredOutputsConfig
    observability_config: ObservabilityConfig
    kv_events_config: KVEventsConfig | None  # [rank_routing, self_check]

    @property
    def num_prefill_lookahead_tokens(self) -> int: ...  # [radix] since 0.32

class CacheConfig:
    enable_prefix_caching: bool
    cache_dtype: str  # [self_check]
    block_size: int  # [routes, rank_routing]
    num_gpu_blocks: int | None  # [rank_routing]

class DeviceConfig:
    device_type: str

class ModelConfig:
    model: str  # [self_check]
    dtype: object  # [self_check]
    quantization: str | None  # [self_check]
    enforce_eager: bool  # [self_check]
    runner_type: str  # [self_check]
    skip_tokenizer_init: bool  # [fsm, jump_forward]
    logits_processors: list[str | type] | None  # [jump_forward]
    logprobs_mode: str  # [jump_forward, routes, engine_backend]
    max_model_len: int  # [routes, engine_backend, self_check]
    multimodal_config: MultiModalConfig | None  # [engine_backend, jump_forward]

    @property
    def is_encoder_decoder(self) -> bool: ...  # [self_check, jump_forward]
    @property
    def is_diffusion(self) -> bool: ...  # [self_check]
    def get_vocab_size(self) -> int: ...  # [fsm, jump_forward, self_check]
    def get_diff_sampling_param(self) -> dict[str, Any]: ...  # [engine_backend]

class MultiModalConfig:
    media_io_kwargs: dict[str, dict[str, Any]]  # [engine_backend]
    mm_processor_cache_type: str  # [jump_forward]

    def is_multimodal_pruning_enabled(self) -> bool: ...  # [jump_forward]

class ParallelConfig:
    tensor_parallel_size: int  # [self_check]
    pipeline_parallel_size: int  # [self_check]
    data_parallel_index: int  # [self_check]
    data_parallel_size: int
    decode_context_parallel_size: int  # [radix]
    prefill_context_parallel_size: int  # [radix]
    data_parallel_size_local: int  # [rank_routing]
    distributed_executor_backend: str | type[object] | None

class SchedulerConfig:
    scheduler_cls: str | type[object] | None
    async_scheduling: bool | None
    enable_chunked_prefill: bool  # [self_check]

class SpeculativeConfig:
    method: str | None
    model: str | None  # [self_check]
    num_speculative_tokens: int | None

    def use_eagle(self) -> bool: ...

class StructuredOutputsConfig:
    backend: str
    disable_any_whitespace: bool  # [fsm, jump_forward]
    disable_additional_properties: bool  # [fsm, jump_forward]

class ObservabilityConfig:
    otlp_traces_endpoint: str | None

class KVEventsConfig:  # [rank_routing]
    enable_kv_cache_events: bool
    publisher: str
    endpoint: str
    replay_endpoint: str | None
