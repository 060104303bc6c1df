import enum
from collections.abc import Mapping
from typing import Any

from torch import Tensor
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec
from vllm.sampling_params import SamplingParams
from vllm.v1.metrics.stats import PrefillStats
from vllm.v1.outputs import LogprobsLists, LogprobsTensors

class FinishReason(enum.IntEnum):
    STOP = ...
    ERROR = ...

class EngineCoreRequest:  # [routes, rank_routing, self_check]
    def __init__(
        self,
        *,
        request_id: str,
        prompt_token_ids: list[int] | None,
        mm_features: list[MultiModalFeatureSpec] | None,
        sampling_params: SamplingParams | None,
        pooling_params: object | None,
        arrival_time: float,
        lora_request: LoRARequest | None,
        cache_salt: str | None,
        data_parallel_rank: int | None,
        reasoning_ended: bool | None = ...,
    ) -> None: ...

    request_id: str
    prompt_token_ids: list[int] | None
    mm_features: list[MultiModalFeatureSpec] | None
    sampling_params: SamplingParams | None
    pooling_params: object | None
    lora_request: LoRARequest | None
    cache_salt: str | None
    data_parallel_rank: int | None
    prompt_embeds: Tensor | None

class EngineCoreOutput:
    request_id: str
    new_token_ids: list[int]
    new_logprobs: LogprobsLists | None
    new_prompt_logprobs_tensors: LogprobsTensors | None
    finish_reason: FinishReason | None
    stop_reason: int | str | None
    kv_transfer_params: dict[str, Any] | None
    trace_headers: Mapping[str, str] | None
    prefill_stats: PrefillStats | None

    @property
    def finished(self) -> bool: ...

class EngineCoreOutputs:
    outputs: list[EngineCoreOutput]
    finished_requests: set[str] | None  # [rank_routing]
