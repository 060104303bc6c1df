# [routes]
from abc import ABC
from collections.abc import AsyncGenerator

from vllm.inputs import EngineInput
from vllm.lora.request import LoRARequest
from vllm.outputs import RequestOutput
from vllm.renderers import BaseRenderer
from vllm.sampling_params import SamplingParams

class EngineClient(ABC):
    renderer: BaseRenderer

    def generate(
        self,
        prompt: EngineInput,
        sampling_params: SamplingParams,
        request_id: str,
        *,
        lora_request: LoRARequest | None = ...,
        data_parallel_rank: int | None = ...,
    ) -> AsyncGenerator[RequestOutput]: ...
