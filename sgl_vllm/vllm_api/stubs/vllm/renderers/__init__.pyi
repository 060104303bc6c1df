# [routes]
from collections.abc import Mapping
from typing import Any

from vllm.renderers.params import TokenizeParams as TokenizeParams

class BaseRenderer:
    async def tokenize_prompt_async(
        self, prompt: Mapping[str, Any], params: TokenizeParams
    ) -> dict[str, Any]: ...
