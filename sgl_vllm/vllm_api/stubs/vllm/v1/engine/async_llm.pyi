# [engine_backend]
from typing import Any, Self

from vllm.config import ModelConfig, VllmConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.engine.protocol import EngineClient
from vllm.v1.engine.core_client import AsyncMPClient
from vllm.v1.engine.input_processor import InputProcessor
from vllm.v1.engine.output_processor import OutputProcessor

class InputStreamError(Exception):  # [routes]
    def __init__(self, cause: Exception) -> None: ...

class AsyncLLM(EngineClient):
    vllm_config: VllmConfig
    model_config: ModelConfig
    engine_core: AsyncMPClient  # [routes]
    input_processor: InputProcessor  # [format_checks]
    output_processor: OutputProcessor  # [routes]

    @property
    def errored(self) -> bool: ...  # [routes]
    @classmethod
    def from_engine_args(cls, engine_args: AsyncEngineArgs) -> Self: ...
    async def add_request(  # [routes, format_checks]
        self, request_id: str, prompt: Any, params: Any, *args: Any, **kwargs: Any
    ) -> Any: ...
    async def get_supported_tasks(self) -> tuple[str, ...]: ...
    async def reset_prefix_cache(self) -> bool: ...
    def shutdown(self, timeout: float | None = ...) -> None: ...  # [routes, engine_backend]
