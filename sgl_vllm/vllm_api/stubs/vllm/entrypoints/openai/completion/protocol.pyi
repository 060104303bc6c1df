# [routes]
from typing import Any

from vllm.entrypoints.serve.engine.protocol import OpenAIBaseModel, UsageInfo
from vllm.logprobs import Logprob
from vllm.sampling_params import SamplingParams

class CompletionRequest(OpenAIBaseModel):
    echo: bool | None
    vllm_xargs: dict[str, Any] | None

    def to_sampling_params(  # [engine_backend]
        self, max_tokens: int, default_sampling_params: dict[str, Any] | None = ...
    ) -> SamplingParams: ...

class CompletionResponse(OpenAIBaseModel):
    choices: list[CompletionResponseChoice]
    usage: UsageInfo

class CompletionResponseChoice(OpenAIBaseModel):
    logprobs: CompletionLogProbs | None = ...
    prompt_logprobs: list[dict[int, Logprob] | None] | None = ...

class CompletionLogProbs(OpenAIBaseModel):
    top_logprobs: list[dict[str, float] | None] = ...
