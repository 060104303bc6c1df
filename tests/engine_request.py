"""A request as vLLM's frontend sends it to an engine, of which a test says what matters to it."""

from __future__ import annotations

from typing import Any

from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreRequest


def engine_request(params: SamplingParams | None = None, **fields: Any) -> EngineCoreRequest:
    defaults = {
        "request_id": "a",
        "external_req_id": fields.get("request_id", "a"),
        "prompt_token_ids": list(range(100)),
        "mm_features": None,
        "sampling_params": params or SamplingParams(),
        "pooling_params": None,
        "arrival_time": 0.0,
        "lora_request": None,
        "cache_salt": None,
        "data_parallel_rank": None,
    }
    return EngineCoreRequest(**{**defaults, **fields})
