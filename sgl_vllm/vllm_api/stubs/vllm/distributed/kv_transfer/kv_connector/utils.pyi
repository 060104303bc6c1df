# [preview]
from vllm.config import VllmConfig
from vllm.v1.attention.backend import AttentionBackend

def get_current_attn_backends(vllm_config: VllmConfig) -> list[type[AttentionBackend]]: ...
