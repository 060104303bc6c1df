# [routes, engine_backend]
from collections.abc import Mapping, Sequence
from typing import Any

from vllm.renderers.params import ChatParams
from vllm.renderers.params import TokenizeParams as TokenizeParams
from vllm.tokenizers import TokenizerLike

class BaseRenderer:
    tokenizer: TokenizerLike | None  # [engine_backend]

    @property
    def default_cmpl_tok_params(self) -> TokenizeParams: ...  # [engine_backend]
    async def tokenize_prompt_async(
        self, prompt: Mapping[str, Any], params: TokenizeParams
    ) -> dict[str, Any]: ...
    async def render_cmpl_async(  # [engine_backend]
        self, prompts: Sequence[Mapping[str, Any]]
    ) -> list[dict[str, Any]]: ...
    async def render_chat_async(  # [engine_backend]
        self, conversations: Sequence[list[dict[str, Any]]], chat_params: ChatParams
    ) -> tuple[list[Any], list[dict[str, Any]]]: ...
