import enum
from collections.abc import Callable, Sequence
from typing import Any

import torch
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec
from vllm.sampling_params import SamplingParams
from vllm.v1.core.kv_cache_utils import BlockHash
from vllm.v1.engine import EngineCoreRequest, FinishReason
from vllm.v1.metrics.stats import PrefillStats
from vllm.v1.structured_output.request import StructuredOutputRequest

class RequestStatus(enum.IntEnum):
    WAITING = ...
    WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR = ...
    WAITING_FOR_REMOTE_KVS = ...
    RUNNING = ...
    PREEMPTED = ...
    FINISHED_ERROR = ...
    FINISHED_ABORTED = ...

class Request:
    @classmethod
    def from_engine_core_request(  # [self_check]
        cls,
        request: EngineCoreRequest,
        block_hasher: Callable[[Request], list[BlockHash]] | None,
    ) -> Request: ...

    request_id: str
    status: RequestStatus
    arrival_time: float
    priority: int
    sampling_params: SamplingParams | None
    lora_request: LoRARequest | None
    cache_salt: str | None
    num_prompt_tokens: int
    num_computed_tokens: int
    num_preemptions: int
    skip_reading_prefix_cache: bool
    is_prefill_chunk: bool
    block_hashes: list[BlockHash]
    prefill_stats: PrefillStats | None  # since 0.31
    num_in_flight_tokens: int
    kv_transfer_params: dict[str, Any] | None  # [tiers, jump_forward]
    kv_cache_report_mode: str  # [radix]
    resumable: bool  # [radix, jump_forward]
    mm_features: list[MultiModalFeatureSpec]  # [radix, jump_forward]
    prompt_embeds: torch.Tensor | None  # [radix, jump_forward]
    prompt_is_token_ids: list[bool] | None  # [radix, jump_forward]
    prompt_token_ids: list[int] | None  # [jump_forward]
    max_tokens: int  # [jump_forward]
    stop_reason: int | str | None  # [jump_forward]
    structured_output_request: StructuredOutputRequest | None  # [jump_forward]
    drop_stale_output: bool  # [jump_forward]
    num_stale_output_tokens: int  # [jump_forward]
    num_output_placeholders: int  # [jump_forward]
    spec_token_ids: list[int]  # [jump_forward]
    _all_token_ids: list[int]

    @property
    def num_tokens(self) -> int: ...
    @property
    def num_output_tokens(self) -> int: ...
    @property
    def output_token_ids(self) -> Sequence[int]: ...  # [radix, jump_forward]
    @property
    def use_structured_output(self) -> bool: ...  # [jump_forward]
    def update_block_hashes(self) -> None: ...  # [radix]
    def append_output_token_ids(self, token_ids: int | list[int]) -> None: ...  # [jump_forward]
    def is_finished(self) -> bool: ...  # [radix, jump_forward, self_check]
    def get_finished_reason(self) -> FinishReason | None: ...  # [jump_forward]
