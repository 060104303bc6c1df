# [labels]
from typing import Any

from vllm.config import ModelConfig
from vllm.entrypoints.serve.engine.protocol import OpenAIBaseModel, UsageInfo
from vllm.renderers.base import BaseRenderer
from vllm.tokenizers import TokenizerLike

class GenerativeScoringRequest(OpenAIBaseModel):
    model: str | None
    items: list[str] | list[list[int]]
    label_token_ids: list[int]
    apply_softmax: bool
    request_id: str

class GenerativeScoringItemResult(OpenAIBaseModel): ...

class GenerativeScoringResponse(OpenAIBaseModel):
    def __init__(
        self, *, id: str, model: str, data: list[GenerativeScoringItemResult], usage: UsageInfo
    ) -> None: ...

class ServingGenerativeScoring:
    models: Any
    model_config: ModelConfig
    renderer: BaseRenderer
    async def create_generative_scoring(self, request: Any, raw_request: Any = None) -> Any: ...
    async def _build_prompts(
        self, request: GenerativeScoringRequest, tokenizer: TokenizerLike, max_model_len: int
    ) -> tuple[list[dict[str, Any]], list[int]]: ...
