# [approximate_reuse]
from contextlib import AbstractContextManager

from vllm.config import VllmConfig

def set_forward_context(
    attn_metadata: None,
    vllm_config: VllmConfig,
    num_tokens: int | None = None,
    *,
    skip_compiled: bool = False,
) -> AbstractContextManager[None]: ...
