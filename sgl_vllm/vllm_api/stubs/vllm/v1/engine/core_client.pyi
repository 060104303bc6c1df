# [rank_routing]
from typing import Any

from vllm.config import VllmConfig
from vllm.v1.engine import EngineCoreOutputs, EngineCoreRequest
from vllm.v1.engine.core import EngineCore

class InprocClient:  # [verify]
    engine_core: EngineCore

    def shutdown(self) -> None: ...

class AsyncMPClient:
    core_engines: list[bytes]

    async def call_utility_async(self, method: str, *args: Any) -> Any: ...  # [routes]
    async def call_utility_all_async(  # [routes] since 0.32
        self, method: str, *args: Any
    ) -> list[Any]: ...

class DPLBAsyncMPClient(AsyncMPClient):
    vllm_config: VllmConfig
    client_count: int
    lb_engines: list[list[int | float]]
    reqs_in_flight: dict[str, bytes]

    def get_core_engine_for_request(self, request: EngineCoreRequest) -> bytes: ...
    @staticmethod
    async def process_engine_outputs(
        self: DPLBAsyncMPClient, outputs: EngineCoreOutputs
    ) -> None: ...
