from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec
from vllm.sampling_params import SamplingParams
from vllm.v1.core.kv_cache_utils import KVCacheBlockCopy

@dataclass
class SchedulerOutput:
    scheduled_new_reqs: list[NewRequestData]
    scheduled_cached_reqs: CachedRequestData
    num_scheduled_tokens: dict[str, int]
    total_num_scheduled_tokens: int
    scheduled_spec_decode_tokens: dict[str, list[int]]  # [radix]
    has_structured_output_requests: bool  # [jump_forward]
    kv_cache_block_copies: list[KVCacheBlockCopy] | None  # [radix]

    @classmethod
    def make_empty(cls) -> SchedulerOutput: ...  # [self_check]

@dataclass
class NewRequestData:
    req_id: str  # [jump_forward, approximate_reuse]
    prompt_token_ids: list[int] | None  # [jump_forward, approximate_reuse]
    mm_features: list[MultiModalFeatureSpec]  # [jump_forward, approximate_reuse]
    sampling_params: SamplingParams | None  # [jump_forward, approximate_reuse]
    pooling_params: None  # [approximate_reuse]
    block_ids: tuple[list[int], ...]  # [radix, jump_forward, approximate_reuse]
    num_computed_tokens: int  # [radix, jump_forward, approximate_reuse]
    lora_request: LoRARequest | None  # [approximate_reuse]
    prefill_token_ids: list[int] | None = ...  # [approximate_reuse]

@dataclass
class CachedRequestData:
    req_ids: list[str]
    resumed_req_ids: set[str]  # [jump_forward]
    num_computed_tokens: list[int]  # [approximate_reuse]

class GrammarOutput:
    structured_output_request_ids: list[str]
    grammar_bitmask: NDArray[np.int32]
