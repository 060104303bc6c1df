# [routes]
from typing import Any

from vllm.entrypoints.serve.engine.protocol import OpenAIBaseModel, UsageInfo
from vllm.logprobs import Logprob

class CompletionRequest(OpenAIBaseModel):
    echo: bool | None
    response_format: object | None
    vllm_xargs: dict[str, Any] | None

class CompletionResponse(OpenAIBaseModel):
    choices: list[CompletionResponseChoice]
    usage: UsageInfo

class CompletionResponseChoice(OpenAIBaseModel):
    logprobs: CompletionLogProbs | None = ...
    prompt_logprobs: list[dict[int, Logprob] | None] | None = ...

class CompletionLogProbs(OpenAIBaseModel):
    top_logprobs: list[dict[str, float] | None] = ...
