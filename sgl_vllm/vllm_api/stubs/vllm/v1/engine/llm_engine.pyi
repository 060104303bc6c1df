# [verify]
from typing import Self

from vllm.config import VllmConfig
from vllm.v1.engine.core_client import InprocClient

class LLMEngine:
    engine_core: InprocClient

    @classmethod
    def from_vllm_config(cls, vllm_config: VllmConfig) -> Self: ...
