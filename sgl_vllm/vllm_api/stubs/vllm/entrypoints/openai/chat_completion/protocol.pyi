# [routes]
from typing import Any

from vllm.entrypoints.serve.engine.protocol import OpenAIBaseModel
from vllm.sampling_params import StructuredOutputsParams

class ChatCompletionRequest(OpenAIBaseModel):
    messages: list[dict[str, Any]]
    response_format: object | None
    vllm_xargs: dict[str, Any] | None
    tools: list[object] | None  # [tools_and_format]
    tool_choice: object  # [tools_and_format]
    parallel_tool_calls: bool | None  # [tools_and_format]
    structured_outputs: StructuredOutputsParams | None  # [tools_and_format]
    def extract_structured_outputs(self) -> Any: ...  # [tools_and_format]
