# [verify]
from typing import Self

from vllm.engine.arg_utils import EngineArgs
from vllm.v1.engine.core_client import InprocClient

class LLMEngine:
    engine_core: InprocClient

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs) -> Self: ...
