# [tools_and_format]
from typing import Any

from vllm.entrypoints.serve.engine.protocol import OpenAIBaseModel
from vllm.sampling_params import StructuredOutputsParams

class ResponsesRequest(OpenAIBaseModel):
    vllm_xargs: dict[str, Any] | None
    tool_choice: object
    parallel_tool_calls: bool | None
    structured_outputs: StructuredOutputsParams | None
    text: object | None

    def extract_structured_outputs(self) -> StructuredOutputsParams | None: ...
