# [fsm, jump_forward]
from vllm.v1.structured_output.backend_types import (
    StructuredOutputGrammar,
    StructuredOutputOptions,
)

class StructuredOutputRequest:
    reasoning_ended: bool | None

    grammar: StructuredOutputGrammar | Exception | None
    structured_output_key: tuple[StructuredOutputOptions, str]
