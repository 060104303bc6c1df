# [engine_backend]
from collections.abc import Sequence
from typing import Any

from vllm.logprobs import PromptLogprobs, SampleLogprobs

class RequestOutput:
    request_id: str
    prompt_token_ids: list[int] | None
    prompt_logprobs: PromptLogprobs | None
    outputs: list[CompletionOutput]
    num_cached_tokens: int | None
    kv_transfer_params: dict[str, Any] | None

class CompletionOutput:
    index: int
    text: str
    token_ids: Sequence[int]
    logprobs: SampleLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | None
