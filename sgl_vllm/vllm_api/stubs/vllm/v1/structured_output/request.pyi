# [fsm, jump_forward]
from vllm.v1.structured_output.backend_types import (
    StructuredOutputGrammar,
    StructuredOutputOptions,
)

class StructuredOutputRequest:
    reasoning_ended: bool | None

    grammar: StructuredOutputGrammar | Exception | None
    @property
    def structured_output_key(self) -> tuple[StructuredOutputOptions, str]: ...
